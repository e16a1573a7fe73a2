"""Consumed gradients of optimizers: captured, and replayed from an anchor, exact to the last bit."""
