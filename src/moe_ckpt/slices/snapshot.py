"""A snapshot in flight: what it holds, where its bytes are, and the small state that is copied at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

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
from moe_ckpt.slices.mirroring import Mirror

Plain = tuple[Any, list[tuple[SliceEntry, torch.Tensor]]]
"""A rank's plain state, encoded, and the tensors of it."""
Encode = Callable[..., Plain]
"""Returns the plain state as of its first call, with further entries that are given by name."""


@dataclass(frozen=True, eq=False)
class SealedPart:
    """A part of a snapshot whose bytes have been read for the first time, and may not change any more.

    Attributes:
        begin: Its first byte in the snapshot's buffer.
        part: Of the plan.
        checksums: Of its slices.
        header: Head and seal of its shard (``format.shard``).
        not_finite: Key of the first slice with NaN or infinity; empty without any.
    """

    begin: int
    part: CompiledPart
    checksums: Checksums
    header: tuple[bytes, ...]
    not_finite: str = ""


@dataclass(eq=False)
class Snapshot:
    """One snapshot on this rank, from the copy to the outcome.

    Attributes:
        identity: Names it.
        contents: What it holds.
        facts: Of its step.
        applied: The token book as of its step; to come, as long as the ranks are agreeing on that.
        plan: What this rank copies and writes for it.
        buffers: Host memory, one for each of ``plan.buffers``.
        copy: The copy under way.
        state: JSON-ready trainer state (side tensors are among the slices).
        began_at: ``time.perf_counter`` of its beginning.
        waited: Training waited for an earlier snapshot before this one could begin.
        refused: Why this rank could not even copy it, so that it fails on every rank; None if it could.
        sealed: Its parts, and behind them ``plan.pieces``, with checksums, once these were taken.
        state_file: The bytes of the state file, from then on.
        freshness: What its checksums show beside those before (``ledger.freshness``).
    """

    identity: Step
    contents: Contents
    facts: Facts
    applied: Future[Counts]
    plan: CompiledPlan
    buffers: Sequence[Buffer]
    copy: Copy
    state: Any
    began_at: float
    waited: bool = False
    refused: str | None = None
    sealed: tuple[SealedPart, ...] | None = None
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
        """Tensor bytes that this rank writes, or of gradients logs."""
        parts = (part for _, part in (*self.plan.parts, *self.plan.pieces))
        return sum(part.nbytes for part in parts if part.is_written or part.kind == GRADIENTS)

    @property
    def written(self) -> tuple[CompiledPart, ...]:
        """The parts that become shards."""
        return tuple(part for _, part in self.plan.parts if part.is_written)

    def not_finite(self, *, written: bool = False) -> str:
        """Key of the first slice with NaN or infinity; empty if there is none.

        Args:
            written: Of what goes to storage only.
        """
        every = (sealed for sealed in self.sealed or () if sealed.part.is_written or not written)
        return next((sealed.not_finite for sealed in every if sealed.not_finite), "")

    def mirrors(self) -> dict[int, Mirror]:
        """Rank -> the part of that rank's share of the same snapshot that this rank's state also holds."""
        mirrors: dict[int, Mirror] = {}
        for part, memory in placed(self.plan, self.buffers):
            if part.source is not None:
                mirrors[part.source] = Mirror(part, memory, mirrors.get(part.source))
        return mirrors

    def bytes_of(self, part: CompiledPart) -> torch.Tensor:
        """One part's bytes inside its buffer, as a uint8 tensor view."""
        return next(memory for candidate, memory in placed(self.plan, self.buffers) if candidate is part)


def placed(plan: CompiledPlan, buffers: Sequence[Buffer]) -> Iterator[tuple[CompiledPart, torch.Tensor]]:
    """Yields every part of a plan with its bytes (uint8, a view), of buffers of ``plan.sizes``."""
    for parts, buffer in zip(plan.buffers, buffers, strict=True):
        for begin, part in parts:
            yield part, buffer.memory[begin : begin + part.nbytes]


def plain_of(capture: Callable[[], Mapping[str, Any]], rank: int) -> Encode:
    """Returns what encodes the plain state of this moment, once."""
    captured = functools.cache(capture)
    encoded = functools.cache(lambda: side_tensors(captured(), rank))
    return lambda **more: side_tensors({**captured(), **more}, rank) if more else encoded()


def side_tensors(state: Any, rank: int) -> Plain:
    """Encode the plain state; its tensors become slices of their own, to be copied before training continues.

    They may change during the next forward pass (buffers, RNG), so a background copy would be torn.

    Args:
        state: Plain state.
        rank: This one.

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


def copy_at_once(
    parts: Sequence[tuple[CompiledPart, torch.Tensor]], side: list[tuple[SliceEntry, torch.Tensor]]
) -> bool:
    """Copy into a plan's buffers, on the training thread, what may change before the next optimizer step.

    Returns:
        As ``copy_here``.
    """
    sources = {entry.name: source for entry, source in side}
    on_device = False
    for part, inside in parts:
        side_copies = ((entry, sources[entry.name]) for entry in part.side_entries())
        on_device |= copy_here([*part.copies.at_once, *side_copies], inside)
    return on_device
