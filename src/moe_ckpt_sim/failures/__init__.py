"""Failures of nodes: distributions, recorded traces, closed forms."""
