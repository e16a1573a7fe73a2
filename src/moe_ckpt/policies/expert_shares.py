"""Divides a number of experts among layers, and chooses them by owner (MoEtion, arXiv 2412.15411 v1, Algorithm 1).

All arithmetic is in whole numbers: floats could round differently on another processor, and plans must be equal on all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.cadence import Division, least_capacity
from moe_ckpt.core.operators import Catalog, MoELayer, Remembered, expert_id, grid_of
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.policies.base import ALL_SENT, PolicyContext, Sends, require_sizes


def layer_shares(risk: Sequence[int], sizes: Sequence[int], total: int, first: int = 0) -> tuple[int, ...]:
    """Returns S[l], how many of ``total`` experts each layer saves, in proportion to its unsaved tokens.

    ``S[l] = floor(R[l] / sum(R) * total)``; the remainder goes to the layers with the largest fractions, one expert
    each. A layer whose share is all its experts or more saves all, and the rest is divided among the other layers by
    the same rule. Layers without unsaved tokens get experts when the other layers are full, all alike, as when no layer
    has unsaved tokens. So ``sum(S) = min(total, sum(sizes))``. (The paper only says "adjust S so that the sum is
    total".)

    Args:
        risk: ``R[l] >= 0``, unsaved tokens of each layer.
        sizes: Number of experts of each layer.
        total: Number of experts to divide.
        first: Equal fractions go to the layer with more unsaved tokens, then in the order of layers from this one on.
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
    """Takes experts one after the other, as long as their owner has capacity left.

    Experts are numbers from 0 on.

    Args:
        owners: ``[experts]`` owner of each expert, counted from 0.
        capacity: Most experts of one owner; None if owners do not matter.
        is_taken: ``[experts]`` True for those taken already, even beyond the capacity of their owners.

    Attributes:
        count: Number of experts taken so far.
        is_taken: ``[experts]`` True for those taken so far.
    """

    def __init__(self, owners: Counts, capacity: int | None, is_taken: npt.NDArray[np.bool_]) -> None:
        self.is_taken = is_taken
        self.count = int(is_taken.sum())
        self._owners = owners
        owned = np.bincount(owners[is_taken], minlength=owners.max(initial=0) + 1)
        self._room: Counts = (len(owners) if capacity is None else capacity) - owned

    def take(self, ordered: Counts, most: int) -> None:
        """Takes experts from ``ordered``, best first, until ``most`` are taken in all."""
        self.take_shares(ordered, most, np.zeros_like(self._owners), (most,))

    def take_shares(self, ordered: Counts, most: int, groups: Counts, shares: Sequence[int]) -> Counts:
        """Takes experts as ``take`` does, but no more of each group than its share.

        Args:
            ordered: Experts, best first.
            most: Number of experts that are taken in all afterwards.
            groups: ``[experts]`` group of each expert.
            shares: Per group, how many more experts are taken.

        Returns:
            The experts that were passed over because their group's share was used up.
        """
        untaken = ordered[~self.is_taken[ordered]]
        of_group, of_each = groups[untaken], np.asarray(shares, dtype=np.int64)
        chosen = self._fitting(self._owners[untaken], of_group, of_each)[: max(0, most - self.count)]
        self.is_taken[untaken[chosen]] = True
        self.count += len(chosen)
        np.subtract.at(self._room, self._owners[untaken[chosen]], 1)
        return untaken[_behind_the_last(of_group, chosen, of_each)]

    def _fitting(self, owners: Counts, groups: Counts, shares: Counts) -> Counts:
        """Returns which of some experts, best first, would be taken one after the other: places, ascending.

        An expert that is skipped because its owner is full leaves its group's place to a later one. All experts are
        chosen at once as if no owner could be full; those after the one that fills up their owner are dropped, and the
        rest is chosen again, until every owner has room. No expert is dropped wrongly: with fewer rivals in their
        groups, an owner's experts fill it up no later.

        Args:
            owners: Owner of each expert.
            groups: Group of each expert.
            shares: Per group, how many are taken.
        """
        room, rivals = np.maximum(self._room, 0), np.arange(len(owners))
        while True:
            of_group = groups[rivals]
            chosen = rivals[_places_in(of_group) < shares[of_group]]
            if (np.bincount(owners[chosen], minlength=len(room)) <= room).all():
                return chosen
            rivals = rivals[~_behind_the_last(owners, chosen, room)[rivals]]


def _places_in(groups: Counts) -> Counts:
    """Returns for each element how many elements before it are of the same group."""
    # Whole numbers of 16 bits are sorted by their digits, without comparisons.
    order = np.argsort(groups.astype(np.uint16) if groups.max(initial=0) < 1 << 16 else groups, kind="stable")
    sizes = np.bincount(groups)
    places: Counts = np.empty_like(order)
    places[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _behind_the_last(kinds: Counts, chosen: Counts, most: Counts) -> npt.NDArray[np.bool_]:
    """Returns for each element whether ``most`` elements of its kind were chosen before it.

    Args:
        kinds: Kind of each element.
        chosen: Places of the chosen elements, ascending.
        most: Per kind, a number.
    """
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
        layers: The MoE layers of the stage.
        owners: ``[experts]`` owner of each expert, counted from 0.
        at: ``[experts]`` place of each expert in flattened counts ``[L * E]``.
        operators: ``[experts]`` place of each expert in the catalog.
        division: Of bytes among the ranks.
        shared: Bytes of all gates and non-experts; 0 if the stage is not weighed, as the next.
        largest: Bytes of the largest expert.
    """

    layers: tuple[MoELayer, ...]
    owners: Counts
    at: Counts
    operators: Counts
    division: Division
    shared: OperatorBytes = _WEIGHTLESS
    largest: OperatorBytes = _WEIGHTLESS

    @property
    def total(self) -> int:
        """Number of experts."""
        return len(self.operators)

    @cached_property
    def groups(self) -> Counts:
        """``[experts]`` place of each expert's layer among ``layers``."""
        return np.repeat(np.arange(len(self.layers)), [layer.experts for layer in self.layers])

    @cached_property
    def starts(self) -> Counts:
        """``[layers]`` the first expert of each layer."""
        return np.cumsum([0, *(layer.experts for layer in self.layers[:-1])])

    @lru_cache(maxsize=1024)  # noqa: B019 - stages are few and stay
    def most(self, limit: int | None, least: int, sends: Sends = ALL_SENT) -> tuple[int, int | None]:
        """Returns how many experts are saved, and how many of them one rank may own (None: any number).

        Args:
            limit: Bytes of one rank; None if there is no budget.
            least: Number of experts that are saved in any case.
            sends: The parts of an operator that count.
        """
        if not sends.experts:
            return self.total, None
        most, capacity = (0, None) if limit is None else self.affordable(limit, sends)
        least = min(least, self.total)
        if most >= least:
            return most, capacity
        return least, least_capacity(least, self.division.owned) if self.division.by_owner else None

    def affordable(self, limit: int, sends: Sends = ALL_SENT) -> tuple[int, int | None]:
        """Returns ``Division.affordable`` of this stage's operators."""
        shared, expert = sends.nbytes(self.shared, expert=False), sends.nbytes(self.largest, expert=True)
        return self.division.affordable(limit, shared, expert)


def stages_of(context: PolicyContext, *, weighed: bool) -> tuple[Stage, ...]:
    """Returns the stages that have MoE layers. They are cached, since they are asked for at every step.

    Args:
        context: Of any step.
        weighed: Also fill in the bytes of operators.

    Raises:
        ConfigError: ``context.model.sizes`` lacks operators, and ``weighed`` is set.
    """
    return _stages(context.model.catalog, context.model.placement, context.model.sizes if weighed else None)


_stages = Remembered(lambda *facts: tuple(_each_stage(*facts)), most=4)


def _each_stage(catalog: Catalog, placement: Placement, sizes: Mapping[str, OperatorBytes] | None) -> Iterator[Stage]:
    if sizes is not None:
        hint = "; give MoEtion(experts=...), or MoC a number of experts, if sizes are not known"
        require_sizes("MoEtion and MoC(k='auto')", catalog, sizes, hint)
    stage_of = placement.stage_of
    most = grid_of(catalog.layers)[1]
    layers_of: dict[int, list[MoELayer]] = {}
    for layer in catalog.layers:
        layers_of.setdefault(stage_of.get(expert_id(layer.index, 0), 0), []).append(layer)
    for number, layers in sorted(layers_of.items()):
        names = [expert_id(layer.index, expert) for layer in layers for expert in range(layer.experts)]
        ranks = [rank for layer in layers for rank in placement.owners[layer.index]]
        owners, owned = np.unique(ranks, return_inverse=True, return_counts=True)[1:]
        stage = Stage(
            layers=tuple(layers),
            owners=owners,
            at=np.concatenate([layer.index * most + np.arange(layer.experts) for layer in layers]),
            operators=np.array([catalog.index_of[name] for name in names], dtype=np.int64),
            division=Division(
                placement.stages[number],
                tuple(owned.tolist()),
                placement.experts_whole or placement.expert_ranks is not None,
                placement.expert_ranks,
            ),
        )
        if sizes is None:
            yield stage
            continue
        shared = [sizes[op.id] for op in catalog.always_saved if stage_of.get(op.id, 0) == number]
        experts = [sizes[name] for name in names]
        full, without_weights = (max(size.sent(weights=weights) for size in experts) for weights in (True, False))
        yield replace(
            stage,
            shared=OperatorBytes(sum(size.full for size in shared), 0, weights=sum(size.weights for size in shared)),
            largest=OperatorBytes(full, 0, weights=full - without_weights),
        )
