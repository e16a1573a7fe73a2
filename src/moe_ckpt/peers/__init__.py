"""Copies of snapshots on other nodes: who sends, receives, checks and keeps them."""
