"""Which checkpoints the nodes of a restarted job hold in memory, and where each rank's share comes from. Pure.

A share is what one rank sealed of one snapshot. After a restart it may lie on any node, under any rank: its own node's,
or, as a replica, a peer's. Ranks of the life that wrote it are called writers here, ranks of this life holders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moe_ckpt.core.step import Step
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.format.slot import GRADIENTS, STATE, TENSORS
from moe_ckpt.ledger.freshness import STALE, UNKNOWN, of_all


@dataclass(frozen=True)
class Share:
    """One slot that a holder offers.

    Attributes:
        holder: Rank of this life.
        node: Of the holder: ranks of one node reach each other's slots as files.
        number: Among the holder's slots.
        identity: Of the snapshot.
        writer: Rank of that life.
        writers: Ranks of that life.
        window: (first step, steps, place) of the sparse window that it is a step of; None if it stands by itself.
        base: Directory of the newest checkpoint on storage when it began; empty if there was none.
        starts: How many in a row went on from it and got nowhere.
        freshness: What the writer's checksums showed (``ledger.freshness``).
        sent: It is a copy of what the writer sent to peers, which is not all that it had.
        since: Of a step of a gradient log, sequence of the first snapshot that it needs; None if it is none.
        only: As of ``format.slot.SlotHeader``.
        sealer: Likewise.
        unagreed: The ranks had not agreed on its step's tokens, so that those of all ranks are needed to know them.
        groups: As of ``core.anchors.GradientGroups``.
        pieces: As of ``format.slot.SlotHeader``.
        held: For each of ``pieces``, the number that this slot has among the holder's; -1 if the holder lacks it.
        piece: Of a slot of gradients (``gradients_of``), as of ``format.slot.SlotHeader``.
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
        """The life of the run that wrote it."""
        return self.identity.generation

    @property
    def is_parting(self) -> bool:
        """True if it was sealed besides what was due, because training stopped."""
        return self.identity.parting

    @property
    def is_lent(self) -> bool:
        """True if one rank sealed it on behalf of another."""
        return self.sealer not in (None, self.writer)

    @property
    def is_own_at_parting(self) -> bool:
        """True if it is all that its writer had when training stopped, as that rank sealed it itself."""
        return self.sealer == self.writer and not self.only

    @property
    def snapshot(self) -> tuple[bool, int]:
        """Names the snapshot within its life, and orders those by age: what is sealed when training stops is newest."""
        return self.identity.parting, self.identity.number

    @property
    def key(self) -> SlotKey:
        return slot_key(self.writer, self.only, self.piece)

    def has(self, piece: int) -> bool:
        """True if the holder has the slot of gradients with ``piece``."""
        return piece in self.pieces and self.held[self.pieces.index(piece)] >= 0

    def gradients_of(self, piece: int) -> Share:
        """The slot of gradients with ``piece``, which the holder has."""
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
    """Slots of gradients of one snapshot, those of all writers with one place.

    Attributes:
        number: The place.
        lacking: Writers whose slot nobody has.
    """

    number: int
    lacking: frozenset[int]


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint of which memory has something.

    Attributes:
        generation: Of the life that wrote it.
        step: That it stands for.
        writers: Ranks of that life.
        base: As of ``Share``.
        snapshots: One, or those of a sparse window, or of a gradient log up to a step of it, in order.
        states: Of writers whose share another rank sealed: who holds their plain state.
        gradients: For each snapshot, the slots of gradients beside it that are needed; none where there are no such.
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
        """Every writer's share of every snapshot is there, with its plain state and the gradients that are needed."""
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
        """Writers whose share of some snapshot is nowhere."""
        lacking = {writer for places in self.gradients for piece in places for writer in piece.lacking}
        present = set.intersection(*(set(snapshot) for snapshot in self.snapshots)) - lacking
        return tuple(writer for writer in range(self.writers) if writer not in present)

    @property
    def is_whole(self) -> bool:
        """``is_complete``, and of every writer all that it had is there."""
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
    """Plain state by itself is no snapshot; it stands behind what is."""
    by_snapshot: dict[_Key, list[Share]] = {}
    for share in sorted(shares, key=lambda one: one.only == STATE):
        key = share.identity.life, share.snapshot
        if share.only != STATE or key in by_snapshot:
            by_snapshot.setdefault(key, []).append(share)
    return by_snapshot


def snapshots_of(shares: Iterable[Share]) -> list[MemoryCheckpoint]:
    """Each snapshot alone, with what it has in full, whether or not it is a checkpoint. Sparse windows and stale
    snapshots are left out."""
    groups = (group for group in _by_snapshot(shares).values() if group[0].window is None)
    return [_checkpoint([group]) for group in groups if _may_be_built_upon(group)]


