"""Finds the checkpoints that the nodes of a restarted job hold in memory, and who holds each rank's share. Pure.

A share is what one rank sealed of one snapshot. After a restart it may be on any node: that of the rank, or, as a copy,
that of a peer. Ranks of the life that wrote it are called writers here, ranks of this life holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moe_ckpt.core.step import Step
from moe_ckpt.format.manifest import age_of, step_dir
from moe_ckpt.format.slot import GRADIENTS, STATE, TENSORS
from moe_ckpt.ledger.freshness import STALE, UNKNOWN, combined_freshness


@dataclass(frozen=True)
class Share:
    """One slot that a holder offers.

    Attributes:
        holder: Rank of this life.
        node: The holder's node: ranks of one node reach each other's slots as files.
        number: The slot's number among the holder's slots.
        identity: Names the snapshot.
        writer: Rank of the life that wrote it.
        writers: How many ranks that life had.
        window: (first step, steps, place) of the sparse window that it is a step of; None if it stands by itself.
        base: Directory of the newest checkpoint on storage when it began; empty if there was none.
        starts: How many starts in a row resumed from it and ended no step.
        freshness: What the writer's checksums showed (``ledger.freshness``).
        sent: It is a copy of what the writer sent to peers, which is not its whole share.
        since: For a step of a gradient log, the number of the first snapshot that it needs; None for another snapshot.
        only: As of ``format.slot.SlotHeader``.
        sealer: As of ``format.slot.SlotHeader``.
        unagreed: The ranks had not agreed on the step's tokens, so that the counts of all ranks have to be added.
        groups: As of ``core.step.GradientGroups``.
        pieces: As of ``format.slot.SlotHeader``.
        held: For each of ``pieces``, the number of that slot of gradients among the holder's; -1 if it lacks the slot.
        piece: For a slot of gradients (``gradients_of``), its ``place`` (``format.slot.SlotHeader``).
    """

    holder: int
    node: str
    number: int
    identity: Step
    writer: int
    writers: int
    window: tuple[int, int, int] | None
    base: str
    starts: int = 0
    freshness: int = UNKNOWN
    sent: bool = False
    since: int | None = None
    only: str = ""
    sealer: int | None = None
    unagreed: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    pieces: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    piece: int = 0

    @property
    def directory(self) -> str:
        """The directory that storage has, or would have, of the step."""
        return step_dir(self.step, self.generation)

    @property
    def step(self) -> int:
        return self.identity.step

    @property
    def generation(self) -> int:
        """The number of the life that wrote it."""
        return self.identity.generation

    @property
    def is_parting(self) -> bool:
        """True if it was sealed because training stopped, although no snapshot was due."""
        return self.identity.parting

    @property
    def is_lent(self) -> bool:
        """True if one rank sealed it on behalf of another."""
        return self.sealer not in (None, self.writer)

    @property
    def is_own_at_parting(self) -> bool:
        """True if its writer sealed its whole share itself when training stopped."""
        return self.sealer == self.writer and not self.only

    @property
    def snapshot(self) -> tuple[bool, int]:
        """Names the snapshot within its life. The newest is the maximum: one sealed because training stopped."""
        return self.identity.parting, self.identity.number

    @property
    def key(self) -> SlotKey:
        return slot_key(self.writer, self.only, self.piece)

    def has(self, piece: int) -> bool:
        """True if the holder has the slot of gradients with ``piece``."""
        return piece in self.pieces and self.held[self.pieces.index(piece)] >= 0

    def gradients_of(self, piece: int) -> Share:
        """Returns the holder's slot of gradients with ``piece``, which it ``has``."""
        number = self.held[self.pieces.index(piece)]
        return replace(self, number=number, only=GRADIENTS, piece=piece, sent=False, groups=(), pieces=(), held=())


Snapshot = Mapping[int, tuple[Share, ...]]
"""Writer -> those who hold its share."""
SlotKey = tuple[int, str, int]
"""(writer; STATE, GRADIENTS or empty; piece of gradients): names a slot of one snapshot, whoever holds it."""


def slot_key(writer: int, only: str, piece: int) -> SlotKey:
    """Returns the key of a slot. A share without plain state has the key of a whole one, which it stands for."""
    return writer, "" if only == TENSORS else only, piece


