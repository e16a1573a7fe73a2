"""Repeats the updates of a gradient log on the units of one rank, from the anchors of its oldest step on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from moe_ckpt.errors import ConfigError, CoverageError, ReplayDivergedError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.format.shard import GRADIENT as KEY
from moe_ckpt.gradient_log.optimizers import GradientBlock, OptimizerReplay, Update
from moe_ckpt.gradient_log.units import Unit, UnitBlock, UpdateLayout
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.modeling.optimizer_state import IMPLEMENTATION_FLAGS
from moe_ckpt.ports import StateTensor
from moe_ckpt.reading.index import StoredSlice, TensorIndex, homes_of
from moe_ckpt.reading.memory.slot_storage import LoggedSnapshot, OpenedMemory
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import MODEL, targets_of, write_targets

PLAIN = "gradient_log"
"""Key of the log in the plain state of a step."""
Parts = Mapping[str, Sequence[tuple[Unit, UnitBlock]]]
"""Operator -> the parts of units that hold its weights, or their masters."""


class LoggedSteps:
    """The part of a gradient log that the units of one rank need, from the oldest anchor to the last step.

    Optimizers of a run before it trains, or optimizers without a model, repeat its updates.

    Args:
        opened: The last step.
        rank: The rank that has the units.
        boxes: Parameter -> its blocks in these units.

    Attributes:
        steps: Steps of the snapshots, ascending.
        anchors: Operator -> step of its anchor.
        homes: Parameter -> the operator that has optimizer state of it without having rows of it.
        rows: Operator -> (parameter, box) of the blocks of weights that it has, on all ranks.
        needed: Step -> the gradients that it consumed, in these blocks, of operators with older anchors.
    """

    def __init__(self, opened: OpenedMemory, rank: int, boxes: Mapping[str, Sequence[Box]]) -> None:
        self._reader, self._rank = opened.reader, rank
        self._index: TensorIndex = opened.reader.index(opened.manifest)
        self._snapshots = {snapshot.manifest.step: snapshot.manifest for snapshot in opened.logged}
        self._plain: dict[int, Mapping[str, Any]] = {}
        self.steps: Sequence[int] = list(self._snapshots)
        self.anchors: Mapping[str, int] = anchors_of(opened)
        self.homes: Mapping[str, str] = homes_of(self._index.tensors)
        self.rows: Mapping[str, Sequence[tuple[str, Box]]] = rows_of(self._index.tensors)
        self.needed = {one.manifest.step: list(needed_gradients(one, self.anchors, boxes)) for one in opened.logged}

    def plain(self, step: int) -> Mapping[str, Any]:
        """Returns ``StepGradients.plain`` of the rank at a step.

        Raises:
            CoverageError, DamagedError: As ``plain_of``.
        """
        if step not in self._plain:
            self._plain[step] = self._recorded(plain_of(self._reader, self._snapshots[step], self._rank))
        return self._plain[step]

    def _recorded(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the part of a step's plain state that describes these units."""
        return plain

    def blocks(self, step: int) -> Sequence[tuple[int, str, Box]]:
        """Returns (optimizer, parameter, box) of the gradients that a step applies to operators with older anchors."""
        return [(*_updated_by(stored.entry.key), stored.entry.box) for stored in self.needed[step]]

    def gradients(self, step: int) -> Iterator[GradientBlock]:
        """Yields these gradients."""
        for stored, values in self._reader.read_many(self.needed[step]):
            yield GradientBlock(*_updated_by(stored.entry.key), stored.entry.box, values)

    def tensors(self) -> Sequence[StateTensor]:
        """Returns the weights and the optimizer state that anchors are written into."""
        raise NotImplementedError

    def load(self, step: int) -> None:
        """Writes the anchors of ``step`` into ``tensors``."""
        slices = {
            key: [stored for stored in group if self.anchors[stored.entry.operator] == step]
            for key, group in self._index.tensors.items()
        }
        write_targets(self._reader, targets_of(slices, self.tensors()))

    # --- updates ---

    def fits(self, replay: OptimizerReplay) -> bool:
        """Returns whether optimizers update the same tensors as the optimizers that wrote the log."""
        if any(_differing(replay.optimizers, update) for step in self.steps[1:] for update in _updates(self, step)):
            return False
        recorded = UpdateLayout.decoded(self.plain(self.steps[-1])["layout"], "the log")
        return set(recorded.units) == set(replay.units)

    def check(self, replay: OptimizerReplay) -> None:
        """Raises unless ``repeat`` is possible. Changes nothing.

        Raises:
            CoverageError: A gradient lacks elements, or these optimizers differ from those that wrote the log.
            UnsupportedError: Steps of an optimizer cannot be repeated.
            ConfigError: As ``require_together``.
        """
        numbers = range(len(replay.optimizers))
        parts: Parts = {
            operator: [part for name, box in blocks for n in numbers for part in replay.pieces.within(n, name, box)]
            for operator, blocks in self.rows.items()
        }
        require_together(replay, parts, self.anchors, self.homes)
        problems = [
            f"a step count of {name}, which no optimizer of this rank updates"
            for recorded in self.plain(self.steps[-1])["counts"]
            for name in recorded["units"]
            if (recorded["optimizer"], name) not in replay.tensors
        ]
        for step in self.steps[1:]:
            volumes = _volumes(replay, self.blocks(step))
            for update in _updates(self, step):
                problems += _differing(replay.optimizers, update)
                if problems:
                    break
                for parameter, needed in self._needed(parts, step, update).items():
                    stored = volumes.get((update.optimizer, parameter), 0)
                    if stored != needed:
                        lacking = f"have {stored:,} of {needed:,} elements"
                        problems.append(f"gradients of {parameter} at step {step} {lacking}")
            if problems:
                raise CoverageError(f"bringing a gradient log to step {self.steps[-1]}", tuple(problems))

    def _needed(self, parts: Parts, step: int, update: Update) -> Mapping[str, int]:
        """Returns for each parameter the number of gradient elements that this rank needs for an update."""
        volumes = dict.fromkeys(update.parameters, 0)
        for operator, pieces in parts.items():
            for unit, piece in pieces if self.anchors[operator] < step else ():
                if unit.optimizer == update.optimizer and piece.parameter in volumes:
                    volumes[piece.parameter] += piece.box.volume
        return volumes

    def repeat(self, replay: OptimizerReplay) -> int:
        """Brings what ``replay`` updates to the last step. Returns the number of updates made.

        Raises:
            ReplayDivergedError: A step count differs from what was recorded.
        """
        made = 0
        self.load(self.steps[0])
        _set_counts(self, self.steps[0], replay, set())
        for step in self.steps[1:]:
            blocks: dict[int, list[GradientBlock]] = defaultdict(list)
            for gradient in self.gradients(step):
                blocks[gradient.optimizer].append(gradient)
            stepped: set[tuple[int, str]] = set()
            for update in _updates(self, step):
                units = replay.step(update, blocks[update.optimizer])
                made, stepped = made + bool(units), stepped | units
            _set_counts(self, step, replay, stepped)
            self.load(step)
        return made


