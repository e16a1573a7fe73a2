"""A log of anchors and consumed gradients in this process's memory, and what is read from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from moe_ckpt.gradient_log.optimizers import GradientBlock, OptimizerKind, detached_optimizers
from moe_ckpt.gradient_log.replaying import LoggedSteps
from moe_ckpt.gradient_log.units import Unit
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.modeling.blocks import block_in
from moe_ckpt.modeling.optimizer_state import class_name
from moe_ckpt.reading.slices import block as part_of
from tests.support.gradient_chain import LoggedStep, chain

WEIGHT, GRADIENT = "", "gradient"


@dataclass(frozen=True, eq=False)
class TensorBlock:
    """Values of a block of one of the model's tensors: a weight, a gradient, or optimizer state by its name."""

    optimizer: int
    parameter: str
    kind: str
    box: Box | None
    values: torch.Tensor


@torch.no_grad()
def load(replay, blocks):
    """Writes blocks into the weights and the optimizer state of a replay."""
    for block in blocks:
        for unit, piece in replay.pieces.of(block.optimizer, block.parameter):
            part = piece.part(block.box)
            if part is None:
                continue
            tensor = replay.tensors[unit.optimizer, unit.name]
            if block.kind != WEIGHT:
                state = replay.state_of(unit.optimizer, unit.name)
                if block.kind not in state:
                    state[block.kind] = torch.zeros_like(tensor.detach(), dtype=block.values.dtype)
                tensor = state[block.kind]
            part.view(block_in(tensor.detach())).copy_(part_of(block.values, block.box.offsets, part.box))


class Copier:
    """A ``GradientConsumer`` that clones: at once, or (late) only when it must let go.

    Late copies are right if nothing touched the gradients since the optimizer consumed them.
    """

    def __init__(self, late=False):
        self.late = late
        self.taken = []
        self.held = []
        self.releases = 0

    def consume(self, gradients):
        if self.late and gradients.stay:
            self.held.append((len(self.taken), gradients))
            self.taken.append(None)
        else:
            self.taken.append(_taken(gradients))

    def release(self, *, dropped=False):
        self.releases += bool(self.held)
        for at, gradients in self.held:
            assert gradients.changed() == ()
            self.taken[at] = _taken(gradients)
        self.held.clear()

    def take(self):
        """What was consumed since the last call: (update, units, copies), in order."""
        self.release()
        taken, self.taken = self.taken, []
        return taken


def _taken(gradients):
    copies = [torch.empty_like(each).copy_(each) for each in gradients.gradients]
    return gradients.update, tuple(gradients.units), copies


@dataclass
class MemoryLog:
    """Everything that a run did, replayed as every adapter does it: by ``LoggedSteps``.

    spans: Of all operators.
    kinds: Of the optimizers.
    units: All.
    counts: step -> state without dimensions, as ``StepGradients.plain`` has it.
    """

    spans: Mapping[str, Sequence]
    kinds: Sequence[OptimizerKind]
    units: Sequence[Unit]
    steps: dict[int, LoggedStep] = field(default_factory=dict)
    made: dict = field(default_factory=dict)
    anchors: dict = field(default_factory=dict)
    consumed: dict = field(default_factory=dict)
    counts: dict = field(default_factory=dict)

    def log(self, step, taken, anchored, counts):
        """taken: of ``Copier.take``. anchored: operator -> live blocks, of those that are anchored at the step."""
        self.made[step] = tuple(update for update, _, _ in taken)
        self.counts[step] = counts
        updated = set()
        for number, (_, units, gradients) in enumerate(taken):
            for operator, spans in self.spans.items():
                blocks = gradient_blocks(units, gradients, spans)
                if blocks:
                    updated.add(operator)
                    if operator not in anchored:
                        self.consumed[operator, step, number] = blocks
        self.anchors.update({(operator, step): copied(blocks) for operator, blocks in anchored.items()})
        gradients = frozenset(updated - set(anchored))
        self.steps[step] = LoggedStep(frozenset(updated), gradients, frozenset(anchored))

    def chains(self, step):
        return {operator: chain(self.steps, operator, step) for operator in self.spans}

    def replayed(self, step, spoil: Callable | None = None):
        """All operators at ``step``, from optimizers full of NaN: operator -> blocks."""
        replay = self.replay_of(step, spoil)
        blocks = partial(state_blocks, replay.optimizers, replay.tensors, replay.units)
        return {operator: blocks(spans) for operator, spans in self.spans.items()}

    def replay_of(self, step, spoil: Callable | None = None):
        replay = detached_optimizers(self.kinds, self.units)
        self.bring(replay, step, spoil)
        return replay

    def bring(self, replay, step, spoil: Callable | None = None):
        """spoil: gives other chains than the right ones, which ``check`` would refuse."""
        ways = self.chains(step)
        steps = _Steps(self, ways if spoil is None else spoil(ways), step, replay)
        if spoil is None:
            steps.check(replay)
        steps.repeat(replay)