class GradientPiece(NamedTuple):
    """The slots of gradients of one snapshot that have the same ``place``, one of each writer.

    Attributes:
        number: The place.
        lacking: Writers whose slot no rank holds.
    """

    number: int
    lacking: frozenset[int]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint of which memory has at least a part.

    Attributes:
        generation: Of the life that wrote it.
        step: The step whose state it has.
        writers: How many ranks that life had.
        base: As of ``Share``.
        snapshots: One snapshot; or those of a sparse window, or of a gradient log up to its step, in order.
        states: Writer -> who holds its plain state, for each writer whose share another rank sealed.
        gradients: For each snapshot, the slots of gradients that are needed beside it; empty if it is no log.
    """

    generation: int
    step: int
    writers: int
    base: str
    snapshots: tuple[Snapshot, ...]
    states: Snapshot = field(default_factory=dict)
    gradients: tuple[tuple[GradientPiece, ...], ...] = ()

    @property
    def directory(self) -> str:
        """The directory that storage has, or would have, of the checkpoint."""
        return step_dir(self.step, self.generation)

    @property
    def is_complete(self) -> bool:
        """True if somebody holds every share of every snapshot, every plain state, and all gradients needed."""
        whole = (
            len(snapshot) == self.writers
            and all(writer in self.states for writer, shares in snapshot.items() if shares[0].is_lent)
            for snapshot in self.snapshots
        )
        return all(whole) and not any(piece.lacking for places in self.gradients for piece in places)

    def slots(self) -> list[list[tuple[Share, ...]]]:
        """Returns, snapshot by snapshot, every slot that the checkpoint needs, as those who hold it."""
        slots = []
        for at, snapshot in enumerate(self.snapshots):
            shares = [snapshot[writer] for writer in sorted(snapshot)]
            pieces = [piece.number for piece in self.gradients[at]] if self.gradients else []
            gradients = (
                tuple(share.gradients_of(piece) for share in holders if share.has(piece))
                for piece in pieces
                for holders in shares
            )
            slots.append([*shares, *filter(None, gradients), *self.states.values()])
        return slots

    @property
    def lost_writers(self) -> tuple[int, ...]:
        """Writers whose share of some snapshot no rank holds."""
        lacking = {writer for places in self.gradients for piece in places for writer in piece.lacking}
        present = set.intersection(*(set(snapshot) for snapshot in self.snapshots)) - lacking
        return tuple(writer for writer in range(self.writers) if writer not in present)

    @property
    def is_whole(self) -> bool:
        """True if it is complete and every share is there as its writer sealed it, not only as peers got it."""
        writers = (shares for snapshot in self.snapshots for shares in snapshot.values())
        return self.is_complete and all(any(not share.sent for share in shares) for shares in writers)

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares of all snapshots."""
        held = (shares for snapshot in (*self.snapshots, self.states) for shares in snapshot.values())
        return tuple(share for shares in held for share in shares)

    @property
    def is_parting(self) -> bool:
        """True if ranks sealed it because training stopped, besides what was due."""
        return self.shares[-1].is_parting

    @property
    def is_window(self) -> bool:
        """True if the checkpoint is a sparse window."""
        return _any_of(self.snapshots[-1]).window is not None

    @property
    def is_log(self) -> bool:
        """True if the checkpoint is reached from anchors by the gradients consumed since."""
        return _any_of(self.snapshots[-1]).since is not None


def _any_of(snapshot: Snapshot) -> Share:
    """Returns one share, for what all shares of a snapshot have alike."""
    return next(iter(snapshot.values()))[0]


_Key = tuple[str, tuple[bool, int]]
"""Life, and ``Share.snapshot``."""


def _by_snapshot(shares: Iterable[Share]) -> dict[_Key, list[Share]]:
    """Groups shares by their snapshots. Plain state by itself is no snapshot; it comes last in its snapshot's group."""
    by_snapshot: dict[_Key, list[Share]] = {}
    for share in sorted(shares, key=lambda one: one.only == STATE):
        key = share.identity.life, share.snapshot
        if share.only != STATE or key in by_snapshot:
            by_snapshot.setdefault(key, []).append(share)
    return by_snapshot


def snapshots_of(shares: Iterable[Share]) -> list[MemoryCheckpoint]:
    """Returns each snapshot by itself, as if what it has in full were a checkpoint. Sparse windows and stale snapshots
    are left out."""
    groups = (group for group in _by_snapshot(shares).values() if group[0].window is None)
    return [_checkpoint([group]) for group in groups if _may_be_built_upon(group)]


