"""Seals snapshots in memory that outlives the process, before any of them goes to storage.

A thread of its own, so that a storage that is stuck holds up no memory checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moe_ckpt.core.step import Contents, Facts, PeerPart
from moe_ckpt.core.tokens import NO_COUNTS
from moe_ckpt.errors import MemoryFullError, MemoryGoneError, NotFiniteError
from moe_ckpt.format.slot import GRADIENTS, TENSORS, SlotHeader, SlotPart, encode_slot
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies.base import needs_of
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.checksums import Checker
from moe_ckpt.slices.compiling import HOST_ONLY
from moe_ckpt.slices.snapshot import FreshnessWatch, Snapshot, SnapshotPart, seal_snapshot
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")


class MemorySealer:
    """Makes the header of each snapshot's slot. For the thread that seals.

    Args:
        run: The session's.
        tier: Keeps the slots.
        to_storage: Takes each snapshot that also goes to storage, or that is made from one for storage, in order.
        checker: Takes checksums.
    """

    def __init__(
        self, run: RunContext, tier: MemoryTier, to_storage: Callable[[Snapshot], None], checker: Checker
    ) -> None:
        self._comm = run.comm
        self._tier = tier
        self._to_storage, self._checker = to_storage, checker
        self._headers = SlotHeaders(run)
        self._watch = FreshnessWatch()
        self._said: set[str] = set()
        self._is_spoiled = False

    def resolve(self, snapshot: Snapshot) -> None:
        """Seal this rank's share. After an error the other ranks are told, and the snapshot may still go to storage."""
        trouble, header = snapshot.refused, list[bytes]()
        try:
            if trouble is None:
                writer = snapshot.contents.writer(self._comm.rank)
                seal_snapshot(snapshot, writer, self._comm.world_size, self._checker)
                snapshot.freshness = self._watch.seen(snapshot)
                trouble = self._spoiled(snapshot)
                header = [] if trouble else self._seal_somehow(snapshot)
        except Exception as error:  # whatever it is, the other ranks must learn that this one has nothing
            trouble = f"{type(error).__name__}: {error}"
            log.warning("memory does not hold the checkpoint of step %d: %s", snapshot.step, trouble)
            if isinstance(error, MemoryGoneError):
                self._tier.forget_gone()
            if snapshot.sealed is None:
                snapshot.refused = trouble
        if snapshot.refused is not None and snapshot.contents.since is not None and snapshot.refused not in self._said:
            self._said.add(snapshot.refused)
            log.warning("step %d of the gradient log is not kept: %s", snapshot.step, snapshot.refused)
        self._tier.sealed(snapshot, header)
        if snapshot.contents.to_storage:
            self._to_storage(snapshot)

    def _seal_somehow(self, snapshot: Snapshot) -> list[bytes]:
        """Seal, on a full file system at the expense of headers that are needed less."""
        while True:
            try:
                self._tier.files.describe()
                return self._seal(snapshot)
            except MemoryFullError:
                if not self._tier.give_up() and not self._tier.files.shrink():
                    raise

    def _spoiled(self, snapshot: Snapshot) -> str | None:
        """Why the snapshot is not sealed, though storage may have it: the newest that memory holds stays a finite one.
        Said once, where snapshots begin to hold NaN or infinity."""
        first, before = snapshot.not_finite(), self._is_spoiled
        self._is_spoiled = bool(first)
        if not first:
            return None
        problem = NotFiniteError(f"step {snapshot.step}", f"{first} on rank {self._comm.rank}")
        if not before:
            log.warning("memory keeps the newest finite step: %s", problem)
        return f"{type(problem).__name__}: {problem}"

    def _seal(self, snapshot: Snapshot) -> list[bytes]:
        """Headers of the slots, as peers get them, that of the snapshot's own after those of gradients beside it; none
        if something lies in private memory, for want of room."""
        own_slot, headers = snapshot.buffer.slot, list[bytes]()
        piece_slots = [buffer.slot for buffer in snapshot.pieces if buffer.slot is not None]
        if own_slot is None or len(piece_slots) < len(snapshot.pieces):
            return headers
        sealed_pieces = (snapshot.sealed or ())[len(snapshot.plan.share_parts) :]
        for index, sealed, slot in zip(snapshot.plan.slots, sealed_pieces, piece_slots, strict=True):
            headers.append(encode_slot(self._headers.of_gradients(snapshot, index, sealed)))
            slot.seal(headers[-1])
        # The one that says which others belong to it comes last: it is never there without them.
        return [*headers, self._seal_own(snapshot, own_slot)]

    def _seal_own(self, snapshot: Snapshot, slot: Slot) -> bytes:
        header = self._headers.of_share(snapshot)
        full, _ = snapshot.plan.claims.saved(snapshot.contents.full)
        raw = encode_slot(header, full)
        slot.seal(raw)
        sent_parts = tuple(part for part in header.parts if part.kind != HOST_ONLY)
        if snapshot.contents.to_peers is not PeerPart.STORED or len(sent_parts) == len(header.parts):
            return raw
        sent_nbytes = max(1, snapshot.plan.own_nbytes(host_only=False))
        return encode_slot(replace(header, parts=sent_parts, nbytes=sent_nbytes, sent=True), full)


