"""A snapshot in flight: its contents, the memory with its bytes, and the plain state, which is copied at once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moe_ckpt.core.step import Contents, Facts, Step
from moe_ckpt.core.tokens import Counts
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.format.shard import Checksums, SliceEntry, dtype_name
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.ledger.freshness import UNKNOWN
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.slices.compiling import GRADIENTS, CompiledPart, CompiledPlan
from moe_ckpt.slices.copying import Copy, copy_here

Plain = tuple[Any, list[tuple[SliceEntry, torch.Tensor]]]
"""A rank's plain state, encoded, and its tensors."""
Encode = Callable[..., Plain]
"""Returns the plain state as of its first call, with further entries that are given by name."""


@dataclass(eq=False)
class SnapshotPart:
    """A part of a snapshot in host memory. Once it is sealed, it has checksums, and must not change any more.

    Attributes:
        number: In the order in which the parts are copied.
        begin: First byte in the part's buffer.
        part: Of the plan.
        memory: ``[nbytes]`` uint8, the part's bytes. Of what duplicates another rank's share, a slice is used only
            if its checksum is that rank's.
        checksums: Of the slices.
        header: Head and seal of the shard (``format.shard``).
        not_finite: Key of the first slice with NaN or infinity; empty if there is none.
    """

    number: int
    begin: int
    part: CompiledPart
    memory: torch.Tensor
    checksums: Checksums = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    header: tuple[bytes, ...] = ()
    not_finite: str = ""


@dataclass(eq=False)
class Snapshot:
    """One snapshot on this rank, from the copy to the outcome.

    Attributes:
        identity: Of the snapshot.
        contents: Of the snapshot.
        facts: Of its step.
        applied: ``[L, E]`` tokens processed by its step, which come when the ranks have agreed on the step.
        plan: The slices that this rank copies and writes.
        buffers: Host memory, one for each of ``plan.buffers``.
        parts: All parts of the plan in these buffers, in the order in which they are copied.
        copy: The copy under way.
        state: Plain state, encoded; its tensors are among the slices.
        began_at: ``time.perf_counter`` of the beginning.
        waited: Training waited for an earlier snapshot before this one could begin.
        refused: Why this rank could not copy it, so that it fails on every rank; None if it could.
        sealed: The parts of this rank's share, then those of ``plan.pieces``, once they have checksums; None before.
        state_file: Bytes of the state file; empty before.
        freshness: Result of comparing checksums with earlier ones (``ledger.freshness``).
    """

    identity: Step
    contents: Contents
    facts: Facts
    applied: Future[Counts]
    plan: CompiledPlan
    buffers: Sequence[Buffer]
    parts: Sequence[SnapshotPart]
    copy: Copy
    state: Any
    began_at: float
    waited: bool = False
    refused: str | None = None
    sealed: tuple[SnapshotPart, ...] | None = None
    state_file: bytes = b""
    freshness: int = UNKNOWN

    @property
    def buffer(self) -> Buffer:
        """Memory of ``plan.parts``."""
        return self.buffers[0]

    @property
    def pieces(self) -> Sequence[Buffer]:
        """The buffers of ``plan.slots``."""
        return self.buffers[1 : 1 + len(self.plan.slots)]

    @property
    def step(self) -> int:
        return self.identity.step

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.identity.generation)

    @property
    def nbytes(self) -> int:
        """Tensor bytes that this rank writes, with gradients that it logs."""
        parts = (part for _, part in (*self.plan.parts, *self.plan.pieces))
        return sum(part.nbytes for part in parts if part.is_written or part.kind == GRADIENTS)

    @property
    def written(self) -> tuple[CompiledPart, ...]:
        """The parts that become shards."""
        return tuple(part for _, part in self.plan.parts if part.is_written)

    def not_finite(self, *, written: bool = False) -> str:
        """Returns the key of the first slice with NaN or infinity; empty if there is none.

        Args:
            written: Look only at slices that go to storage.
        """
        every = (sealed for sealed in self.sealed or () if sealed.part.is_written or not written)
        return next((sealed.not_finite for sealed in every if sealed.not_finite), "")

    def mirrors(self) -> dict[int, list[SnapshotPart]]:
        """Returns rank -> the parts of its share of the same snapshot that this rank's state also holds."""
        mirrors: dict[int, list[SnapshotPart]] = {}
        for part in self.parts:
            if part.part.source is not None:
                mirrors.setdefault(part.part.source, []).append(part)
        return mirrors


def parts_in(plan: CompiledPlan, buffers: Sequence[Buffer]) -> list[SnapshotPart]:
    """Returns the parts of a plan, in buffers of ``plan.sizes``."""
    numbers = itertools.count()
    return [
        SnapshotPart(next(numbers), begin, part, buffer.memory[begin : begin + part.nbytes])
        for parts, buffer in zip(plan.buffers, buffers, strict=True)
        for begin, part in parts
    ]


def plain_of(capture: Callable[[], Mapping[str, Any]], rank: int) -> Encode:
    """Returns a function that encodes the plain state of its first call, once."""
    captured = functools.cache(capture)
    encoded = functools.cache(lambda: side_tensors(captured(), rank))
    return lambda **more: side_tensors({**captured(), **more}, rank) if more else encoded()


def side_tensors(state: Any, rank: int) -> Plain:
    """Encodes the plain state. Its tensors become slices of their own, which are copied before training continues,
    since buffers and random numbers may change during the next forward pass.

    Args:
        state: Plain state.
        rank: Of this process.

    Raises:
        UnencodableStateError: names the path of a value that only pickle could hold.
    """
    encoded, tensors = encode_tree(state)
    slices = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype, name)
        entry = SliceEntry(f"side/{rank}/{name}", "", dtype, (0,) * len(shape), shape, shape)
        slices.append((entry, tensor.detach()))
    return encoded, slices


def copy_at_once(parts: Sequence[SnapshotPart], side: list[tuple[SliceEntry, torch.Tensor]]) -> bool:
    """Copies slices that may change before the next optimizer step, on the training thread.

    Args:
        parts: Of the snapshot.
        side: Tensors of the plain state.

    Returns:
        As ``copy_here``.
    """
    sources = {entry.name: source for entry, source in side}
    on_device = False
    for part in parts:
        side_copies = ((entry, sources[entry.name]) for entry in part.part.side_entries())
        on_device |= copy_here([*part.part.copies.at_once, *side_copies], part.memory)
    return on_device
