"""What a selector is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import PolicyContext

Expert = tuple[int, int]
"""``(layer, expert)``."""


@dataclass(frozen=True)
class Request:
    """Number of experts per MoE layer that one checkpoint takes; a layer with fewer gives all it has.

    Attributes:
        k: Experts that go to storage.
        snapshot_k: Experts that are copied to host memory, those for storage included; at least k.
        every_n_steps: Steps between checkpoints, as configured.
    """

    k: int
    snapshot_k: int
    every_n_steps: int = 1


@dataclass(frozen=True)
class Selection:
    """Experts that a checkpoint saves, layer by layer.

    Attributes:
        stored: They go to storage.
        host_only: They are copied to host memory, and do not go to storage.
    """

    stored: tuple[Expert, ...]
    host_only: tuple[Expert, ...] = ()


Selector = Callable[[PolicyContext, Request], Selection]
"""A pure function: same context and request, same selection, on every rank."""


def in_shape(context: PolicyContext, counts: Counts, unknown: int) -> Counts:
    """``counts`` if it has the model's shape ``[L, E]``; otherwise nothing is known yet, and all are ``unknown``."""
    layers = context.catalog.layers
    shape = (len(layers), max((layer.experts for layer in layers), default=0))
    return counts if counts.shape == shape else np.full(shape, unknown, dtype=np.int64)


def experts_of(context: PolicyContext, operators: Iterable[str]) -> set[Expert]:
    """The experts among ``operators``, which are ids of the catalog."""
    at = context.catalog.expert_at
    return {at[op] for op in operators if op in at}


def where_it_goes(context: PolicyContext, every_n_steps: int) -> PolicyContext:
    """The context; of a checkpoint that only memory gets, with what memory lacks in the place of what storage lacks.

    What storage has does not change before something is written there: by that alone, all checkpoints in between would
    save the very same experts, and a failure would find the others in memory as old as on storage.

    Args:
        every_n_steps: Steps between checkpoints in memory. ``index`` counts those on storage.
    """
    memory = context.memory
    if memory is None or memory.storage_due or Tier.HOST not in memory.chosen_at:
        return context
    return replace(
        context,
        chosen_at=memory.chosen_at[Tier.HOST],
        expected_unsaved=memory.expected_unsaved[Tier.HOST],
        index=context.step // every_n_steps,
    )
