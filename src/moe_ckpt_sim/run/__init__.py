"""The simulation of one run under failures, driven by the library's own policy."""
