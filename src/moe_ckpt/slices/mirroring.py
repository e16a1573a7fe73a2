"""What a rank copies of other ranks' shares, because its own training state holds the same bytes.

A rank that holds copies of a data-parallel peer's snapshots copies the peer's share, as far as it has the same state,
out of its own tensors beside its own share. Those bytes need not be sent then: ``peers.store`` puts them into
the copy, compares each slice with the checksum that the peer's had, and asks for what differs or is not there. So a
copy is whole, whichever way its bytes came, and a recovery reads it like any other (MoEtion, arXiv 2412.15411 v1,
Algorithm 2 and section 5.1).
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
"""How the kinds of parts begin that hold what of another rank's share is here, too; its number follows."""


class MirroredShares:
    """Cuts the part of other ranks' shares that this rank's state also holds. For the training thread only.

    Args:
        catalog: Of the model.
        placement: This rank's.
        sources: Ranks whose copies lie here.
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
        """The state that this rank lacks of its sources' shares: all non-experts, all their experts, and the weights
        alone of both.

        Of the tensors of the newest ``cuts``; true of all before.
        """
        if self._sends is None and self._tensors:
            # Of what is no expert, and of experts. A distributed optimizer's ranks have the weights of what it divides,
            # each knowing whose they are; FSDP2's ranks have their own part alone.
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
        """Returns kind of part -> what it holds, for each source.

        Args:
            operators: That are saved in full, and sent.
            tensors: This rank's.
            assignment: Who writes what of what all peers have.
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
        """Returns the same of consumed gradients, which are other tensors at each step: nothing is kept of them."""
        local = {s: LocalState(self._catalog, gradients, s, alike=s in self._alike) for s in self._sources}
        return {f"{MIRROR}{source}": local[source].cuts(operators, assignment, source) for source in self._sources}


@dataclass(frozen=True, eq=False)
class Mirror:
    """The part of another rank's snapshot that this rank's memory has.

    Attributes:
        part: Of the plan of this rank's own snapshot of the step.
        memory: ``[nbytes]`` uint8 on the host: the part's bytes. They are used only where checksums say what they are.
        following: Another part of the same.
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
