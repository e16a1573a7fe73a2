"""Selects the experts of each layer that a partial checkpoint saves: in turn, or by unsaved tokens.

``load_aware`` is the paper's rule (PEC, arXiv 2408.04307, Algorithm 1), and ``least_loss`` loses fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from moe_ckpt.core.cadence import least_capacity
from moe_ckpt.core.operators import Remembered
from moe_ckpt.core.placement import interleaved_order
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import PolicyContext

Expert = tuple[int, int]
"""``(layer, expert)``."""


@dataclass(frozen=True)
class Request:
    """The number of experts per MoE layer that one checkpoint takes. A layer with fewer experts gives all.

    Attributes:
        k: Experts that go to storage.
        snapshot_k: Experts that are copied to host memory, those for storage included; at least k.
        interval_steps: Steps between checkpoints.
        tier: The tier whose versions and unsaved tokens decide.
    """

    k: int
    snapshot_k: int
    interval_steps: int = 1
    tier: Tier = Tier.STORAGE


@dataclass(frozen=True)
class Selection:
    """The experts that a checkpoint saves, layer by layer.

    Attributes:
        stored: Experts that go to storage.
        host_only: Experts that are copied to host memory, and do not go to storage.
    """

    stored: tuple[Expert, ...]
    host_only: tuple[Expert, ...] = ()


Selector = Callable[[PolicyContext, Request], Selection]
"""A pure function: same context and request, same selection, on every rank."""


def in_shape(context: PolicyContext, counts: Counts | None, unknown: int) -> Counts:
    """Returns ``counts`` if it has the model's shape ``[L, E]``; otherwise a table of ``unknown``."""
    layers = context.model.catalog.layers
    shape = (len(layers), max((layer.experts for layer in layers), default=0))
    return counts if counts is not None and counts.shape == shape else np.full(shape, unknown, dtype=np.int64)


def unsaved_of(context: PolicyContext, tier: Tier) -> Counts:
    """Returns ``[L, E]`` tokens that a tier will lack once the snapshots under way are complete there."""
    return in_shape(context, context.tokens.expected_unsaved.get(tier), 0)


def chosen_at_of(context: PolicyContext, tier: Tier) -> Counts:
    """Returns ``[L, E]`` steps at which experts were last chosen for a tier; -1 if never."""
    return in_shape(context, context.tokens.chosen_at.get(tier), -1)


def tier_of(context: PolicyContext) -> Tier:
    """Returns the tier by which a partial checkpoint chooses experts: storage, or memory if only memory gets it.

    The versions on storage do not change between writes. If these decided, all checkpoints in memory would save the
    same experts, and the others would be as old in memory as on storage.
    """
    return Tier.STORAGE if context.memory.storage_due else Tier.HOST


def interval_steps(context: PolicyContext, every_n_steps: int) -> int:
    """Returns the steps from one checkpoint to the next: ``every_n_steps``, or the run's mean so far if that is longer.

    Checkpoints that stay in memory are not counted; they are as frequent as configured.
    """
    run = context.run
    return max(every_n_steps, ceil(run.step / (run.index + 1))) if context.memory.storage_due else every_n_steps


def storage_steps(context: PolicyContext, every_n_steps: int) -> int:
    """Returns the steps that storage has for a checkpoint: since the newest one there, if memory got others since."""
    newest = int(chosen_at_of(context, Tier.STORAGE).max(initial=-1))
    if newest < 0 or not context.memory.outlives_process:
        return every_n_steps
    return context.run.step - newest or every_n_steps


def experts_of(context: PolicyContext, operators: Iterable[str]) -> set[Expert]:
    """Returns the experts among ``operators``, which are ids of the catalog."""
    at = context.model.catalog.expert_at
    return {at[op] for op in operators if op in at}


