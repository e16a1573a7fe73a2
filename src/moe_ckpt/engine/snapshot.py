"""A snapshot in flight: what was planned, where its bytes are, and the small state taken at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.engine.buffers import HostBuffer
from moe_ckpt.engine.copying import Copy
from moe_ckpt.engine.pieces import Piece, shard_kind
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.format.shard import SliceEntry, lay_out
from moe_ckpt.format.tree import encode_tree

_ALIGNMENT = 64


@dataclass(frozen=True)
class ShardPart:
    """One shard inside the snapshot's buffer: ``entries`` laid out from byte ``base`` on."""

    kind: str
    entries: tuple[SliceEntry, ...]
    base: int

    @property
    def nbytes(self) -> int:
        return self.entries[-1].end if self.entries else 0


@dataclass(eq=False)
class Snapshot:
    """Facts frozen when the snapshot began, and the handles on its bytes.

    sequence: how many snapshots this process began before it.
    state: JSON-ready trainer state (side tensors are among the slices).
    wanted: the boxes that all ranks together must deliver; filled on rank 0 only.
    applied, faults: the token book as of this step.
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
    wanted: Mapping[str, list[Box]]
    applied: Counts
    faults: tuple[FaultRecord, ...]
    began_at: float
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)

    @property
    def nbytes(self) -> int:
        """Tensor bytes that this rank writes."""
        return sum(part.nbytes for part in self.parts)


def split_shards(catalog: Catalog, pieces: Sequence[Piece]) -> tuple[ShardPart, ...]:
    """Lay the pieces out as this rank's expert and non-expert shard, one after the other."""
    by_kind: dict[str, list[SliceEntry]] = {"expert": [], "non_expert": []}
    for piece in pieces:
        by_kind[shard_kind(catalog, piece.entry.operator)].append(piece.entry)
    parts: list[ShardPart] = []
    base = 0
    for kind, entries in by_kind.items():
        if entries:
            part = ShardPart(kind, lay_out(entries), base)
            parts.append(part)
            base += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(parts)


def buffer_bytes(parts: Collection[ShardPart]) -> int:
    return max((part.base + part.nbytes for part in parts), default=0)


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
