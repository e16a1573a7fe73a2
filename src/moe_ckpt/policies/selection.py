"""What a selector is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

import numpy as np

from moe_ckpt.core.step import Tier
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
        interval_steps: Steps between checkpoints.
        tier: Experts are chosen by what this tier has of them.
    """

    k: int
    snapshot_k: int
    interval_steps: int = 1
    tier: Tier = Tier.STORAGE


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


def in_shape(context: PolicyContext, counts: Counts | None, unknown: int) -> Counts:
    """``counts`` if it has the model's shape ``[L, E]``; otherwise nothing is known yet, and all are ``unknown``."""
    layers = context.model.catalog.layers
    shape = (len(layers), max((layer.experts for layer in layers), default=0))
    return counts if counts is not None and counts.shape == shape else np.full(shape, unknown, dtype=np.int64)


def unsaved_of(context: PolicyContext, tier: Tier) -> Counts:
    """``[L, E]`` tokens that a tier will lack once what is under way is complete there."""
    return in_shape(context, context.tokens.expected_unsaved.get(tier), 0)


def chosen_at_of(context: PolicyContext, tier: Tier) -> Counts:
    """``[L, E]`` steps at which experts were chosen last for a tier; -1 of those that never were."""
    return in_shape(context, context.tokens.chosen_at.get(tier), -1)


def tier_of(context: PolicyContext) -> Tier:
    """The tier by which a partial checkpoint chooses experts: storage, or memory where only this gets it.

    What storage has does not change before something is written there: by that alone, all checkpoints in between would
    save the very same experts, and a failure would find the others in memory as old as on storage.
    """
    return Tier.STORAGE if context.memory.storage_due else Tier.HOST


def interval_steps(context: PolicyContext, every_n_steps: int) -> int:
    """Steps from one checkpoint to the next: ``every_n_steps``, or as rarely as the run made them so far.

    Those that stay in memory are not counted, and are as frequent as configured.
    """
    run = context.run
    return max(every_n_steps, ceil(run.step / (run.index + 1))) if context.memory.storage_due else every_n_steps


def storage_steps(context: PolicyContext, every_n_steps: int) -> int:
    """Steps that storage has for a checkpoint: since the newest one there, if memory gets others in between."""
    newest = int(chosen_at_of(context, Tier.STORAGE).max(initial=-1))
    if newest < 0 or not context.memory.outlives_process:
        return every_n_steps
    return context.run.step - newest or every_n_steps


def experts_of(context: PolicyContext, operators: Iterable[str]) -> set[Expert]:
    """The experts among ``operators``, which are ids of the catalog."""
    at = context.model.catalog.expert_at
    return {at[op] for op in operators if op in at}


def best_first(groups: Counts, priority: Counts, chosen_at: Counts) -> Counts:
    """Returns places of experts group by group: highest priority first, then the oldest, then as they are listed."""
    if not len(groups):
        return groups
    highest, oldest = int(priority.max()), int(chosen_at.min())
    amounts, ages = highest - int(priority.min()) + 1, int(chosen_at.max()) - oldest + 1
    if (int(groups.max()) + 1) * amounts * ages * len(groups) >= 1 << 63:
        return np.lexsort((chosen_at, -priority, groups))  # stable: what is equal stays in order
    # One number for all of it, the expert's own included: no two are equal, and sorting them is quick.
    keys = (groups * amounts + (highest - priority)) * ages + (chosen_at - oldest)
    order: Counts = np.sort(keys * len(groups) + np.arange(len(groups))) % len(groups)
    return order
