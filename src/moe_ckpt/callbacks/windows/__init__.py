"""Sparse windows under Lightning: what their replay needs, leaves out, and must not round."""