def checkpoints_of(shares: Iterable[Share]) -> list[MemoryCheckpoint]:
    """Returns the checkpoints of which memory has every step, or a part of the only step, newest first.

    Stale snapshots are left out.
    """
    by_snapshot = _by_snapshot(shares)
    places: dict[tuple[str, int], list[GradientPiece]] = {}
    windows: dict[tuple[str, int], dict[int, list[Share]]] = {}
    checkpoints: list[tuple[tuple[bool, int], MemoryCheckpoint]] = []
    for (life, snapshot), group in by_snapshot.items():
        if combined_freshness(share.freshness for share in group) == STALE:
            continue
        window, since = group[0].window, group[0].since
        if since is not None:
            sequence = group[0].identity.number
            if sequence - since >= len(by_snapshot):  # so many snapshots are not there, whatever the slot says
                continue
            groups = [by_snapshot.get((life, (False, number)), []) for number in range(since, sequence + 1)]
            if all(_may_be_built_upon(shares_of_step) for shares_of_step in groups):
                checkpoints.append((snapshot, _with_gradients(_checkpoint(groups), places)))
        elif window is None:
            checkpoints.append((snapshot, _checkpoint([group])))
        else:
            windows.setdefault((life, window[0]), {})[window[2]] = group
    for slots in windows.values():
        groups = [slots[slot] for slot in sorted(slots)]
        if len(groups) == next(iter(groups[0])).window[1]:  # type: ignore[index]  # it is a window's
            checkpoints.append((groups[-1][0].snapshot, _checkpoint(groups)))
    return [made for _, made in sorted(checkpoints, key=lambda e: (e[1].generation, e[1].step, e[0]), reverse=True)]


def _with_gradients(
    checkpoint: MemoryCheckpoint, places: dict[tuple[str, int], list[GradientPiece]]
) -> MemoryCheckpoint:
    """Returns the checkpoint with the slots of gradients that lead to it: those of operators without a newer anchor.

    Args:
        checkpoint: A step of a log.
        places: (life, number) -> the slots of gradients of a snapshot, which other checkpoints share; filled here.
    """
    live = {group for groups in _any_of(checkpoint.snapshots[-1]).groups for group in groups}
    gradients = []
    for snapshot in checkpoint.snapshots:
        one = _any_of(snapshot)
        key = one.identity.life, one.identity.number
        if key not in places:
            places[key] = [GradientPiece(at, _lacking(snapshot, at)) for at in range(len(one.groups))]
        pairs = zip(places[key], one.groups, strict=True)
        gradients.append(tuple(piece for piece, groups in pairs if live.intersection(groups)))
    return replace(checkpoint, gradients=tuple(gradients))


def _lacking(snapshot: Snapshot, piece: int) -> frozenset[int]:
    """Returns the writers that sealed a slot of gradients which no rank holds."""
    return frozenset(
        writer
        for writer, shares in snapshot.items()
        if piece in shares[0].pieces and not any(share.has(piece) for share in shares)
    )


def without_damaged(shares: Iterable[Share], bad: Collection[tuple[int, int]]) -> list[Share]:
    """Returns the shares without damaged slots.

    Args:
        shares: The shares that are known.
        bad: (holder, number) of each damaged slot.
    """
    intact = []
    for share in shares:
        if any((share.holder, number) in bad for number in share.held):
            held = (-1 if (share.holder, number) in bad else number for number in share.held)
            share = replace(share, held=tuple(held))
        if (share.holder, share.number) not in bad:
            intact.append(share)
    return intact


def without_log(shares: Iterable[Share], generation: int) -> list[Share]:
    """Returns the shares without the steps of a life's gradient log, except those that were saved in full."""
    return [share for share in shares if share.generation != generation or share.since in (None, share.identity.number)]


def _may_be_built_upon(group: Sequence[Share]) -> bool:
    """Returns whether there is a share of the snapshot, and the snapshot is not stale."""
    return bool(group) and combined_freshness(share.freshness for share in group) != STALE


def _checkpoint(groups: Sequence[Sequence[Share]]) -> MemoryCheckpoint:
    last = groups[-1][0]
    snapshots: list[dict[int, tuple[Share, ...]]] = []
    for group in groups:  # of each writer's shares those that it sealed itself, or copies of them, if there are any
        by_writer = _by_writer(group, state=False)
        snapshots.append({w: tuple(s for s in held if not s.is_lent) or tuple(held) for w, held in by_writer.items()})
    sealed_by_others = {
        writer for snapshot in snapshots for writer, (one, *_) in snapshot.items() if one.only == TENSORS
    }
    states_by_writer = _by_writer(groups[-1], state=True)
    states = {writer: tuple(shares) for writer, shares in states_by_writer.items() if writer in sealed_by_others}
    return MemoryCheckpoint(last.generation, last.step, last.writers, last.base, tuple(snapshots), states)


def _by_writer(group: Iterable[Share], *, state: bool) -> dict[int, list[Share]]:
    """Returns writer -> its shares, or, if ``state``, its plain state by itself."""
    by_writer: dict[int, list[Share]] = {}
    for share in sorted(group, key=lambda one: (one.writer, one.holder, one.number)):
        if (share.only == STATE) == state:
            by_writer.setdefault(share.writer, []).append(share)
    return by_writer


