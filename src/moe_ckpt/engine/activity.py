"""Popularity of experts in recent steps, counted as the policies need it."""

from __future__ import annotations

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import Activity

_DECAY = 0.9
"""Share of the past in the time-decayed activity (see ``policies.base.Activity``)."""


class RoutingActivity:
    """Tokens routed in the newest step, since a window began, and with time decay; all ``[L, E]``.

    Attributes:
        newest: Tokens of the newest step, summed over ranks.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.newest: Counts = np.zeros(shape, dtype=np.int64)
        self._decayed = np.zeros(shape)
        # Never written to; where tables are large, others at each step would be fresh memory each time.
        self._nothing = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        for table in self._nothing:
            table.setflags(write=False)
        self.begin_window()

    def begin_window(self) -> None:
        """Resets the count that runs from a window's first slot."""
        self._hard, self._soft = self._nothing

    def add(self, routed: Counts, soft: Counts | None = None) -> None:
        """Adds one step.

        Args:
            soft: Gate weights, if a policy uses them.
        """
        self.newest = routed
        self._hard = self._hard + routed
        self._soft = self._soft if soft is None else self._soft + soft
        self._decayed = _DECAY * self._decayed + (1 - _DECAY) * routed

    def add_often(self, routed: Counts, steps: int) -> None:
        """``steps`` equal steps; time-decayed activity is set to its limit under them."""
        self.newest = routed
        self._hard = self._hard + routed * steps
        self._soft = self._soft + routed * steps
        self._decayed = routed.astype(np.float64)

    def described(self) -> Activity:
        """All counts, for a policy."""
        return Activity(self._hard, self._soft, self._decayed)
