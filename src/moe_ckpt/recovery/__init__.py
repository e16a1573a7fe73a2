"""Open a store, verify it, plan a recovery, restore."""
