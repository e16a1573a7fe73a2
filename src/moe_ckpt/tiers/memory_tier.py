"""This rank's snapshots in memory that outlives the process, from the copy until they are superseded.

A snapshot passes through: begun (its slot is being copied into), sealed (this rank's share is safe from ``kill -9``),
complete (every rank has sealed its share, which the ranks learn from a step's agreement), and is needed until a newer
checkpoint is complete (``ledger.memory_retention``). Where it goes to storage, too, it stays until that has been tried.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from moe_ckpt.core.plan import Tier
from moe_ckpt.core.step import Contents, PeerPart
from moe_ckpt.errors import MemoryGoneError
from moe_ckpt.ledger.freshness import CAUSE, STALE, UNKNOWN
from moe_ckpt.ledger.memory_retention import (
    MemoryStep,
    is_live,
    live_groups,
    needed,
    newest_checkpoint,
    with_newest_experts,
)
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.peers.messages import SealedSlot
from moe_ckpt.peers.replication import Replicator
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.slices.writing import SealedShare
from moe_ckpt.tiers.buffers import BufferPool

log = logging.getLogger("moe_ckpt")

SEALED, ALONE, NOT_YET, FAILED = 0, 1, 2, 3
"""What ranks tell each other of a snapshot, ascending: the maximum over ranks is what is true of all.