def best_first(groups: Counts, priority: Counts, chosen_at: Counts) -> Counts:
    """Returns places of experts group by group: highest priority first, then the oldest, then as they are listed."""
    if not len(groups):
        return groups
    highest, oldest = int(priority.max()), int(chosen_at.min())
    amounts, ages = highest - int(priority.min()) + 1, int(chosen_at.max()) - oldest + 1
    if (int(groups.max()) + 1) * amounts * ages * len(groups) >= 1 << 63:
        return np.lexsort((chosen_at, -priority, groups))  # stable: equal experts stay in order
    # One number per expert, with its place, so that no two are equal: sorting these is fast.
    keys = (groups * amounts + (highest - priority)) * ages + (chosen_at - oldest)
    order: Counts = np.sort(keys * len(groups) + np.arange(len(groups))) % len(groups)
    return order


STALE_ROUNDS = 4
"""An expert that was not chosen for this many rounds of ceil(E/K) checkpoints is overdue, and goes first."""


def load_aware(context: PolicyContext, request: Request) -> Selection:
    """Selects per layer the K experts with most unsaved tokens whose rank has capacity left (Algorithm 1).

    Experts are ordered by unsaved tokens (those that checkpoints under way save count as saved), then oldest, then
    lowest index, and taken while their owner rank has capacity left. The paper indexes capacity by expert, as if a rank
    owned one of each layer; here it is the owner's. If no capacity is used up, that is the whole rule.

    Further rules, where the paper leaves a question open or would lose more tokens than ``sequential`` (docs/moc.md has
    the figures):
    - Capacity is the smallest one with which all K of all layers can be taken: ceil(L*K/R) where R divides E, and
      more where some ranks own less than others, or nothing. Layers that have no owner in common (pipeline stages)
      have nothing to share, so each such group of layers chooses by itself.
    - Layers choose in the order of the unsaved tokens that they would save if all ranks were free, and from the last
      to the first only where these are equal. The paper always goes from the last to the first; where capacity is
      scarce, its first layers then get what the others left, at every checkpoint.
    - An expert is skipped if taking it would leave the layers still to come with ranks that own too few of their
      experts. With layers of one size that is exact (see ``Dealer``). If a layer runs short nevertheless, among
      layers of different sizes, it takes from the rank with the least to save, over its capacity.
    - Nothing bounds the age of an expert that gets few tokens. Its file could never be deleted, and weight decay and
      momentum change it even without tokens. So an overdue expert goes first, the oldest of all layers before the
      others, within K and capacity. Where R divides E it waits at most another 2*ceil(E/K) checkpoints: each that
      passes it over takes either K older ones of its layer or a full capacity of older ones of its rank.
    """
    return _by_priority(context, request, unsaved_of(context, request.tier))


def least_loss(context: PolicyContext, request: Request) -> Selection:
    """Selects as ``load_aware`` does, but by unsaved tokens times age, which loses least on average.

    Let expert e get ``a_e`` tokens per checkpoint and be saved every ``n_e``-th. When a fault comes, it lacks
    ``a_e*(n_e - 1)/2`` tokens on average. Under ``sum_e 1/n_e = K``, the sum of that is least for n_e proportional to
    ``1/sqrt(a_e)``: when ``a_e * n_e**2``, unsaved tokens times age, is the same for all at the moment of saving.
    Most unsaved tokens first makes ``a_e * n_e`` the same instead, which on average loses as much as taking turns; it
    gains by experts that are saved at every checkpoint only.
    """
    age = context.run.step - chosen_at_of(context, request.tier)
    return _by_priority(context, request, unsaved_of(context, request.tier) * age)


