"""In which order operators are saved over the steps of a window or a log, and what that costs."""
