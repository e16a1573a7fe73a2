"""What a run is to its checkpoints: its options and context, its ledger, and what its ranks agree on at each step."""
