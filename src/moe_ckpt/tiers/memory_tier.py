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
"""States of a rank's share, ascending: the maximum over ranks is the state of the snapshot.

``ALONE`` is sealed, too, but some peer did not get its copy."""
_SAFE = (SEALED, ALONE)
_AHEAD = 64
"""Copies of so many snapshots beyond the newest one of this rank stay: a peer may be ahead."""
_PARTING_SECS = 5.0
"""Longest wait for peers that still send when training has ended well."""
_REPORTED = 8
"""Snapshots in one agreement: so many that go to peers, and so many that do not, which must not wait for the former.
Others wait for a later step."""


class Settled(NamedTuple):
    """The outcome of a snapshot, equal on every rank.

    Attributes:
        number: Of the snapshot.
        complete: Every rank has sealed its share.
        copied: The peers of every rank have their copies.
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
        """Path of a sealed slot of this snapshot that somebody has deleted; empty if there is none."""
        slots = (buffer.slot for part, buffer in self.buffers.items() if part != _MIRRORED)
        sealed = (slot for slot in slots if slot is not None)
        return next((str(slot.path) for slot in sealed if not (slot.is_there and slot.is_sealed)), "")

    def fail(self) -> None:
        """Notes that this rank will never have the snapshot."""
        self.state, self.complete = FAILED, False


class MemoryTier:
    """Owns the slots of one rank while they are in use. ``begin`` and ``settle`` are called on the training
    thread, ``sealed`` on the thread that seals, ``ended`` on the persist thread.

    Args:
        run: The session's.
        node: Name of the machine with the memory (``node_of``).
        pool: Lends the buffers.
        files: Makes the slots.
        left_slots: Slots of earlier lives, which do not count for the pool's budget.
        replicator: Sends copies to peers, and holds theirs; None without peers.

    Attributes:
        complete_step: Step of the newest checkpoint that all ranks hold: of this life, or the one that it resumed from.
            None before the first, and if this rank has given it up for room.
        complete_since: First step of the newest checkpoint of this life, if that is a sparse window; else its step.
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
        self._open: list[int] = []  # snapshots that are not settled, oldest first
        self._asked: list[int] = []  # those that the agreement under way is about: the same on all ranks
        self._next = 0
        self._given_up: set[int | None] = set()
        self._lock = threading.RLock()

    def offer(self, snapshot: Snapshot) -> None:
        """Does nothing: the share was sealed before it was written to storage."""

    def ended(self, snapshot: Snapshot, *, committed: bool) -> None:
        """Notes that a snapshot was committed on storage or failed there: storage no longer reads the buffer."""
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
        """Makes room on the file system: gives up released slots, or slots of earlier lives, or an older snapshot that
        is kept for its experts or copies. On any thread.

        Returns:
            False if there are none of these.
        """
        if self._pool.unseal():
            return True
        if self.left_slots.remove():
            self.complete_step = None  # until a checkpoint of this life is complete
            self.files.wait_removed()
            return True
        with self._lock:
            for entry in _superseded(self._entries.values())[:1]:
                self._free(entry)
                return True
            return False

    def begin(self, snapshot: Snapshot) -> None:
        """Adds a snapshot, whose copy begins. A parting one is not added: it stays, and no agreement settles it."""
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
        """Notes that this rank's share is sealed, and sends it to peers.

        With peers it counts as sealed once all of them have answered or are given up: one without room answers, too.

        Args:
            snapshot: Of the share.
            headers: Of the slots, that of the rank's share last; empty if the share could not be sealed.
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
            pieces = (snapshot.sealed or ())[len(snapshot.plan.share_parts) :]
            views = [*(sealed.memory for sealed in pieces), slot.memory[:end]]
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
        """Returns numbers for the other ranks, always as many: state and freshness (``ledger.freshness``) of each
        snapshot that is not settled.
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
        """Records the agreement on the snapshots of the last ``reports``.

        Args:
            reduced: Maximum over ranks of each number.

        Returns:
            The snapshots whose outcome is known now, in order.
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
                # This rank may have given up its share since it reported it.
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
        if self.replicator is not None and settled:  # copies of peers' snapshots that no recovery needs any more
            with self._lock:
                entries = self._entries.values()
                retained = {*self._needed(), *self._open, *range(self._next, self._next + _AHEAD)}
                spare = with_newest_experts(entries) - retained
                over = _over(entries)
            self.replicator.store.release_except(retained | spare, spare, over)
        return sorted(settled)

    def _note_newest(self) -> list[_Entry]:
        """Returns the snapshots of the newest checkpoint of this life that all ranks hold, and notes its steps."""
        newest = newest_checkpoint(self._entries.values())
        if newest:
            self.complete_step = newest[-1].identity.step
            self.complete_since = newest[0].identity.step
        return newest

    def goes_on(self, window: int | None) -> None:
        """Releases the snapshots of windows that were given up; equal on every rank.

        Args:
            window: First step of the window that continues or begins; None for none.
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
        # One that this rank has given up may still have to be reported to the others.
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
        """Returns whether the outcome of every snapshot is known; equal on all ranks."""
        return not self._open

    def drop(self, *, chain: bool = True, last: bool = False) -> bool:
        """Gives up snapshots that a recovery can do without, because another snapshot needs the room.

        First the oldest one that is kept for its copies or experts; then those that other ranks do not know of; then
        those that storage has as well.

        Args:
            chain: Also give up a gradient log. False for the next step of it.
            last: Also give up a window under way, since the run's last snapshot needs the room.

        Returns:
            False if there were none.
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
        """Gives up the snapshots that have a slot that somebody has deleted."""
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
        """Number of older snapshots that are kept for their copies or experts."""
        with self._lock:
            return len(_superseded(self._entries.values()))

    @property
    def paths(self) -> Sequence[Path]:
        """Directories of the slots, that of this life first."""
        return self.files.paths

    @property
    def droppable_bytes(self) -> int:
        """Bytes that ``drop`` would free."""
        with self._lock:
            entries = self._entries.values()
            stored = [entry for entry in entries if entry.complete and entry.on_storage]
            logged = [entry for entry in _logged(entries) if entry.complete and not entry.readers]
            going = {*stored, *_superseded(entries), *logged}
            return sum(buffer.nbytes for entry in going for buffer in entry.buffers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots, copies of peers, and slots of earlier lives."""
        with self._lock:
            copies = 0 if self.replicator is None else self.replicator.store.nbytes
            in_slots = sum(buffer.nbytes for entry in self._entries.values() for buffer in entry.buffers.values())
            return self.left_slots.nbytes + copies + in_slots

    def retire(self, *, keep: bool) -> None:
        """Ends with the session.

        Args:
            keep: Sealed slots stay for the next start of the run.
        """
        if self.replicator is not None:
            self.replicator.close(0.0 if keep else _PARTING_SECS)
        with self._lock:
            self._pool.retire()
            self.left_slots.forget()
            self.left_slots.checker.close()
            self._open.clear()
            self._entries.clear()  # a thread that still uses their bytes keeps the memory
            self.files.close(keep=keep)


def _over(entries: Collection[_Entry]) -> set[tuple[int, int]]:
    """Returns (number, index) of gradients, of any rank, that no checkpoint needs, also none that may come."""
    live = live_groups(entries)
    return {
        (entry.number, index)
        for entry in entries
        for index, groups in enumerate(entry.gradient_slots)
        if not is_live(entry, groups, live)
    }


def _logged(entries: Reversible[_Entry]) -> set[_Entry]:
    """Returns the snapshots that the newest step of a gradient log needs, whether it is complete or not."""
    newest_first = (entry.contents.since for entry in reversed(entries))
    since = next((number for number in newest_first if number is not None), None)
    return set() if since is None else {entry for entry in entries if entry.number >= since}


def _superseded(entries: Reversible[_Entry]) -> list[_Entry]:
    """Returns older snapshots, the oldest first, that are kept although a newer checkpoint is complete: because peers
    lack copies of that, or because it lacks some experts."""
    newest = newest_checkpoint(entries)
    older = [entry for entry in entries if newest and entry.number < newest[0].number]
    superseded = [entry for entry in older if entry.complete and not entry.readers and entry.buffers]
    return sorted(superseded, key=lambda entry: entry.number)
