"""``MoEtion`` (arXiv 2412.15411 v1): saves the most popular experts, as many as can be saved during an iteration.

Later versions of that paper are MoEvement, which is exact. This one bounds lost tokens instead, as MoC does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.cadence import BLOCK, is_small
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError, no_moe_layer
from moe_ckpt.policies.base import (
    ALL_SENT,
    AS_CONSUMED,
    Measured,
    NamedPolicy,
    Needs,
    PolicyContext,
    Sends,
    next_multiple,
    require_boost,
    require_positive,
)
from moe_ckpt.policies.expert_shares import Stage, Taking, layer_shares, stages_of
from moe_ckpt.policies.selectors import (
    STALE_ROUNDS,
    best_first,
    chosen_at_of,
    interval_steps,
    storage_steps,
    unsaved_of,
)

MOST_GRADIENTS = 8
"""Most gradients in a row that are sent of an expert: memory keeps all snapshots back to its newest full copy on peers,
and a recovery repeats as many updates."""

PROBED_CHECKPOINTS = 128
"""Most checkpoints with which a run probes. If the slowdown is not measured by then, it is assumed to be 0."""

_Limit = tuple[Stage, int, int | None]
"""A stage, how many of its experts are saved, and how many of them any rank may own."""
_Mask = npt.NDArray[np.bool_]
"""``[operators]`` in the catalog's order, or ``[experts]`` of a stage."""


class _Budget(NamedTuple):
    """A budget. limit: Bytes of one rank; None while not known. sends: The parts of operators that count."""

    limit: int | None
    sends: Sends = ALL_SENT


