"""The steps of a simulated log of gradients that peers lack. Its anchors are in the ledger, as in a trainer."""

from __future__ import annotations

import numpy as np

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import Counts
from moe_ckpt.ledger.ledger import Anchors


class PeersLog:
    """Records each snapshot in a ledger's anchors, even while it is under way, and remembers what peers lack.

    Args:
        logs: Snapshots may be steps of a log of gradients; otherwise nothing is anchored.
        leaves_out: Steps of the log may leave operators out.
    """

    def __init__(self, *, logs: bool = False, leaves_out: bool = False) -> None:
        self._logs, self._leaves_out = logs, leaves_out
        self._missed = -1
        """The newest step of which peers got nothing."""

    def save(self, anchors: Anchors, sequence: int, plan: SnapshotPlan, *, sent: bool) -> Counts | None:
        """Record a snapshot that begins.

        Args:
            anchors: The ledger's anchors.
            sequence: The snapshot's number.
            plan: The snapshot's plan.
            sent: The snapshot goes to peers, too.

        Returns:
            ``[operators]`` steps of the anchors from which the log leads to this step; None if it is no step of a log.
        """
        anchored_at = None
        if plan.gradients or self._leaves_out:
            anchors.begun(sequence, plan.step, plan.full, plan.gradients)
            if plan.gradients:
                anchored_at = np.where(anchors.steps < 0, plan.step, anchors.steps)
        elif self._logs and len(plan.full) == len(anchors.steps):
            anchors.begun(sequence, plan.step, plan.full)
        if not sent:
            self._missed = plan.step
        return anchored_at

    def forget(self) -> None:
        """Begin a new log, for a new life."""
        self._missed = -1

    def is_cut_off(self, anchored_at: Counts | None) -> bool:
        """Returns whether peers lack a step between these anchors and now."""
        return anchored_at is not None and 0 <= int(anchored_at.min(initial=0)) <= self._missed

    def move(self, steps: int) -> None:
        """Advance by ``steps``, in a run that repeats itself."""
        self._missed += steps if self._missed >= 0 else 0

    def pattern(self, anchors: Anchors, step: int) -> tuple[bytes, int]:
        """A pattern that is equal at two decisions if the run repeats itself."""
        is_near = self._logs and self._missed >= int(anchors.steps.min(initial=0))
        ages = np.where(anchors.steps < 0, -1, step - anchors.steps)
        return ages.tobytes(), step - self._missed if is_near else -1
