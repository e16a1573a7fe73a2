"""What one snapshot saves: decided once per step, and passed from the session to the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.anchors import GradientGroups
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.survivors import survivor_sequence
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.slices.assignment import ComputeTypes


@dataclass(frozen=True, eq=False)
class SnapshotRequest:
    """Frozen facts of one step, equal on every rank.

    Attributes:
        step: Optimizer step whose state is saved.
        generation: Life of the run; with ``step`` it names the directory.
        index: Snapshots begun before this one in the run.
        operators: Go to storage.
        host_only: Are copied, but stay in host memory; none of ``operators``.
        compute_only: Only their compute weights go to storage, in the types ``compute_types``, as a part of ``window``.
        window, slot: The sparse window that the snapshot belongs to, and its place there (MoEvement); None and 0 for a
            checkpoint that stands by itself.
        applied: ``[L, E]`` tokens that experts had processed by ``step``, summed over ranks; to come, as long as the
            ranks are agreeing on them.
        faults: Recoveries of the run so far.
        lost: ``TokenBook.lost_since``; None if nothing.
        policy: ``Policy.describe()``.
        measured: For ``Manifest.measured``.
        base: Directory of the newest checkpoint on storage; empty before the first.
        stored: It goes to storage; otherwise into memory that outlives the process only.
        copied: It goes to peers, where there are any.
        updates: That changed weights in this process by then.
        sends_host_only: ``host_only`` go to peers, too.
        experts: That memory holds then by this snapshot alone, a bit each (``OperatorSets``).
        sent: Of those, the ones that peers get.
        gradients: Operators of which only the consumed gradients are saved, in a gradient log; none of ``operators``.
        since: Of a step of a gradient log, sequence in memory of the first snapshot that it needs; None if it is none.
        groups: How ``gradients`` are divided into slots of their own; None if they lie beside the rest.
        is_partial_log: It leaves operators out, which have neither (MoEtion).
        survivors_of: Whose share is sealed because training stops at a failure, which ranks need not have begun alike;
            None for a policy's plan.
        rank_tokens: ``format.slot.StepFacts.own``.
    """

    step: int
    generation: int
    index: int
    operators: tuple[str, ...]
    host_only: tuple[str, ...]
    compute_only: tuple[str, ...]
    compute_types: ComputeTypes
    window: Window | None
    slot: int
    applied: Future[Counts]
    faults: tuple[FaultRecord, ...]
    policy: Mapping[str, Any]
    measured: Mapping[str, float]
    base: str = ""
    lost: Counts | None = None
    stored: bool = True
    copied: bool = True
    updates: int = 0
    sends_host_only: bool = True
    experts: int = 0
    sent: int = 0
    gradients: tuple[str, ...] = ()
    since: int | None = None
    groups: GradientGroups | None = None
    is_partial_log: bool = False
    survivors_of: int | None = None
    rank_tokens: Counts | None = None

    @property
    def to_peers(self) -> tuple[str, ...]:
        """Operators that go to peers in full, where there are any."""
        if not self.copied:
            return ()
        return (*self.operators, *self.host_only) if self.sends_host_only and self.host_only else self.operators

    def share_of(self, rank: int, due: int) -> tuple[int, int]:
        """Returns whose share ``rank`` copies, and the snapshot's number in memory.

        Args:
            due: That of the next one in order.
        """
        writer = self.survivors_of
        return (rank, due) if writer is None else (writer, survivor_sequence(self.step, of_another=writer != rank))

    def is_whole(self, catalog: Catalog) -> bool:
        """True if this snapshot alone holds every operator in full."""
        return self.window is None and len(self.operators) + len(self.host_only) == len(catalog.everything)

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)
