"""A snapshot in flight: what was planned, where its bytes are, and the small state taken at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.engine.buffers import HostBuffer
from moe_ckpt.engine.copying import Copy
from moe_ckpt.engine.pieces import Piece
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.format.shard import REPLAY, SliceEntry
from moe_ckpt.format.tree import encode_tree

ALIGNMENT = 64
"""Bytes; where a part of a buffer may begin."""
_FROZEN = f"{REPLAY}model/"


HELD = "held"
"""Kind of the part that stays in host memory and goes into no shard."""


@dataclass(frozen=True)
class ShardPart:
    """One part of the snapshot's buffer: ``entries`` laid out from byte ``base`` on.

    kind: that of the shard it becomes (see ``shard_path``), or ``HELD``.
    """

    kind: str
    entries: tuple[SliceEntry, ...]
    base: int

    @property
    def is_written(self) -> bool:
        return self.kind != HELD

    @property
    def nbytes(self) -> int:
        return self.entries[-1].end if self.entries else 0


@dataclass(eq=False)
class Snapshot:
    """Facts frozen when the snapshot began, and the handles on its bytes.

    sequence: how many snapshots this process began before it.
    operators: what goes to storage. What is only held in memory is in a part of its own.
    window, slot: the sparse window that it belongs to, and its place there (MoEvement).
    state: JSON-ready trainer state (side tensors are among the slices).
    wanted: gives the boxes that all ranks together must deliver; asked on rank 0 only, when it commits.
    applied, faults: the token book as of this step.
    keep: its buffer becomes the recovery buffer once it is committed (see ``engine.host_tier``).
    waited: training waited for an earlier snapshot before this one could begin.
    refused: why this rank could not even copy it, so that it fails on every rank; None if it could.
    """

    sequence: int
    step: int
    generation: int
    index: int
    operators: tuple[str, ...]
    parts: tuple[ShardPart, ...]
    buffer: HostBuffer
    copy: Copy
    state: Any
    wanted: Callable[[], Mapping[str, list[Box]]]
    applied: Counts
    faults: tuple[FaultRecord, ...]
    began_at: float
    policy: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    window: Window | None = None
    slot: int = 0
    keep: bool = False
    waited: bool = False
    refused: str | None = None

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)

    @property
    def nbytes(self) -> int:
        """Tensor bytes that this rank writes."""
        return sum(part.nbytes for part in self.written)

    @property
    def frozen_nbytes(self) -> int:
        """Of ``nbytes``, the weights of operators that the window anchors later."""
        entries = (entry for part in self.written for entry in part.entries)
        return sum(entry.nbytes for entry in entries if entry.key.startswith(_FROZEN)) if self.window else 0

    @property
    def written(self) -> tuple[ShardPart, ...]:
        """The parts that become shards."""
        return tuple(part for part in self.parts if part.is_written)


def side_pieces(state: Mapping[str, Any], rank: int) -> tuple[Any, list[Piece]]:
    """Encode the plain state; its tensors become pieces of their own, copied here and now.

    They may change during the next forward pass (buffers, RNG), so a background copy would be torn.

    Raises:
        UnencodableStateError: names the path of a value that only pickle could hold.
    """
    encoded, tensors = encode_tree(state)
    pieces = []
    for name, tensor in tensors.items():
        copied = tensor.detach().to("cpu", copy=True).contiguous()
        shape = tuple(copied.shape)
        entry = SliceEntry(f"side/{rank}/{name}", "", dtype_name(copied.dtype), (0,) * len(shape), shape, shape)
        pieces.append(Piece(entry, copied))
    return encoded, pieces


def part_bytes(snapshot: Snapshot, part: ShardPart) -> torch.Tensor:
    """The part's bytes inside the buffer, as a uint8 tensor view."""
    return snapshot.buffer.memory[part.base : part.base + part.nbytes]