class _Steps(LoggedSteps):
    """The steps of a ``MemoryLog`` from the oldest anchor on, whose anchors are loaded into ``replay``."""

    def __init__(self, log, ways, step, replay):
        self._log, self._ways, self._replay = log, ways, replay
        self.steps = list(range(min(way.anchor for way in ways.values()), step + 1))
        self.anchors = {operator: way.anchor for operator, way in ways.items()}
        self.homes = {}
        self.rows = {
            operator: dict.fromkeys((piece.parameter, piece.box) for _, piece in of_spans(log.units, spans))
            for operator, spans in log.spans.items()
        }

    def plain(self, step):
        return {"updates": [vars(update) for update in self._log.made[step]], "counts": self._log.counts[step]}

    def _blocks(self, step):
        for (operator, at, _), blocks in self._log.consumed.items():
            if at == step and step in self._ways[operator].gradients:
                yield from blocks

    def blocks(self, step):
        return [(block.optimizer, block.parameter, block.box) for block in self._blocks(step)]

    def gradients(self, step):
        for block in self._blocks(step):
            yield GradientBlock(block.optimizer, block.parameter, block.box, block.values)

    def load(self, step):
        for operator, anchor in self.anchors.items():
            if anchor == step:
                blocks = self._log.anchors[operator, anchor]
                load(self._replay, [block for block in blocks if block.box is not None])
                for block in (block for block in blocks if block.box is None and block.values.ndim):
                    for unit, _ in self._replay.pieces.of(block.optimizer, block.parameter):
                        self._replay.state_of(unit.optimizer, unit.name)[block.kind] = block.values.clone()


def kind_of(optimizer) -> OptimizerKind:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return class_name(optimizer), groups


def counts_of(optimizers, tensors):
    """Optimizer state without dimensions, as ``RunLog`` gives it."""
    return [
        {"optimizer": number, "state": kind, "units": [name], "values": torch.stack([value])}
        for (number, name), tensor in tensors.items()
        for kind, value in optimizers[number].state.get(tensor, {}).items()
        if value is not None and value.ndim == 0
    ]


def of_spans(units, spans):
    """Yields (unit, the part of a piece of it that lies in the rows of a span)."""
    for span in spans:
        for unit in units:
            for piece in (one for one in unit.pieces if one.parameter == span.parameter):
                offsets, shape = piece.box.offsets[1:], piece.box.shape[1:]
                whole = span.start is None
                rows = piece.box if whole else Box((span.start, *offsets), (span.stop - span.start, *shape))
                part = piece.part(rows)
                if part is not None:
                    yield unit, part


