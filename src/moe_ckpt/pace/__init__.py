"""How often to checkpoint, and how much at once, from measured times. Pure."""
