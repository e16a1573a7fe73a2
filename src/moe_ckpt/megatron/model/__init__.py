"""The model on one rank, and on all ranks together."""
