"""Which experts of each layer a partial checkpoint saves.

A selector is a pure function of the context; ``MoC`` names it by its registry key, so that another one
(load-aware selection) is added here without touching the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_ckpt.core.placement import interleaved_order
from moe_ckpt.policies.base import PolicyContext

Selector = Callable[[PolicyContext, int], tuple[tuple[int, int], ...]]
"""(context, K) -> the chosen ``(layer, expert)`` pairs."""


def sequential(context: PolicyContext, k: int) -> tuple[tuple[int, int], ...]:
    """Sequential interleaved selection (PEC; MoC section 3.2).

    At checkpoint c, layer l takes positions ``(c*K + l*K + i) mod E``, i < K, of the rank-interleaved
    order. Every expert is saved at least once in ceil(E/K) checkpoints, and no rank saves more than
    ceil(L*K/R) experts in one checkpoint when the R ranks divide E.
    """
    chosen: list[tuple[int, int]] = []
    for layer in context.catalog.layers:
        order = interleaved_order(layer.experts, context.ranks)
        first = (context.index + layer.index) * k
        chosen.extend((layer.index, order[(first + i) % layer.experts]) for i in range(k))
    return tuple(chosen)


SELECTORS: Mapping[str, Selector] = {"sequential": sequential}
