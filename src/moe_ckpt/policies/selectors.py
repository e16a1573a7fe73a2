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
    for layer, owners in zip(context.catalog.layers, context.owners, strict=True):
        order = _order(owners)
        oldest = _oldest_first(chosen_at[layer.index, order], layer.index * request.k)[: request.snapshot_k]
        experts = [(layer.index, expert) for expert in order[oldest].tolist()]
        stored.extend(experts[: request.k])
        held.extend(experts[request.k :])
    return Selection(tuple(stored), tuple(held))


def _oldest_first(chosen_at: Counts, first: int) -> Counts:
    """Positions by age. chosen_at: ``[E]`` by position. first: where to count from if all are alike."""
    positions = np.arange(len(chosen_at))
    turn = (positions - first) % len(chosen_at)
    newest = chosen_at == chosen_at.max()
    ends = positions[newest & ~np.concatenate([newest[1:], newest[:1]])]
    if ends.size:
        turn = (positions - ends[turn[ends].argmin()] - 1) % len(chosen_at)
    oldest: Counts = np.lexsort((turn, chosen_at))
    return oldest


@lru_cache(maxsize=1024)
def _order(owners: tuple[int, ...]) -> Counts:
    return np.asarray(interleaved_order(owners), dtype=np.int64)


SELECTORS: Mapping[str, Selector] = {
    "sequential": sequential,
    "load_aware": load_aware,
    "least_loss": least_loss,
}
