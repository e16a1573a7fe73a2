"""Which experts of each layer a partial checkpoint saves, by name.

``MoC`` names a selector by its key in ``SELECTORS``; another rule is added there without touching the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from moe_ckpt.core.placement import interleaved_order
from moe_ckpt.core.remembered import Remembered
from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt.policies.experts.load_aware import least_loss, load_aware
from moe_ckpt.policies.experts.selection import Expert, Request, Selection, Selector, chosen_at_of


def sequential(context: PolicyContext, request: Request) -> Selection:
    """Sequential interleaved selection (PEC, arXiv 2408.04307; MoC section 3.2): the oldest experts first.

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
    stored: list[Expert] = []
    host_only: list[Expert] = []
    chosen = _oldest(context, chosen_at, request)
    for layer in context.model.catalog.layers:
        experts = [(layer.index, expert) for expert in chosen[layer.index]]
        stored.extend(experts[: request.k])
        host_only.extend(experts[request.k :])
    return Selection(tuple(stored), tuple(host_only))


def _oldest(context: PolicyContext, chosen_at: Counts, request: Request) -> dict[int, list[int]]:
    """Layer -> its ``snapshot_k`` oldest experts. Layers of one size are sorted together, which is much faster."""
    chosen: dict[int, list[int]] = {}
    for rows, orders in _orders(context.model.placement.owners):
        column = rows[:, None]
        oldest = _oldest_first(chosen_at[column, orders], rows * request.k, request.snapshot_k)
        chosen.update(zip(rows.tolist(), orders[np.arange(len(rows))[:, None], oldest].tolist(), strict=True))
    return chosen


def _oldest_first(chosen_at: Counts, first: Counts, most: int) -> Counts:
    """The ``most`` oldest positions by age, ``[L, most]``.

    chosen_at: ``[L, E]`` by position. first: ``[L]`` where to count from if all are alike.
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
    rank = chosen_at * count + turn  # by age, and among those of one age by turn: no two are alike
    if most == 1:
        first_of_all: Counts = rank.argmin(axis=1)[:, None]
        return first_of_all
    rows = np.arange(len(rank))[:, None]
    oldest: Counts = np.argpartition(rank, min(most, count) - 1, axis=1)[:, :most]  # to sort them all takes longer
    by_age: Counts = oldest[rows, rank[rows, oldest].argsort(axis=1)]
    return by_age


@lru_cache(maxsize=8)
def _turns(count: int) -> Counts:
    """``[E, E]``: in row r, when each of ``count`` positions has its turn if r begins."""
    positions = np.arange(count)
    return (positions - positions[:, None]) % count


def _orders_of(owners: tuple[tuple[int, ...], ...]) -> tuple[tuple[Counts, Counts], ...]:
    """For each size of layers: the layers ``[l]``, and their experts in rank-interleaved order ``[l, E]``."""
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
