"""Which experts of each layer a partial checkpoint saves, by name.

``MoC`` names a selector by its key in ``SELECTORS``; another rule is added there without touching the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from moe_ckpt.core.placement import interleaved_order
from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt.policies.load_aware import least_loss, load_aware
from moe_ckpt.policies.selection import Expert, Request, Selection, Selector, known


def sequential(context: PolicyContext, request: Request) -> Selection:
    """Sequential interleaved selection (PEC, arXiv 2408.04307; MoC section 3.2): the oldest experts first.

    Per layer: the experts with the smallest ``context.chosen_at``. Ties go by position in the rank-interleaved
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
    chosen_at = known(context, context.chosen_at, -1)
    stored: list[Expert] = []
    held: list[Expert] = []
    chosen = _oldest(context, chosen_at, request)
    for layer in context.catalog.layers:
        experts = [(layer.index, expert) for expert in chosen[layer.index]]
        stored.extend(experts[: request.k])
        held.extend(experts[request.k :])
    return Selection(tuple(stored), tuple(held))


def _oldest(context: PolicyContext, chosen_at: Counts, request: Request) -> dict[int, list[int]]:
    """Layer -> its ``snapshot_k`` oldest experts. Layers of one size are sorted together, which is much faster."""
    alike: dict[int, list[int]] = {}
    for layer in context.catalog.layers:
        alike.setdefault(layer.experts, []).append(layer.index)
    found: dict[int, list[int]] = {}
    for rows in alike.values():
        orders = np.stack([_order(context.owners[row]) for row in rows])
        ages = np.take_along_axis(chosen_at[rows, : orders.shape[1]], orders, axis=1)
        oldest = _oldest_first(ages, np.asarray(rows) * request.k, request.snapshot_k)
        found.update(zip(rows, np.take_along_axis(orders, oldest, axis=1).tolist(), strict=True))
    return found


def _oldest_first(chosen_at: Counts, first: Counts, most: int) -> Counts:
    """The ``most`` oldest positions by age, ``[L, most]``.

    chosen_at: ``[L, E]`` by position. first: ``[L]`` where to count from if all are alike.
    """
    count = chosen_at.shape[1]
    positions = np.arange(count)
    turn = (positions - first[:, None]) % count
    newest = chosen_at == chosen_at.max(axis=1, keepdims=True)
    ends = newest & ~np.roll(newest, -1, axis=1)
    last = np.where(ends, turn, count).argmin(axis=1)
    from_last = (positions - last[:, None] - 1) % count
    turn = np.where(ends.any(axis=1, keepdims=True), from_last, turn)
    rank = chosen_at * count + turn  # by age, and among those of one age by turn: no two are alike
    oldest: Counts = np.argpartition(rank, min(most, count) - 1, axis=1)[:, :most]  # to sort them all takes longer
    by_age: Counts = np.take_along_axis(oldest, np.take_along_axis(rank, oldest, axis=1).argsort(axis=1), axis=1)
    return by_age


@lru_cache(maxsize=1024)
def _order(owners: tuple[int, ...]) -> Counts:
    return np.asarray(interleaved_order(owners), dtype=np.int64)


SELECTORS: Mapping[str, Selector] = {
    "sequential": sequential,
    "load_aware": load_aware,
    "least_loss": least_loss,
}
