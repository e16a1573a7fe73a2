"""``MoC``: saves only some experts in each checkpoint (PEC, arXiv 2408.04307; MoC-System, ASPLOS'25)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from moe_ckpt.core.cadence import largest_k
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError, no_moe_layer
from moe_ckpt.policies.base import NamedPolicy, Needs, PolicyContext, next_multiple, require_positive
from moe_ckpt.policies.budget import dynamic_k, resolve_budget, top_up
from moe_ckpt.policies.expert_shares import stages_of
from moe_ckpt.policies.selectors import SELECTORS, Expert, Request, interval_steps, storage_steps, tier_of

AUTO = "auto"


@named_arguments
@dataclass(frozen=True)
class MoC(NamedPolicy):
    """Saves all gates and non-experts, and K experts of every MoE layer, at each checkpoint.

    Each checkpoint can be loaded as a whole: the other experts are taken from the checkpoint that saved them last. If a
    failure returns to it, the tokens that these experts have not seen are counted as lost (PLT). The first checkpoint
    of a run is dense, since there is no older copy of any expert. Source: PEC, arXiv 2408.04307; MoC-System, ASPLOS
    '25.

    Attributes:
        k: Experts saved per MoE layer, ``1 <= k <= E``; or ``"auto"``: as many as storage can commit before it gets the
            next checkpoint, and can be copied (see ``levels``).
        every_n_steps: Steps from one checkpoint to the next.
        selector: Which experts: ``"sequential"`` (the oldest), ``"load_aware"`` (those with most unsaved tokens, the
            paper's rule) or ``"least_loss"`` (unsaved tokens times age).
        snapshot_k: Experts per MoE layer that are copied to host memory, ``k <= snapshot_k <= E`` (two-level PEC).
            Those that are not written stay there until the next checkpoint, for a recovery from failures that spare
            this memory. ``"auto"``: as many as can be copied during one forward and backward pass. None: ``k``.
        plt_budget: Portion of lost tokens to stay within, a number or a name in ``policies.budget.PLT_BUDGETS``. K then
            doubles as failures use up the budget, and falls during training (``dynamic_k``), and ``snapshot_k`` follows
            if it must; a checkpoint saves more experts if one more failure could otherwise exceed the budget
            (``top_up``). None: K does not change.

    Raises:
        ConfigError: A value out of range, or no such selector.
    """

    name: ClassVar[str] = "moc"
    k: int | str = 1
    every_n_steps: int = 1
    selector: str = "sequential"
    snapshot_k: int | str | None = None
    plt_budget: float | str | None = None

    def __post_init__(self) -> None:
        require_positive("MoC", every_n_steps=self.every_n_steps)
        require_positive("MoC", AUTO, k=self.k)
        if not isinstance(self.selector, str) or self.selector not in SELECTORS:
            raise ConfigError(f"MoC(selector={self.selector!r}): no such selector; choose from {sorted(SELECTORS)}")
        if self.snapshot_k is not None:
            require_positive("MoC", AUTO, snapshot_k=self.snapshot_k)
            if isinstance(self.k, int) and isinstance(self.snapshot_k, int) and self.snapshot_k < self.k:
                raise ConfigError(
                    f"MoC(k={self.k}, snapshot_k={self.snapshot_k}): what goes to storage passes through host memory, "
                    "so snapshot_k must be at least k; raise snapshot_k or lower k"
                )
        if self.plt_budget is not None:
            resolve_budget(self.plt_budget, "MoC: plt_budget")

    @property
    def budget(self) -> float | None:
        """``plt_budget`` as a number; None without a budget."""
        return None if self.plt_budget is None else resolve_budget(self.plt_budget)

    def check(self, catalog: Catalog) -> None:
        if not catalog.layers:
            raise no_moe_layer("MoC")
        for layer in catalog.layers:
            for name, value in (("k", self.k), ("snapshot_k", self.snapshot_k or self.k)):
                if isinstance(value, int) and value > layer.experts:
                    raise ConfigError(f"MoC({name}={value}): layer {layer.name!r} has only {layer.experts} experts")

    def levels(self, context: PolicyContext) -> tuple[int, int]:
        """Returns ``k`` and ``snapshot_k`` of a checkpoint at this step, at least 1 and ``k``.

        "auto" is the largest K with which no rank copies more than fits into one forward and backward pass and its host
        memory (``snapshot_k``), and no rank commits more than fits between two checkpoints on storage (``k``, at most
        ``snapshot_k``), at the rates measured on the slowest rank; 1 until they are measured. With memory that outlives
        the process, a checkpoint that stays in memory is limited by the copy alone, and one for storage has the time
        since the last one there. Both are computed anew for each checkpoint, from numbers that are equal on all ranks,
        and assume that experts are divided evenly. Experts that are only copied are chosen after those that are
        written, so some rank may have more of them. Dynamic-K raises both.
        """
        copied = _largest(context, context.copy_bytes()) if self._is_auto else 1
        snapshot_k = copied if self.snapshot_k == AUTO else self.snapshot_k
        if isinstance(self.k, int):
            k = self.k
        else:
            k = snapshot_k if isinstance(snapshot_k, int) else copied
            if context.memory.storage_due:
                since = storage_steps(context, self.every_n_steps)
                k = min(k, _largest(context, context.measured.persist_bytes(since)))
        if self.budget is not None:
            most = max((layer.experts for layer in context.model.catalog.layers), default=k)
            k = dynamic_k(k, most, context.run.lost_tokens, context.tokens.routed_tokens, self.budget)
        return k, max(k, snapshot_k) if isinstance(snapshot_k, int) else k

    @property
    def _is_auto(self) -> bool:
        return AUTO in (self.k, self.snapshot_k)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if context.run.step < self.next_due(context):
            return SnapshotPlan(context.run.step)
        k, snapshot_k = self.levels(context)
        request = Request(k, snapshot_k, interval_steps(context, self.every_n_steps), tier_of(context))
        selection = SELECTORS[self.selector](context, request)
        catalog, budget = context.model.catalog, self.budget
        chosen = np.zeros(len(catalog.everything), dtype=bool)
        chosen[_places(catalog, selection.stored)] = True
        chosen[list(map(catalog.index_of.__getitem__, context.run.missing))] = True
        if budget is not None:
            more = top_up(context, catalog.layer_and_expert[chosen & catalog.is_expert], budget)
            chosen[_places(catalog, more)] = True
        chosen |= ~catalog.is_expert
        stored = catalog.ids_of(chosen)
        places = _places(catalog, selection.host_only).tolist()
        host_only = tuple(catalog.everything[at] for at in places if not chosen[at])
        return SnapshotPlan(context.run.step, stored, memory_only=host_only, k=k, plt_budget=budget)

    @property
    def needs(self) -> Needs:
        budgeted = self.plt_budget is not None
        return Needs(
            sizes=self._is_auto,
            partial=True,
            lost_tokens=budgeted,
            period_steps=self.every_n_steps,
            next_due=self.next_due,
        )

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return next_multiple(context.run.last_step, self.every_n_steps)

    def describe(self) -> dict[str, Any]:
        resolved = {"snapshot_k": self.snapshot_k or self.k, "plt_budget": self.budget}
        return {**super().describe(), **resolved}


def _largest(context: PolicyContext, limit: int | None) -> int:
    """Returns the largest K with which no rank saves over ``limit`` bytes; 1 if the limit is unknown or too small."""
    if limit is None:
        return 1
    stages = stages_of(context, weighed=True)
    return max(
        1,
        min(
            (largest_k([layer.experts for layer in stage.layers], stage.affordable(limit)[0]) for stage in stages),
            default=1,
        ),
    )


def _places(catalog: Catalog, experts: Sequence[Expert]) -> Counts:
    """Returns ``[n]`` the place of each expert in the catalog."""
    flat = np.fromiter(chain.from_iterable(experts), dtype=np.int64, count=2 * len(experts))
    places: Counts = catalog.expert_places[flat[::2], flat[1::2]]
    return places
