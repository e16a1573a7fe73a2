"""What a run does around its checkpoints, whichever framework trains: open, resume, step, replay, finish."""
