"""Compares systems on the same failures and recommends one; reads a run's own profile."""
