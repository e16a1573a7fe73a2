"""Brings a run that lost its state to the newest step of a gradient log, by its own optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Catalog
from moe_ckpt.errors import CoverageError, ReplayDivergedError
from moe_ckpt.format.shard import GRADIENT as KEY
from moe_ckpt.gradients.capture import GradientCapture
from moe_ckpt.gradients.layout import UpdateLayout
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.running import Spans, coupled_with, require_together
from moe_ckpt.gradients.updates import GRADIENT, TensorBlock, Update
from moe_ckpt.modeling.param_groups import IMPLEMENTATION_FLAGS
from moe_ckpt.ports import LoggedSteps, UpdateReplayer

Attach = Callable[[], GradientCapture]
"""Hooks a capture, which is closed again before an optimizer steps: only what it knows of units is asked."""


class LogReplayer(UpdateReplayer):
    """Replays updates from a log (``ports.UpdateReplayer``). For the training thread, before training.

    Args:
        optimizers: Of this rank.
        catalog: Of the model.
        attach: See ``Attach``.
        finish: See ``ports.UpdateReplayer``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        catalog: Catalog,
        attach: Attach,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._spans: Spans = {operator.id: operator.spans for operator in catalog.operators}
        self._attach = attach
        self._finish = finish

    def _opened(self) -> OptimizerReplay:
        capture = self._attach()
        try:
            return OptimizerReplay(self._optimizers, capture.units(), capture.tensors())
        finally:
            capture.close()

    def fits(self, log: LoggedSteps) -> bool:
        """See ``ports.UpdateReplayer``."""
        if any(_differing(self._optimizers, update) for step in log.steps[1:] for update in _updates(log, step)):
            return False
        recorded = UpdateLayout.decoded(log.plain(log.steps[-1])["layout"], "the log")
        return set(recorded.units) == set(self._opened().units)

    def joined(self, operators: Collection[str], homes: Mapping[str, str]) -> frozenset[str]:
        """See ``ports.UpdateReplayer``."""
        return coupled_with(self._opened(), self._spans, operators, homes) if operators else frozenset()

    def check(self, log: LoggedSteps) -> None:
        """See ``ports.UpdateReplayer``.

        Raises:
            CoverageError: A gradient lacks elements, or these optimizers are not those that wrote the log.
            UnsupportedError: Their steps cannot be repeated.
            ConfigError: As ``require_together``.
        """
        replay = self._opened()
        require_together(replay, self._spans, log.anchors, log.homes)
        problems = [
            f"a step count of {name}, which no optimizer of this rank updates"
            for recorded in log.plain(log.steps[-1])["counts"]
            for name in recorded["units"]
            if (recorded["optimizer"], name) not in replay.tensors
        ]
        for step in log.steps[1:]:
            volumes = _volumes(replay, log.blocks(step))
            for update in _updates(log, step):
                problems += _differing(self._optimizers, update)
                if problems:
                    break
                for parameter, needed in self._needed(replay, log.anchors, step, update).items():
                    stored = volumes.get((update.optimizer, parameter), 0)
                    if stored != needed:
                        lacking = f"have {stored:,} of {needed:,} elements"
                        problems.append(f"gradients of {parameter} at step {step} {lacking}")
            if problems:
                raise CoverageError(f"bringing a gradient log to step {log.steps[-1]}", tuple(problems))

    def _needed(
        self, replay: OptimizerReplay, anchors: Mapping[str, int], step: int, update: Update
    ) -> Mapping[str, int]:
        """Elements of gradients of each parameter that this rank needs of an update."""
        had, volumes = set(update.parameters), dict.fromkeys(update.parameters, 0)
        for operator, anchor in anchors.items():
            if anchor < step:
                for _, piece in replay.pieces.of_operator(self._spans[operator], update.optimizer):
                    if piece.parameter in had:
                        volumes[piece.parameter] += piece.box.volume
        return volumes

    def replay(self, log: LoggedSteps) -> int:
        """See ``ports.UpdateReplayer``.

        Raises:
            ReplayDivergedError: Step counts become others than were recorded.
        """
        replay, made = self._opened(), 0
        log.load(log.steps[0])
        self._set_counts(log, log.steps[0], replay, frozenset())
        for step in log.steps[1:]:
            blocks: dict[int, list[TensorBlock]] = defaultdict(list)
            for key, offsets, values in log.gradients(step):
                number, _, parameter = key.removeprefix(KEY).partition("/")
                box = Box(offsets, tuple(values.shape))
                blocks[int(number)].append(TensorBlock(int(number), parameter, GRADIENT, box, values))
            stepped: set[tuple[int, str]] = set()
            for update in _updates(log, step):
                mine = blocks[update.optimizer]
                made += bool(replay.step(update, mine))
                units = (replay.pieces.of(block.optimizer, block.parameter) for block in mine)
                stepped |= {(unit.optimizer, unit.name) for matches in units for unit, _ in matches}
            self._set_counts(log, step, replay, stepped)
            log.load(step)
        return made

    def finish(self) -> None:
        with torch.no_grad():
            self._finish()

    def _set_counts(
        self, log: LoggedSteps, step: int, replay: OptimizerReplay, stepped: set[tuple[int, str]] | frozenset[Any]
    ) -> None:
        """Step counts become those of ``step``; those of ``stepped`` units must have come to them by themselves."""
        for recorded in log.plain(step)["counts"]:
            number, kind = int(recorded["optimizer"]), str(recorded["state"])
            for name, value in zip(recorded["units"], recorded["values"].unbind(), strict=True):
                state = self._optimizers[number].state[replay.tensors[number, name]]
                count = state.get(kind)
                if count is None:
                    state[kind] = value.clone()
                elif (number, name) not in stepped:
                    count.copy_(value)
                elif not torch.equal(count.cpu(), value.cpu()):
                    difference = f"{kind} of {name} is {count.item()}, recorded was {value.item()}"
                    raise ReplayDivergedError(step, difference, logged=True)


def _updates(log: LoggedSteps, step: int) -> Iterator[Update]:
    for recorded in log.plain(step)["updates"]:
        groups = tuple(dict(group) for group in recorded["groups"])
        names = tuple(recorded["parameters"])
        yield Update(int(recorded["optimizer"]), groups, names, recorded["grad_scale"], recorded["found_inf"])


def _volumes(
    replay: OptimizerReplay, blocks: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> Mapping[tuple[int, str], int]:
    """(optimizer, parameter) -> elements of blocks in units of this rank."""
    volumes: dict[tuple[int, str], int] = defaultdict(int)
    for key, offsets, shape in blocks:
        number, _, parameter = key.removeprefix(KEY).partition("/")
        for _, piece in replay.pieces.of(int(number), parameter):
            part = piece.part(Box(offsets, shape))
            volumes[int(number), parameter] += 0 if part is None else part.box.volume
    return volumes


def _differing(optimizers: Sequence[Optimizer], update: Update) -> list[str]:
    """Why an optimizer would round in another way than the one that made the update, or not step at all."""
    if update.optimizer >= len(optimizers):
        return [f"an update of optimizer {update.optimizer} was recorded, and this run has {len(optimizers)}"]
    groups = optimizers[update.optimizer].param_groups
    if len(groups) != len(update.groups):
        return [f"optimizer {update.optimizer} had {len(update.groups)} param groups, and has {len(groups)} here"]
    return [
        f"optimizer {update.optimizer} had {flag}={before.get(flag)}, and has {flag}={group.get(flag)} here"
        for group, before in zip(groups, update.groups, strict=True)
        for flag in sorted(IMPLEMENTATION_FLAGS)
        if before.get(flag) != group.get(flag)
    ]
