"""Makes the headers of a snapshot's slots, in memory that outlives the process and in this process's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ckpt.core.survivors import GRADIENTS, TENSORS
from moe_ckpt.engine.commit import SavedOperators
from moe_ckpt.engine.context import RunContext
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.engine.writing import SealedPart, SealedShare
from moe_ckpt.format.slot import SlotHeader, SlotPart, StepFacts, WindowPlace

_NO_TOKENS = np.zeros((0, 0), dtype=np.int64)


class SlotHeaders:
    """Makes headers for one rank of one life, on one thread.

    Args:
        run: The session's.
        run_id: Of the store.
        life: A token that names this life of the run, equal on every rank.
    """

    def __init__(self, run: RunContext, run_id: str, life: str) -> None:
        self._rank, self._ranks, self._catalog = run.comm.rank, run.comm.world_size, run.catalog
        self._run_id, self._life = run_id, life
        self._saved_operators = SavedOperators(run.catalog)

    def of_gradients(self, snapshot: Snapshot, share: SealedShare, index: int, sealed: SealedPart) -> SlotHeader:
        """Returns the header of a slot of gradients. It does not repeat the facts that the share's header has.

        Args:
            snapshot: That the gradients belong to.
            share: Of the snapshot.
            index: Of the gradients, among those of the snapshot.
            sealed: The gradients.
        """
        request = snapshot.request
        facts = StepFacts(request.index, request.base, (), None, _NO_TOKENS, since=request.since)
        part = SlotPart(sealed.part.kind, 0, b"".join(sealed.header))
        nbytes = max(1, sealed.part.nbytes)
        return self._header(snapshot, share, nbytes, facts, (part,), state=b"", only=GRADIENTS, place=index)

    def of_share(self, snapshot: Snapshot, share: SealedShare) -> SlotHeader:
        """Returns the header of the slot that has a rank's share of a snapshot. Waits for the step's tokens."""
        is_lent = snapshot.writer != self._rank and snapshot.request.is_whole(self._catalog)
        return self._header(
            snapshot,
            share,
            max(1, snapshot.plan.own_nbytes()),
            self._facts(snapshot),
            tuple(SlotPart(sealed.part.kind, sealed.begin, b"".join(sealed.header)) for sealed in share.parts),
            state=share.state,
            only=TENSORS if is_lent else "",
            beside=tuple(index for index, _ in snapshot.plan.pieces),
        )

    def _header(
        self,
        snapshot: Snapshot,
        share: SealedShare,
        nbytes: int,
        facts: StepFacts,
        parts: tuple[SlotPart, ...],
        **of_slot: Any,
    ) -> SlotHeader:
        """of_slot: fields of this slot alone."""
        return SlotHeader(
            run_id=self._run_id,
            life=self._life,
            sequence=snapshot.memory_sequence,
            step=snapshot.request.step,
            generation=snapshot.request.generation,
            rank=snapshot.writer,
            world_size=self._ranks,
            nbytes=nbytes,
            freshness=share.freshness,
            facts=facts,
            parts=parts,
            **of_slot,
        )

    def _facts(self, snapshot: Snapshot) -> StepFacts:
        request = snapshot.request
        window = request.window
        return StepFacts(
            index=request.index,
            base=request.base,
            operators=self._saved_operators.of(request, snapshot.plan.claims)[0],
            window=None if window is None else WindowPlace(window.start, window.size, request.slot),
            applied=request.applied.result(),
            faults=request.faults,
            lost=request.lost,
            own=request.rank_tokens,
            policy=request.policy,
            measured=request.measured,
            since=request.since,
            gradients=request.gradients if request.is_partial_log else (),
            groups=() if request.groups is None else request.groups.groups,
        )
