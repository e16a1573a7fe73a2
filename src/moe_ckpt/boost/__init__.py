"""Gives stale experts more tokens after a recovery, until they have made up for their lost tokens."""
