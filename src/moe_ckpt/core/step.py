"""The records of one snapshot: the policy's plan, its identity, its contents, the facts of its step, and its end.

Each record is made once, from the record before and from the ledger. The code that copies, commits, keeps and recovers
snapshots reads them. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ckpt.core.tokens import Counts, FaultRecord
    from moe_ckpt.core.window import Window


class Tier(str, enum.Enum):
    """Destination of a snapshot: this node's memory, a peer's memory, or durable storage."""

    HOST = "host"
    PEER = "peer"
    STORAGE = "storage"


@dataclass(frozen=True)
class SnapshotPlan:
    """The decision of a policy for one step; equal on every rank.

    An empty plan means: no checkpoint at this step. Operators that go to storage pass through host memory anyway.

    Attributes:
        step: Optimizer steps done.
        full: Operators that go to storage with master weights and optimizer state (12 B/param for fp32 Adam).
        memory_only: Further operators that are kept in full in host memory only.
        compute: Operators of which only the weights that forward and backward read are saved (2 B/param in bf16), in a
            sparse window.
        gradients: Operators of which only the gradients that the step's update consumed are saved, in a gradient log.
        wait: True if training waits until the checkpoint is finished (the synchronous baseline).
        k: Experts per layer that the policy sends to storage at present; None if it does not count experts so.
        plt_budget: Portion of lost tokens that the policy stays within; None without a budget.
        window: The sparse window that this step belongs to (MoEvement). The snapshot of such a step is no checkpoint by
            itself: the checkpoint exists when the window's last snapshot is committed.
        slot: The step's place in ``window``.
        sends_memory_only: True if peers, if there are any, also get ``memory_only``. They always get ``full``.
        together: Groups of ``full`` that will be anchored together in the gradient log that begins with this step. A
            forecast, which only saves memory.
    """

    step: int
    full: tuple[str, ...] = ()
    memory_only: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    wait: bool = False
    k: int | None = None
    plt_budget: float | None = None
    window: Window | None = None
    slot: int = 0
    sends_memory_only: bool = True
    together: tuple[tuple[str, ...], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.full or self.memory_only or self.compute or self.gradients)


@dataclass(frozen=True)
class Step:
    """The identity of a snapshot.

    Attributes:
        run: Id of the store.
        life: Token that no other life of the run has, if memory outlives the process.
        generation: Number of that life; with ``step`` it names the directory.
        step: Optimizer step whose state is saved.
        number: Number of earlier snapshots of that life; the step if the snapshot is ``parting``.
        parting: True if the snapshot was not due, but is sealed because training stops. Ranks may stop at different
            steps, so that they have only the step in common.
    """

    run: str
    life: str
    generation: int
    step: int
    number: int = 0
    parting: bool = False


@dataclass(frozen=True)
class WindowPlace:
    """A step's place in a sparse window: the window's first step, its length, and the number of this step in it."""

    start: int
    size: int
    slot: int

    @property
    def is_last(self) -> bool:
        """True if the window ends with this step."""
        return self.slot + 1 == self.size


class PeerPart(enum.IntEnum):
    """The part of a snapshot's full operators that goes to peers, if there are any."""

    NOTHING = 0
    STORED = 1
    EVERYTHING = 2


@dataclass(frozen=True, eq=False)
class GradientGroups:
    """The operators whose gradients a step logs, grouped by the snapshot that anchored them.

    If the policy keeps to its rounds, operators that were anchored together are anchored together again, and then none
    of their older gradients is needed. So each group has its own memory slot for gradients.

    Attributes:
        groups: For each slot, the numbers of its groups, in the order in which they were anchored.
        slot_of: ``[operators]`` slot of each operator; -1 for operators whose gradients are not logged.
    """

    groups: tuple[tuple[int, ...], ...]
    slot_of: Counts


