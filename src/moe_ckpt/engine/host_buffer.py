"""One buffer of host memory: what it is for, what it may serve, and how its memory is given back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ckpt.memory.slot import Slot

_OVERSIZE = 2
_SMALL_BYTES = 1 << 20
"""Up to here a buffer of any size may serve: what it wastes is not worth another allocation."""
_STEPS_PER_DOUBLING = 16
"""Buffers come in so many sizes between one power of two and the next."""
WHOLE, PIECES, MIRRORED = "whole", "pieces", "mirrored"
"""What a buffer is for: a snapshot without the gradients that have buffers of their own; such gradients; duplicates of
other ranks' shares. A buffer never changes its kind, since kinds differ in size and in how long they stay."""


@dataclass(eq=False)
class HostBuffer:
    """One buffer lent out by the pool. Its memory is the pool's again after ``HostBufferPool.give_back``.

    Attributes:
        memory: ``[nbytes]`` uint8.
        slot: Whose bytes these are, if they outlive the process; None for private memory.
        kind: What it is for.
        foreseen: It was made before anybody knew what it must hold, and may be too large.
        is_cold: Of an earlier life: this process has not touched its pages yet.
    """

    memory: torch.Tensor
    slot: Slot | None = None
    kind: str = WHOLE
    foreseen: bool = False
    is_cold: bool = False

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def registered(self) -> bool:
        """CUDA was told to page-lock the slot's bytes."""
        return self.slot is not None and self.slot.pages.is_locked


def let_go(buffer: HostBuffer) -> None:
    """The buffer is no longer used. Its memory is freed as soon as nobody has a view of it."""
    if buffer.slot is not None:
        buffer.slot.remove()
    buffer.slot, buffer.memory = None, buffer.memory.new_empty(0)


def serves(buffer: HostBuffer, nbytes: int) -> bool:
    """True if the buffer is neither too small nor so large that it is wasted."""
    return nbytes <= buffer.nbytes <= max(_OVERSIZE * nbytes, _SMALL_BYTES)


def roomy(nbytes: int) -> int:
    """Rounds up by at most 1/16, so that snapshots that differ by a few bytes use the same buffers."""
    grain = max(1, (1 << nbytes.bit_length() - 1) // _STEPS_PER_DOUBLING)
    return -(-nbytes // grain) * grain
