"""How many experts each layer may save, and which ones do (MoEtion, arXiv 2412.15411 v1, Algorithm 1).

Whole numbers only: fractions of floats could round differently on another processor, and plans must be equal on all
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog, MoELayer, Remembered, expert_id
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.save_budget import Load, least_capacity
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import ALL_SENT, PolicyContext, Sends
from moe_ckpt.policies.selectors import best_first


def layer_shares(risk: Sequence[int], sizes: Sequence[int], total: int, first: int = 0) -> tuple[int, ...]:
    """S[l], how many of ``total`` experts each layer saves, in proportion to what it has at risk.

    ``S[l] = floor(R[l] / sum(R) * total)``; what is left goes to the largest fractions, one each. A layer whose part is
    all its experts or more saves all, and the rest is shared out among the others by the same rule. Layers with
    nothing at risk get something when the others are full, and all alike then, as when nothing is at risk anywhere.
    So ``sum(S) = min(total, sum(sizes))``. (The paper only says "adjust S so that the sum is total".)

    Args:
        risk: ``R[l] >= 0``, unsaved tokens of each layer.
        sizes: Experts of each.
        first: Equal fractions go to the layer with more at risk, then from this layer on, round and round.
    """
    shares = [0] * len(sizes)
    remaining = total
    sharing = [layer for layer, size in enumerate(sizes) if size]
    while remaining and sharing:
        weights = [risk[layer] for layer in sharing]
        whole = sum(weights)
        if not whole:
            weights, whole = [1] * len(sharing), len(sharing)
        full = [
            layer for layer, weight in zip(sharing, weights, strict=True) if remaining * weight >= sizes[layer] * whole
        ]
        if not full:
            fractions = []
            for layer, weight in zip(sharing, weights, strict=True):
                shares[layer], fraction = divmod(remaining * weight, whole)
                fractions.append((-fraction, -weight, (layer - first) % len(sizes), layer))
            for *_, layer in sorted(fractions)[: remaining - sum(shares[layer] for layer in sharing)]:
                shares[layer] += 1
            break
        for layer in full:
            shares[layer] = sizes[layer]
        remaining -= sum(sizes[layer] for layer in full)
        sharing = [layer for layer in sharing if layer not in full]
    return tuple(shares)


class Taking:
    """Experts taken one after the other, as long as their owner has capacity left.

    Experts are numbers from 0 on.

    Args:
        owners: Of each, counted from 0.
        capacity: Experts per owner; None where it does not matter who owns them.

    Attributes:
        count: How many were taken so far.
        is_taken: Of each expert.
    """

    def __init__(self, owners: Counts, capacity: int | None) -> None:
        self.count = 0
        self.is_taken: npt.NDArray[np.bool_] = np.zeros(len(owners), dtype=np.bool_)
        self._owners = owners
        self._room: Counts = np.full(owners.max(initial=0) + 1, len(owners) if capacity is None else capacity)

    def force(self, experts: Sequence[int]) -> None:
        """Take ``experts`` whoever owns them."""
        forced = np.unique(np.asarray(experts, dtype=np.int64))
        self._take(forced[~self.is_taken[forced]])

    def take(self, ordered: Counts, most: int) -> None:
        """Take from ``ordered``, best first, until ``most`` are taken in all."""
        self.take_shares(ordered, most, np.zeros_like(self._owners), (most,))

    def take_shares(self, ordered: Counts, most: int, groups: Counts, shares: Sequence[int]) -> Counts:
        """Takes experts as ``take`` does, but no more of each group than its share.

        Returns those whose group had none left.

        Args:
            groups: Of each expert.
            shares: How many more of each group.
        """
        untaken = ordered[~self.is_taken[ordered]]
        of_group, of_each = groups[untaken], np.asarray(shares, dtype=np.int64)
        chosen = self._fitting(self._owners[untaken], of_group, of_each)[: max(0, most - self.count)]
        self._take(untaken[chosen])
        return untaken[_behind_the_last(of_group, chosen, of_each)]

    def _fitting(self, owners: Counts, groups: Counts, shares: Counts) -> Counts:
        """Which of some experts, best first, would be taken one after the other: places among them, ascending.

        An expert that is skipped because its owner has no room leaves its group's place to a later one. All are chosen
        at once as if there were room; those after the one that fills up their owner are dropped, and the others are
        chosen again, until there is room for all. No expert is dropped wrongly: with fewer rivals in their groups, an
        owner's experts fill it up no later.

        Args:
            owners: Of each.
            groups: Of each.
            shares: How many are taken of each group.
        """
        room, rivals = np.maximum(self._room, 0), np.arange(len(owners))
        while True:
            of_group = groups[rivals]
            chosen = rivals[_places_in(of_group) < shares[of_group]]
            if (np.bincount(owners[chosen], minlength=len(room)) <= room).all():
                return chosen
            rivals = rivals[~_behind_the_last(owners, chosen, room)[rivals]]

    def _take(self, experts: Counts) -> None:
        self.is_taken[experts] = True
        self.count += len(experts)
        np.subtract.at(self._room, self._owners[experts], 1)


def _places_in(groups: Counts) -> Counts:
    """Of each, how many before it are of the same group."""
    # Whole numbers of 16 bits are sorted by their digits, without comparisons.
    order = np.argsort(groups.astype(np.uint16) if groups.max(initial=0) < 1 << 16 else groups, kind="stable")
    sizes = np.bincount(groups)
    places: Counts = np.empty_like(order)
    places[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _behind_the_last(kinds: Counts, chosen: Counts, most: Counts) -> npt.NDArray[np.bool_]:
    """Of each, whether ``most`` of its kind are before it among the ``chosen``, which are places in ascending order."""
    of_kind = kinds[chosen]
    is_last = _places_in(of_kind) == most[of_kind] - 1
    last = np.where(most > 0, len(kinds), -1)
    last[of_kind[is_last]] = chosen[is_last]
    behind: npt.NDArray[np.bool_] = np.arange(len(kinds)) > last[kinds]
    return behind


_WEIGHTLESS = OperatorBytes(0, 0)


@dataclass(frozen=True, eq=False)
class Stage:
    """The MoE layers of one pipeline stage, whose experts the same ranks save.

    Its experts are numbers from 0 on, layer by layer.

    Attributes:
        ranks: Of the stage.
        owners: Of each expert.
        at: Of each expert, its place in counts ``[L, E]`` that were made flat.
        operators: Of each expert, its operator's place in the catalog.
        by_owner: An owner's experts cannot be evened out with others'.
        divided: Ranks that share the bytes of each expert, beside their share of the rest; None where ranks are filled
            up evenly.
        shared: All gates and non-experts.
        largest: The largest expert; without bytes where sizes are not asked for.
    """

    layers: tuple[MoELayer, ...]
    ranks: int
    owners: tuple[int, ...]
    at: Counts
    operators: Counts
    by_owner: bool
    divided: int | None
    shared: OperatorBytes = _WEIGHTLESS
    largest: OperatorBytes = _WEIGHTLESS

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers)

    @cached_property
    def total(self) -> int:
        return sum(layer.experts for layer in self.layers)

    @cached_property
    def owned(self) -> Counter[int]:
        """Owner rank -> how many experts it owns."""
        return Counter(self.owners)

    @cached_property
    def owner_numbers(self) -> Counts:
        """Owner of each expert, counted from 0."""
        numbers: Counts = np.unique(self.owners, return_inverse=True)[1]
        return numbers

    @cached_property
    def groups(self) -> Counts:
        """Place of each expert's layer among ``layers``."""
        return np.repeat(np.arange(len(self.layers)), self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Experts of each layer."""
        return tuple(layer.experts for layer in self.layers)

    @cached_property
    def starts(self) -> Counts:
        """The first expert of each layer."""
        return np.cumsum([0, *self.sizes[:-1]])

    @cached_property
    def numbers(self) -> Mapping[int, int]:
        """Place in the catalog -> expert."""
        return {index: number for number, index in enumerate(self.operators.tolist())}

    @lru_cache(maxsize=1024)  # noqa: B019 - stages are few and stay
    def most(self, limit: int | None, least: int, sends: Sends = ALL_SENT) -> tuple[int, int | None]:
        """Returns how many experts are saved, and how many of them any rank may own.

        Args:
            limit: Bytes of one rank; None: no budget.
            least: Experts that are saved in any case.
            sends: What is paid from the limit.
        """
        if not sends.experts:
            return self.total, None
        most, capacity = (0, None) if limit is None else self.load(sends).affordable(limit)
        least = min(least, self.total)
        if most >= least:
            return most, capacity
        return least, least_capacity(least, self.owned.values()) if self.by_owner else None

    def load(self, sends: Sends = ALL_SENT) -> Load:
        """Returns the load from which the experts that a budget buys are computed.

        Args:
            sends: What of it counts.
        """
        owned = tuple(self.owned.values())
        shared, expert = sends.nbytes(self.shared, expert=False), sends.nbytes(self.largest, expert=True)
        return Load(self.ranks, owned, self.by_owner, self.divided, shared, expert)


class Together:
    """Several stages, whose experts follow on one another: arrays of all of them are gone through once.

    at, operators: as those of the stages. bounds: of each stage, its first expert and the one behind its last.
    """

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.at, self.operators = (
            np.concatenate([getattr(stage, name) for stage in stages]) for name in ("at", "operators")
        )
        self._totals = [stage.total for stage in stages]
        self.bounds = tuple(pairwise(np.cumsum([0, *self._totals]).tolist()))
        self._stage = self.spread(range(len(stages)))
        firsts = [first for first, _ in self.bounds]
        self._first = self.spread(firsts)
        self._starts = np.concatenate([first + stage.starts for first, stage in zip(firsts, stages, strict=True)])
        self._layers = tuple(pairwise(np.cumsum([0, *(len(stage.layers) for stage in stages)]).tolist()))

    def spread(self, figures: Sequence[int]) -> Counts:
        """One figure of each stage, as one of each expert."""
        return np.repeat(np.asarray(figures, dtype=np.int64), self._totals)

    def by_layer(self, counts: Counts) -> list[list[int]]:
        """Stage by stage, the sum of each of its layers."""
        sums = np.add.reduceat(counts, self._starts).tolist()
        return [sums[first:end] for first, end in self._layers]

    def ordered(self, chosen_at: Counts, unsaved: Counts) -> list[Counts]:
        """Stage by stage, all experts: most unsaved tokens first, then the oldest, then by layer and index."""
        order = best_first(self._stage, unsaved, chosen_at)
        numbers = order - self._first
        return [numbers[first:end] for first, end in self.bounds]


together = lru_cache(maxsize=8)(Together)
"""Of the same stages, the same."""


def stages_of(context: PolicyContext, *, weighed: bool) -> tuple[Stage, ...]:
    """The stages that have MoE layers.

    Args:
        weighed: With their bytes.

    The same objects give the same answer, and it is remembered: they change rarely, and this is asked at every step.

    Raises:
        ConfigError: ``context.model.sizes`` lacks operators that are to be weighed.
    """
    return _stages(context.model.catalog, context.model.placement, context.model.sizes if weighed else None)


_stages = Remembered(lambda *facts: tuple(_each_stage(*facts)), most=4)


def _each_stage(catalog: Catalog, placement: Placement, sizes: Mapping[str, OperatorBytes] | None) -> Iterator[Stage]:
    stage_of = placement.stage_of
    shared, shared_weights = Counter[int](), Counter[int]()
    largest, lightest = dict[int, int](), dict[int, int]()  # in full, and without weights
    if sizes is not None:
        unknown = [op for op in catalog.everything if op not in sizes]
        if unknown:
            raise ConfigError(
                f"ModelFacts.sizes must have every operator of the catalog, but {len(unknown)} are not there, such "
                f"as {unknown[0]}; give MoEtion(experts=...), or MoC a number of experts, where sizes are not known"
            )
        for op in catalog.always_saved:
            shared[stage_of.get(op.id, 0)] += sizes[op.id].full
            shared_weights[stage_of.get(op.id, 0)] += sizes[op.id].weights
        for name, row, _ in catalog.experts_by_layer:
            largest[row] = max(largest.get(row, 0), sizes[name].full)
            lightest[row] = max(lightest.get(row, 0), sizes[name].sent(weights=False))
    most = max((layer.experts for layer in catalog.layers), default=0)
    layers_of: dict[int, list[MoELayer]] = {}
    for layer in catalog.layers:
        layers_of.setdefault(stage_of.get(expert_id(layer.index, 0), 0), []).append(layer)
    for number, layers in sorted(layers_of.items()):
        names = [expert_id(layer.index, expert) for layer in layers for expert in range(layer.experts)]
        most_full = max(largest.get(layer.index, 0) for layer in layers)
        yield Stage(
            layers=tuple(layers),
            ranks=placement.stages[number],
            owners=tuple(rank for layer in layers for rank in placement.owners[layer.index]),
            at=np.concatenate([layer.index * most + np.arange(layer.experts) for layer in layers]),
            operators=np.array([catalog.index_of[name] for name in names], dtype=np.int64),
            by_owner=placement.experts_whole or placement.expert_ranks is not None,
            divided=placement.expert_ranks,
            shared=OperatorBytes(shared[number], 0, weights=shared_weights[number]),
            largest=OperatorBytes(
                most_full, 0, weights=most_full - max(lightest.get(layer.index, 0) for layer in layers)
            ),
        )