def _by_priority(context: PolicyContext, request: Request, priority: Counts) -> Selection:
    """Selects the experts with the highest ``priority`` [L, E], evenly over the ranks.

    Priorities are whole numbers: sums of floats, and so plans, could differ between ranks with different processors.
    """
    chosen_at = chosen_at_of(context, request.tier)
    sizes = [layer.experts for layer in context.model.catalog.layers]
    ranked = sorted_rows(chosen_at, priority, sizes)
    orders = [order.tolist() for order in ranked]
    at_stake = [int(priority[row, order[: request.k]].sum()) for row, order in enumerate(ranked)]
    turns = sorted(range(len(sizes)), key=lambda row: (-at_stake[row], -row))
    overdue = _overdue(context, chosen_at, sizes, request)
    stored: list[list[int]] = [[] for _ in sizes]
    host_only: list[list[int]] = [[] for _ in sizes]
    for group in _groups(context.model.placement.owners):
        rows = group.owners.keys()
        dealer = Dealer(orders, [row for row in turns if row in rows], group)
        dealer.deal(request.k, first=[(row, expert) for row, expert in overdue if row in rows])
        for row in rows:
            stored[row] = list(dealer.taken[row])
        if request.snapshot_k > request.k:
            dealer.deal(request.snapshot_k)
        for row in rows:
            host_only[row] = dealer.taken[row][len(stored[row]) :]
    return Selection(_pairs(stored), _pairs(host_only))


def sorted_rows(chosen_at: Counts, priority: Counts, sizes: Sequence[int]) -> list[Counts]:
    """Returns the experts of each layer: highest priority first, then oldest, then by index."""
    is_expert = np.arange(priority.shape[1]) < np.array(sizes, dtype=np.int64).reshape(-1, 1)
    layers, experts = np.nonzero(is_expert)
    order = best_first(layers, priority[is_expert], chosen_at[is_expert])
    return np.split(experts[order], np.cumsum(sizes)[:-1])[: len(sizes)]


class OwnerGroup(NamedTuple):
    """Layers that share owners, directly or through others.

    Attributes:
        owners: Layer -> owner of each of its experts, counted from 0.
        owned: ``[L, R]`` number of each layer's experts that each rank owns.
    """

    owners: Mapping[int, Sequence[int]]
    owned: Counts


def _groups_of(owners: tuple[tuple[int, ...], ...]) -> tuple[OwnerGroup, ...]:
    return tuple(group_of(owners, rows) for rows in _connected(owners))


_groups = Remembered(_groups_of)


def _connected(owners: Sequence[Sequence[int]]) -> Iterator[set[int]]:
    remaining = {row: set(ranks) for row, ranks in enumerate(owners)}
    while remaining:
        row, ranks = remaining.popitem()
        rows = {row}
        while joined := [other for other, theirs in remaining.items() if theirs & ranks]:
            for other in joined:
                ranks |= remaining.pop(other)
            rows.update(joined)
        yield rows


def group_of(owners: Sequence[Sequence[int]], rows: Iterable[int]) -> OwnerGroup:
    number = {rank: at for at, rank in enumerate(sorted({rank for row in rows for rank in owners[row]}))}
    numbered = {row: [number[rank] for rank in owners[row]] for row in rows}
    owned = np.zeros((len(owners), len(number)), dtype=np.int64)
    for row, numbers in numbered.items():
        owned[row] = np.bincount(numbers, minlength=len(number))
    return OwnerGroup(numbered, owned)


def _pairs(per_layer: list[list[int]]) -> tuple[Expert, ...]:
    return tuple((row, expert) for row, experts in enumerate(per_layer) for expert in experts)


def _overdue(context: PolicyContext, chosen_at: Counts, sizes: list[int], request: Request) -> list[Expert]:
    """Returns experts not chosen for over ``STALE_ROUNDS`` rounds, the oldest first, then from the last layer on.

    Rounds are counted in steps, so that a storage that cannot keep up does not make every expert overdue.
    """
    rounds = np.array([[ceil(size / request.k)] for size in sizes], dtype=np.int64).reshape(-1, 1)
    late = (chosen_at >= 0) & (context.run.step - chosen_at > STALE_ROUNDS * rounds * request.interval_steps)
    late &= np.arange(late.shape[1]) < np.array(sizes, dtype=np.int64).reshape(-1, 1)
    rows, experts = np.nonzero(late)
    order = np.lexsort((experts, -rows, chosen_at[rows, experts]))
    return list(zip(rows[order].tolist(), experts[order].tolist(), strict=True))


