"""Find MoE layers, count routed tokens, hand out training state as live tensors."""