def checkpoints_of(shares: Iterable[Share]) -> list[MemoryCheckpoint]:
    """Checkpoints, newest first, of which memory has every step, or a part of their only step. Stale snapshots are left
    out."""
    by_snapshot = _by_snapshot(shares)
    places: dict[tuple[str, int], list[GradientPiece]] = {}
    windows: dict[tuple[str, int], dict[int, list[Share]]] = {}
    checkpoints: list[tuple[tuple[bool, int], MemoryCheckpoint]] = []
    for (life, snapshot), group in by_snapshot.items():
        if of_all(share.freshness for share in group) == STALE:
            continue
        window, since = group[0].window, group[0].since
        if since is not None:
            sequence = group[0].identity.number
            if sequence - since >= len(by_snapshot):  # some are lacking, however many it says
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
    """The checkpoint with the slots of gradients that lead to it: those of operators that it has no newer anchor of.

    Args:
        checkpoint: A step of a log.
        places: Those of each snapshot, which other checkpoints have, too; filled here.
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
    """Writers that sealed a slot of gradients which nobody has."""
    return frozenset(
        writer
        for writer, shares in snapshot.items()
        if piece in shares[0].pieces and not any(share.has(piece) for share in shares)
    )


def without(shares: Iterable[Share], bad: Collection[tuple[int, int]]) -> list[Share]:
    """Returns the shares without damaged slots.

    Args:
        shares: Those that are known.
        bad: (holder, number) of slots in which damage was found.
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
    """Returns the shares without those of a life's gradient log that updates lead to; full ones stay."""
    return [share for share in shares if share.generation != generation or share.since in (None, share.identity.number)]


def _may_be_built_upon(group: Sequence[Share]) -> bool:
    """Whether there is something of a snapshot, which is not stale."""
    return bool(group) and of_all(share.freshness for share in group) != STALE


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
    """Who holds each writer's share, or plain ``state`` by itself."""
    by_writer: dict[int, list[Share]] = {}
    for share in sorted(group, key=lambda one: (one.writer, one.holder, one.number)):
        if (share.only == STATE) == state:
            by_writer.setdefault(share.writer, []).append(share)
    return by_writer


@dataclass(frozen=True)
class LeftBehind:
    """A checkpoint that memory had, and from which no run can resume.

    Attributes:
        step: The newest of which some node still holds a part; None if no node holds anything.
        writers: Ranks of the life that wrote it, whose shares no node holds, undamaged. Empty where no share is missing
            (its sparse window was not complete), or where an older step is whole, which the run cannot use.
    """

    step: int | None = None
    writers: tuple[int, ...] = ()


def left_behind(checkpoints: Sequence[MemoryCheckpoint], generation: int, step: int) -> LeftBehind | None:
    """The checkpoint in memory that a run loses when it resumes from storage; None if memory has nothing newer.

    Args:
        checkpoints: Those of which memory has a part.
        generation: The life that wrote the checkpoint that the run resumes from.
        step: Likewise.
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
    """Those of ``snapshots``, from ``snapshots_of``, that may give experts that ``checkpoint`` lacks, oldest first.

    Earlier snapshots of its life that were due, and what survivors sealed of the very same step. Of steps of a gradient
    log they give what was saved in full.
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
    """Returns the writer from whose slot the state that all ranks share is read: one that knew all ranks' tokens, if
    there is any."""
    return min(snapshot, key=lambda writer: (fullest(snapshot[writer]).unagreed, writer))


def is_agreed(snapshot: Snapshot) -> bool:
    """Returns whether a rank that sealed something of the snapshot knew the tokens of all ranks."""
    return not fullest(snapshot[teller_of(snapshot)]).unagreed


def fullest(shares: Sequence[Share]) -> Share:
    """The share that has everything that any of these shares of one writer has."""
    return min(shares, key=lambda share: share.sent)


def nearest(shares: Sequence[Share], rank: int, node: str) -> Share:
    """The holder that ``rank``, on ``node``, takes a share from: its own memory, else its node's, else any other."""
    return min(shares, key=lambda share: (share.holder != rank, share.node != node, share.holder, share.number))


def base_of(checkpoint: MemoryCheckpoint, stored: Sequence[tuple[int, int, str]]) -> list[str]:
    """Checkpoints on storage that an incomplete state of the model may be completed from, best first.

    Only what the same life wrote, or came from: another branch of the run has other states at the same steps.

    Args:
        checkpoint: In memory.
        stored: (generation, step, directory) of those on storage, newest first.
    """
    mine = [
        directory
        for generation, step, directory in stored
        if generation == checkpoint.generation and step <= checkpoint.step
    ]
    return mine + [directory for *_, directory in stored if directory == checkpoint.base and directory not in mine]
