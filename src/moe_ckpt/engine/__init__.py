"""Copy, checksum, write, acknowledge, commit, collect garbage."""
