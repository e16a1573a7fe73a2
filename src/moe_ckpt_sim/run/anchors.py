"""Which steps of a simulated log of gradients peers lack. Its anchors are in the ledger, as a trainer's are."""

from __future__ import annotations

import numpy as np

from moe_ckpt.core.anchors import Anchors
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.core.tokens import Counts


class PeersLog:
    """Tells a ledger's anchors of each snapshot, those under way included, and remembers what peers lack.

    Args:
        logs: Snapshots may be steps of a log of gradients; else nothing is ever anchored.
        leaves_out: Which leaves operators out.
    """

    def __init__(self, *, logs: bool = False, leaves_out: bool = False) -> None:
        self._logs, self._leaves_out = logs, leaves_out
        self._missed = -1
        """Newest step of which peers got nothing."""

    def save(self, anchors: Anchors, sequence: int, plan: SnapshotPlan, *, sent: bool) -> Counts | None:
        """A snapshot begins.

        Args:
            anchors: Of the ledger.
            sequence: Of the snapshot.
            plan: What it has.
            sent: To peers, too.

        Returns:
            ``[operators]`` the anchors from which the log leads to this step; None where it is no step of a log.
        """
        found = None
        if plan.gradients or self._leaves_out:
            anchors.begun(sequence, plan.step, plan.full, plan.gradients)
            if plan.gradients:
                found = np.where(anchors.steps < 0, plan.step, anchors.steps)
        elif self._logs and len(plan.full) == len(anchors.steps):
            anchors.begun(sequence, plan.step, plan.full)
        if not sent:
            self._missed = plan.step
        return found

    def forget(self) -> None:
        """A new life begins its log anew."""
        self._missed = -1

    def is_cut_off(self, anchored_at: Counts | None) -> bool:
        """Whether peers lack a step on the way from these anchors."""
        return anchored_at is not None and 0 <= int(anchored_at.min(initial=0)) <= self._missed

    def move(self, steps: int) -> None:
        """As it would be ``steps`` later, in a run that repeats itself."""
        self._missed += steps if self._missed >= 0 else 0

    def pattern(self, anchors: Anchors, step: int) -> tuple[bytes, int]:
        """Alike at two decisions if the run repeats itself."""
        is_near = self._logs and self._missed >= int(anchors.steps.min(initial=0))
        ages = np.where(anchors.steps < 0, -1, step - anchors.steps)
        return ages.tobytes(), step - self._missed if is_near else -1
