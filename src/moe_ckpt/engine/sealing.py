"""Seals snapshots in memory that outlives the process, before any of them goes to storage.

A thread of its own, so that a storage that is stuck holds up no memory checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from moe_ckpt.core.survivors import TENSORS
from moe_ckpt.engine.buffers import roomy
from moe_ckpt.engine.commit import SavedOperators
from moe_ckpt.engine.context import RunContext
from moe_ckpt.engine.freshness import FreshnessWatch
from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.engine.outcomes import Resolution
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.engine.writing import SealedShare, seal_share
from moe_ckpt.format.slot import SlotHeader, SlotPart, StepFacts, WindowPlace, encode_slot
from moe_ckpt.slices.compiling import HOST_ONLY

log = logging.getLogger("moe_ckpt")


class MemorySealer:
    """Makes the header of each snapshot's slot. For the thread that seals.

    Args:
        run: The session's.
        tier: Keeps the slots.
        to_storage: Takes each snapshot that also goes to storage, or that is made from one for storage, in order.
    """

    def __init__(self, run: RunContext, tier: MemoryTier, to_storage: Callable[[Snapshot], None]) -> None:
        self._comm, self._catalog = run.comm, run.catalog
        self._tier = tier
        self._to_storage = to_storage
        self._saved_operators = SavedOperators(run.catalog)
        self._watch = FreshnessWatch()
        self._said: set[str] = set()

    def resolve(self, snapshot: Snapshot) -> Resolution:
        """Seal this rank's share. After an error the other ranks are told, and the snapshot may still go to storage."""
        trouble, header = snapshot.refused, None
        try:
            if trouble is None:
                share = seal_share(snapshot, self._tier.files.run_id, snapshot.writer, self._comm.world_size)
                snapshot.share = replace(share, freshness=self._watch.seen(snapshot, share.parts))
                header = self._seal(snapshot, snapshot.share)
        except Exception as error:  # whatever it is, the other ranks must learn that this one has nothing
            trouble = f"{type(error).__name__}: {error}"
            log.warning("memory does not hold the checkpoint of step %d: %s", snapshot.step, trouble)
            if snapshot.share is None:
                snapshot.refused = trouble
        if snapshot.refused is not None and snapshot.request.since is not None and snapshot.refused not in self._said:
            self._said.add(snapshot.refused)
            log.warning("step %d of the gradient log is not kept: %s", snapshot.step, snapshot.refused)
        self._tier.sealed(snapshot, header)
        if snapshot.dense is not None:
            snapshot.dense.refused = snapshot.refused or trouble
            self._to_storage(snapshot.dense)
        if snapshot.request.stored:
            if snapshot.share is not None:  # more is sealed before it is written
                snapshot.share = snapshot.share.detached()
            self._to_storage(snapshot)
        return Resolution(snapshot.sequence, snapshot.step, snapshot.directory, False, trouble, 0.0)

    def _seal(self, snapshot: Snapshot, share: SealedShare) -> bytes | None:
        """The header of the slot, as peers get it; None if the snapshot lies in private memory, for want of room."""
        slot = snapshot.buffer.slot
        if slot is None:
            return None
        nbytes = min(slot.memory.numel(), roomy(max(1, snapshot.plan.own_nbytes())))
        header = self._header(snapshot, share, nbytes)
        raw = encode_slot(header)
        slot.seal(raw)
        request, kept = snapshot.request, tuple(part for part in header.parts if part.kind != HOST_ONLY)
        if not request.copied or request.sends_host_only or len(kept) == len(header.parts):
            return raw
        sent_nbytes = min(nbytes, roomy(max(1, snapshot.plan.own_nbytes(host_only=False))))
        return encode_slot(replace(header, parts=kept, nbytes=sent_nbytes, sent=True))

    def _header(self, snapshot: Snapshot, share: SealedShare, nbytes: int) -> SlotHeader:
        request, files = snapshot.request, self._tier.files
        window = request.window
        return SlotHeader(
            run_id=files.run_id,
            life=files.life,
            sequence=snapshot.memory_sequence,
            step=request.step,
            generation=request.generation,
            rank=snapshot.writer,
            world_size=self._comm.world_size,
            boot_id=files.boot_id,
            nbytes=nbytes,
            freshness=share.freshness,
            facts=StepFacts(
                index=request.index,
                base=request.base,
                operators=self._saved_operators.of(request, snapshot.plan.claims)[0],
                window=None if window is None else WindowPlace(window.start, window.size, request.slot),
                applied=request.applied.result(),
                faults=request.faults,
                lost=request.lost,
                own=request.own,
                policy=request.policy,
                measured=request.measured,
                since=request.since,
                gradients=request.gradients if request.is_partial_log else (),
            ),
            state=share.state,
            only=TENSORS if snapshot.writer != self._comm.rank and request.is_whole(self._catalog) else "",
            parts=tuple(SlotPart(each.part.kind, each.begin, b"".join(each.header)) for each in share.parts),
        )
