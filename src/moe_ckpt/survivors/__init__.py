"""Ranks that live on when training stops at a failure: each seals the newest step in memory before it goes."""
