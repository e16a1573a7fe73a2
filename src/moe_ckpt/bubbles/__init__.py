"""Holds copies and sends back until the schedule of a pipeline leaves this rank idle."""
