"""What a model on a cluster would get from a policy: closed forms, a seeded simulation, a planner.

The policies, windows and ledger are those of the trainer; only clocks, bytes and failures are simulated here.
"""
