"""Counts the updates that optimizers make in a step, and tells whether any of them changed weights."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from moe_ckpt.modeling.optimizer_state import note_gradients
from moe_ckpt.modeling.routing import counts_on_host
from moe_ckpt.run.agreement import Deferred, Updated


class Updates:
    """The updates since the newest step."""

    def __init__(self) -> None:
        self._made = 0
        self._overflows: list[Deferred[bool]] = []

    def note(self, optimizer: Optimizer) -> None:
        """Notes that an optimizer stepped. Called by its post hook, on the training thread; waits for no device.

        A ``GradScaler`` does not call ``step`` of an ordinary optimizer if gradients overflowed. A fused optimizer gets
        the tensor that tells, and skips the update by itself, on the device.
        """
        note_gradients(optimizer)
        found_inf: Any = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self._made += 1
        else:
            table = found_inf.detach().reshape(1).repeat(2)  # the last entry does not count
            self._overflows.append(counts_on_host({0: table}, (1, 1)).then(lambda counts: bool(counts.any())))

    def take(self) -> Updated:
        """Returns whether weights changed, and begins to count the next step's updates."""
        made, overflows = self._made, self._overflows
        self._made, self._overflows = 0, []
        if made or not overflows:
            return made > 0
        return Deferred(lambda: not all(overflow.result() for overflow in overflows))
