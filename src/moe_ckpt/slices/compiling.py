"""Compiles the contents of a snapshot into a plan of this rank: the bytes to copy, their places, and their headers.

A dense checkpoint of a model with many experts has tens of thousands of slices, so that no step may take Python work
for each of them. The slices of an operator are described once (``slices.cuts``), and a new plan is joined from them. A
plan that occurs again, as every dense one does, is the same object as long as the live tensors are the same: its cost
is C code, which compares pointers, copies bytes and computes checksums.

A plan's *key* is what is saved, whatever the step: (operators, host-only, compute-only, part of a window or not). Plans
are cached by key for one layout. Layouts are compared by value, and live tensors by identity, since it is their memory
that is copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, is_

import numpy as np

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import Contents, PeerPart
from moe_ckpt.format.shard import ALIGNMENT, GRADIENT, SliceEntry, head_of, require_distinct, with_byte_range
from moe_ckpt.ledger.coverage import PRIME, Box
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.assignment import ComputeTypes, Sharder, WriteAssignment
from moe_ckpt.slices.checksums import Piece, digests_of, pieces_of
from moe_ckpt.slices.claims import Claims
from moe_ckpt.slices.copying import CopyProgram
from moe_ckpt.slices.cuts import (
    NBYTES,
    Cut,
    Cuts,
    Numbers,
    are_distinct,
    frozen_nbytes,
    sorted_rows,
    stretches,
    table_of_side,
)
from moe_ckpt.slices.local_state import MIRROR, LocalState, MirroredShares

HOST_ONLY = "held"
"""Kind of the part that stays in host memory and becomes no shard."""
GRADIENTS = "gradient"
"""Kind of the part with consumed gradients. It goes to peers, and becomes no shard either."""
_MOST_SLICES = 1 << 19
"""Slices of all cached plans. Beyond that, the plans that were used longest ago are dropped."""

_COVER_SUM: Callable[[Cut], int] = attrgetter("cover_sum")

PlanKey = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], bool]
_WholeKey = tuple[PlanKey, tuple[SliceEntry, ...], PeerPart]
"""With side tensors, and the part that goes to peers."""


class CompiledPart:
    """One part of a plan, whose slices are in one place. Offsets count from the part's first byte.

    Made on the training thread, except for cached properties, which take long and are needed by other threads.

    Attributes:
        kind: That of the shard it becomes (see ``shard_path``), ``HOST_ONLY``, ``GRADIENTS``, or ``MIRROR`` and a rank.
        joined: The cuts of the part.
        slices: Numbers in ``shelved`` of all slices, side tensors included, in the order of ``lay_out``.
        shelved: The slices of a shelf, without references to live memory.
        source: Rank whose share this part duplicates from this rank's state; None for this rank's own share.
        is_written: The part becomes a shard.
        is_consumed: The part has gradients, of this rank's share or of another's.
        ends: End of each slice, where the next begins.
        side: Numbers in ``slices`` of the side tensors, in the given order.
        copies: Copies all slices but the side tensors.
        nbytes: Bytes of all slices.
        frozen_nbytes: Bytes of the weights of operators that a window anchors later.
    """

    def __init__(self, kind: str, cuts: Cuts, side: Sequence[SliceEntry], at_once: Collection[str]) -> None:
        self.kind = kind
        self.joined = cuts
        self.given_side = tuple(side)
        self._shelf = shelf = cuts.shelf
        numbers = cuts.slices
        table, live = shelf.table(numbers), len(numbers)
        if side:
            numbers = np.concatenate([numbers, shelf.side_numbers(side)])
            table = np.concatenate([table, table_of_side(side)])
        order = sorted_rows(table)
        table, numbers = table.take(order, axis=0), numbers.take(order)
        self.slices, self.shelved = numbers, shelf.entries
        self.source = int(kind.removeprefix(MIRROR)) if kind.startswith(MIRROR) else None
        self.is_written = kind not in (HOST_ONLY, GRADIENTS) and self.source is None
        self.is_consumed = len(numbers) > 0 and shelf.entries[numbers[0]].key.startswith(GRADIENT)
        self.ends = np.cumsum(table[:, NBYTES])
        self.side = tuple(np.argsort(order)[live:].tolist()) if side else ()
        begins = self.ends - table[:, NBYTES]
        copied = order < live if side else slice(None)
        self.copies = CopyProgram(shelf, numbers[copied], table[copied], begins[copied], at_once)
        self.nbytes = int(self.ends[-1]) if len(order) else 0
        self.frozen_nbytes = frozen_nbytes(table)
        self._table = table
        self._head: bytes | None = None
        self._is_used = False

    @cached_property
    def cuts(self) -> Sequence[Cut]:
        return self.joined.listed()

    def listed(self) -> list[SliceEntry]:
        """Returns all slices, in their order."""
        return list(map(self.shelved.__getitem__, self.slices.tolist()))

    def side_entries(self) -> list[SliceEntry]:
        """Returns the slices that ``side`` names, each with its byte range."""
        numbered = zip(self.side, self.given_side, strict=True)
        return [with_byte_range(entry, int(self.ends[at]) - entry.nbytes) for at, entry in numbered]

    def release(self) -> None:
        """Drops all references to live tensors, once the copy is done."""
        self.copies.release()
        self._shelf.release()

    @cached_property
    def names(self) -> Numbers:
        """``[n]`` digests of the names of the slices."""
        return digests_of([entry.name for entry in self.listed()])

    @cached_property
    def pieces(self) -> Sequence[Sequence[Piece]]:
        """The slices, divided into tasks for checking threads."""
        return pieces_of(self.ends, stretches(self._table))

    @property
    def boxes(self) -> tuple[tuple[str, Box], ...]:
        """Key and block of every slice in the coverage proof."""
        return tuple((entry.key, entry.box) for cut in self.cuts for entry in cut.entries)

    @cached_property
    def cover_sum(self) -> int:
        """``cover_sum`` of ``boxes``."""
        return sum(map(_COVER_SUM, self.cuts)) % PRIME

    def head(self, run_id: str, rank: int, step: int) -> bytes:
        """Returns the shard's head, cached from the second use on, since it is large and most plans are used once.

        Raises:
            CoverageError: Two of the slices are the same one.
        """
        if self._head is not None:
            return self._head
        entries = self.listed()
        if not are_distinct(self._table):
            require_distinct(rank, step, entries)
        head = head_of(run_id, rank, entries, self.ends.tolist())
        self._head, self._is_used = head if self._is_used else None, True
        return head


Placed = tuple[int, CompiledPart]
"""A part, and the byte of its buffer at which it begins."""


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """The parts that one rank copies and writes for one key.

    Attributes:
        buffers: The parts of each buffer: first ``parts``, then for each of ``slots`` its gradients. Duplicates of
            other ranks' shares are in the first buffer, behind this rank's share; if there are ``slots``, in a buffer
            of their own, the last one, since they are needed for a short time only.
        key: Operators that are saved.
        claims: The slices that all ranks together must write.
        slots: Numbers in ``Contents.groups`` of the gradients in buffers of their own.
    """

    buffers: tuple[tuple[Placed, ...], ...]
    key: PlanKey
    claims: Claims
    slots: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[Placed, ...]:
        """The parts of the first buffer."""
        return self.buffers[0]

    @cached_property
    def sizes(self) -> list[int]:
        """The bytes of each buffer, for ``BufferPool``."""
        return [max((begin + part.nbytes for begin, part in parts), default=0) for parts in self.buffers]

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(self.sizes)

    @property
    def share_parts(self) -> tuple[Placed, ...]:
        """The parts of this rank's share."""
        return tuple(placed for placed in self.parts if placed[1].source is None)

    def own_nbytes(self, *, host_only: bool = True) -> int:
        """Returns the bytes of the first buffer up to the end of this rank's share, with or without ``HOST_ONLY``
        parts."""
        ends = (begin + part.nbytes for begin, part in self.share_parts if host_only or part.kind != HOST_ONLY)
        return max(ends, default=0)

    @cached_property
    def cover_difference(self) -> int:
        """``cover_sum`` of the slices that this rank writes, less those that it accounts for. The sum over all ranks is
        0 modulo ``PRIME`` if their slices tile the plan."""
        operators, _, compute_only, in_window = self.key
        written = sum(part.cover_sum for _, part in self.parts if part.is_written)
        return (written - self.claims.own_sum(operators, compute_only, in_window=in_window)) % PRIME

    def claimed_boxes(self) -> Mapping[str, list[Box]]:
        """Returns all boxes that the ranks together must write."""
        operators, _, compute_only, in_window = self.key
        return self.claims.boxes(operators, compute_only, in_window=in_window)


