"""One life of a training run, as checkpointing sees it: what begins at a step, and what ends there."""
