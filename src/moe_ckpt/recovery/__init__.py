"""Plans a recovery, and returns training to a checkpoint."""
