"""The gradients that optimizers consumed: captured as they are, and stepped again from an anchor, to the last bit."""
