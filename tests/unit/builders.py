"""Small catalogs and contexts as literals, for tests that need no model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np

from moe_ckpt.core.operators import (
    Catalog,
    MoELayer,
    Operator,
    OperatorKind,
    Span,
    expert_id,
    gate_id,
    non_expert_id,
)
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents, GradientGroups, Step, Tier, WindowPlace
from moe_ckpt.core.tokens import NO_COUNTS
from moe_ckpt.format.shard import REPLAY, SliceEntry, lay_out_in_order
from moe_ckpt.ledger.retention import MemoryStep
from moe_ckpt.policies import FaultRecord, MemoryFacts, ModelFacts, PolicyContext, RunFacts
from moe_ckpt.slices.assignment import WriteAssignment
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.cuts import BLOCK, Cut, SliceSource
from moe_ckpt.slices.local_state import LocalState


def catalog(layers: int, experts: int, *, stacked: bool = True, first_index: int = 0) -> Catalog:
    """A model of ``layers`` MoE layers, each with a gate and ``experts`` experts, and one embedding."""
    parameters: dict[str, tuple[int, ...]] = {"embed.weight": (7, 4)}
    operators = [Operator(non_expert_id("embed"), OperatorKind.NON_EXPERT, (Span("embed.weight"),))]
    moe = []
    for layer in range(first_index, first_index + layers):
        name = f"layers.{layer}.moe"
        moe.append(MoELayer(layer, name, experts, top_k=1))
        parameters[f"{name}.gate.weight"] = (experts, 4)
        operators.append(Operator(gate_id(layer), OperatorKind.GATE, (Span(f"{name}.gate.weight"),), layer))
        if stacked:
            parameters[f"{name}.w"] = (experts, 4, 3)
        for expert in range(experts):
            if stacked:
                span = Span(f"{name}.w", expert, expert + 1)
            else:
                span = Span(f"{name}.experts.{expert}.w")
                parameters[span.parameter] = (4, 3)
            operators.append(Operator(expert_id(layer, expert), OperatorKind.EXPERT, (span,), layer, expert))
    return Catalog(tuple(operators), tuple(moe), parameters)


def mixed(*sizes: int) -> Catalog:
    """A model whose MoE layers have ``sizes`` experts."""
    parts = [catalog(1, size, first_index=layer) for layer, size in enumerate(sizes)]
    operators = [parts[0].operators[0], *(op for part in parts for op in part.operators[1:])]
    parameters = {name: shape for part in parts for name, shape in part.parameters.items()}
    return Catalog(tuple(operators), tuple(part.layers[0] for part in parts), parameters)


def pieces_of(local: LocalState, operators: Collection[str], dealt: WriteAssignment, rank: int) -> list[SliceSource]:
    """What ``rank`` writes of ``operators``, slice by slice."""
    found = local.cuts(operators, dealt, rank)
    shelf, numbers = found.shelf, found.slices
    blocks = [shelf.blocks[at] for at in shelf.table(numbers)[:, BLOCK].tolist()]
    return [SliceSource(shelf.entries[n], shelf.source(n), b) for n, b in zip(numbers.tolist(), blocks, strict=True)]


def entries_of(part: CompiledPart) -> tuple[SliceEntry, ...]:
    """The slices of a part, each with its byte range."""
    return lay_out_in_order(part.listed())


def is_replay(cut: Cut) -> bool:
    """Only a replay needs its slices. A cut has only such slices, or none."""
    return cut.entries[0].key.startswith(REPLAY)


def operators_of(part: CompiledPart) -> tuple[str, ...]:
    """Operators of a part, except those of which it has only slices for a replay."""
    return tuple(sorted({cut.operator for cut in part.cuts if not is_replay(cut)}))


def context(model: Catalog, step: int = 1, *, ranks: int = 1, **facts: Any) -> PolicyContext:
    """A context with ``facts`` by the names of their fields; ``ranks`` hold everything unless there is a placement."""
    placement = everywhere(model.layers, ranks)
    return with_facts(PolicyContext(ModelFacts(model, placement), RunFacts(step)), **facts)


def with_facts(context: PolicyContext, **facts: Any) -> PolicyContext:
    """``context`` with other ``facts``, by the names of their fields.

    Args:
        facts: A table in place of a mapping by tier is storage's; lost tokens are of one fault, and routed ones of one
            layer. ``memory`` is a whole group.
    """
    if "lost_tokens" in facts:
        facts["faults"] = (FaultRecord(0, facts.pop("lost_tokens"), 0),)
    if "routed_tokens" in facts:
        facts["routed"] = np.array([facts.pop("routed_tokens")])
    context = replace(context, **{name: facts.pop(name) for name in ("measured", "memory") if name in facts})
    for name in ("expected_unsaved", "chosen_at"):
        if isinstance(facts.get(name), np.ndarray):
            facts[name] = {**getattr(context.tokens, name), Tier.STORAGE: facts[name]}
    for group in ("model", "run", "tokens", "memory"):
        former = getattr(context, group)
        changed = {field.name: facts.pop(field.name) for field in fields(former) if field.name in facts}
        context = replace(context, **{group: replace(former, **changed)})
    assert not facts, f"no facts of a policy: {facts}"
    return context


def memory(*, storage_due: bool = True, replicas: int = 0, **facts: Any) -> MemoryFacts:
    """Memory that outlives the process, for a step that is also written to storage or not."""
    tiers = {Tier.HOST: True, Tier.STORAGE: storage_due, Tier.PEER: bool(replicas)}
    return MemoryFacts(tiers=frozenset(tier for tier, used in tiers.items() if used), **facts)


def memory_step(number: int, *, window: WindowPlace | None = None, since=None, groups=(), **known: Any) -> MemoryStep:
    """A snapshot in memory. groups: of operators, for each slot of gradients."""
    slots = GradientGroups(tuple(groups), NO_COUNTS) if groups else None
    contents = Contents((), window=window, since=since, groups=slots)
    return MemoryStep(Step("run", "life", 0, number, number), contents, **known)


def experts_in(operators: tuple[str, ...]) -> set[tuple[int, int]]:
    """The ``(layer, expert)`` pairs among operator ids."""
    parts = [op.split("/") for op in operators if op.startswith("expert/")]
    return {(int(layer), int(expert)) for _, layer, expert in parts}
