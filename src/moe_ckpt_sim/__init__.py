"""Predicts what a policy costs for a model on a cluster: closed forms, a seeded simulation, a planner.

The policies, windows and ledger are those of the trainer; only clocks, bytes and failures are simulated here.
"""
