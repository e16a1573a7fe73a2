"""The pure core: names, numbers and rules. No I/O, no clock, no process group, no torch."""
