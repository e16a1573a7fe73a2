"""Helpers shared by the tests; imported as ``tests.support``."""

from tests.support.processes import Outcome, RanksFailed, run_ranks, start_ranks

__all__ = ["Outcome", "RanksFailed", "run_ranks", "start_ranks"]
