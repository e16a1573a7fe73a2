"""Megatron-LM's own training scripts."""
