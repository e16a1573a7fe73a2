"""This rank's snapshots in memory that outlives the process, from the copy until they are superseded.

A snapshot passes through: begun (its slot is being copied into), sealed (this rank's share is safe from ``kill -9``),
complete (every rank has sealed its share, which the ranks learn from a step's agreement), and is needed until a newer
checkpoint is complete (``ledger.retention``). Where it goes to storage, too, it stays until that has been tried.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Reversible, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from moe_ckpt.core.step import PeerPart, Tier
from moe_ckpt.errors import MemoryGoneError
from moe_ckpt.ledger.freshness import CAUSE, STALE, UNKNOWN
from moe_ckpt.ledger.retention import (
    NO_EXPERTS,
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
        number: Of the snapshot.
        complete: Every rank has it.
        copied: So have the peers of every rank.
    """

    number: int
    complete: bool
    copied: bool


_SHARE, _MIRRORED = -1, -2
"""Places in ``_Entry.buffers`` of this rank's share, and of duplicates of other ranks' shares."""


@dataclass(eq=False)
class _Entry(MemoryStep):
    """One snapshot of this life.

    Attributes:
        buffers: The snapshot's memory, none once it was given up: ``_SHARE``; place in ``Contents.groups`` -> gradients
            in a buffer of their own, as long as they are needed; ``_MIRRORED``, until the other ranks' shares have been
            copied.
        readers: How many snapshots have still to be written to storage from the buffers, which stay until then.
        state: Of this rank's share.
        freshness: What its checksums show.
        reported: The other ranks know that it is sealed.
    """

    buffers: dict[int, Buffer] = field(default_factory=dict)
    readers: int = 0
    state: int = NOT_YET
    freshness: int = UNKNOWN
    reported: bool = False

    @property
    def gone(self) -> str:
        """One of its slots that was sealed and that somebody has deleted; empty if all are there."""
        slots = (buffer.slot for part, buffer in self.buffers.items() if part != _MIRRORED)
        sealed = (slot for slot in slots if slot is not None)
        return next((str(slot.path) for slot in sealed if not (slot.is_there and slot.is_sealed)), "")

    def fail(self) -> None:
        """This rank will never have it."""
        self.state, self.complete = FAILED, False


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
        self._entries: dict[int, _Entry] = {}  # in ascending order
        self._open: list[int] = []  # those of which the ranks do not know yet whether all have them, oldest first
        self._asked: list[int] = []  # those of them that the agreement under way is about: the same on all ranks
        self._next = 0
        self._given_up: set[int | None] = set()
        self._lock = threading.RLock()

    def offer(self, snapshot: Snapshot) -> None:
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
                    if other is entry or (entry.window is not None and other.window == entry.window):
                        other.on_storage = True
            self._release_unneeded()

    def give_up(self) -> bool:
        """Free room at the expense of what is needed least: released slots, an earlier life's slots, older experts.

        On any thread.

        Returns:
            False if there are none of these.
        """
        if self._pool.unseal():
            return True
        if self.left_slots.remove():
            self.complete_step = None  # those of this life are still to come
            self.files.wait_removed()
            return True
        with self._lock:
            for entry in _superseded(self._entries.values())[:1]:
                self._free(entry)
                return True
            return False

    def begin(self, snapshot: Snapshot) -> None:
        """A snapshot's buffer is being copied into.

        One that is sealed because training stops stays as it is: nothing is newer, and no agreement settles it.
        """
        if snapshot.identity.parting:
            return
        contents, number, catalog = snapshot.contents, snapshot.identity.number, self._catalog
        experts, sent = (
            NO_EXPERTS
            if contents.window
            else catalog.is_expert & catalog.mask(contents.brings(tier, catalog.everything))
            for tier in (Tier.HOST, Tier.PEER)
        )
        buffers = dict(zip((_SHARE, *snapshot.plan.slots, _MIRRORED), snapshot.buffers, strict=False))
        entry = _Entry(
            snapshot.identity,
            contents,
            experts,
            sent,
            copied=bool(contents.to_peers),
            buffers=buffers,
            readers=int(contents.to_storage),
        )
        with self._lock:
            self._open.append(number)
            self._next = number + 1
            self._entries[number] = entry

    def sealed(self, snapshot: Snapshot, headers: Sequence[bytes]) -> None:
        """This rank's share is sealed, and goes to peers; or, without headers, it never will be.

        Args:
            snapshot: Of the share.
            headers: Of its slots; that of the snapshot's own is the last.

        With peers it counts as sealed when all of them have answered, or are given up: one without room has said so.
        """
        if snapshot.identity.parting:
            return
        slot, number, replicator = snapshot.buffer.slot, snapshot.identity.number, self.replicator
        to_peers = snapshot.contents.to_peers
        freshness = snapshot.freshness
        if replicator is not None and to_peers:
            replicator.store.mirrored(number, {} if snapshot.sealed is None else snapshot.mirrors())
        if not headers or slot is None:
            self._sealed(number, FAILED)
        elif replicator is None:
            self._sealed(number, SEALED, freshness)
        elif not to_peers:
            replicator.left_out(snapshot.step)
            self._sealed(number, ALONE, freshness)
        else:
            end = snapshot.plan.own_nbytes(host_only=to_peers is PeerPart.EVERYTHING)
            views = [*(snapshot.bytes_of(part) for _, part in snapshot.plan.pieces), slot.memory[:end]]
            shares = [SealedSlot(snapshot.step, view, raw) for view, raw in zip(views, headers, strict=True)]
            copies = replicator.submit(number, *shares)
            copies.add_done_callback(
                lambda done: self._sealed(number, SEALED if replicator.all_hold(done) else ALONE, freshness)
            )

    def _sealed(self, number: int, state: int, freshness: int = UNKNOWN) -> None:
        with self._lock:
            entry = self._entries.get(number)  # none once the session has ended
            if entry is not None:
                entry.state, entry.freshness = state, freshness
                if entry.complete is not None:  # the others have given it up meanwhile
                    self._release_unneeded()

    def reports(self) -> tuple[int, ...]:
        """Numbers for the other ranks: of each snapshot that is not settled its state and what its checksums show
        (``ledger.freshness``). Their count is always the same.
        """
        with self._lock:
            for_peers, others = (
                [number for number in self._open if self._entries[number].copied is copied] for copied in (True, False)
            )
            self._asked = [*for_peers[:_REPORTED], *others[:_REPORTED]]
            entries = [self._entries[number] for number in self._asked]
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
            asked, self._asked = self._asked, []
            settled = []
            for number, state, freshness in zip(asked, reduced[::2], reduced[1::2], strict=False):
                if state == NOT_YET:
                    continue
                entry = self._entries[number]
                if freshness == STALE and state != FAILED:
                    state = FAILED
                    if self.rank == 0:
                        log.warning("memory does not hold the checkpoint of step %d: %s", entry.identity.step, CAUSE)
                settled.append(Settled(number, state != FAILED, state == SEALED))
                # Its own may be deleted since this rank reported it.
                entry.complete, entry.copied = state != FAILED and entry.state != FAILED, state == SEALED
                self._open.remove(number)
            newest = self._note_newest()
            if newest and (gone := newest[-1].gone):
                log.warning(
                    "memory does not hold the checkpoint of step %d: %s", self.complete_step, MemoryGoneError(gone)
                )
                self.forget_gone()
            if settled:
                self._release_unneeded()
        if newest:
            self.left_slots.remove()
        if self.replicator is not None and settled:
            self._release_copies(self.replicator)
        return sorted(settled)

    def _release_copies(self, replicator: Replicator) -> None:
        """Releases the copies of peers' snapshots that no recovery needs any more."""
        with self._lock:
            entries = self._entries.values()
            retained = {*self._needed(), *self._open, *range(self._next, self._next + _AHEAD)}
            spare = with_newest_experts(entries) - retained
            over = _over(entries)
        replicator.store.release_except(retained | spare, spare, over)

    def _note_newest(self) -> list[_Entry]:
        """Returns the snapshots of the newest checkpoint of this life that the ranks hold."""
        newest = newest_checkpoint(self._entries.values())
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
            entries = self._entries.values()
            slots = Counter(entry.window for entry in entries)
            given_up = {entry.window for entry in entries if slots[entry.window] < entry.size} - {window, None}
            if given_up != self._given_up:
                self._given_up = given_up
                self._release_unneeded()

    def _needed(self) -> frozenset[int]:
        return needed(entry for entry in self._entries.values() if entry.window not in self._given_up)

    def _release_unneeded(self) -> None:
        retained = self._needed() | with_newest_experts(self._entries.values())
        # Of one that was given up here the others may still have to hear.
        settled = {
            number: entry
            for number, entry in self._entries.items()
            if not entry.readers and entry.state != NOT_YET and entry.complete is not None and number not in self._open
        }
        for number in settled.keys() - retained:
            self._free(self._entries.pop(number))
        over = _over(self._entries.values())
        for number in settled.keys() & retained:  # duplicates, and gradients that are needed no more
            buffers = settled[number].buffers
            for part in [part for part in buffers if part == _MIRRORED or (number, part) in over]:
                self._pool.give_back(buffers.pop(part))

    def _free(self, entry: _Entry) -> None:
        """Gives back all memory of a snapshot."""
        while entry.buffers:
            self._pool.give_back(entry.buffers.popitem()[1])

    @property
    def is_settled(self) -> bool:
        """Returns whether it is known of every snapshot that all ranks have it, or not; equal on all ranks."""
        return not self._open

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
                self._free(entry)
                return True
            idle = [entry for entry in self._entries.values() if not entry.readers and entry.state in _SAFE]
            logged = _logged(self._entries.values())
            newest = newest_checkpoint(self._entries.values())
            for going in (
                [entry for entry in idle if entry.complete is None and not entry.reported and entry not in logged],
                [entry for entry in idle if entry.complete and entry.on_storage and entry not in logged],
                [entry for entry in idle if entry in logged] if chain else [],
                [entry for entry in idle if entry not in newest and entry not in logged] if last else [],
            ):
                for entry in going:
                    entry.fail()
                    self._free(entry)
                if going:
                    return True
            return False

    def forget_gone(self) -> None:
        """Gives up the snapshots of which somebody has deleted slots."""
        with self._lock:
            for entry in self._entries.values():
                if entry.state in _SAFE and entry.gone:
                    entry.fail()
                    if not entry.readers:
                        self._free(entry)
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
            stored = [entry for entry in entries if entry.complete and entry.on_storage]
            logged = [entry for entry in _logged(entries) if entry.complete and not entry.readers]
            going = {*stored, *_superseded(entries), *logged}
            return sum(buffer.nbytes for entry in going for buffer in entry.buffers.values())

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory of what is kept."""
        with self._lock:
            copies = 0 if self.replicator is None else self.replicator.store.nbytes
            in_slots = sum(buffer.nbytes for entry in self._entries.values() for buffer in entry.buffers.values())
            return self.left_slots.nbytes + copies + in_slots

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
            self._open.clear()
            self._entries.clear()  # whoever still uses their bytes keeps them
            self.files.close(keep=keep)


def _over(entries: Collection[_Entry]) -> set[tuple[int, int]]:
    """(number, index) of gradients, of any rank, that no checkpoint needs any more, nor one that may come."""
    live = live_groups(entries)
    return {
        (entry.number, index)
        for entry in entries
        for index, groups in enumerate(entry.gradient_slots)
        if not is_live(entry, groups, live)
    }


def _logged(entries: Reversible[_Entry]) -> set[_Entry]:
    """Those of a gradient log that the newest step of it, complete or not, needs."""
    newest_first = (entry.contents.since for entry in reversed(entries))
    since = next((number for number in newest_first if number is not None), None)
    return set() if since is None else {entry for entry in entries if entry.number >= since}


def _superseded(entries: Reversible[_Entry]) -> list[_Entry]:
    """Those with memory that stay for their copies or for experts only, the oldest first: a newer checkpoint is
    complete, but not at all peers, or without those experts."""
    newest = newest_checkpoint(entries)
    older = [entry for entry in entries if newest and entry.number < newest[0].number]
    superseded = [entry for entry in older if entry.complete and not entry.readers and entry.buffers]
    return sorted(superseded, key=lambda entry: entry.number)
