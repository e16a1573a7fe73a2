"""The records of one snapshot: the policy's plan, which step it is of, what it holds, the facts of that step, its end.

Each is made once, from the one before and what the ledger adds. All that copy, commit, keep and recover a snapshot read
them. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ckpt.core.anchors import GradientGroups
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
        memory_only: Others that are kept in host memory in full, beside those.
        compute: Operators of which storage gets what forward and backward read (2 B/param in bf16), in a window.
        gradients: Operators of which only what the step's update consumed is saved, in a gradient log.
        wait: The engine finishes the checkpoint before training continues (the synchronous baseline).
        k: Experts per layer that the policy sends to storage at present, where it counts them so (MoC).
        plt_budget: Portion of lost tokens that the policy keeps to, if it does.
        window: The sparse window that this step belongs to (MoEvement). Such a step's snapshot is no checkpoint by
            itself: that exists when the window's last one is committed.
        slot: The step's place in ``window``.
        sends_memory_only: What is ``memory_only`` goes to peers, too, where there are any; what goes to storage always
            does.
        together: Operators that are saved in full here and will be anchored together in the gradient log that begins
            with this step, one group after the other. A forecast: it only spares memory.
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
        life: Token that no other life of the run has, where memory outlives the process.
        generation: Number of that life; with ``step`` it names the directory.
        step: Optimizer step whose state is saved.
        number: Snapshots of that life before this one; its step if it is ``parting``.
        parting: It is sealed besides what was due, because training stops. Ranks may stop at different steps, so that
            they have only the step in common.
    """

    run: str
    life: str
    generation: int
    step: int
    number: int = 0
    parting: bool = False


@dataclass(frozen=True)
class WindowPlace:
    """A step's place in a sparse window: the window's first step, its length, and which of its steps this is."""

    start: int
    size: int
    slot: int

    @property
    def is_last(self) -> bool:
        """True if the window ends with this step."""
        return self.slot + 1 == self.size


class PeerPart(enum.IntEnum):
    """Part of a snapshot's operators in full that goes to peers, where there are any."""

    NOTHING = 0
    STORED = 1
    EVERYTHING = 2


@dataclass(frozen=True)
class Contents:
    """The contents of one snapshot; equal on every rank, but for shares that survivors seal.

    Attributes:
        full: Operators in full that go to storage, if the snapshot does.
        memory_only: Others in full that stay in host memory.
        compute: Operators whose compute weights alone are saved, as a part of ``window``.
        gradients: Operators of which only the consumed gradients are saved, in a gradient log; none of ``full``.
        groups: How ``gradients`` are divided into slots of their own; None if they are in one with the rest.
        window: The snapshot's place in a sparse window (MoEvement); None for a checkpoint by itself.
        since: First snapshot that a step of a gradient log needs, by its number; None for all others.
        to_storage: It goes to storage; otherwise into memory that outlives the process only.
        to_peers: What goes to peers.
        on_behalf_of: The other rank whose share a survivor seals; None for its own.
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
        """The place in ``window``; 0 without one."""
        return 0 if self.window is None else self.window.slot

    @property
    def is_checkpoint(self) -> bool:
        """True if it is self-contained, or ends its sparse window."""
        return self.window is None or self.window.is_last

    def is_complete(self, everything: tuple[str, ...]) -> bool:
        """True if storage needs nothing else to open it, and it is of one step."""
        return self.window is None and len(self.full) == len(everything)

    def is_whole(self, everything: tuple[str, ...]) -> bool:
        """True if this snapshot alone holds every operator in full."""
        return self.window is None and len(self.copied) == len(everything)

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """All operators in full: the same object each time, so that caches recognize it."""
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

        Of a sparse window's last slot that is every operator, since the replay computes the others; of earlier slots
        none.
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
    """The facts of a snapshot's step besides; equal on every rank, but for ``counted``.

    Attributes:
        index: Checkpoints begun before this one in the run.
        base: Directory of the newest checkpoint on storage when the snapshot began; empty before the first.
        applied: ``[L, E]`` tokens that experts had processed by the step, summed over ranks. As long as the ranks are
            agreeing on the step, those of the step itself are missing.
        faults: Recoveries of the run so far.
        policy: ``Policy.describe()``.
        measured: As ``Manifest.measured``.
        lost: ``[L, E]`` tokens that those lost which ``base`` does not know of: no later one loses them again. None if
            there are none.
        counted: ``[L, E]`` tokens that this rank counted in the step itself, where ``applied`` has none of that step
            because ranks had not agreed on it: those of all ranks are to be added. None if they had.
        updates: That changed weights in this process by then.
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
"""What no checkpoint needs any more, for each rank to delete its own of it: step directory -> (True if nothing of this
format is left in it then, groups of files)."""


@dataclass(frozen=True)
class Fate:
    """The end of one snapshot on storage. Rank 0 decides the first three fields, and each rank adds the others.

    Attributes:
        cause: Why it was not committed; None if it was.
        lost: Files that older checkpoints had written are gone, so that nothing on storage may be built upon.
        superseded: What no checkpoint needs any more.
        number: As in ``Step``.
        step: As in ``Step``.
        persist_secs: From its beginning to its end.
        rates: What this rank's tensors took, as in ``policies.base.Measured``; empty if it had none.
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