@dataclass(frozen=True)
class Contents:
    """The contents of one snapshot; equal on every rank, except for shares that survivors seal.

    Attributes:
        full: Operators in full, which go to storage if the snapshot does.
        memory_only: Further operators in full, which stay in host memory.
        compute: Operators of which only compute weights are saved, as a part of ``window``.
        gradients: Operators of which only the consumed gradients are saved, in a gradient log; none of ``full``.
        groups: The memory slots of ``gradients``; None if they share the slot of all other contents.
        window: The snapshot's place in a sparse window (MoEvement); None for a checkpoint by itself.
        since: Number of the first snapshot that a step of a gradient log needs; None for other snapshots.
        to_storage: True if the snapshot goes to storage; otherwise only memory that outlives the process gets it.
        to_peers: The part that goes to peers.
        on_behalf_of: The other rank whose share a survivor seals; None for its own share.
    """

    full: tuple[str, ...]
    memory_only: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    groups: GradientGroups | None = None
    window: WindowPlace | None = None
    since: int | None = None
    to_storage: bool = True
    to_peers: PeerPart = PeerPart.EVERYTHING
    on_behalf_of: int | None = None

    @property
    def slot(self) -> int:
        """The place in ``window``; 0 without a window."""
        return 0 if self.window is None else self.window.slot

    @property
    def is_checkpoint(self) -> bool:
        """True if the snapshot is a checkpoint by itself, or ends its sparse window."""
        return self.window is None or self.window.is_last

    def is_complete(self, everything: tuple[str, ...]) -> bool:
        """True if storage can open the snapshot alone, with all operators as of one step."""
        return self.window is None and len(self.full) == len(everything)

    def is_whole(self, everything: tuple[str, ...]) -> bool:
        """True if this snapshot alone holds every operator in full."""
        return self.window is None and len(self.copied) == len(everything)

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """All operators in full. The same object each time, so that caches by identity recognize it."""
        return (*self.full, *self.memory_only) if self.memory_only else self.full

    @property
    def sent(self) -> tuple[str, ...]:
        """Operators in full that go to peers."""
        return {PeerPart.NOTHING: (), PeerPart.STORED: self.full, PeerPart.EVERYTHING: self.copied}[self.to_peers]

    def writer(self, rank: int) -> int:
        """Returns the rank whose share ``rank`` saves."""
        return rank if self.on_behalf_of is None else self.on_behalf_of

    def brings(self, tier: Tier, everything: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the operators that a tier has as of the step, once the snapshot is a checkpoint there.

        For the last slot of a sparse window these are all operators, since the replay computes the others; for earlier
        slots there are none.
        """
        if self.window is not None:
            return everything if self.window.is_last else ()
        if tier is Tier.STORAGE:
            return self.full
        in_full = self.copied if tier is Tier.HOST else self.sent
        if not self.gradients or (tier is Tier.PEER and not self.to_peers):
            return in_full
        return everything if len(in_full) + len(self.gradients) == len(everything) else (*in_full, *self.gradients)


@dataclass(frozen=True)
class Facts:
    """Further facts about a snapshot's step; equal on every rank, except for ``counted``.

    Attributes:
        index: Number of checkpoints begun earlier in the run.
        base: Directory of the newest checkpoint on storage when the snapshot began; empty before the first.
        applied: ``[L, E]`` tokens that experts had processed by the step, summed over ranks. While the ranks are still
            agreeing on the step, the tokens of the step itself are missing.
        faults: Recoveries of the run so far.
        policy: ``Policy.describe()``.
        measured: As ``Manifest.measured``.
        lost: ``[L, E]`` tokens lost in recoveries that ``base`` does not know of; no later recovery loses them again.
            None if there are none.
        counted: ``[L, E]`` tokens that this rank counted in the step itself, if ranks had not agreed on them, so that
            ``applied`` lacks them: the sum over ranks must be added. None if ranks had agreed.
        updates: Number of updates so far that changed weights in this process.
    """

    index: int
    base: str
    applied: Counts = field(compare=False)
    faults: tuple[FaultRecord, ...] = ()
    policy: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    lost: Counts | None = field(default=None, compare=False)
    counted: Counts | None = field(default=None, compare=False)
    updates: int = 0


Superseded = Mapping[str, tuple[bool, Sequence[str]]]
"""Files that no checkpoint needs any more, of which each rank deletes its own: step directory -> (True if it has no
files of this format afterwards, groups of files)."""


@dataclass(frozen=True)
class Fate:
    """The end of one snapshot on storage. Rank 0 decides the first three fields, and each rank adds the others.

    Attributes:
        cause: Why the snapshot was not committed; None if it was.
        lost: True if files of older checkpoints are gone, so that no later checkpoint may refer to files on storage.
        superseded: Files that no checkpoint needs any more.
        number: As in ``Step``.
        step: As in ``Step``.
        persist_secs: Time from the beginning of the snapshot to its end.
        rates: Rates measured on this rank, by their names in ``policies.base.Measured``; empty if it wrote no tensors.
    """

    cause: str | None = None
    lost: bool = False
    superseded: Superseded = field(default_factory=dict)
    number: int = -1
    step: int = -1
    persist_secs: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def committed(self) -> bool:
        return self.cause is None
