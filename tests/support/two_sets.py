"""A policy whose two sets are known beforehand: what stays on a node, and what of that goes to peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.operators import Catalog, expert_id
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies.base import Needs, PolicyContext

SENT, HERE = 1, 2
"""Experts of each layer that peers get, and that this node's memory gets."""
Expert = tuple[int, int]


def chosen(step: int, count: int, layers: int, experts: int) -> set[Expert]:
    """So many experts of each layer, others at each step, and layer by layer."""
    return {(layer, (step * (layer + 1) + at) % experts) for layer in range(layers) for at in range(count)}


def newest(step: int, layers: int, experts: int, holders: dict[Expert, set[int]], lost: Sequence[int]) -> dict:
    """Expert -> the step that it must come back as of, when all processes and the nodes ``lost`` died after ``step``.

    holders: the nodes that have a part of an expert by the snapshot of this node itself.
    """
    found = {}
    for expert, nodes in holders.items():
        count = SENT if nodes & set(lost) else HERE
        steps = (at for at in range(2, step + 1) if expert in chosen(at, count, layers, experts))
        found[expert] = max(steps, default=1)
    return found


@dataclass(frozen=True)
class TwoSets:
    """All at the first step, and then as ``chosen`` says."""

    @property
    def needs(self) -> Needs:
        return Needs(partial=True)

    def check(self, catalog: Catalog) -> None:
        pass

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        catalog = context.model.catalog
        grid = len(catalog.layers), catalog.layers[0].experts
        if context.run.missing:
            return SnapshotPlan(context.run.step, catalog.everything)
        sent, here = (chosen(context.run.step, count, *grid) for count in (SENT, HERE))
        rest = tuple(op.id for op in catalog.always_saved)
        stored = (*rest, *(expert_id(*at) for at in sorted(sent)))
        held = tuple(expert_id(*at) for at in sorted(here - sent))
        return SnapshotPlan(context.run.step, stored, memory_only=held, sends_memory_only=False)

    def describe(self) -> dict[str, Any]:
        return {"name": "two-sets"}
