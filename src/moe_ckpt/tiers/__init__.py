"""Snapshots in host memory: the buffers that they are copied into, and the tiers that keep them."""
