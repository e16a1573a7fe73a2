"""Sparse windows (MoEvement): what a replay of their steps loads, and must not round."""
