"""Reads a store: checkpoints, their indexes and slices, verified, and written into live training state."""
