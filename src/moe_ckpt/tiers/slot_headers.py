"""Makes the headers of a snapshot's slots, in memory that outlives the process and in this process's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_ckpt.core.step import Contents, Facts
from moe_ckpt.core.survivors import GRADIENTS, TENSORS
from moe_ckpt.core.tokens import NO_COUNTS
from moe_ckpt.format.fragment import Fragment
from moe_ckpt.format.slot import SlotHeader, SlotPart
from moe_ckpt.policies.base import needs_of
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.claims import SavedOperators
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.slices.writing import SealedPart, SealedShare


class SlotHeaders:
    """Makes headers for one rank of one life, on one thread.

    Args:
        run: The session's.
    """

    def __init__(self, run: RunContext) -> None:
        self._rank, self._ranks, self._catalog = run.comm.rank, run.comm.world_size, run.catalog
        self._saved_operators = SavedOperators(run.catalog)
        needs = needs_of(run.policy)
        self._names_gradients = needs.gradients and needs.partial  # else they are of all others

    def of_gradients(self, snapshot: Snapshot, share: SealedShare, index: int, sealed: SealedPart) -> SlotHeader:
        """Returns the header of a slot of gradients. It does not repeat the facts that the share's header has.

        Args:
            snapshot: That the gradients belong to.
            share: Of the snapshot.
            index: Of the gradients, among those of the snapshot.
            sealed: The gradients.
        """
        part = SlotPart(sealed.part.kind, 0, b"".join(sealed.header))
        return self._header(
            snapshot,
            share,
            nbytes=max(1, sealed.part.nbytes),
            contents=Contents((), since=snapshot.contents.since),
            facts=Facts(snapshot.facts.index, snapshot.facts.base, NO_COUNTS),
            parts=(part,),
            state=b"",
            only=GRADIENTS,
            place=index,
        )

    def of_share(self, snapshot: Snapshot, share: SealedShare) -> SlotHeader:
        """Returns the header of the slot that has a rank's share of a snapshot. Waits for the step's tokens."""
        contents, everything = snapshot.contents, self._catalog.everything
        without_state = contents.on_behalf_of is not None and contents.is_whole(everything)
        _, saved = self._saved_operators.of(contents.full, snapshot.plan.claims)
        if len(saved) < len(contents.full):
            contents = replace(contents, full=tuple(map(everything.__getitem__, saved.tolist())))
        if not self._names_gradients:
            contents = replace(contents, gradients=())
        return self._header(
            snapshot,
            share,
            nbytes=max(1, snapshot.plan.own_nbytes()),
            contents=contents,
            facts=replace(snapshot.facts, applied=snapshot.applied.result()),
            parts=tuple(SlotPart(sealed.part.kind, sealed.begin, b"".join(sealed.header)) for sealed in share.parts),
            state=share.state,
            only=TENSORS if without_state else "",
            beside=tuple(index for index, _ in snapshot.plan.pieces),
        )

    def operators(self, snapshot: Snapshot) -> Fragment:
        """Returns the operators in full of ``of_share``, encoded."""
        return self._saved_operators.of(snapshot.contents.full, snapshot.plan.claims)[0]

    def _header(self, snapshot: Snapshot, share: SealedShare, **of_slot: Any) -> SlotHeader:
        """of_slot: fields of this slot alone."""
        identity = snapshot.identity
        return SlotHeader(
            run_id=identity.run,
            life=identity.life,
            sequence=identity.number,
            step=identity.step,
            generation=identity.generation,
            rank=snapshot.contents.writer(self._rank),
            world_size=self._ranks,
            freshness=share.freshness,
            **of_slot,
        )
