"""Checkpoints in the memory of a job's nodes, read as the files of a store."""
