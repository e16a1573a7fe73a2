"""The log of what a rank sends to other pipeline stages: in its host memory, and on the network for a recovery."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedUpstreamLog:
    """Of the rank with most of it.

    Attributes:
        step_bytes: Of one iteration (``iteration.boundary_bytes``); 0 where none is kept.
        budget_bytes: The most that the log may take; None: as much as it needs.
    """

    step_bytes: float
    budget_bytes: float | None = None

    def held_bytes(self, window: int | None) -> float:
        """Returns what it takes of host memory where it reaches as far back as a recovery may: two windows, of which
        the second is not complete, and the iteration under way.

        Args:
            window: W; None before the first.
        """
        wanted = self.step_bytes * (2 * (window or 1) + 1)
        return wanted if self.budget_bytes is None else min(wanted, self._whole_steps() * self.step_bytes)

    def reaches(self, steps: int) -> bool:
        """Returns whether it has the newest ``steps`` iterations beside the one under way: the oldest go first, as in a
        trainer."""
        return self.budget_bytes is None or not self.step_bytes or steps + 1 <= self._whole_steps()

    def _whole_steps(self) -> int:
        return int((self.budget_bytes or 0.0) // self.step_bytes) if self.step_bytes else 0
