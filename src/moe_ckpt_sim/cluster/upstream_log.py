"""The log of what a rank sends to other pipeline stages: in its host memory, and on the network for a recovery."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedUpstreamLog:
    """The upstream log of the rank that logs most.

    Attributes:
        step_bytes: Bytes of one iteration (``iteration.boundary_bytes``); 0 without a log.
        budget_bytes: The most that the log may take; None: as much as it needs.
    """

    step_bytes: float
    budget_bytes: float | None = None

    def held_bytes(self, window: int | None) -> float:
        """Returns the host memory of a log that reaches back as far as a recovery may: two windows, the second of
        them incomplete, and the iteration under way.

        Args:
            window: W; None before the first window.
        """
        nbytes = self.step_bytes * (2 * (window or 1) + 1)
        return nbytes if self.budget_bytes is None else min(nbytes, self._whole_steps() * self.step_bytes)

    def reaches(self, steps: int) -> bool:
        """Returns whether the log has the newest ``steps`` iterations besides the one under way. The oldest are dropped
        first, as in a trainer."""
        return self.budget_bytes is None or not self.step_bytes or steps + 1 <= self._whole_steps()

    def _whole_steps(self) -> int:
        return int((self.budget_bytes or 0.0) // self.step_bytes) if self.step_bytes else 0
