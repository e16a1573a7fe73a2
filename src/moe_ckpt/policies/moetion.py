"""MoEtion (arXiv 2412.15411 v1): as many experts per checkpoint as fit beside an iteration, the most popular ones.

Later versions of that paper are MoEvement, which is exact. This one bounds lost tokens instead, as MoC does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from math import ceil, isfinite
from typing import Any

import numpy as np

from moe_ckpt.core.arguments import named_arguments
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import SnapshotPlan, save_full, save_nothing
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError, NoMoELayerError
from moe_ckpt.policies.base import Measured, Needs, PolicyContext, interval_passed, next_multiple, require_positive
from moe_ckpt.policies.expert_shares import Stage, Taking, Together, layer_shares, stages_of, together
from moe_ckpt.policies.load_aware import STALE_ROUNDS
from moe_ckpt.policies.selection import known

SELECTIONS = ("popular", "round_robin")

_Room = tuple[Stage, int, int | None]
"""A stage, how many of its experts are saved, and how many of them any rank may own."""


@named_arguments
@dataclass(frozen=True)
class MoEtion:
    """Save all gates and non-experts, and the experts that the rest of a budget buys, at each checkpoint.

    The budget is what a rank can copy beside one iteration's forward and backward, and commit until the next
    checkpoint, at the measured rates: ``copy rate * (iteration - update)`` or ``commit rate * iteration *
    every_n_steps``, whichever is less, times ``budget_fraction``. Non-experts are paid first. What that leaves is
    ``S_total`` experts, on the rank that has most to save (``core.save_budget.Load.affordable``), of each pipeline
    stage by itself. They are shared out among its layers by unsaved tokens, and in each layer those with most unsaved
    tokens are saved, ties oldest first, then lowest index (Algorithm 1, ``expert_shares.layer_shares``). What a layer
    cannot save because the owners of its experts have no room left goes to the next best experts of all layers.

    As in MoC, the other experts are taken from the checkpoint that saved them last, lost tokens are counted, and the
    first checkpoint of a run is dense. At least one expert per layer (on average) is saved in any case, over the budget
    if need be, so that all come round: also while rates are not known, after a start or a restart, so that the first
    checkpoints measure them. An expert that was not saved for ``STALE_ROUNDS`` rounds goes first, since the file with
    its last copy could never be deleted otherwise, and weight decay changes experts without tokens too; such experts
    get at most half of a checkpoint, for many become overdue at once.

    It writes to storage only. Replication to peers (the remote budget, Algorithm 2), a boosted capacity for experts
    that came back stale, and asynchronous optimizer recomputation (Algorithm 3) are not there yet. Source: MoEtion,
    arXiv 2412.15411 v1.

    Attributes:
        every_n_steps: Steps from one checkpoint to the next.
        experts: Per layer on average, ``S_total / L``, instead of what the budget gives; every owner rank then saves
            about equally many. None: by the budget.
        selection: ``"popular"`` (the paper), or ``"round_robin"``, its baseline: even shares, oldest experts first.
        budget_fraction: Portion of both times that saving may take.

    Raises:
        ConfigError: A value out of range, or no such selection.
    """

    every_n_steps: int = 1
    experts: int | None = None
    selection: str = "popular"
    budget_fraction: float = 1.0

    def __post_init__(self) -> None:
        require_positive("MoEtion", every_n_steps=self.every_n_steps)
        if self.experts is not None:
            require_positive("MoEtion", experts=self.experts)
        if not isinstance(self.selection, str) or self.selection not in SELECTIONS:
            raise ConfigError(
                f"MoEtion(selection={self.selection!r}): no such selection; choose from {list(SELECTIONS)}"
            )
        value = self.budget_fraction
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not number or not 0 < value <= 1:
            raise ConfigError(
                f"MoEtion(budget_fraction={value!r}): budget_fraction must be a number above 0 and at most 1, the "
                "portion of the time between checkpoints that saving may take"
            )

    @property
    def needs(self) -> Needs:
        sizes = self.experts is None
        return Needs(sizes=sizes, partial=True, period_steps=self.every_n_steps, next_due=self.next_due)

    def check(self, catalog: Catalog) -> None:
        if not catalog.layers:
            raise NoMoELayerError(
                "MoEtion saves some experts of the MoE layers, but no MoE layer was found in the model. "
                "Register the layer's class with moe_ckpt.register_moe(...), or use the Dense policy."
            )
        there = len(catalog.experts)
        if self.experts is not None and self.experts * len(catalog.layers) > there:
            raise ConfigError(
                f"MoEtion(experts={self.experts}): the model has only {there} experts in {len(catalog.layers)} MoE "
                f"layers, {there / len(catalog.layers):g} per layer"
            )

    def budget_bytes(self, measured: Measured) -> int | None:
        """Most bytes of one checkpoint on one rank that there is time for; None while not known."""
        copied = measured.copy_bytes(self.budget_fraction)
        persisted = measured.persist_bytes(self.every_n_steps, self.budget_fraction)
        return None if copied is None or persisted is None else min(copied, persisted)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """The plan's ``k`` is the mean of experts per layer that fit, rounded down.

        Raises:
            ConfigError: the budget is known, but ``context.sizes`` lacks operators.
        """
        if not interval_passed(context.step, context.last_step, self.every_n_steps):
            return save_nothing(context.step)
        limit = self.budget_bytes(context.measured) if self.experts is None else None
        stages = stages_of(context, weighed=limit is not None)
        rooms = [(stage, *self._room(stage, limit)) for stage in stages]
        total = sum(most for _, most, _ in rooms)
        fits = total >= len(context.catalog.experts)
        stored = context.catalog.everything if fits else self._stored(context, rooms)
        return save_full(context.step, stored, k=total // max(len(context.catalog.layers), 1))

    def _room(self, stage: Stage, limit: int | None) -> tuple[int, int | None]:
        """As ``Stage.most``, which remembers it."""
        return stage.most(limit, len(stage.layers) * (self.experts or 1))

    def _stored(self, context: PolicyContext, rooms: Sequence[_Room]) -> tuple[str, ...]:
        """In the catalog's order."""
        catalog = context.catalog
        chosen = ~catalog.is_expert
        for stage in (stage for stage, most, _ in rooms if most >= stage.total):
            chosen[stage.operators] = True
        rooms = [room for room in rooms if room[1] < room[0].total]
        if rooms:
            all_of_them = together(tuple(stage for stage, *_ in rooms))
            taken = b"".join(self._taken(context, all_of_them, rooms))
            chosen[all_of_them.operators] = np.frombuffer(taken, dtype=np.bool_)
        return tuple(compress(catalog.everything, chosen.tolist()))

    def _taken(self, context: PolicyContext, stages: Together, rooms: Sequence[_Room]) -> Iterator[bytearray]:
        """Stage by stage, whether each of its experts is saved."""
        popular = self.selection == "popular"
        missing = [context.catalog.place[op] for op in context.missing]
        unsaved = known(context, context.expected_unsaved, 0).ravel()[stages.at]
        chosen_at = known(context, context.chosen_at, -1).ravel()[stages.at]
        if not popular:
            unsaved = np.zeros_like(unsaved)
        orders, risks = stages.ordered(chosen_at, unsaved), stages.by_layer(unsaved)
        overdue = self._overdue(context, stages, rooms, chosen_at) if popular else [()] * len(rooms)
        for number, (stage, most, capacity) in enumerate(rooms):
            taking, risk, sizes = Taking(stage.owners, capacity, stage.owned), risks[number], stage.sizes
            if missing:
                taking.force(stage.numbers[place] for place in missing if place in stage.numbers)
            if overdue[number]:
                taking.take(overdue[number], -(-most // 2))
            if taking.count:
                left = ~taking.mask
                sizes = tuple(np.add.reduceat(left, stage.starts, dtype=np.int64).tolist())
                risk = np.add.reduceat(unsaved[slice(*stages.bounds[number])] * left, stage.starts).tolist()
            # Where all layers get alike, what cannot be divided goes on from where it ended last time.
            first = context.index * most % len(sizes)
            shares = layer_shares(risk, sizes, max(0, most - taking.count), first)
            passed_over = taking.take_shares(orders[number], most, stage.groups, shares)
            if taking.count < most:
                taking.take(passed_over, most)
            yield taking.is_taken

    def _overdue(
        self, context: PolicyContext, stages: Together, rooms: Sequence[_Room], chosen_at: Counts
    ) -> list[Sequence[int]]:
        """Experts not chosen for over ``STALE_ROUNDS`` rounds of ceil(experts / most) checkpoints, the oldest first.

        As in ``load_aware``, rounds are counted in steps, at the run's own mean interval.
        """
        interval_steps = max(self.every_n_steps, ceil(context.step / (context.index + 1)))
        rounds = [ceil(stage.total / most) for stage, most, _ in rooms]
        due = context.step - STALE_ROUNDS * interval_steps * stages.spread(rounds)
        late = np.flatnonzero((chosen_at >= 0) & (chosen_at < due))
        if not len(late):
            return [()] * len(rooms)
        found: list[Sequence[int]] = []
        for first, end in stages.bounds:
            mine = late[np.searchsorted(late, first) : np.searchsorted(late, end)]
            found.append((mine[np.argsort(chosen_at[mine], kind="stable")] - first).tolist())
        return found

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``."""
        return next_multiple(context.last_step, self.every_n_steps)

    def describe(self) -> dict[str, Any]:
        return {"name": "moetion", **asdict(self)}
