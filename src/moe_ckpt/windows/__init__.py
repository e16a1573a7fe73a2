"""Replays the steps of sparse windows (MoEvement), and finds the types in which their weights may be saved."""
