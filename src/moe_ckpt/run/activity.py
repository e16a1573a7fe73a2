"""Popularity of experts in recent steps, counted as the policies need it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import DECAYED, GATE_WEIGHTS

_DECAY = 0.9
"""Share of the past in the time-decayed activity (see ``policies.base.Needs``)."""
_UNCOUNTED: Counts = np.zeros((0, 0), dtype=np.int64)


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

    def popularity(self, kind: str | None) -> npt.NDArray[Any]:
        """Returns ``TokenFacts.popularity``.

        Args:
            kind: ``Needs.popularity``.
        """
        if kind is None:
            return _UNCOUNTED
        counts = {GATE_WEIGHTS: self._soft, DECAYED: self._decayed}.get(kind, self._hard)
        # A router that does not return its weights: tokens instead, in all layers, so that these can be compared.
        unweighed = self._hard.any(axis=1) & ~counts.any(axis=1)
        return self._hard if unweighed.any() else counts
