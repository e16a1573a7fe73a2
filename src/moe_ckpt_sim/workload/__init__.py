"""The training itself: models, their load, and iterations without checkpoints."""