@named_arguments
@dataclass(frozen=True)
class MoEtion(NamedPolicy):
    """Saves all gates and non-experts, and as many experts as fit into a time budget, at each checkpoint.

    The budget is the number of bytes that a rank can copy during one forward and backward pass, and commit until the
    next checkpoint, at the measured rates: ``copy rate * (iteration - update)`` or ``commit rate * iteration *
    every_n_steps``, whichever is less, times ``MemoryFacts.budget_fraction``; the time that saving itself adds to
    an iteration does not count, if there are iterations without a checkpoint to compare with, or, with
    ``every_n_steps=1``, once small checkpoints at the beginning of the run have shown it (``probes``).
    Non-experts come first. The rest is enough for ``S_total`` experts, on the rank that has most to save
    (``core.cadence.Division.affordable``), in each pipeline stage separately. They are divided among its layers by
    unsaved tokens, and in each layer those with most unsaved tokens are saved, ties oldest first, then lowest index
    (Algorithm 1, ``expert_shares.layer_shares``). What a layer cannot save because the owners of its experts have
    no room left goes to the next best experts of all layers.

    As in MoC, the other experts are taken from the checkpoint that saved them last, lost tokens are counted, and the
    first checkpoint of a run is dense. At least one expert per layer (on average) is always saved, even beyond the
    budget, so that each expert gets its turn; also while rates are not known, at a run's start or after a restart on
    another number of ranks, so that the first checkpoints measure them. An expert that was not saved for
    ``STALE_ROUNDS`` rounds comes first: otherwise the file with its last copy could never be deleted, and weight decay
    also changes experts without tokens. Such experts get at most half of a checkpoint, because many become overdue at
    once.

    Experts that are stale after a recovery get more tokens until they have made up for the lost ones
    (``boost.layer``).

    With memory that outlives the process (``moe_ckpt.Memory``) there are three tiers, each with its own unsaved tokens.
    A checkpoint that stays in memory has two sets of experts, each chosen by Algorithm 1: those sent to peers, within
    ``send rate * iteration * every_n_steps``, where state that the peers hold anyway costs nothing; and those kept on
    this node, limited by the copy budget only. The first set is part of the second. A checkpoint on storage has one
    set, chosen by storage's unsaved tokens, which fits all these budgets; storage has the time since the last
    checkpoint that was written there.

    With ``recompute`` an expert that was sent to peers at the step before, and is sent again, is sent as the gradient
    that its optimizer consumed (asynchronous optimizer recomputation, Algorithm 3): peers hold its newest full copy and
    the gradients since, ``MOST_GRADIENTS`` at most, from which a recovery repeats the updates. An expert that is no
    longer chosen is sent in full a last time, in the place of a new one, so that peers have a full copy of its newest
    version. The budget counts experts at their full size all the same; storage gets full state.

    Source: MoEtion, arXiv 2412.15411 v1.

    Attributes:
        every_n_steps: Steps from one checkpoint to the next.
        experts: Per layer on average, ``S_total / L``, instead of the budget; every owner rank then saves about the
            same number. None: as many as the budget allows.
        capacity_boost: How many more tokens a stale expert gets, 0.1 for 10 % (the paper); None: no more tokens.
        recompute: Send gradients instead of full state where possible. Needs memory with copies on peers, of which not
            each checkpoint goes to storage, and a checkpoint at each step.

    Raises:
        ConfigError: A value out of range.
    """

    name: ClassVar[str] = "moetion"
    every_n_steps: int = 1
    experts: int | None = None
    capacity_boost: float | None = 0.1
    recompute: bool = False
    stale_rounds: ClassVar[int] = STALE_ROUNDS

    def __post_init__(self) -> None:
        require_positive("MoEtion", every_n_steps=self.every_n_steps)
        if self.experts is not None:
            require_positive("MoEtion", experts=self.experts)
        require_boost("MoEtion(capacity_boost", self.capacity_boost)
        if not isinstance(self.recompute, bool):
            raise ConfigError(f"MoEtion(recompute={self.recompute!r}): choose True or False")
        if self.recompute and self.every_n_steps != 1:
            raise ConfigError(
                f"MoEtion(recompute=True, every_n_steps={self.every_n_steps}): recompute needs a checkpoint at each "
                "step, because a gradient leads from one step to the next: set every_n_steps=1, or recompute=False"
            )

    @property
    def probes(self) -> bool:
        """True if a run probes at its beginning, because with a checkpoint at each step no iteration is without one.

        It then saves one expert per layer in two of four checkpoints, until the slowdown by saving is measured
        (``core.cadence``), for ``PROBED_CHECKPOINTS`` at most. No gradients are sent until then.
        """
        return self.every_n_steps == 1 and self.experts is None

    @property
    def needs(self) -> Needs:
        return Needs(
            sizes=self.experts is None or self.recompute,
            gradients=AS_CONSUMED if self.recompute else None,
            alone=self.recompute,
            tiers=True,
            partial=True,
            boost=self.capacity_boost,
            replicas=1 if self.recompute else 0,
            bubbles=True,
            period_steps=self.every_n_steps * (2 * BLOCK if self.probes else 1),
            next_due=self.next_due,
            warning=why_no_gradients if self.recompute else None,
        )

    def check(self, catalog: Catalog) -> None:
        if not catalog.layers:
            raise no_moe_layer("MoEtion")
        experts = len(catalog.experts)
        if self.experts is not None and self.experts * len(catalog.layers) > experts:
            raise ConfigError(
                f"MoEtion(experts={self.experts}): the model has only {experts} experts in {len(catalog.layers)} MoE "
                f"layers, {experts / len(catalog.layers):g} per layer"
            )

    def budget_bytes(
        self, measured: Measured, storage_steps: int | None = None, budget_fraction: float = 1.0
    ) -> int | None:
        """Returns the most bytes of one checkpoint that one rank has time to save; None while not known.

        Args:
            measured: Times and rates.
            storage_steps: Steps since the last checkpoint that went to storage; None for ``every_n_steps``.
            budget_fraction: Portion of the time that saving may use.
        """
        copied = measured.copy_bytes(budget_fraction)
        persisted = measured.persist_bytes(storage_steps or self.every_n_steps, budget_fraction)
        return None if copied is None or persisted is None else min(copied, persisted)

    def _sent(self, context: PolicyContext) -> _Budget | None:
        """Returns the budget of sends to peers; None without peers, or if they have all state anyway."""
        memory = context.memory
        if not memory.sends_copies:
            return None
        return _Budget(context.measured.send_bytes(self.every_n_steps, memory.budget_fraction), memory.sends)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns the plan of a step. Its ``k`` is the mean number of experts per layer that fit, rounded down.

        Raises:
            ConfigError: The budget is known, but ``context.model.sizes`` lacks operators.
        """
        if context.run.step < self.next_due(context):
            return SnapshotPlan(context.run.step)
        layers = max(len(context.model.catalog.layers), 1)
        if not context.memory.storage_due:
            return self._two_sets(context)
        since = storage_steps(context, self.every_n_steps)
        budgets = [
            _Budget(self.budget_bytes(context.measured, since, context.memory.budget_fraction)),
            _Budget(context.copy_bytes(context.memory.budget_fraction)),
            self._sent(context),
        ]
        by_stage = self._expert_limits(context, budgets)
        total = sum(most for _, most, _ in by_stage)
        if total >= len(context.model.catalog.experts):
            return SnapshotPlan(context.run.step, context.model.catalog.everything, k=total // layers)
        forced = context.model.catalog.mask(context.run.missing)
        stored = self._chosen(context, by_stage, Tier.STORAGE, forced)
        return SnapshotPlan(context.run.step, context.model.catalog.ids_of(stored), k=total // layers)

    def _two_sets(self, context: PolicyContext) -> SnapshotPlan:
        """Returns the plan of a step in memory: Algorithm 1 for peers, and for this node, which keeps the same and
        more."""
        catalog, sent = context.model.catalog, self._sent(context)
        local = _Budget(context.copy_bytes(context.memory.budget_fraction))
        to_peers, gradients = None, np.zeros_like(catalog.is_expert)
        if sent is not None:
            by_stage = self._expert_limits(context, [local, sent])
            to_peers, gradients = self._divided_for_peers(context, by_stage, sent.sends)
        by_stage = self._expert_limits(context, [local])
        here = self._chosen(context, by_stage, Tier.HOST, to_peers)
        first = here if to_peers is None else to_peers
        return SnapshotPlan(
            context.run.step,
            catalog.ids_of(first & ~gradients),
            gradients=catalog.ids_of(gradients) if gradients.any() else (),
            memory_only=catalog.ids_of(here & ~first),
            k=sum(most for _, most, _ in by_stage) // max(len(catalog.layers), 1),
            sends_memory_only=False,
        )

    def _divided_for_peers(
        self, context: PolicyContext, by_stage: Sequence[_Limit], sends: Sends
    ) -> tuple[_Mask, _Mask]:
        """Returns the operators that peers get, and those of them that are sent as gradients alone (Algorithm 3)."""
        chosen = self._chosen(context, by_stage, Tier.PEER)
        none = np.zeros_like(chosen)
        held = context.memory.anchored_at
        if not (self.recompute and sends.experts and len(held) == len(chosen)):
            return chosen, none
        catalog = context.model.catalog
        mirrored = catalog.is_expert & (held >= 0)
        for group in context.model.coupled:
            mirrored[catalog.places_of(tuple(sorted(group)))] = False
        behind = mirrored & (held < (context.run.last_step or 0))
        ending = behind & ~chosen
        if ending.any():  # experts that end a chain of gradients are sent in full, in the place of new ones
            chosen = self._chosen(context, by_stage, Tier.PEER, behind)
        if self._is_probing(context):  # small checkpoints would end chains of gradients
            return chosen, none
        return chosen, chosen & mirrored & ~ending & (context.run.step - held <= MOST_GRADIENTS)

    def _expert_limits(self, context: PolicyContext, budgets: Sequence[_Budget | None]) -> list[_Limit]:
        """Returns how many experts fit all budgets; for a small checkpoint that probes, only the least number."""
        limits = [budget if self.experts is None else _Budget(None) for budget in budgets if budget is not None]
        if self._is_probing(context) and is_small(self._number(context)):
            limits = [budget if budget.limit is None else budget._replace(limit=0) for budget in limits]
        by_stage = []
        for stage in stages_of(context, weighed=any(budget.limit is not None for budget in limits)):
            least = len(stage.layers) * (self.experts or 1)
            fitting = [stage.most(budget.limit, least, budget.sends) for budget in limits]
            capacities = [capacity for _, capacity in fitting if capacity is not None]
            by_stage.append((stage, min(most for most, _ in fitting), min(capacities, default=None)))
        return by_stage

    def _is_probing(self, context: PolicyContext) -> bool:
        measured = context.measured
        unknown = measured.copy_interference_secs is None and measured.iteration_secs is None
        return self.probes and unknown and self._number(context) < PROBED_CHECKPOINTS

    def _number(self, context: PolicyContext) -> int:
        """Returns the number of the checkpoint that is due; those that stay in memory have no index."""
        return context.run.step // self.every_n_steps

    def _chosen(
        self, context: PolicyContext, by_stage: Sequence[_Limit], tier: Tier, forced: _Mask | None = None
    ) -> _Mask:
        """Returns ``[operators]`` True for gates, non-experts, and the experts that a tier gets.

        Args:
            context: Of this step.
            by_stage: How many experts each stage saves.
            tier: The tier whose unsaved tokens decide.
            forced: ``[operators]`` True for experts that are saved in any case.
        """
        chosen = ~context.model.catalog.is_expert
        if forced is not None:
            chosen |= forced
        unsaved, chosen_at = unsaved_of(context, tier).ravel(), chosen_at_of(context, tier).ravel()
        turn = context.run.index if tier is Tier.STORAGE else self._number(context)
        patience = self.stale_rounds * interval_steps(context, self.every_n_steps)
        for stage, most, capacity in by_stage:
            if most >= stage.total:
                chosen[stage.operators] = True
                continue
            unsaved_here, chosen_here = unsaved[stage.at], chosen_at[stage.at]
            taking = Taking(stage.owners, capacity, chosen[stage.operators])
            overdue = _overdue(chosen_here, context.run.step - patience * ceil(stage.total / most))
            if len(overdue):
                taking.take(overdue, most_overdue(most))
            untaken = ~taking.is_taken
            sizes = np.add.reduceat(untaken, stage.starts, dtype=np.int64).tolist()
            risk = np.add.reduceat(unsaved_here * untaken, stage.starts).tolist()
            # If all layers get the same number, the remainder goes to the layers after those that got it last time.
            first = turn * most % len(sizes)
            shares = layer_shares(risk, sizes, max(0, most - taking.count), first)
            order = best_first(np.zeros(stage.total, dtype=np.int64), unsaved_here, chosen_here)
            passed_over = taking.take_shares(order, most, stage.groups, shares)
            if taking.count < most:
                taking.take(passed_over, most)
            chosen[stage.operators] = taking.is_taken
        return chosen

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return next_multiple(context.run.last_step, self.every_n_steps)


def why_no_gradients(context: PolicyContext) -> str | None:
    """Returns why ``MoEtion(recompute=True)`` sends no gradient of any expert, and what to do; None if it may."""
    if not context.memory.sends.experts:
        return (
            "MoEtion(recompute=True) sends no gradients: the peers that hold copies train the same experts (data "
            "parallelism without sharded optimizer state), and take them from their own tensors, so that nothing of "
            "experts is sent. Set recompute=False, which sends as little, or shard the optimizer"
        )
    coupled = frozenset[str]().union(*context.model.coupled)
    if coupled and coupled.issuperset(context.model.catalog.experts_in_order):
        return (
            "MoEtion(recompute=True) sends no gradients: the optimizer's update of an expert depends on other rows of "
            "the same parameter (Adafactor and Muon are such), so that experts are sent in full. Use AdamW or SGD, or "
            "set recompute=False"
        )
    return None


def most_overdue(most: int) -> int:
    """Returns how many of ``most`` experts may be overdue ones: half, since many become overdue at once."""
    return -(-most // 2)


def _overdue(chosen_at: Counts, due: int) -> Counts:
    """Returns the experts that were chosen last before step ``due``, the oldest first, without those never chosen."""
    late = np.flatnonzero((chosen_at >= 0) & (chosen_at < due))
    return late[np.argsort(chosen_at[late], kind="stable")]
