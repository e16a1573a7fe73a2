"""Sparse windows (MoEvement): what a replay of their steps loads, leaves out, and must not round."""
