"""Which experts of each layer a partial checkpoint saves."""