@dataclass(frozen=True)
class LeftBehind:
    """A checkpoint that memory had, and from which no run can resume.

    Attributes:
        step: The newest step of which some node still holds a part; None if no node holds anything.
        writers: Ranks of the life that wrote it, whose shares no node holds undamaged. Empty if no share is missing
            (its sparse window was not complete), or if an older step is whole and the run cannot use it.
    """

    step: int | None = None
    writers: tuple[int, ...] = ()


def left_behind(checkpoints: Sequence[MemoryCheckpoint], generation: int, step: int) -> LeftBehind | None:
    """Returns the checkpoint in memory that a run loses by resuming from storage; None if memory has nothing newer.

    Args:
        checkpoints: The checkpoints of which memory has a part.
        generation: Of the life that wrote the checkpoint from which the run resumes.
        step: Of that checkpoint.
    """
    if not checkpoints:
        return LeftBehind()
    newer = [checkpoint for checkpoint in checkpoints if (checkpoint.generation, checkpoint.step) > (generation, step)]
    parts = [checkpoint for checkpoint in newer if not checkpoint.is_complete]
    if not parts:
        return None
    newest = max(parts, key=lambda checkpoint: (checkpoint.generation, checkpoint.step))
    if len(parts) < len(newer):  # a lost part is not why the run cannot continue from memory
        return LeftBehind(newest.step)
    return LeftBehind(newest.step, newest.lost_writers)


def beneath_of(checkpoint: MemoryCheckpoint, snapshots: Iterable[MemoryCheckpoint]) -> list[MemoryCheckpoint]:
    """Returns the ``snapshots`` (``snapshots_of``) that may give experts that ``checkpoint`` lacks, oldest first.

    These are earlier snapshots of its life that were due, and what survivors sealed of its own step. A step of a
    gradient log gives the experts that it saved in full.
    """
    if checkpoint.is_window:
        return []
    mine, first = checkpoint.shares[-1], min(share.snapshot for share in checkpoint.shares)

    def lies_beneath(snapshot: MemoryCheckpoint) -> bool:
        if snapshot.is_parting:
            return snapshot.step == mine.step and not mine.is_parting
        return snapshot.shares[0].snapshot < first

    alike = (snapshot for snapshot in snapshots if snapshot.shares[0].identity.life == mine.identity.life)
    return sorted(filter(lies_beneath, alike), key=lambda snapshot: (snapshot.step, snapshot.shares[0].snapshot))


def newer_than(checkpoint: MemoryCheckpoint, shares: Iterable[Share]) -> LeftBehind | None:
    """Returns the newest step after ``checkpoint`` that survivors sealed and of which other ranks' shares are missing.

    A run resumes from the newest step of which every rank's share is there.

    Returns:
        The newest such step, and the ranks that sealed it; None if there is none.
    """
    last = checkpoint.shares[-1]
    sealed = [share for share in shares if share.is_own_at_parting and share.identity.life == last.identity.life]
    newest = max((share.step for share in sealed), default=checkpoint.step)
    if newest <= checkpoint.step:
        return None
    return LeftBehind(newest, tuple(sorted({share.writer for share in sealed if share.step == newest})))


def teller_of(snapshot: Snapshot) -> int:
    """Returns the writer from whose slot the contents and facts are read: if there is one, a writer that knew the
    tokens of all ranks."""
    return min(snapshot, key=lambda writer: (fullest(snapshot[writer]).unagreed, writer))


def is_agreed(snapshot: Snapshot) -> bool:
    """Returns whether a rank that sealed something of the snapshot knew the tokens of all ranks."""
    return not fullest(snapshot[teller_of(snapshot)]).unagreed


def fullest(shares: Sequence[Share]) -> Share:
    """Returns the share of one writer that has everything that its other copies have."""
    return min(shares, key=lambda share: share.sent)


def nearest(shares: Sequence[Share], rank: int, node: str) -> Share:
    """Returns the copy of a share that ``rank``, on ``node``, uses: its own, else its node's, else another node's."""
    return min(shares, key=lambda share: (share.holder != rank, share.node != node, share.holder, share.number))


def bases_of(checkpoint: MemoryCheckpoint, stored: Sequence[str]) -> list[str]:
    """Returns the checkpoints on storage that may complete a part of the model's state in memory, best first.

    These are checkpoints that the same life wrote or resumed from, since another branch of the run has other states at
    the same steps.

    Args:
        checkpoint: In memory.
        stored: Directories of those on storage, newest first.
    """
    first, last = (checkpoint.generation, 0), (checkpoint.generation, checkpoint.step)
    mine = [directory for directory in stored if first <= age_of(directory) <= last]
    return mine + [directory for directory in stored if directory == checkpoint.base and directory not in mine]
