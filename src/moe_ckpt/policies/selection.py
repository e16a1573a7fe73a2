"""What a selector is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.policies.base import PolicyContext

Expert = tuple[int, int]
"""``(layer, expert)``."""


@dataclass(frozen=True)
class Request:
    """How many experts per MoE layer one checkpoint takes; a layer with fewer gives all it has.

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
        held: They stay in host memory besides.
    """

    stored: tuple[Expert, ...]
    held: tuple[Expert, ...] = ()


Selector = Callable[[PolicyContext, Request], Selection]
"""A pure function: same context and request, same selection, on every rank."""


def known(context: PolicyContext, counts: Counts, unknown: int) -> Counts:
    """``counts`` if it has the model's shape ``[L, E]``; otherwise nothing is known yet, and all are ``unknown``."""
    layers = context.catalog.layers
    shape = (len(layers), max((layer.experts for layer in layers), default=0))
    return counts if counts.shape == shape else np.full(shape, unknown, dtype=np.int64)


def experts_of(context: PolicyContext, operators: Iterable[str]) -> set[Expert]:
    """The experts among ``operators``, which are ids of the catalog."""
    at = context.catalog.expert_at
    return {at[op] for op in operators if op in at}
