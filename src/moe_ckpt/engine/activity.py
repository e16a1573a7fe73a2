"""What the router did lately: popularity of experts, counted as the policies ask for it."""

from __future__ import annotations

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import Activity

_DECAY = 0.9
"""Share of the past in the time-decayed activity (see ``policies.base.Activity``)."""


class RoutingActivity:
    """Tokens routed in the newest step, since a window began, and with the past fading; all ``[L, E]``.

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
        """What is counted since a window's first slot begins anew."""
        self._hard, self._soft = self._nothing

    def add(self, routed: Counts, soft: Counts | None = None) -> None:
        """One step.

        Args:
            soft: Gate weights, where somebody goes by them.
        """
        self.newest = routed
        self._hard = self._hard + routed
        self._soft = self._soft if soft is None else self._soft + soft
        self._decayed = _DECAY * self._decayed + (1 - _DECAY) * routed

    def add_often(self, routed: Counts, steps: int) -> None:
        """``steps`` steps that route alike; time-decayed activity is taken at the limit to which that brings it."""
        self.newest = routed
        self._hard = self._hard + routed * steps
        self._soft = self._soft + routed * steps
        self._decayed = routed.astype(np.float64)

    def described(self) -> Activity:
        """All of it for a policy."""
        return Activity(self._hard, self._soft, self._decayed)
