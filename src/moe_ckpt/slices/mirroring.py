"""Parts of other ranks' shares that a rank copies from its own training state, which has the same bytes.

A rank that keeps copies of a data-parallel peer's snapshots copies the peer's share from its own tensors, as far as it
has the same state, beside its own share. These bytes need not be sent: ``peers.store`` puts them into the copy,
compares each slice with the peer's checksum, and requests slices that differ or are missing. So a copy is whole,
whichever way its bytes came, and a recovery reads it like any other (MoEtion, arXiv 2412.15411 v1, Algorithm 2 and
section 5.1).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from moe_ckpt.core.operators import Catalog, OperatorKind
from moe_ckpt.core.placement import Placement
from moe_ckpt.policies.base import ALL_SENT, Sends
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices.assignment import WriteAssignment, holders, is_weight
from moe_ckpt.slices.cuts import Cuts, Numbers
from moe_ckpt.slices.local_state import LocalState

if TYPE_CHECKING:
    from moe_ckpt.slices.compiling import CompiledPart

MIRROR = "mirror/"
"""Prefix of the kinds of parts that duplicate another rank's share; the number of that rank follows."""


class MirroredShares:
    """Cuts the part of other ranks' shares that this rank's state also holds. For the training thread only.

    Args:
        catalog: Of the model.
        placement: Of this rank.
        sources: Ranks of whose snapshots this rank keeps copies.
    """

    def __init__(self, catalog: Catalog, placement: Placement, sources: Sequence[int]) -> None:
        self._catalog = catalog
        self._alike = frozenset(placement.peers)
        self._experts_alike = frozenset(placement.expert_peers)
        self._sources = tuple(sources)
        self._tensors: Sequence[StateTensor] = ()
        self._local: dict[int, LocalState] = {}
        self._sends: Sends | None = None

    @property
    def sends(self) -> Sends:
        """State that sources must send, since this rank lacks it: non-experts, experts, and the weights alone of both.

        For the tensors of the newest ``cuts``; everything before the first.
        """
        if self._sends is None and self._tensors:
            # [of non-experts, of experts]. With a distributed optimizer, ranks have all weights, and know which rank
            # updates each; with FSDP2, a rank has its own part alone.
            replicated, updated, weights, gathered = [True, True], [True, True], [True, True], [False, False]
            for tensor in self._tensors:
                experts = any(op.kind is OperatorKind.EXPERT for op, _ in holders(self._catalog, tensor))
                has_writer = not tensor.duplicate or tensor.writer is not None
                replicated[experts] &= tensor.replicated
                updated[experts] &= has_writer and (tensor.updated_here or not tensor.duplicate)
                if is_weight(tensor):
                    weights[experts] &= has_writer
                    gathered[experts] |= has_writer and not tensor.updated_here
            sources = frozenset(self._sources)
            alike, apart = sources <= self._alike, sources <= self._experts_alike
            shared = replicated[False] and alike
            experts_alike = (replicated[True] and alike) or (not replicated[True] and updated[True] and apart)
            shared_weights = shared or (weights[False] and gathered[False] and alike)
            expert_weights = experts_alike or (weights[True] and gathered[True] and apart)
            self._sends = Sends(not shared, not experts_alike, not shared_weights, not expert_weights)
        return self._sends or ALL_SENT

    def cuts(
        self, operators: Collection[str], tensors: Sequence[StateTensor], assignment: WriteAssignment
    ) -> dict[str, Cuts]:
        """Returns kind of part -> cuts, for each source.

        Args:
            operators: Saved in full, and sent.
            tensors: This rank's.
            assignment: Of replicated state to its writers.
        """
        if tensors is not self._tensors:
            if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
                self._local.clear()
                self._sends = None
            self._tensors = tensors
        local = self._local
        for source in self._sources:
            if source not in local or local[source].is_crowded:
                local[source] = LocalState(self._catalog, tensors, source, alike=source in self._alike)
        return {f"{MIRROR}{source}": local[source].cuts(operators, assignment, source) for source in self._sources}

    def cuts_of_gradients(
        self, operators: Collection[str], gradients: Sequence[StateTensor], assignment: WriteAssignment
    ) -> dict[str, Cuts]:
        """Returns the same for consumed gradients, which are other tensors at each step, so that no cut is reused."""
        local = {s: LocalState(self._catalog, gradients, s, alike=s in self._alike) for s in self._sources}
        return {f"{MIRROR}{source}": local[source].cuts(operators, assignment, source) for source in self._sources}


@dataclass(frozen=True, eq=False)
class Mirror:
    """The part of another rank's snapshot that this rank's memory has.

    Attributes:
        part: Of the plan of this rank's own snapshot of the step.
        memory: ``[nbytes]`` uint8 on the host, the part's bytes. A slice is used only if its checksum is the peer's.
        following: Another part of the same snapshot.
    """

    part: CompiledPart
    memory: torch.Tensor
    following: Mirror | None = None


def digests_of(names: Collection[str]) -> Numbers:
    """Returns the XXH3-64 of each name. Equal digests do no harm: checksums tell slices apart."""
    digests = np.fromiter(
        (xxhash.xxh3_64_intdigest(name.encode()) for name in names), dtype=np.uint64, count=len(names)
    )
    return digests.astype(np.int64)