class Dealer:
    """Takes experts layer by layer, in a given order, evenly over the ranks that own them.

    Args:
        orders: Per layer, its experts in the order of preference.
        turns: The layers that take part, in the order in which they choose.
        group: Owners of their experts.

    Attributes:
        taken: Per layer, the experts taken so far, in the order of taking.

    Why nothing runs short, for layers of one size: let rank r own n_r experts of each layer and have c_r capacity
    left, with m layers still to come that need K each. They can be served if and only if
    sum_r min(c_r, m*n_r) >= m*K (deal each rank's share out evenly over the layers; an integral flow exists where
    that fractional one does). So taking from a rank is free while c_r > m*n_r, and otherwise uses up the slack of
    that sum by one. Passing over experts when neither is left is a matroid, in which greedy never gets stuck.
    """

    def __init__(self, orders: list[list[int]], turns: list[int], group: OwnerGroup) -> None:
        self.taken: list[list[int]] = [[] for _ in orders]
        self._orders, self._turns = orders, turns
        self._owners = group.owners
        self._load = np.zeros(group.owned.shape[1], dtype=np.int64)
        self._owned = group.owned.copy()
        """``[L, R]`` number of experts not taken yet."""
        self._supply: list[int] = self._owned.sum(axis=0).tolist()

    def deal(self, per_layer: int, first: list[Expert] | None = None) -> None:
        """Takes experts until every layer has ``per_layer`` of them, or all.

        Args:
            first: Experts to begin with, as long as their layer and their rank have room.
        """
        targets = [0] * len(self._orders)
        for row in self._turns:
            targets[row] = min(per_layer, len(self._orders[row]))
        capacity = least_capacity(sum(targets), self._supply)
        for row, expert in first or ():
            if len(self.taken[row]) < targets[row] and self._load[self._owners[row][expert]] < capacity:
                self._take(row, expert)
        needs = [want - len(taken) for want, taken in zip(targets, self.taken, strict=True)]
        to_come = self._owned.sum(axis=0)
        needed = sum(needs)
        for row in self._turns:
            to_come -= self._owned[row]
            needed -= needs[row]
            if needs[row]:
                self._deal_layer(row, needs[row], capacity, to_come.copy(), needed)

    def _deal_layer(self, row: int, need: int, capacity: int, to_come: Counts, needed: int) -> None:
        """Takes ``need`` experts of one layer. ``to_come`` [R] and ``needed`` are supply and need of later layers."""
        rooms = np.maximum(capacity - self._load, 0)
        slack = int(np.minimum(rooms, to_come).sum()) - needed
        free = np.maximum(rooms - to_come, 0).tolist()
        rooms = rooms.tolist()
        owners, before = self._owners[row], set(self.taken[row])
        for expert in self._orders[row]:
            rank = owners[expert]
            if not rooms[rank] or (slack <= 0 and not free[rank]) or expert in before:
                continue
            self._take(row, expert)
            need -= 1
            if not need:
                return
            if free[rank]:
                free[rank] -= 1
            else:
                slack -= 1
            rooms[rank] -= 1
        taken = set(self.taken[row])
        over = [expert for expert in self._orders[row] if expert not in taken]
        for _ in range(need):
            expert = min(over, key=lambda e: self._load[owners[e]])
            over.remove(expert)
            self._take(row, expert)

    def _take(self, row: int, expert: int) -> None:
        rank = self._owners[row][expert]
        self.taken[row].append(expert)
        self._load[rank] += 1
        self._owned[row, rank] -= 1


