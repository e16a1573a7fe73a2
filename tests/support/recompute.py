"""MoEtion that writes down its plans, experts chosen by the step alone or by itself, and what must be left of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_ckpt.core.cadence import is_small
from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.errors import MemoryFullError
from moe_ckpt.format.slot import SlotHeader
from moe_ckpt.peers.store import ReplicaStore
from moe_ckpt.policies import MoEtion
from moe_ckpt.policies.base import Measured, PolicyContext

Expert = tuple[int, int]
SENT, ALL = ("full", "gradients"), ("full", "gradients", "held")
"""Ways of a plan: to peers, and to this node's memory."""


def steady(step: int, layers: int, experts: int, every: int = 3) -> set[Expert]:
    """Two experts of each layer, one of which is another one every so many steps, layer by layer."""
    turn = 1 + step // every
    return {(layer, (at * turn + layer) % experts) for layer in range(layers) for at in (0, 1)}


@dataclass(frozen=True)
class Steady(MoEtion):
    """Sends gradients from the first step on, or, if it is ``probing``, after small checkpoints.

    Writes down what it plans, on rank 0's side of ``told``: a line per step.
    """

    recompute: bool = True
    probing: bool = False
    told: str = ""
    every: int = 3

    @property
    def probes(self) -> bool:
        return self.probing

    def _chosen(self, context: PolicyContext, rooms: Any, tier: Tier, forced: Any = None) -> Any:
        catalog = context.model.catalog
        chosen = ~catalog.is_expert
        if forced is not None:
            chosen |= forced
        wanted = steady(context.run.step, len(catalog.layers), catalog.layers[0].experts, self.every)
        if self._is_probing(context) and is_small(context.run.step):
            wanted = {place for place in wanted if place[1] % 2}
        for name, place in catalog.expert_at.items():
            chosen[catalog.index_of[name]] |= place in wanted
        return chosen

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        return written_down(super().plan(context), context, self.told)

    def describe(self) -> dict[str, Any]:
        return {"name": "steady"}


@dataclass(frozen=True)
class Paced(MoEtion):
    """MoEtion as it is, by Algorithm 1 for both sets; acted are only the rates that its two budgets follow from.

    Of an even share of all state a rank can copy the portion ``copied`` in an iteration, and send ``sent``.
    """

    capacity_boost: float | None = None
    probes = False
    told: str = ""
    copied: float = 0.8
    sent: float = 0.55
    ranks: int = 4

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        share = sum(size.full for size in context.model.sizes.values()) / self.ranks
        rates = Measured(
            recent_iteration_secs=1.0,
            copy_bytes_per_sec=self.copied * share,
            send_bytes_per_sec=self.sent * share,
            persist_bytes_per_sec=1e12,
        )
        return written_down(super().plan(replace(context, measured=rates)), context, self.told)

    def describe(self) -> dict[str, Any]:
        return {"name": "paced"}


def written_down(plan: SnapshotPlan, context: PolicyContext, told: str) -> SnapshotPlan:
    """Appends a line to the file ``told``."""
    found = {"full": plan.full, "gradients": plan.gradients, "held": plan.memory_only}
    with open(told, "a") as file:
        file.write(json.dumps({"step": context.run.step, **found}) + "\n")
    return plan


def plans(path: Path) -> dict[int, dict[str, list[str]]]:
    """Step -> what was planned of it last."""
    return {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}


def experts_by(plan: Mapping[str, Sequence[str]], ways: Sequence[str]) -> set[str]:
    return {name for way in ways for name in plan[way] if name.startswith("expert/")}


def newest(planned: dict[int, dict[str, list[str]]], step: int, operator: str, *, from_peers: bool) -> int:
    """The newest version of an operator up to ``step``: in full, by gradients, or, on its own node, held there."""
    ways = SENT if from_peers else ALL
    return max(at for at, plan in planned.items() if at <= step and any(operator in plan[way] for way in ways))


def factor_of(plan: dict[str, list[str]], rest: int, expert: int, full_bytes: int) -> float | None:
    """How many times more bytes a plan would have without gradients, of 4 bytes per parameter.

    Args:
        plan: As ``plans`` gives it.
        rest: Parameters of all gates and non-experts.
        expert: Of one expert.
        full_bytes: Per parameter that is sent in full.
    """
    if not plan["gradients"]:
        return None
    in_full = full_bytes * (rest + expert * sum(name.startswith("expert/") for name in plan["full"]))
    of_others = expert * len(plan["gradients"])
    return (in_full + full_bytes * of_others) / (in_full + 4 * of_others)


def refuse(step: int) -> None:
    """This process has no room for copies of ``step``."""
    reserve = ReplicaStore.reserve

    def full(self: ReplicaStore, header: SlotHeader, *others: Any) -> Any:
        if header.step == step:
            raise MemoryFullError("memory", 2, 1)
        return reserve(self, header, *others)

    ReplicaStore.reserve = full  # type: ignore[method-assign]