def state_blocks(optimizers, tensors, units, spans):
    """An operator's weights and optimizer state, as views of live memory; without a box what has no rows."""
    blocks, seen = [], set()
    for unit, piece in of_spans(units, spans):
        tensor = tensors[unit.optimizer, unit.name].detach()
        blocks.append(TensorBlock(unit.optimizer, piece.parameter, WEIGHT, piece.box, piece.view(block_in(tensor))))
        for name, value in optimizers[unit.optimizer].state.get(tensors[unit.optimizer, unit.name], {}).items():
            if value is None:
                continue
            local, box = block_in(value.detach()), None
            if value.shape == tensor.shape and value.ndim:
                local, box = piece.view(local), piece.box
            elif (unit.optimizer, piece.parameter, name) in seen:
                continue
            seen.add((unit.optimizer, piece.parameter, name))
            blocks.append(TensorBlock(unit.optimizer, piece.parameter, name, box, local))
    return blocks


def gradient_blocks(units, gradients, spans):
    """The blocks of consumed gradients that belong to the operator with ``spans``, as views of them."""
    of = {id(unit): gradient for unit, gradient in zip(units, gradients, strict=True)}
    return [
        TensorBlock(unit.optimizer, piece.parameter, GRADIENT, piece.box, piece.view(of[id(unit)]))
        for unit, piece in of_spans(units, spans)
    ]


def copied(blocks):
    return [replace(block, values=block.values.clone()) for block in blocks]


def differing(one: Mapping[str, Sequence[TensorBlock]], other: Mapping[str, Sequence[TensorBlock]]) -> list[str]:
    """Names of the tensors in which two states differ in any bit, or which only one has."""
    found = []
    for operator in sorted(one.keys() | other.keys()):
        ours, theirs = _by_key(one.get(operator, ())), _by_key(other.get(operator, ()))
        for key in sorted(ours.keys() | theirs.keys(), key=repr):
            if key not in ours or key not in theirs or not same_bits(ours[key], theirs[key]):
                found.append(f"{operator}: {key}")
    return found


def _by_key(blocks):
    return {(b.optimizer, b.parameter, b.kind, b.box): b.values for b in blocks}


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Recorder:
    """Logs a run's steps: everything at each, so that any of it can be an anchor.

    Gradients are copied as late as they may be: nothing is asked of the copier before the run is over.

    Args:
        optimizers: Live ones.
        spans: Of all operators.
        attach: (consumer) -> ``GradientCapture``.
    """

    def __init__(self, optimizers, spans, attach):
        self.optimizers, self.spans = optimizers, spans
        self.copier = Copier(late=True)
        self.capture = attach(self.copier)
        self.units = self.capture.units()
        self.tensors = {
            (unit.optimizer, unit.name): parameter
            for unit, parameter in zip(
                self.units, (p for o in optimizers for g in o.param_groups for p in g["params"]), strict=True
            )
        }
        self.kinds = [kind_of(optimizer) for optimizer in optimizers]
        self.states = [self.state()]
        self.scalars = [counts_of(self.optimizers, self.tensors)]
        self.counts = [0]

    def state(self):
        found = {op: state_blocks(self.optimizers, self.tensors, self.units, s) for op, s in self.spans.items()}
        return {operator: copied(blocks) for operator, blocks in found.items()}

    def step(self):
        self.states.append(self.state())
        self.scalars.append(counts_of(self.optimizers, self.tensors))
        self.counts.append(len(self.copier.taken))

    def finish(self, window=4):
        """(log with rolling anchors, state after each step). Can be pickled."""
        self.copier.release()
        self.capture.close()
        log = MemoryLog(self.spans, self.kinds, self.units)
        log.log(0, [], self.states[0], self.scalars[0])
        order = list(self.spans)
        for at in range(1, len(self.states)):
            anchored = {op: self.states[at][op] for op in order[at % window :: window]}
            log.log(at, self.copier.taken[self.counts[at - 1] : self.counts[at]], anchored, self.scalars[at])
        return log, self.states


def require_exact(log, states):
    """Every step can be reached, and is what it was."""
    for at in range(1, len(states)):
        found = differing(states[at], log.replayed(at))
        assert found == [], f"step {at}: {len(found)} tensors differ, as {found[:5]}"
