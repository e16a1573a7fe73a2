"""What is trained: models, their load and their iterations without checkpoints."""