class SlotHeaders:
    """Makes headers for one rank of one life, on one thread.

    Args:
        run: The session's.
    """

    def __init__(self, run: RunContext) -> None:
        self._rank, self._ranks, self._catalog = run.comm.rank, run.comm.world_size, run.catalog
        needs = needs_of(run.policy)
        self._names_gradients = needs.gradients and needs.partial  # else they are of all others

    def of_gradients(self, snapshot: Snapshot, index: int, sealed: SnapshotPart) -> SlotHeader:
        """Returns the header of a slot of gradients. It does not repeat the facts that the share's header has.

        Args:
            snapshot: That the gradients belong to.
            index: Of the gradients, among those of the snapshot.
            sealed: The gradients.
        """
        part = SlotPart(sealed.compiled.kind, 0, b"".join(sealed.header))
        return self._header(
            snapshot,
            nbytes=max(1, sealed.compiled.nbytes),
            contents=Contents((), since=snapshot.contents.since),
            facts=Facts(snapshot.facts.index, snapshot.facts.base, NO_COUNTS),
            parts=(part,),
            state=b"",
            only=GRADIENTS,
            place=index,
        )

    def of_share(self, snapshot: Snapshot) -> SlotHeader:
        """Returns the header of the slot that has a rank's share of a snapshot. Waits for the step's tokens."""
        contents, everything = snapshot.contents, self._catalog.everything
        without_state = contents.on_behalf_of is not None and contents.is_whole(everything)
        _, saved = snapshot.plan.claims.saved(contents.full)
        if len(saved) < len(contents.full):
            contents = replace(contents, full=tuple(map(everything.__getitem__, saved.tolist())))
        if not self._names_gradients:
            contents = replace(contents, gradients=())
        sealed_parts = (snapshot.sealed or ())[: len(snapshot.plan.share_parts)]
        return self._header(
            snapshot,
            nbytes=max(1, snapshot.plan.own_nbytes()),
            contents=contents,
            facts=replace(snapshot.facts, applied=snapshot.applied.result()),
            parts=tuple(SlotPart(part.compiled.kind, part.begin, b"".join(part.header)) for part in sealed_parts),
            state=snapshot.state_file,
            only=TENSORS if without_state else "",
            beside=snapshot.plan.slots,
        )

    def _header(self, snapshot: Snapshot, **of_slot: Any) -> SlotHeader:
        """of_slot: fields of this slot alone."""
        return SlotHeader(
            snapshot.identity,
            rank=snapshot.contents.writer(self._rank),
            sealer=self._rank if snapshot.identity.parting else None,
            world_size=self._ranks,
            freshness=snapshot.freshness,
            **of_slot,
        )
