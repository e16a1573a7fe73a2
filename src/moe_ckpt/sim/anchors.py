"""Anchors of a simulated log of gradients, and which of its steps peers lack."""

from __future__ import annotations

import numpy as np

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.core.rolling import anchored_after
from moe_ckpt.core.tokens import Counts


class Anchors:
    """The newest anchor of every operator, snapshots under way included.

    Attributes:
        steps: ``[operators]`` as ``PolicyContext.anchored_at``.

    Args:
        logs: Snapshots may be steps of a log of gradients; else nothing is ever anchored.
        leaves_out: Which leaves operators out.
    """

    def __init__(self, catalog: Catalog, *, logs: bool = False, leaves_out: bool = False) -> None:
        self._catalog, self._logs, self._leaves_out = catalog, logs, leaves_out
        self.steps: Counts = np.full(len(catalog.operators), -1, dtype=np.int64)
        self._missed = -1
        """Newest step of which peers got nothing."""

    def save(self, plan: SnapshotPlan, *, sent: bool) -> Counts | None:
        """A snapshot begins.

        Args:
            sent: To peers, too.

        Returns:
            ``[operators]`` the anchors from which the log leads to this step; None where it is no step of a log.
        """
        found = None
        if plan.gradients or self._leaves_out:
            places = self._catalog.places_of
            self.steps = anchored_after(self.steps, plan.step, places(plan.operators()), places(plan.gradients))
            if plan.gradients:
                found = np.where(self.steps < 0, plan.step, self.steps)
        elif self._logs and len(plan.operators()) == len(self.steps):
            self.steps = np.full_like(self.steps, plan.step)
        if not sent:
            self._missed = plan.step
        return found

    def gap(self) -> None:
        """No snapshot was made of a step: no operator reaches the newest step any more."""
        self.steps = np.full_like(self.steps, -1)

    def forget(self) -> None:
        """A new life starts a new log."""
        self.gap()
        self._missed = -1

    def are_cut_off(self, anchored_at: Counts | None) -> bool:
        """Whether peers lack a step on the way from these anchors."""
        return anchored_at is not None and 0 <= int(anchored_at.min(initial=0)) <= self._missed

    def move(self, steps: int) -> None:
        """As they would be ``steps`` later, in a run that repeats itself."""
        self.steps = later(self.steps, steps)
        self._missed += steps if self._missed >= 0 else 0

    def pattern(self, step: int) -> tuple[bytes, int]:
        """Alike at two decisions if the run repeats itself."""
        is_near = self._logs and self._missed >= int(self.steps.min(initial=0))
        return np.where(self.steps < 0, -1, step - self.steps).tobytes(), step - self._missed if is_near else -1


def later(anchored_at: Counts, steps: int) -> Counts:
    """Steps of anchors as they would be ``steps`` later; -1 stays none."""
    return np.where(anchored_at < 0, anchored_at, anchored_at + steps)