def _set_counts(log: LoggedSteps, step: int, replay: OptimizerReplay, stepped: Collection[tuple[int, str]]) -> None:
    """Sets step counts to those of ``step``. Counts of ``stepped`` units must have reached these by their updates."""
    for recorded in log.plain(step)["counts"]:
        number, kind = int(recorded["optimizer"]), str(recorded["state"])
        for name, value in zip(recorded["units"], recorded["values"].unbind(), strict=True):
            state = replay.state_of(number, name)
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


def _volumes(replay: OptimizerReplay, blocks: Iterable[tuple[int, str, Box]]) -> Mapping[tuple[int, str], int]:
    """Returns (optimizer, parameter) -> number of elements of ``blocks`` in this rank's units."""
    volumes: dict[tuple[int, str], int] = defaultdict(int)
    for number, parameter, box in blocks:
        volumes[number, parameter] += sum(part.box.volume for _, part in replay.pieces.within(number, parameter, box))
    return volumes


def _differing(optimizers: Sequence[Optimizer], update: Update) -> list[str]:
    """Returns why an optimizer would round differently than the one that made the update, or could not step at all."""
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


def require_together(replay: OptimizerReplay, parts: Parts, steps: Mapping[str, int], homes: Mapping[str, str]) -> None:
    """Raises if parts of a coupled parameter are anchored at different steps (``Coupling.PARAMETERS``).

    Args:
        replay: The optimizers.
        parts: Of the operators in ``steps``.
        steps: Operator -> step of its anchor.
        homes: As ``LoggedSteps.homes``: state that all rows share must be of the same step as the rows.

    Raises:
        ConfigError: There are such anchors.
    """
    anchors: dict[tuple[int, str], tuple[str, int]] = {}
    for unit, operator, has in _sharing(replay, parts, homes):
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


def _sharing(
    replay: OptimizerReplay, parts: Parts, homes: Mapping[str, str]
) -> Iterator[tuple[tuple[int, str], str, str]]:
    """Yields for coupled units ((optimizer, name of the unit), an operator that has a part of it, what part)."""
    for operator, pieces in parts.items():
        for unit, piece in pieces:
            if replay.coupled(unit.optimizer):
                key = unit.optimizer, unit.name
                yield key, operator, "rows"
                if piece.parameter in homes:
                    yield key, homes[piece.parameter], "optimizer state"


def rows_of(tensors: Mapping[str, Iterable[StoredSlice]]) -> Mapping[str, Sequence[tuple[str, Box]]]:
    """Returns ``LoggedSteps.rows`` for the slices of each tensor, by its key."""
    rows: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for key, group in tensors.items():
        for stored in group if key.startswith(MODEL) else ():
            rows[stored.entry.operator].append((key.removeprefix(MODEL), stored.entry.box))
    return rows


def needed_gradients(
    snapshot: LoggedSnapshot, anchors: Mapping[str, int], boxes: Mapping[str, Sequence[Box]]
) -> Iterator[StoredSlice]:
    """Yields the gradients of a snapshot that a replay applies to these blocks: of operators with older anchors."""
    for stored in snapshot.gradients:
        if anchors[stored.entry.operator] < snapshot.manifest.step and any(
            box.overlap(stored.entry.box) for box in boxes.get(_updated_by(stored.entry.key)[1], ())
        ):
            yield stored


def plain_of(reader: StoreReader, snapshot: Manifest, rank: int) -> Mapping[str, Any]:
    """Returns what a rank recorded about the updates of a snapshot's step.

    Raises:
        CoverageError: The rank recorded nothing.
        DamagedError: As ``StoreReader.state``.
    """
    plain = reader.state(snapshot, rank).get(PLAIN)
    if not isinstance(plain, Mapping):
        path = state_path(snapshot.directory, rank)
        raise CoverageError(f"gradient log of {snapshot.directory}", (f"{path} describes no updates",))
    return plain


def anchors_of(opened: OpenedMemory) -> Mapping[str, int]:
    """Returns operator -> step of its anchor. Operators that are not ``chained`` are loaded at the last step."""
    manifest, chained = opened.manifest, opened.chained
    return {op: record.step if op in chained else manifest.step for op, record in manifest.operators.items()}


def _updated_by(key: str) -> tuple[int, str]:
    """Returns the number of the optimizer and the parameter that a gradient is of."""
    number, _, parameter = key.removeprefix(KEY).partition("/")
    return int(number), parameter