def sequential(context: PolicyContext, request: Request) -> Selection:
    """Selects the oldest experts (sequential interleaved selection: PEC, arXiv 2408.04307; MoC section 3.2).

    Per layer: the experts with the smallest ``TokenFacts.chosen_at``. Ties go by position in the rank-interleaved
    order, counted on from where the newest experts end, or in layer l from position ``l*K`` where all are alike.
    While K stays the same, that is the round robin of the paper: checkpoint c after a dense one takes positions
    ``(c*K + l*K + i) mod E``, i < K. Going by age keeps it right where counting checkpoints would not: when K changes,
    a checkpoint is skipped or fails, or more experts than K were saved.

    Guarantees:
    - Every expert is chosen at least once in any ceil(E / smallest K) checkpoints in a row, from any state: the K
      chosen become the newest, so none is chosen again before all that were older, at most E - 1.
    - With K constant since a dense checkpoint, and R ranks that divide every E, no rank gets over ceil(L*K/R)
      experts in one checkpoint: the layers take runs of K positions that follow on one another, and position p
      belongs to rank ``p mod R``.
    """
    chosen_at = chosen_at_of(context, request.tier)
    chosen: list[list[int]] = [[] for _ in context.model.catalog.layers]
    for rows, orders in _orders(context.model.placement.owners):  # layers of one size together, which is much faster
        oldest = _oldest_first(chosen_at[rows[:, None], orders], rows * request.k, request.snapshot_k)
        for row, experts in zip(rows.tolist(), orders[np.arange(len(rows))[:, None], oldest].tolist(), strict=True):
            chosen[row] = experts
    stored, host_only = ([experts[part] for experts in chosen] for part in (slice(request.k), slice(request.k, None)))
    return Selection(_pairs(stored), _pairs(host_only))


def _oldest_first(chosen_at: Counts, first: Counts, most: int) -> Counts:
    """Returns the ``most`` oldest positions by age, ``[L, most]``.

    Args:
        chosen_at: ``[L, E]`` by position.
        first: ``[L]`` position from which to count if all are equally old.
        most: Number of positions.
    """
    count = chosen_at.shape[1]
    turn = _turns(count)[first % count]
    newest = chosen_at == chosen_at.max(axis=1, keepdims=True)
    ends = newest.copy()
    ends[:, :-1] &= ~newest[:, 1:]
    ends[:, -1] &= ~newest[:, 0]
    has_end = ends.any(axis=1)
    last = np.where(ends, turn, count).argmin(axis=1)
    turn[has_end] = _turns(count)[(last[has_end] + 1) % count]
    rank = chosen_at * count + turn  # by age, then by turn: no two are equal
    rows = np.arange(len(rank))[:, None]
    oldest: Counts = np.argpartition(rank, min(most, count) - 1, axis=1)[:, :most]  # faster than sorting all
    by_age: Counts = oldest[rows, rank[rows, oldest].argsort(axis=1)]
    return by_age


@lru_cache(maxsize=8)
def _turns(count: int) -> Counts:
    """Returns ``[E, E]``: in row r, the turn of each of ``count`` positions if r begins."""
    positions = np.arange(count)
    return (positions - positions[:, None]) % count


def _orders_of(owners: tuple[tuple[int, ...], ...]) -> tuple[tuple[Counts, Counts], ...]:
    """Returns for each size of layers: the layers ``[l]``, and their experts in rank-interleaved order ``[l, E]``."""
    alike: dict[int, list[int]] = {}
    for row, ranks in enumerate(owners):
        alike.setdefault(len(ranks), []).append(row)
    return tuple(
        (np.array(rows), np.array([interleaved_order(owners[row]) for row in rows], dtype=np.int64))
        for rows in alike.values()
    )


_orders = Remembered(_orders_of)


SELECTORS: Mapping[str, Selector] = {
    "sequential": sequential,
    "load_aware": load_aware,
    "least_loss": least_loss,
}