class PlanCompiler:
    """Compiles contents for one rank, and caches the plans. For the training thread only.

    Attributes:
        mirrors: Cuts duplicates of the shares of the ``sources``.

    Args:
        catalog: Of the model.
        placement: Ranks of the operators.
        rank: This one.
        ranks: How many there are.
        sources: Ranks of whose snapshots this rank keeps copies.
    """

    def __init__(
        self, catalog: Catalog, placement: Placement, rank: int, ranks: int, sources: Sequence[int] = ()
    ) -> None:
        self._catalog, self._placement = catalog, placement
        self._rank, self._ranks, self._sources = rank, ranks, sources
        self._specs: tuple[TensorSpec, ...] = ()
        self._claims = Claims(catalog, (), rank, ranks)
        self._compute_types: Mapping[str, str] = {}
        self._unstable: frozenset[str] = frozenset()
        self._plans: OrderedDict[_WholeKey, CompiledPlan] = OrderedDict()  # the one used longest ago first
        self._slices = 0  # of all plans
        self._newest: dict[str, CompiledPart] = {}
        self._describe(())

    def _describe(self, tensors: Sequence[StateTensor]) -> None:
        """Takes other tensors: their memory is copied, so that nothing that was made of the ones before is of use."""
        self._tensors = tensors
        self._sharder = Sharder(self._catalog, self._placement, tensors)
        self._local = LocalState(self._catalog, tensors)
        self.mirrors = self._mirrored(self._sources, tensors)
        self._newest.clear()

    def _mirrored(self, sources: Sequence[int], tensors: Sequence[StateTensor]) -> MirroredShares:
        return MirroredShares(self._catalog, self._placement, sources, tensors)

    def add_unstable(self, keys: Collection[str]) -> None:
        """Has these tensors copied before training continues, from now on: something other than the optimizer changes
        them."""
        self._unstable |= frozenset(keys)
        self._forget()

    def compile(
        self,
        contents: Contents,
        tensors: Sequence[StateTensor],
        specs: Sequence[TensorSpec],
        side: Sequence[SliceEntry],
        gradients: Sequence[StateTensor] = (),
        compute_types: ComputeTypes | None = None,
    ) -> CompiledPlan:
        """Returns the plan for ``contents``: the same object again if neither the operators nor the tensors have
        changed.

        Args:
            contents: Of the snapshot; on behalf of another rank, this rank plans the part that it also holds.
            tensors: This rank's.
            specs: Those of all ranks.
            side: Tensors of no operator, which go into this rank's non-expert shard.
            gradients: This rank's. They may be other tensors at each step, so that their parts are not cached.
            compute_types: Types of compute weights, by default those of the tensors.
        """
        self._update(tensors, specs, compute_types or {})
        key: PlanKey = (contents.full, contents.memory_only, contents.compute, contents.window is not None)
        if contents.on_behalf_of is not None:
            return self._compile_lent(key, contents, contents.on_behalf_of, side)
        whole_key = (key, tuple(side), contents.to_peers)
        plan = self._plans.pop(whole_key, None)
        if plan is None:
            plan = self._compile(key, contents, side)
            self._slices += _slices(plan)
        self._plans[whole_key] = plan
        while self._slices > _MOST_SLICES and len(self._plans) > 1:
            self._slices -= _slices(self._plans.popitem(last=False)[1])
        return self._with_gradients(plan, contents, gradients) if gradients else plan

    def _update(
        self, tensors: Sequence[StateTensor], specs: Sequence[TensorSpec], compute_types: Mapping[str, str]
    ) -> None:
        if tensors is not self._tensors:
            if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
                self._describe(tensors)
                self._forget()
            self._tensors = tensors
        # Equal layouts keep their plans. The newer object is stored, since it is likely to come again.
        if specs is not self._specs:
            before, self._specs = self._specs, tuple(specs)
            if self._specs != before:
                self._claims = Claims(self._catalog, self._specs, self._rank, self._ranks)
                self._forget()
        if compute_types is not self._compute_types:
            types, self._compute_types = self._compute_types, compute_types
            if compute_types != types:
                self._forget()

    def _forget(self) -> None:
        self._plans.clear()
        self._newest.clear()
        self._slices = 0

    def _compile_lent(self, key: PlanKey, contents: Contents, writer: int, side: Sequence[SliceEntry]) -> CompiledPlan:
        """Returns the plan of the part of another rank's share that this rank also holds, once training stops."""
        _, assignment = self._cut(contents)
        [cuts] = self._mirrored([writer], self._tensors).cuts(contents.full, assignment).values()
        is_expert = self._catalog.is_expert[cuts.places]
        by_kind = ("non_expert", cuts.masked(~is_expert), side), ("expert", cuts.masked(is_expert), ())
        return self._laid_out(key, (CompiledPart(*of_kind, self._unstable) for of_kind in by_kind))

    def _laid_out(self, key: PlanKey, parts: Iterable[CompiledPart]) -> CompiledPlan:
        return CompiledPlan((_in_a_buffer(part for part in parts if len(part.slices)),), key, self._claims)

    def _compile(self, key: PlanKey, contents: Contents, side: Sequence[SliceEntry]) -> CompiledPlan:
        share, assignment = self._cut(contents)
        is_expert, is_held = (
            of[share.places] for of in (self._catalog.is_expert, self._catalog.mask(contents.memory_only))
        )
        by_kind = {
            "expert": share.masked(is_expert & ~is_held),
            "non_expert": share.masked(~is_expert & ~is_held),
            HOST_ONLY: share.masked(is_held),
        }
        if contents.to_peers:
            by_kind |= self.mirrors.cuts(contents.sent, assignment)
        parts = (self._part(kind, cuts, side if kind == "non_expert" else ()) for kind, cuts in by_kind.items())
        return self._laid_out(key, parts)

    def _with_gradients(self, plan: CompiledPlan, contents: Contents, gradients: Sequence[StateTensor]) -> CompiledPlan:
        """Returns the plan with this rank's share of the gradients, behind its other parts or in buffers of their
        own."""
        operators, groups = contents.gradients, contents.groups
        assignment = self._sharder.assign(operators)
        share = LocalState(self._catalog, gradients).cuts(operators, assignment, self._rank)
        sources = self._sources if contents.to_peers else ()
        of_others = self._mirrored(sources, gradients).cuts(operators, assignment)
        mirrored = [CompiledPart(kind, cuts, (), ()) for kind, cuts in of_others.items() if len(cuts)]
        planned = [part for _, part in plan.parts]
        if groups is None:
            made = [CompiledPart(GRADIENTS, share, (), ())] if len(share) else []
            # This rank's share first, and at its end the parts that peers do not get.
            order = sorted((*planned, *made, *mirrored), key=lambda e: (e.source is not None, e.kind == HOST_ONLY))
            return replace(plan, buffers=(_in_a_buffer(order),))
        slot_of = groups.slot_of[share.places]
        slots = np.unique(slot_of).tolist()
        pieces = [[CompiledPart(GRADIENTS, share.masked(slot_of == slot), (), ())] for slot in slots]
        duplicates = [*(part for part in planned if part.source is not None), *mirrored]
        parts = [part for part in planned if part.source is None], *pieces, *([duplicates] if duplicates else [])
        return replace(plan, buffers=tuple(map(_in_a_buffer, parts)), slots=tuple(slots))

    def _cut(self, contents: Contents) -> tuple[Cuts, WriteAssignment]:
        """Returns this rank's share of the slices to copy, and the assignment of all shares."""
        if self._local.is_crowded or self.mirrors.is_crowded:
            self._describe(self._tensors)
        compute, types = contents.compute, self._compute_types
        assignment = self._sharder.assign(contents.copied, compute, types)
        cuts = self._local.cuts(contents.copied, assignment, self._rank)
        if contents.window is not None:
            cuts = cuts.joined(self._local.replay_cuts(contents.full, compute, assignment, self._rank, types))
        return cuts, assignment

    def _part(self, kind: str, cuts: Cuts, side: Sequence[SliceEntry]) -> CompiledPart:
        """Returns a part, the one of the plan before if it has the same slices: every plan saves the non-experts."""
        newest = self._newest.get(kind)
        if newest is None or newest.given_side != tuple(side) or not newest.joined.same(cuts):
            newest = self._newest[kind] = CompiledPart(kind, cuts, side, self._unstable)
        return newest


def _in_a_buffer(parts: Iterable[CompiledPart]) -> tuple[Placed, ...]:
    """Returns the parts one after the other, aligned."""
    placed: list[Placed] = []
    end = 0
    for part in parts:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        placed.append((begin, part))
        end = begin + part.nbytes
    return tuple(placed)


def _slices(plan: CompiledPlan) -> int:
    return sum(len(part.slices) for _, part in plan.parts)
