"""What checkpointing costs a training run, beside the checkpointers that one would take instead."""
