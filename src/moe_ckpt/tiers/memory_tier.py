"""This rank's snapshots in host memory that a recovery may need, until they are superseded.

Where memory outlives the process, a snapshot passes through: begun (its slot is being copied into), sealed (this rank's
share is safe from ``kill -9``), complete (every rank has sealed its share, which the ranks learn from a step's
agreement), and is needed until a newer checkpoint is complete (``ledger.retention``). Where it goes to storage, too, it
stays until that has been tried.

Private memory ends with the process, and survives a failure that the process survives: an exception, or a dead peer,
after which the survivors form a new process group. There the commit on storage makes a snapshot complete, and its
buffer stays lent out, as the recovery buffer, until the next commit (MoC, section 3.2, "triple buffering" and
"two-level PEC"). It has what went to storage and, where the policy asked for it, further experts that storage has in
older versions only. What storage has, too, is worth time only, so it is given up wherever a snapshot finds no other
room. The recovery buffers of all ranks are of one step, since every rank hears of the commit. A checkpoint whose
announcement got lost with a peer may be committed all the same: it is kept beside the last announced one, and storage
decides which of them counts.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Reversible, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moe_ckpt.core.step import Contents, PeerPart, Tier, WindowPlace
from moe_ckpt.errors import MemoryGoneError
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.format.slot import SlotHeader
from moe_ckpt.ledger.freshness import CAUSE, STALE, UNKNOWN
from moe_ckpt.ledger.retention import (
    NO_EXPERTS,
    MemoryStep,
    is_live,
    live_groups,
    needed_steps,
    newest_checkpoint,
    with_newest_experts,
)
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.memory.files import FoundSlot, MemoryFiles
from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.memory.slot import Slot
from moe_ckpt.peers.messages import SealedSlot
from moe_ckpt.peers.replication import Replicator
from moe_ckpt.policies.base import needs_of
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.compiling import HOST_ONLY
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
        slot: What a restart in this process reads; None if memory outlives it.
    """

    buffers: dict[int, Buffer] = field(default_factory=dict)
    readers: int = 0
    state: int = NOT_YET
    freshness: int = UNKNOWN
    reported: bool = False
    slot: FoundSlot | None = None

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
    """Owns the snapshots of one rank in host memory. ``begin``, ``settle`` and ``drop`` are called on the training
    thread, ``sealed`` on the thread that seals, ``offer`` and ``ended`` on the persist thread.

    Private memory is a tier without ``files``: it has no agreements, and outlives the session unless that ended well.

    Args:
        run: The session's.
        run_id: Of the store.
        generation: Life of the run, newer than all that memory holds.
        life: A token that no other life has, equal on every rank.
        pool: Lends the buffers.
        files: Makes the slots; None for private memory.
        node: Name of the machine with the slots (``node_of``).
        left_slots: Slots of earlier lives, which do not count for the pool's budget; see also ``take_over``.
        replicator: Sends copies to peers, and holds theirs; None without peers.

    Attributes:
        outlives_process: The snapshots are checkpoints by themselves, which later processes read.
        node: As given; for private memory the name of this process, since no other one reaches it.
        complete_step: Step of the newest checkpoint that all ranks hold: of this life, or the one that it resumed from.
            None before the first, and if this rank has given it up for room.
        complete_since: First step of the newest checkpoint of this life, if that is a sparse window; else its step.
    """

    def __init__(
        self,
        run: RunContext,
        run_id: str,
        generation: int,
        life: str,
        pool: BufferPool,
        *,
        files: MemoryFiles | None = None,
        node: str = "",
        left_slots: LeftSlots | None = None,
        replicator: Replicator | None = None,
    ) -> None:
        self.rank, self.model, self.pool = run.comm.rank, run.model, pool
        self.run_id, self.generation, self.life = run_id, generation, life
        self.outlives_process, self.root = files is not None, "" if files is None else files.root
        self.node = node or f"process {os.getpid()} {secrets.token_hex(8)}"
        self.left_slots, self.replicator = left_slots or LeftSlots((), self._free_taken), replicator
        self.complete_step: int | None = None
        self.complete_since: int | None = None
        self._catalog, self._files, self._logs = run.catalog, files, bool(needs_of(run.policy).gradients)
        self._entries: dict[int, _Entry] = {}  # in ascending order
        self._open: list[int] = []  # snapshots that are not settled, oldest first
        self._asked: list[int] = []  # those that the agreement under way is about: the same on all ranks
        self._next = 0
        self._given_up: set[int | None] = set()
        self._lock = threading.RLock()

    @property
    def files(self) -> MemoryFiles:
        """Returns what makes the slots. Raises ``RuntimeError`` for private memory."""
        if self._files is None:
            raise RuntimeError("private memory has no slots that outlive the process")
        return self._files

    @property
    def sources(self) -> Sequence[int]:
        """Ranks of whose snapshots this rank keeps copies."""
        return () if self.replicator is None else self.replicator.roster.placement.sources_of[self.rank]

    @property
    def has_more(self) -> bool:
        """True if a failure without this memory would cost tokens: storage has only older versions of some experts."""
        return self.outlives_process or any(
            part.kind == HOST_ONLY for held in self.holds() for part in held.header.parts
        )

    # --- private memory ---

    def take_over(self, slots: Sequence[FoundSlot]) -> None:
        """Takes over the private slots of an earlier session, until this one has a checkpoint."""
        self.left_slots.add(slots)
        for room in filter(None, (leftover.slot.room for leftover in slots)):
            self.pool.adopt(room)

    def _free_taken(self, slots: list[FoundSlot]) -> None:
        for room in filter(None, (leftover.slot.room for leftover in slots)):
            self.pool.give_back(room)
        slots.clear()

    def holds(self) -> tuple[FoundSlot, ...]:
        """Returns all private slots here, the oldest first."""
        with self._lock:
            offered = filter(None, (entry.slot for entry in self._entries.values()))
            return (*reversed(self.left_slots.slots), *offered)

    def surrender(self) -> tuple[FoundSlot, ...]:
        """Returns all private slots, and owns them no more: a thread of the old session that still runs cannot touch
        them."""
        with self._lock:
            slots = self.holds()
            self._entries.clear()
            self.left_slots.forget()
            return slots

    def offer(self, snapshot: Snapshot, header: SlotHeader) -> None:
        """Notes that this rank's share is written, so that the snapshot may be committed from now on.

        Args:
            snapshot: Not a single step of a window.
            header: That a slot with the share would have.
        """
        name = f"{step_dir(header.step, header.identity.generation)} in memory of process {os.getpid()}"
        slot = Slot(Path(name), snapshot.buffer.memory, None, snapshot.buffer)
        entry = self._entry(snapshot, state=SEALED, slot=FoundSlot(slot, header))
        with self._lock:
            self._entries[entry.number] = entry

    # --- all memory ---

    def ended(self, snapshot: Snapshot, *, committed: bool) -> None:
        """Notes that a snapshot was committed on storage or failed there: storage no longer reads the buffer.

        In private memory a commit makes it the recovery buffer, if it was offered, in place of the former one.
        """
        with self._lock:
            entry = self._entries.get(snapshot.identity.number)
            if entry is None:  # it was not offered, or the session has ended
                if not self.outlives_process:
                    self.pool.give_back(snapshot.buffer)
                return
            if not self.outlives_process:
                entry.complete = committed
                if committed and self.left_slots.slots:
                    self.left_slots.remove()
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
        if self.pool.unseal():
            return True
        if self.left_slots.remove():
            self.complete_step = None  # until a checkpoint of this life is complete
            self.files.wait_removed()
            return True
        return self._free_oldest()

    def _free_oldest(self) -> bool:
        """Gives up the oldest snapshot that is kept for its copies or experts; False if there is none."""
        with self._lock:
            oldest = _superseded(self._entries.values())[:1]
            for entry in oldest:
                self._free(entry)
            return bool(oldest)

    def begin(self, snapshot: Snapshot) -> None:
        """Adds a snapshot, whose copy begins. A parting one is not added: it stays, and no agreement settles it."""
        if snapshot.identity.parting:
            return
        entry = self._entry(snapshot)
        with self._lock:
            self._open.append(entry.number)
            self._next = entry.number + 1
            self._entries[entry.number] = entry

    def _entry(self, snapshot: Snapshot, **fields: Any) -> _Entry:
        contents, catalog = snapshot.contents, self._catalog
        experts, sent = (
            NO_EXPERTS
            if contents.window or not self.outlives_process
            else catalog.is_expert & catalog.mask(contents.brings(tier, catalog.everything))
            for tier in (Tier.HOST, Tier.PEER)
        )
        return _Entry(
            snapshot.identity,
            contents,
            experts,
            sent,
            copied=bool(contents.to_peers),
            buffers=dict(zip((_SHARE, *snapshot.plan.slots, _MIRRORED), snapshot.buffers, strict=False)),
            readers=int(contents.to_storage),
            **fields,
        )

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
        return needed_steps(entry for entry in self._entries.values() if entry.window not in self._given_up)

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
                self.pool.give_back(buffers.pop(part))

    def _free(self, entry: _Entry) -> None:
        """Gives back all memory of a snapshot."""
        entry.slot = None
        while entry.buffers:
            self.pool.give_back(entry.buffers.popitem()[1])

    @property
    def is_settled(self) -> bool:
        """Returns whether the outcome of every snapshot is known; equal on all ranks."""
        return not self._open

    def drop(self, *, chain: bool = True, last: bool = False, of: Contents | None = None) -> bool:
        """Gives up snapshots that a recovery can do without, because another snapshot needs the room.

        First private slots that were taken over, which take room of the budget; then the oldest snapshot that is kept
        for its copies or experts; then those that other ranks do not know of; then those that storage has as well; and
        at last the newest checkpoint, in whose place a snapshot for storage comes.

        Args:
            chain: Also give up a gradient log. False for the next step of it.
            last: Also give up a window under way, since the run's last snapshot needs the room.
            of: The snapshot that needs the room.

        Returns:
            False if there were none.
        """
        with self._lock:
            if (not self.outlives_process and self.left_slots.remove()) or self._free_oldest():
                return True
            idle = [entry for entry in self._entries.values() if not entry.readers and entry.state in _SAFE]
            logged = _logged(self._entries.values())
            newest = newest_checkpoint(self._entries.values())
            for going in (
                [entry for entry in idle if entry.complete is None and not entry.reported and entry not in logged],
                [entry for entry in idle if entry.complete and entry.on_storage and entry not in logged],
                [entry for entry in idle if entry in logged] if chain else [],
                [entry for entry in idle if entry not in newest and entry not in logged] if last else [],
                self._replaceable(of.window) if of is not None and of.to_storage else [],
            ):
                for entry in going:
                    entry.fail()
                    self._free(entry)
                if going:
                    return True
            return False

    def _replaceable(self, window: WindowPlace | None = None) -> list[_Entry]:
        """Returns the snapshots of the newest checkpoint, if only one in its place can take over from it.

        Storage should have it where memory has no room for two, but its write failed, or checkpoints have grown since.
        A gradient log, which needs its anchors, is given up otherwise.

        Args:
            window: Of the snapshot in its place, whose earlier steps are under way.
        """
        newest, start = newest_checkpoint(self._entries.values()), None if window is None else window.start
        coming = (entry for entry in self._entries.values() if newest and entry.number > newest[-1].number)
        if any(entry.complete is not False and (start is None or entry.window != start) for entry in coming):
            return []
        return [] if self._logs or any(entry.readers for entry in newest) else newest

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
        """Directories of the slots, that of this life first; none for private memory."""
        return () if self._files is None else self._files.paths

    @property
    def droppable_bytes(self) -> int:
        """Bytes that ``drop`` would free."""
        with self._lock:
            entries = self._entries.values()
            stored = [entry for entry in entries if entry.complete and entry.on_storage]
            logged = [entry for entry in _logged(entries) if entry.complete and not entry.readers]
            going = {*stored, *_superseded(entries), *logged, *self._replaceable()}
            taken_over = 0 if self.outlives_process else self.left_slots.nbytes
            return taken_over + sum(buffer.nbytes for entry in going for buffer in entry.buffers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots, copies of peers, and slots of earlier lives."""
        with self._lock:
            copies = 0 if self.replicator is None else self.replicator.store.nbytes
            in_slots = sum(buffer.nbytes for entry in self._entries.values() for buffer in entry.buffers.values())
            return self.left_slots.nbytes + copies + in_slots

    def retire(self, *, keep: bool) -> None:
        """Ends with the session. Of private memory only the buffers of this tier stay.

        Args:
            keep: Sealed slots stay for the next start of the run.
        """
        if self.replicator is not None:
            self.replicator.close(0.0 if keep else _PARTING_SECS)
        with self._lock:
            self.pool.retire()
            if not self.outlives_process:
                return
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
