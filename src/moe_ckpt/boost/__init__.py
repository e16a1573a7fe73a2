"""Gives experts that came back stale more tokens, until they have made up for those that they lost."""
