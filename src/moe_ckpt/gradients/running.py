"""Brings operators along their chains to one step, and checks that every element gets there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from moe_ckpt.core.gradient_chain import Chain
from moe_ckpt.core.operators import Span
from moe_ckpt.errors import ConfigError, GradientGapError
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.updates import WEIGHT, TensorBlock, Update

Spans = Mapping[str, Sequence[Span]]
"""Operator -> its rows of parameters."""
NO_HOMES: Mapping[str, str] = {}
"""Of anchors that have state without rows each (``state_blocks``)."""


class GradientSource(Protocol):
    """A source of anchors and gradients: host memory, a peer's copy, files. What it gives was verified before."""

    def updates(self, step: int) -> Sequence[Update]:
        """Returns the updates that made ``step``, in their order; none if it was skipped."""
        ...

    def anchor(self, operator: str, step: int) -> Iterable[TensorBlock]:
        """Returns weights and optimizer state of an operator as they were after ``step``."""
        ...

    def gradients(self, operator: str, step: int, number: int) -> Iterable[TensorBlock]:
        """Returns what the ``number``-th update of ``step`` consumed of an operator's gradients."""
        ...


def replay_chains(
    replay: OptimizerReplay, spans: Spans, chains: Mapping[str, Chain], step: int, source: GradientSource
) -> int:
    """Brings every operator in ``chains`` to ``step``. What the optimizers hold of other operators is undefined then.

    The caller verifies what ``source`` reads before this begins, since the state is neither the old nor the new one
    until it returns.

    Args:
        replay: Of this rank's optimizers, or of a copy's.
        spans: Of the operators in ``chains``.
        chains: Of ``core.gradient_chain.chains``.
        step: To which they lead.
        source: Of anchors, updates and gradients.

    Returns:
        How many updates were made once more.

    Raises:
        GradientGapError: An anchor or gradient lacks elements.
        ConfigError: Operators that share a parameter which must be anchored as a whole have different anchors.
        ReplayDivergedError: Two anchors in one parameter contradict each other.
    """
    require_together(replay, spans, {operator: way.anchor for operator, way in chains.items()})
    replay.forget()
    made = 0
    for at in range(min((way.anchor for way in chains.values()), default=step), step + 1):
        stepping = [operator for operator, way in chains.items() if at in way.gradients]
        if stepping:
            for number, update in enumerate(source.updates(at)):
                made += _step(replay, spans, stepping, at, number=number, update=update, source=source)
        for operator, way in chains.items():
            if way.anchor == at:
                expected = sum(piece.box.volume for _, piece in replay.pieces.of_operator(spans[operator]))
                written = replay.load(at, _only(operator, source.anchor(operator, at), at))
                if written != expected:
                    gap = f"its anchor has {written:,} of {expected:,} elements"
                    raise GradientGapError(operator, at, step, gap)
    return made


def _step(
    replay: OptimizerReplay,
    spans: Spans,
    operators: Sequence[str],
    at: int,
    *,
    number: int,
    update: Update,
    source: GradientSource,
) -> bool:
    """Makes one update of ``operators``. Returns whether it had anything of them."""
    blocks: list[TensorBlock] = []
    had = set(update.parameters)
    for operator in operators:
        gradients = [block for block in source.gradients(operator, at, number) if block.optimizer == update.optimizer]
        pieces = replay.pieces.of_operator(spans[operator], update.optimizer)
        expected = sum(piece.box.volume for _, piece in pieces if piece.parameter in had)
        volume = sum(block.values.numel() for block in gradients)
        if volume != expected:
            raise GradientGapError(operator, at, at, f"its gradients have {volume:,} of {expected:,} elements")
        blocks += gradients
    return bool(replay.step(update, blocks))


def _only(operator: str, blocks: Iterable[TensorBlock], at: int) -> list[TensorBlock]:
    """Returns an anchor whose state has the elements of its weights; refuses one of which a part is missing."""
    anchor = list(blocks)
    sizes: dict[tuple[int, str, str], int] = {}
    for block in anchor:
        if block.box is not None:
            key = block.optimizer, block.parameter, block.kind
            sizes[key] = sizes.get(key, 0) + block.box.volume
    for (optimizer, parameter, kind), size in sizes.items():
        weights = sizes.get((optimizer, parameter, WEIGHT), 0)
        if size != weights:
            found_there = f"{kind or 'the weight'} of {parameter} in its anchor has {size:,} of {weights:,} elements"
            raise GradientGapError(operator, at, at, found_there)
    return anchor


def require_together(
    replay: OptimizerReplay, spans: Spans, steps: Mapping[str, int], homes: Mapping[str, str] = NO_HOMES
) -> None:
    """Refuses anchors of different steps in one parameter whose optimizer lets its rows act on one another.

    Args:
        replay: Of the optimizers.
        spans: Of the operators in ``steps``.
        steps: Operator -> step of its anchor.
        homes: As ``ports.LoggedSteps.homes``: what updates all rows must be of the same step as these.

    Raises:
        ConfigError: There are such.
    """
    anchors: dict[tuple[int, str], tuple[str, int]] = {}
    for unit, operator, has in _sharing(replay, {operator: spans.get(operator, ()) for operator in steps}, homes):
        step = steps.get(operator)
        if step is None:
            continue
        other, anchor = anchors.setdefault(unit, (operator, step))
        if anchor != step:
            raise ConfigError(
                f"{operator}, with {has} of {unit[1]}, is anchored at step {step} and {other} at step {anchor}, but "
                "the optimizer's update of a row depends on all rows, so the log leads to wrong numbers: anchor them "
                "together, and run moe-ckpt memory clear on every node to return to the newest checkpoint on storage"
            )


def coupled_with(
    replay: OptimizerReplay, spans: Spans, operators: Iterable[str], homes: Mapping[str, str] = NO_HOMES
) -> frozenset[str]:
    """Returns ``operators``, and all that must be anchored together with one of them (``require_together``).

    Args:
        replay: Of the optimizers.
        spans: Of all operators.
        operators: Some of them.
        homes: As of ``require_together``.
    """
    coupled = set(operators)
    sharing: dict[tuple[int, str], set[str]] = defaultdict(set)
    if any(map(replay.coupled, range(len(replay.optimizers)))):
        for unit, operator, _ in _sharing(replay, spans, homes):
            sharing[unit].add(operator)
    while more := {operator for group in sharing.values() if group & coupled for operator in group} - coupled:
        coupled |= more
    return frozenset(coupled)


def _sharing(
    replay: OptimizerReplay, spans: Spans, homes: Mapping[str, str]
) -> Iterator[tuple[tuple[int, str], str, str]]:
    """Yields (optimizer and name of a unit, an operator that has a part of it, what), of units that are coupled."""
    for operator, rows in spans.items():
        for unit, piece in replay.pieces.of_operator(rows):
            if replay.coupled(unit.optimizer):
                key = unit.optimizer, unit.name
                yield key, operator, "rows"
                if piece.parameter in homes:
                    yield key, homes[piece.parameter], "optimizer state"
