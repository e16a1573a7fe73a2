"""Which version of every operator exists where, and which may go. Pure: no I/O, no clock, no torch."""