``ALONE`` is sealed, too, but some peer did not get its copy."""
_SAFE = (SEALED, ALONE)
_AHEAD = 64
"""So many snapshots a peer may be ahead of what all ranks have settled: its copies stay."""
_PARTING_SECS = 5.0
"""Longest wait, at a good end, for peers that still send."""
_REPORTED = 8
"""Snapshots that ranks tell each other of at once: so many that go to peers, and so many that do not, which must not
wait for the former. Others wait for a later step."""


class Settled(NamedTuple):
    """The outcome of a snapshot.

    Attributes:
        complete: Every rank has it.
        copied: So have the peers of every rank.
    """

    sequence: int
    complete: bool
    copied: bool


@dataclass(eq=False)
class _Entry:
    """One snapshot.

    Attributes:
        step: What it is, and what has become of it.
        buffer: Its bytes; None once it was given up.
        readers: Snapshots that are to be written to storage from the buffer still: it stays.
        state: Of this rank's share.
        freshness: What its checksums show.
        reported: The other ranks know that it is sealed.
        pieces: Place in ``Contents.groups`` -> gradients that lie by themselves, as far as they are needed.
        mirrored: Duplicates of other ranks' shares, until those have been copied.
    """

    step: MemoryStep
    buffer: Buffer | None
    readers: int
    state: int = NOT_YET
    freshness: int = UNKNOWN
    reported: bool = False
    pieces: dict[int, Buffer] = field(default_factory=dict)
    mirrored: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        buffers = (self.buffer, self.mirrored, *self.pieces.values())
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    @property
    def gone(self) -> str:
        """One of its slots that was sealed and that somebody has deleted; empty if all are there."""
        slots = (None if buffer is None else buffer.slot for buffer in (self.buffer, *self.pieces.values()))
        sealed = (slot for slot in slots if slot is not None)
        return next((str(slot.path) for slot in sealed if not (slot.is_there and slot.is_sealed)), "")

    def take_unneeded(self, places: Collection[int]) -> list[Buffer]:
        """Returns what is not needed once the ranks know what became of the snapshot: duplicates, and gradients."""
        mirrored, self.mirrored = self.mirrored, None
        buffers = [self.pieces.pop(index) for index in places]
        return buffers if mirrored is None else [mirrored, *buffers]

    def take_all(self) -> list[Buffer]:
        """Returns all that it has."""
        buffer, self.buffer = self.buffer, None
        buffers = self.take_unneeded(tuple(self.pieces))
        return buffers if buffer is None else [buffer, *buffers]


@dataclass
class Unsettled:
    """Snapshots of one rank, by sequence, of which the ranks do not know yet whether all have them.

    The order is the same on all ranks.

    Attributes:
        open: Those that began, the oldest first.
        asked: Those of them that the agreement under way is about.
        next: The sequence after the newest that began.
    """

    open: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    next: int = 0

    def begun(self, sequence: int) -> None:
        """A snapshot began."""
        self.open.append(sequence)
        self.next = sequence + 1

    def ask(self, most: int, copied: Callable[[int], bool]) -> list[int]:
        """Returns the oldest, at most so many that peers get and so many others: what the next agreement is about."""
        sent = [sequence for sequence in self.open if copied(sequence)]
        others = [sequence for sequence in self.open if not copied(sequence)]
        self.asked = [*sent[:most], *others[:most]]
        return self.asked

    def answered(self) -> list[int]:
        """Returns what the agreement that has ended was about."""
        asked, self.asked = self.asked, []
        return asked

    def ended(self, sequences: Collection[int]) -> None:
        """The ranks know what became of them."""
        self.open = [sequence for sequence in self.open if sequence not in sequences]


class MemoryTier:
    """Owns the slots of one rank while they are in use. ``begin`` and ``settle`` are called on the training
    thread, ``sealed`` on the thread that seals, ``ended`` on the persist thread.

    Args:
        run: The session's.
        node: Names the machine whose memory this is.
        pool: That the buffers come from.
        files: Where the slots lie.
        left: What earlier lives left. It does not count for the pool's budget.
        replicator: Sends copies to peers, and holds theirs; None without.

    Attributes:
        complete_step: Step of the newest checkpoint that the ranks hold: of this life, or the one that it resumed from.
            None before the first, and where this rank needed the room.
        complete_since: The first step of the newest one of this life, if that is a sparse window; else its only step.
    """

    outlives_process = True
    has_more = True

    def __init__(
        self,
        run: RunContext,
        node: str,
        pool: BufferPool,
        files: MemoryFiles,
        left_slots: LeftSlots,
        *,
        replicator: Replicator | None = None,
    ) -> None:
        self.rank, self.node, self.model, self.files = run.comm.rank, node, run.model, files
        self.run_id, self.root = files.run_id, files.root
        self.left_slots, self.replicator = left_slots, replicator
        self.complete_step: int | None = None
        self.complete_since: int | None = None
        self._catalog = run.catalog
        self._pool = pool
        self._entries: dict[int, _Entry] = {}
        self._unsettled = Unsettled()
        self._given_up: set[int | None] = set()
        self._lock = threading.RLock()

    def offer(self, snapshot: Snapshot, share: SealedShare) -> None:
        """Does nothing: the share was sealed before it went to storage."""

    def ended(self, snapshot: Snapshot, *, committed: bool) -> None:
        """Storage needs the buffer no longer, whether it has the snapshot now or not."""
        with self._lock:
            entry = self._entries.get(snapshot.identity.number)
            if entry is None:  # the session has ended
                return
            entry.readers -= 1
            if committed and snapshot.contents.is_checkpoint:
                for other in self._entries.values():
                    if other is entry or (entry.step.window is not None and other.step.window == entry.step.window):
                        other.step = replace(other.step, on_storage=True)
            self._release_unneeded()

    def give_up(self) -> bool:
        """Free room at the expense of what is needed least: released slots, an earlier life's slots, older experts.

        On any thread.

        Returns:
            False if there are none of these.
        """
        if self._pool.unseal_released():
            return True
        if self.left_slots.remove():
            self.complete_step = None  # those of this life are still to come
            self.files.wait_removed()
            return True
        with self._lock:
            for entry in _superseded(self._entries.values())[:1]:
                _give_up(entry, self._pool)
                return True
            return False

    def begin(self, snapshot: Snapshot) -> None:
        """A snapshot's buffer is being copied into.

        One that is sealed because training stops stays as it is: nothing is newer, and no agreement settles it.
        """
        if snapshot.identity.parting:
            return
        contents = snapshot.contents
        experts, sent = (self._experts(contents, tier) for tier in (Tier.HOST, Tier.PEER))
        step = MemoryStep(snapshot.identity, contents, experts, sent, copied=bool(contents.to_peers))
        entry = _Entry(step, snapshot.buffer, int(contents.to_storage), mirrored=snapshot.mirrored)
        places = (index for index, _ in snapshot.plan.pieces)
        entry.pieces = dict(zip(places, snapshot.pieces, strict=True))
        with self._lock:
            self._unsettled.begun(step.number)
            self._entries[step.number] = entry

    def _experts(self, contents: Contents, tier: Tier) -> int:
        """The experts that a tier has by a snapshot alone, a bit each; none of a sparse window."""
        sets = self._catalog.sets
        return 0 if contents.window else sets.experts & sets.of(contents.brings(tier, self._catalog.everything))

    def sealed(self, snapshot: Snapshot, headers: Sequence[bytes]) -> None:
        """This rank's share is sealed, and goes to peers; or, without headers, it never will be.

        Args:
            snapshot: Of the share.
            headers: Of its slots; that of the snapshot's own is the last.

        With peers it counts as sealed when all of them have answered, or are given up: one without room has said so.
        """
        if snapshot.identity.parting:
            return
        slot, sequence, replicator = snapshot.buffer.slot, snapshot.identity.number, self.replicator
        to_peers = snapshot.contents.to_peers
        freshness = UNKNOWN if snapshot.share is None else snapshot.share.freshness
        if replicator is not None and to_peers:
            replicator.store.mirrored(sequence, {} if snapshot.share is None else snapshot.mirrors())
        if not headers or slot is None:
            self._sealed(sequence, FAILED)
        elif replicator is None:
            self._sealed(sequence, SEALED, freshness)
        elif not to_peers:
            replicator.left_out(snapshot.step)
            self._sealed(sequence, ALONE, freshness)
        else:
            end = snapshot.plan.own_nbytes(host_only=to_peers is PeerPart.EVERYTHING)
            views = [*(snapshot.bytes_of(part) for _, part in snapshot.plan.pieces), slot.memory[:end]]
            shares = [SealedSlot(snapshot.step, view, raw) for view, raw in zip(views, headers, strict=True)]
            copies = replicator.submit(sequence, *shares)
            copies.add_done_callback(
                lambda done: self._sealed(sequence, SEALED if replicator.all_hold(done) else ALONE, freshness)
            )

    def _sealed(self, sequence: int, state: int, freshness: int = UNKNOWN) -> None:
        with self._lock:
            entry = self._entries.get(sequence)  # none once the session has ended
            if entry is not None:
                entry.state, entry.freshness = state, freshness
                self._release_unneeded()

    def reports(self) -> tuple[int, ...]:
        """Numbers for the other ranks: of each snapshot that is not settled its state and what its checksums show
        (``ledger.freshness``). Their count is always the same.
        """
        with self._lock:
            asked = self._unsettled.ask(_REPORTED, lambda sequence: self._entries[sequence].step.copied)
            entries = [self._entries[sequence] for sequence in asked]
            for entry in entries:
                entry.reported = entry.state in _SAFE
            filler = (NOT_YET, UNKNOWN) * (2 * _REPORTED - len(entries))
            return (*(number for entry in entries for number in (entry.state, entry.freshness)), *filler)

    def settle(self, reduced: Sequence[int]) -> list[Settled]:
        """Records what the ranks agreed on, for the snapshots that ``reports`` covered when it was sent.

        Returns:
            Those whose fate is known now, in order.
        """
        with self._lock:
            answers = list(zip(self._unsettled.answered(), reduced[::2], reduced[1::2], strict=False))
            ended = {sequence: _judged(*answer) for sequence, *answer in answers if answer[0] != NOT_YET}
            for sequence, state, freshness in answers:
                if freshness == STALE and state not in (NOT_YET, FAILED) and self.rank == 0:
                    step = self._entries[sequence].step.identity.step
                    log.warning("memory does not hold the checkpoint of step %d: %s", step, CAUSE)
            for sequence, state in ended.items():
                entry = self._entries[sequence]
                complete = state != FAILED and entry.state != FAILED  # the latter: deleted since this rank reported it
                entry.step = replace(entry.step, complete=complete, copied=state == SEALED)
            self._unsettled.ended(ended)
            newest = self._note_newest()
            if newest and (gone := self._entries[newest[-1].number].gone):
                log.warning(
                    "memory does not hold the checkpoint of step %d: %s", self.complete_step, MemoryGoneError(gone)
                )
                self.forget_gone()
            self._release_unneeded()
            steps = [entry.step for entry in self._entries.values()]
            retained = {
                *self._needed(steps),
                *self._unsettled.open,
                *range(self._unsettled.next, self._unsettled.next + _AHEAD),
            }
            spare = set(with_newest_experts(steps)) - retained
            over = _over(self._entries.values())
        if newest:
            self.left_slots.remove()
        if self.replicator is not None and ended:
            self.replicator.release_except(retained | spare, spare, over)
        return [Settled(sequence, state != FAILED, state == SEALED) for sequence, state in sorted(ended.items())]

    def _note_newest(self) -> list[MemoryStep]:
        """Returns the snapshots of the newest checkpoint of this life that the ranks hold."""
        newest = newest_checkpoint(entry.step for entry in self._entries.values())
        if newest:
            self.complete_step = newest[-1].identity.step
            self.complete_since = newest[0].identity.step
        return newest

    def goes_on(self, window: int | None) -> None:
        """Releases what lies here of windows that were given up; equal on every rank.

        Args:
            window: First step of the one that goes on, or begins; None: none does.
        """
        with self._lock:
            slots = Counter(entry.step.window for entry in self._entries.values())
            steps = [entry.step for entry in self._entries.values()]
            given_up = {step.window for step in steps if slots[step.window] < step.size} - {window, None}
            if given_up != self._given_up:
                self._given_up = given_up
                self._release_unneeded()

    def _needed(self, steps: Sequence[MemoryStep]) -> frozenset[int]:
        return needed(step for step in steps if step.window not in self._given_up)

    def _release_unneeded(self) -> None:
        steps = [entry.step for entry in self._entries.values()]
        retained = self._needed(steps) | frozenset(with_newest_experts(steps))
        for sequence, entry in list(self._entries.items()):
            if sequence in retained or entry.readers or entry.state == NOT_YET or entry.step.complete is None:
                continue
            if sequence in self._unsettled.open:  # given up here, of which the others are still to hear
                continue
            del self._entries[sequence]
            _give_up(entry, self._pool)
        over = _over(self._entries.values())
        for sequence, entry in self._entries.items():
            is_settled = entry.state != NOT_YET and entry.step.complete is not None
            if is_settled and sequence not in self._unsettled.open and not entry.readers:
                for buffer in entry.take_unneeded({index for index in entry.pieces if (sequence, index) in over}):
                    self._pool.give_back(buffer)

    @property
    def is_settled(self) -> bool:
        """Returns whether it is known of every snapshot that all ranks have it, or not; equal on all ranks."""
        return not self._unsettled.open

    def drop(self, *, chain: bool = True, last: bool = False) -> bool:
        """Give up what a failure could do without, because there is no other room; True if there was any.

        First this rank's own of the oldest checkpoint whose copies stay, or that holds older experts only; then what
        others may not have yet; then what storage has, too.

        Args:
            chain: Give up the newest step of a gradient log, too, and all that it needs. False for the next step of it.
            last: No snapshot comes after the one that needs the room: give up a window under way, too.
        """
        with self._lock:
            for entry in _superseded(self._entries.values())[:1]:
                _give_up(entry, self._pool)
                return True
            idle = [entry for entry in self._entries.values() if not entry.readers and entry.state in _SAFE]
            logged = _logged(self._entries.values())
            newest = {step.number for step in newest_checkpoint(entry.step for entry in self._entries.values())}
            for going in (
                [entry for entry in idle if entry.step.complete is None and not entry.reported and entry not in logged],
                [entry for entry in idle if entry.step.complete and entry.step.on_storage and entry not in logged],
                [entry for entry in idle if entry in logged] if chain else [],
                [entry for entry in idle if entry.step.number not in newest and entry not in logged] if last else [],
            ):
                for entry in going:
                    entry.state, entry.step = FAILED, replace(entry.step, complete=False)
                    _give_up(entry, self._pool)
                if going:
                    return True
            return False

    def forget_gone(self) -> None:
        """Gives up the snapshots of which somebody has deleted slots."""
        with self._lock:
            for entry in self._entries.values():
                if entry.state in _SAFE and entry.gone:
                    entry.state, entry.step = FAILED, replace(entry.step, complete=False)
                    if not entry.readers:
                        _give_up(entry, self._pool)
            if not self._note_newest():
                self.complete_step = None

    @property
    def retained_count(self) -> int:
        """Snapshots that stay for their copies or for older experts only."""
        with self._lock:
            return len(_superseded(self._entries.values()))

    @property
    def paths(self) -> Sequence[Path]:
        """Directories of the slots, this life's first."""
        return self.files.paths

    @property
    def droppable_bytes(self) -> int:
        """Host memory that ``drop`` would free, and that is not needed."""
        with self._lock:
            entries = self._entries.values()
            stored = [entry for entry in entries if entry.step.complete and entry.step.on_storage]
            logged = [entry for entry in _logged(entries) if entry.step.complete and not entry.readers]
            going = {*stored, *_superseded(entries), *logged}
            return sum(entry.nbytes for entry in going if entry.buffer is not None)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory of what is kept."""
        with self._lock:
            copies = 0 if self.replicator is None else self.replicator.held_bytes
            return self.left_slots.nbytes + copies + sum(entry.nbytes for entry in self._entries.values())

    def retire(self, *, keep: bool) -> None:
        """The session ended.

        Args:
            keep: What is sealed stays for the next start of the run.
        """
        if self.replicator is not None:
            self.replicator.close(0.0 if keep else _PARTING_SECS)
        with self._lock:
            self._pool.retire()
            self.left_slots.forget()
            self.left_slots.checker.close()
            self._unsettled.open.clear()
            self._entries.clear()  # whoever still uses their bytes keeps them
            self.files.close(keep=keep)


def _give_up(entry: _Entry, pool: BufferPool) -> None:
    for buffer in entry.take_all():
        pool.give_back(buffer)


def _over(entries: Collection[_Entry]) -> set[tuple[int, int]]:
    """(sequence, index) of gradients, of any rank, that no checkpoint needs any more, nor one that may come."""
    live = live_groups(entry.step for entry in entries)
    return {
        (entry.step.number, index)
        for entry in entries
        for index, groups in enumerate(entry.step.gradient_slots)
        if not is_live(entry.step, groups, live)
    }


def _logged(entries: Collection[_Entry]) -> set[_Entry]:
    """Those of a gradient log that the newest step of it, complete or not, needs."""
    steps = [entry.step for entry in entries if entry.step.contents.since is not None]
    since = max(steps, key=lambda step: step.number).contents.since if steps else None
    return set() if since is None else {entry for entry in entries if entry.step.number >= since}


def _superseded(entries: Collection[_Entry]) -> list[_Entry]:
    """Those with memory that stay for their copies or for experts only, the oldest first: a newer checkpoint is
    complete, but not at all peers, or without those experts."""
    newest = newest_checkpoint(entry.step for entry in entries)
    older = [entry for entry in entries if newest and entry.step.number < newest[0].number]
    superseded = [entry for entry in older if entry.step.complete and not entry.readers and entry.buffer is not None]
    return sorted(superseded, key=lambda entry: entry.step.number)


def _judged(state: int, freshness: int) -> int:
    """Returns the state of a snapshot, which is ``FAILED`` if it is stale."""
    return FAILED if freshness == STALE else state
