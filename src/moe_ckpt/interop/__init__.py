"""Other formats: DCP, safetensors, checkpoints of Lightning."""
