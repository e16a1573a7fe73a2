"""What checkpoints cost on a GPU, measured by one command: ``python -m benchmarks.gpu``."""
