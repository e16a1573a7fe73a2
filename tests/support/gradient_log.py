"""A log of anchors and consumed gradients in this process's memory, and what is read from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from moe_ckpt.core.gradient_chain import LoggedStep, chains
from moe_ckpt.gradients.detached import OptimizerKind, detached, kind_of
from moe_ckpt.gradients.replay import gradient_blocks, state_blocks
from moe_ckpt.gradients.running import replay_chains
from moe_ckpt.gradients.units import Pieces, Unit
from moe_ckpt.gradients.updates import TensorBlock


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

    def release(self):
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
    """A ``GradientSource`` over everything that a run did.

    spans: Of all operators.
    kinds: Of the optimizers.
    units: All.
    """

    spans: Mapping[str, Sequence]
    kinds: Sequence[OptimizerKind]
    units: Sequence[Unit]
    steps: dict[int, LoggedStep] = field(default_factory=dict)
    made: dict = field(default_factory=dict)
    anchors: dict = field(default_factory=dict)
    consumed: dict = field(default_factory=dict)

    def log(self, step, taken, anchored):
        """taken: of ``Copier.take``. anchored: operator -> live blocks, of those that are anchored at the step."""
        self.made[step] = tuple(update for update, _, _ in taken)
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

    def updates(self, step):
        return self.made[step]

    def anchor(self, operator, step):
        return self.anchors[operator, step]

    def gradients(self, operator, step, number):
        return self.consumed.get((operator, step, number), ())

    def replayed(self, step, spoil: Callable | None = None):
        """All operators at ``step``, from optimizers full of NaN: operator -> blocks."""
        replay = self.replay_of(step, spoil)
        return {operator: replay.read(spans) for operator, spans in self.spans.items()}

    def replay_of(self, step, spoil: Callable | None = None):
        ways = chains(self.steps, self.spans, step)
        if spoil is not None:
            ways = spoil(ways)
        replay = detached(self.kinds, self.units)
        replay_chains(replay, self.spans, ways, step, self)
        return replay


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
        self.pieces = Pieces(self.units)
        self.tensors = {
            (unit.optimizer, unit.name): parameter
            for unit, parameter in zip(
                self.units, (p for o in optimizers for g in o.param_groups for p in g["params"]), strict=True
            )
        }
        self.kinds = [kind_of(optimizer) for optimizer in optimizers]
        self.states = [self.state()]
        self.counts = [0]

    def state(self):
        found = {op: state_blocks(self.optimizers, self.tensors, self.pieces, s) for op, s in self.spans.items()}
        return {operator: copied(blocks) for operator, blocks in found.items()}

    def step(self):
        self.states.append(self.state())
        self.counts.append(len(self.copier.taken))

    def finish(self, window=4):
        """(log with rolling anchors, state after each step). Can be pickled."""
        self.copier.release()
        self.capture.close()
        log = MemoryLog(self.spans, self.kinds, self.units)
        log.log(0, [], self.states[0])
        order = list(self.spans)
        for at in range(1, len(self.states)):
            anchored = {op: self.states[at][op] for op in order[at % window :: window]}
            log.log(at, self.copier.taken[self.counts[at - 1] : self.counts[at]], anchored)
        return log, self.states


def require_exact(log, states):
    """Every step can be reached, and is what it was."""
    for at in range(1, len(states)):
        found = differing(states[at], log.replayed(at))
        assert found == [], f"step {at}: {len(found)} tensors differ, as {found[:5]}"
