"""The training state of a model and its optimizers."""
