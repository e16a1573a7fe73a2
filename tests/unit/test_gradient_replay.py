"""Replay from anchors and gradients: bits after every step, and every fact that they need."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

from moe_ckpt.core.operators import Span
from moe_ckpt.errors import ConfigError, CoverageError, ReplayDivergedError, UnsupportedError
from moe_ckpt.format.tree import decode_tree, encode_tree
from moe_ckpt.gradient_log.capture import GradientCapture
from moe_ckpt.gradient_log.optimizers import (
    Coupling,
    OptimizerReplay,
    Update,
    coupling_of,
    detached_optimizers,
    register,
)
from moe_ckpt.gradient_log.replaying import require_together
from moe_ckpt.gradient_log.units import whole_unit
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.recovery.replay import are_plain_states_equal
from tests.support.gradient_chain import Chain
from tests.support.gradient_log import (
    GRADIENT,
    WEIGHT,
    Copier,
    MemoryLog,
    TensorBlock,
    copied,
    counts_of,
    differing,
    gradient_blocks,
    kind_of,
    load,
    state_blocks,
)

EXPERTS, WINDOW = 7, 5
UNIT = whole_unit("bias", 0, 0, torch.zeros(EXPERTS, 13))
STACKED = ("up", "down")


class Tiny(nn.Module):
    """Stacked experts of sizes that fill no vector register, a transposed matrix, a vector, a scalar, an idle part."""

    def __init__(self, dtype=torch.float32, rarely=3):
        super().__init__()
        self.rarely = rarely
        make = torch.Generator().manual_seed(7)
        self.up = nn.Parameter(torch.randn(EXPERTS, 13, 11, generator=make).to(dtype))
        self.down = nn.Parameter(torch.randn(EXPERTS, 11, 13, generator=make).to(dtype))
        self.gate = nn.Parameter(torch.randn(EXPERTS, 13, generator=make).to(dtype))
        self.turned = nn.Parameter(torch.randn(13, 5, generator=make).to(dtype).t())
        self.norm = nn.Parameter(torch.ones(13, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
        self.rare = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x, step):
        y = torch.einsum("bi,eij->bej", x * self.norm, self.up).tanh()
        y = torch.einsum("bej,eji->bei", y, self.down) * (x @ self.gate.t()).softmax(-1)[..., None]
        out = (y.sum(1) @ self.turned.t()) * self.scale
        return out * self.rare.sum() if step % self.rarely == 0 else out


def spans_of(model):
    """Experts by row, everything else by itself."""
    found = {f"expert/0/{e}": [Span(name, e, e + 1) for name in STACKED] for e in range(EXPERTS)}
    return found | {f"non_expert/{name}": [Span(name)] for name, _ in model.named_parameters() if name not in STACKED}


def whole_spans(model):
    """Stacks as a whole, for optimizers that couple rows."""
    return {f"non_expert/{name}": [Span(name)] for name, _ in model.named_parameters()}


@dataclass(frozen=True)
class Kind:
    """How a run trains."""

    make: object
    dtype: torch.dtype = torch.float32
    masters: bool = False
    clip: float | None = 0.5
    scaler: bool = False
    whole: bool = False
    rarely: int = 3
    steps: int = 200


def adamw(**flags):
    def make(groups):
        return torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.97), **flags)

    return make


def sgd(**flags):
    return lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, **flags)


FUSED, FOREACH, LOOP = {"fused": True}, {"foreach": True}, {"foreach": False}
BF16 = torch.bfloat16
KINDS = {
    "adamw-fused": Kind(adamw(**FUSED)),
    "adamw-foreach": Kind(adamw(**FOREACH)),
    "adamw-loop": Kind(adamw(**LOOP)),
    "adamw-fused-bf16": Kind(adamw(**FUSED), BF16),
    "adamw-loop-amsgrad-bf16": Kind(adamw(**LOOP, amsgrad=True), BF16, steps=40),
    "adamw-foreach-masters": Kind(adamw(**FOREACH), BF16, masters=True),
    "adamw-fused-masters": Kind(adamw(**FUSED, maximize=True), BF16, masters=True),
    "adamw-fused-scaler": Kind(adamw(**FUSED), scaler=True, clip=None),
    "adamw-loop-scaler": Kind(adamw(**LOOP), scaler=True),
    "sgd-fused": Kind(sgd(**FUSED, nesterov=True), rarely=1, steps=40),  # torch's own kernel wants all momenta or none
    "sgd-foreach": Kind(sgd(**FOREACH)),
    "sgd-loop-bf16": Kind(sgd(**LOOP, dampening=0.0), BF16, steps=40),
    "adafactor-foreach": Kind(lambda groups: torch.optim.Adafactor(groups, foreach=True), whole=True),
    "adafactor-loop-bf16": Kind(
        lambda groups: torch.optim.Adafactor(groups, foreach=False), BF16, whole=True, steps=40
    ),
    "nadam": Kind(lambda groups: torch.optim.NAdam(groups), steps=30),
    "adagrad": Kind(lambda groups: torch.optim.Adagrad(groups), steps=30),
    "rmsprop": Kind(lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True), steps=30),
    "asgd": Kind(lambda groups: torch.optim.ASGD(groups), steps=30),
}


class Run:
    """Trains ``Tiny`` and logs it; with a schedule, weight decay, clipping, and gradients that are sometimes None."""

    def __init__(self, kind, window=WINDOW):
        self.kind, self.window = kind, window
        self.model = Tiny(kind.dtype, kind.rarely)
        of_model = dict(self.model.named_parameters())
        self.updated = {name: nn.Parameter(p.detach().float()) if kind.masters else p for name, p in of_model.items()}
        matrices = [p for p in self.updated.values() if p.ndim > 1]
        others = [p for p in self.updated.values() if p.ndim <= 1]
        self.optimizer = kind.make(
            [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, T_0=17)
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2) if kind.scaler else None
        self.copier = Copier(late=True)
        names = {id(p): name for name, p in self.updated.items()}
        describe = lambda number, group, p: whole_unit(names[id(p)], number, group, p)  # noqa: E731
        self.capture = GradientCapture([self.optimizer], describe, self.copier)
        self.capture.release_before([self.optimizer], "zero_grad")
        units = self.capture.units()
        self.tensors = {(0, name): p for name, p in self.updated.items()}
        self.units = units
        spans = whole_spans(self.model) if kind.whole else spans_of(self.model)
        self.log = MemoryLog(spans, [kind_of(self.optimizer)], units)
        self.log.log(0, [], {op: self.anchor(op) for op in spans}, [])
        self.skipped = 0

    def anchor(self, operator):
        return state_blocks([self.optimizer], self.tensors, self.units, self.log.spans[operator])

    def state(self):
        return {operator: self.anchor(operator) for operator in self.log.spans}

    def step(self, at):
        self._compute(at)
        self.optimizer.zero_grad()  # hands over what was consumed before
        taken = self.copier.take()
        self.skipped += not taken
        order = list(self.log.spans)
        anchored = {op: self.anchor(op) for op in order[at % self.window :: self.window]} if self.window else {}
        self.log.log(at, taken, anchored, counts_of([self.optimizer], self.tensors))
        self.schedule.step()

    def _compute(self, at):
        x = torch.randn(4, 13, generator=torch.Generator().manual_seed(at)).to(self.kind.dtype)
        loss = self.model(x, at).float().square().mean()
        if self.scaler and at % 7 == 3:
            loss = loss * torch.inf  # an overflow
        self.model.zero_grad()
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.kind.masters:
            for name, p in self.model.named_parameters():
                self.updated[name].grad = None if p.grad is None else p.grad.float()
        if self.scaler and self.kind.clip:
            self.scaler.unscale_(self.optimizer)
        if self.kind.clip:
            nn.utils.clip_grad_norm_(self.updated.values(), self.kind.clip)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.kind.masters:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.copy_(self.updated[name])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_bits_are_equal_after_every_step(kind):
    run = Run(kind)
    for at in range(1, kind.steps + 1):
        run.step(at)
        assert differing(run.state(), run.log.replayed(at)) == [], f"step {at}"
    if kind.scaler:
        stayed = sum(bool(u.found_inf) for made in run.log.made.values() for u in made if u.found_inf is not None)
        assert run.skipped + stayed > 3


@pytest.fixture(scope="module")
def trained():
    run = Run(KINDS["adamw-foreach"])
    for at in range(1, 13):
        run.step(at)
    return run


def test_a_long_chain_is_exact_too(trained):
    """All operators from their oldest anchors, 12 updates back, though newer ones are there."""

    def oldest(ways):
        logged = trained.log.steps
        updated = {op: [at for at in range(1, 13) if op in logged[at].updated] for op in ways}
        return {op: Chain(op, 0, tuple(updated[op])) for op in ways}

    log = Run(KINDS["adamw-foreach"], window=None)
    for at in range(1, 13):
        log.step(at)
    assert differing(trained.state(), log.log.replayed(12, oldest)) == []


@pytest.mark.parametrize("name", ["adamw-fused", "sgd-foreach", "adafactor-foreach"])
def test_live_optimizers_that_were_used_come_to_a_step_and_train_on_alike(name):
    """A process that lost its state takes its own optimizers; what they did before leaves nothing behind."""
    run, again = Run(KINDS[name]), Run(KINDS[name])
    for at in range(1, 9):
        run.step(at)
    for at in range(50, 53):
        again.step(at)
    again.capture.close()
    with torch.no_grad():
        for parameter in again.updated.values():
            parameter.fill_(torch.nan)
    again.optimizer.state.clear()  # as a restore prepares it
    run.log.bring(OptimizerReplay([again.optimizer], again.log.units, again.tensors), 8)
    assert differing(run.state(), again.state()) == []
    again.schedule.load_state_dict(run.schedule.state_dict())
    for group, of_run in zip(again.optimizer.param_groups, run.optimizer.param_groups, strict=True):
        group["lr"] = of_run["lr"]  # the schedule set it after the update
    for at in range(9, 12):
        run.step(at)
        again.step(at)
    assert differing(run.state(), again.state()) == []


# --- every needed fact, switched off ---


def spoiled(log, **changes):
    """The log with every update's fields replaced: by functions of (step, update)."""
    made = {
        at: tuple(replace(u, **{name: change(at, u) for name, change in changes.items()}) for u in updates)
        for at, updates in log.made.items()
    }
    return replace(log, made=made)


def is_other(run, log, step, spoil=None):
    """Whether a log does not lead to the run's state: step counts say so, or some bits do."""
    try:
        return differing(run.state(), log.replayed(step, spoil)) != []
    except ReplayDivergedError:
        return True


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas", "eps"])
def test_hyperparameters_are_needed(trained, key):
    other = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-6}
    log = spoiled(trained.log, groups=lambda at, u: tuple({**g, key: other[key]} for g in u.groups))
    assert is_other(trained, log, 12)


def test_hyperparameters_are_needed_of_each_step(trained):
    last = trained.log.made[12][0].groups
    log = spoiled(trained.log, groups=lambda at, u: last)
    assert is_other(trained, log, 12)


def test_gradients_are_needed_as_they_were_clipped(trained):
    consumed = {
        key: [replace(b, values=b.values * 1.0000002) for b in blocks] for key, blocks in trained.log.consumed.items()
    }
    assert is_other(trained, replace(trained.log, consumed=consumed), 12)


def test_which_parameters_had_a_gradient_is_needed(trained):
    """Adam steps a parameter whose gradient is zero, not one that has none."""
    rare = "non_expert/rare"
    at = max(step for step, held in trained.log.steps.items() if rare not in held.updated | held.anchored)
    way = trained.log.chains(at)[rare]
    assert at not in way.gradients
    log = spoiled(trained.log, parameters=lambda step, u: (*u.parameters, "rare") if step == at else u.parameters)
    zero = [replace(b, kind=GRADIENT, values=torch.zeros(3)) for b in trained.log.anchors[rare, way.anchor][:1]]
    log = replace(log, consumed={**log.consumed, (rare, at, 0): zero})
    also = lambda ways: {**ways, rare: Chain(rare, way.anchor, (*way.gradients, at))}  # noqa: E731
    with pytest.raises(ReplayDivergedError, match="step of rare"):
        log.replayed(at, also)


@pytest.mark.parametrize("name", ["adamw-fused-scaler", "adamw-loop-scaler"])
def test_skipped_steps_are_needed(name):
    run = Run(KINDS[name])
    for at in range(1, 12):
        run.step(at)
    assert differing(run.state(), run.log.replayed(11)) == []
    if name == "adamw-fused-scaler":
        log = spoiled(run.log, found_inf=lambda at, u: torch.zeros(()))
        log = replace(log, anchors=run.log.anchors)
    else:
        skipped = max(at for at, held in run.log.steps.items() if at and not held.updated)
        before = max(at for at in run.log.made if at < skipped and run.log.made[at])
        made = {**run.log.made, skipped: run.log.made[before]}
        steps = {**run.log.steps, skipped: replace(run.log.steps[before], anchored=frozenset())}
        again = {(op, skipped, 0): blocks for (op, at, _), blocks in run.log.consumed.items() if at == before}
        steps[skipped] = replace(steps[skipped], updated=steps[skipped].gradients)
        anchors = {key: blocks for key, blocks in run.log.anchors.items() if key[1] != skipped}
        log = replace(run.log, made=made, steps=steps, consumed={**run.log.consumed, **again}, anchors=anchors)
    assert is_other(run, log, 11, lambda ways: ways)


def test_the_loss_scale_is_needed_by_a_fused_optimizer():
    run = Run(KINDS["adamw-fused-scaler"])
    for at in range(1, 8):
        run.step(at)
    log = spoiled(run.log, grad_scale=lambda at, u: None)
    assert is_other(run, log, 7)


def test_the_order_of_anchors_is_needed(trained):
    """An anchor put in a step late misses an update: its rows do, or the step count contradicts."""

    def late(ways):
        return {
            op: Chain(op, way.anchor, way.gradients[1:]) if op == "expert/0/1" and way.gradients else way
            for op, way in ways.items()
        }

    assert trained.log.chains(12)["expert/0/1"].gradients
    assert is_other(trained, trained.log, 12, late)


def test_step_counts_of_another_step_contradict_the_updates(trained):
    log = replace(trained.log, counts={**trained.log.counts, 12: trained.log.counts[11]})
    with pytest.raises(ReplayDivergedError, match=r"(?s)step of .*run moe-ckpt memory clear on every node"):
        log.replayed(12)


def test_a_learning_rate_that_is_a_tensor_is_not_written_to_where_it_was_recorded():
    """What was recorded of the first update is needed again: by other units of the same rank."""
    recorded = {"lr": torch.tensor(0.1), "momentum": 0.0, "betas": [0.1, 0.2]}
    kind = "torch.optim.SGD", [recorded]
    unit = whole_unit("bias", 0, 0, torch.zeros(3))
    for _ in range(2):
        replay = detached_optimizers([kind], [unit])
        load(replay, [TensorBlock(0, "bias", WEIGHT, unit.pieces[0].box, torch.zeros(3))])
        for lr in (0.1, 0.2):
            update = Update(0, ({"lr": torch.tensor(lr)},), ("bias",))
            replay.step(update, [TensorBlock(0, "bias", GRADIENT, unit.pieces[0].box, torch.ones(3))])
    assert recorded["lr"].item() == torch.tensor(0.1).item()


def test_a_row_stepped_alone_by_a_fused_kernel_comes_out_otherwise():
    """Why whole units are stepped."""
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(7, 13, 11))
    rows = [nn.Parameter(row.detach().clone()) for row in whole]
    gradients = torch.randn(5, 7, 13, 11)
    for parameters, pick in (([whole], lambda g: [g]), (rows, list)):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
        for gradient in gradients:
            for parameter, each in zip(parameters, pick(gradient), strict=True):
                parameter.grad = each.clone()
            optimizer.step()
    assert any(not torch.equal(whole[at], row) for at, row in enumerate(rows))


# --- what is refused ---


def test_a_gradient_of_which_a_part_is_missing(trained):
    key = next(key for key in trained.log.consumed if key[0] == "expert/0/1" and key[1] == 12)
    log = replace(trained.log, consumed={**trained.log.consumed, key: trained.log.consumed[key][:1]})
    with pytest.raises(CoverageError, match=r"gradients of down at step 12 have [\d,]+ of [\d,]+ elements"):
        log.replayed(12)


def test_rows_of_a_coupled_parameter_anchored_at_different_steps():
    run = Run(replace(KINDS["adafactor-loop-bf16"], whole=False))
    for at in range(1, 7):
        run.step(at)
    with pytest.raises(ConfigError, match="anchor them together"):
        run.log.replayed(6)


def test_state_without_rows_of_a_coupled_parameter_anchored_at_another_step():
    replay = detached_optimizers([kind_of(torch.optim.Adafactor([nn.Parameter(torch.zeros(EXPERTS, 13))]))], [UNIT])
    boxes = [Box((e, 0), (1, 13)) for e in range(EXPERTS)]
    parts = {f"expert/0/{e}": list(replay.pieces.within(0, "bias", box)) for e, box in enumerate(boxes)}
    steps = dict.fromkeys(parts, 7) | {"gate/0": 8}
    require_together(replay, parts, steps, {})
    require_together(replay, parts, {**steps, "gate/0": 7}, {"bias": "gate/0"})
    with pytest.raises(
        ConfigError, match=r"gate/0, with optimizer state of bias, is anchored at step 8 and expert/0/0"
    ):
        require_together(replay, parts, steps, {"bias": "gate/0"})


def test_other_param_groups(trained):
    [(name, groups)] = trained.log.kinds
    log = replace(trained.log, kinds=[(name, [*groups, {}])])
    with pytest.raises(CoverageError, match="optimizer 0 had 2 param groups, and has 3 here"):
        log.replayed(12)


class Shampoo(torch.optim.SGD):
    pass


class Unheard(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be stepped again.*one history for all"),
        (torch.optim.SparseAdam, "SparseAdam cannot.*sparse"),
        (Shampoo, r"Shampoo cannot.*as MoEtion\(recompute=True\) and GradientLog.*preconditioners.*recompute=False"),
        (Unheard, r"Unheard may couple parameters.*MoEtion\(recompute=True\).*register.*recompute=False"),
    ],
)
def test_optimizers_that_couple_parameters_are_refused_by_name(optimizer, said):
    with pytest.raises(UnsupportedError, match=said):
        GradientCapture([optimizer([nn.Parameter(torch.ones(2))], lr=0.1)], whole_unit, Copier())


def test_a_class_that_is_registered_is_stepped():
    class Mine(torch.optim.SGD):
        pass

    register(Mine, Coupling.ELEMENTS)
    optimizer = Mine([nn.Parameter(torch.ones(2))], lr=0.1)
    assert coupling_of(optimizer) is Coupling.ELEMENTS
    unit = whole_unit("w", 0, 0, torch.ones(2))
    assert isinstance(detached_optimizers([kind_of(optimizer)], [unit]).optimizers[0], Mine)


def test_sparse_gradients_are_refused_by_parameter():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    GradientCapture([optimizer], lambda n, g, p: whole_unit("table", n, g, p), Copier())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"the gradient of table is torch.sparse_coo"):
        optimizer.step()


def test_a_gradient_with_other_strides_is_refused():
    parameter = nn.Parameter(torch.ones(3, 5))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    GradientCapture([optimizer], lambda n, g, p: whole_unit("w", n, g, p), Copier())
    parameter.grad = torch.ones(5, 3).t()
    with pytest.raises(UnsupportedError, match=r"the gradient of w .*strides \(1, 3\)"):
        optimizer.step()


# --- capture ---


def parts(late=False, **flags):
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], **flags)
    copier = Copier(late)
    capture = GradientCapture([optimizer], lambda n, g, p: whole_unit("w", n, g, p), copier)
    return parameter, optimizer, copier, capture


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_that_a_closure_computes_are_seen_when_it_returns(by_name):
    parameter, optimizer, copier, _ = parts()

    def closure():
        optimizer.zero_grad()
        loss = (parameter * 3).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss.item() == 12.0
    [(update, units, [gradient])] = copier.take()
    assert gradient.tolist() == [3.0] * 4
    assert (update.parameters, units[0].name) == (["w"], "w")


def test_a_parameter_that_changes_its_group_or_is_replaced_is_described_anew():
    first, second, third = (nn.Parameter(torch.full((2,), number)) for number in (1.0, 2.0, 3.0))
    names = {id(first): "first", id(second): "second", id(third): "third"}
    optimizer = torch.optim.SGD([{"params": [first, second]}, {"params": [third], "lr": 0.2}], lr=0.1)
    copier = Copier()
    capture = GradientCapture([optimizer], lambda n, g, p: whole_unit(names[id(p)], n, g, p), copier)
    before = capture.tensors()
    assert capture.tensors() is before, "nothing has changed"
    lists = [group["params"] for group in optimizer.param_groups]
    lists[1].append(lists[0].pop())
    moved = capture.tensors()
    assert moved is not before, "who goes by the object would use the former groups"
    for parameter in (first, second, third):
        parameter.grad = torch.ones(2)
    optimizer.step()
    [(_, units, _)] = copier.take()
    assert [(unit.name, unit.group) for unit in units] == [("first", 0), ("third", 1), ("second", 1)]
    lists[0][0] = another = nn.Parameter(torch.zeros(2))
    names[id(another)] = "first"
    assert capture.tensors()[0, "first"] is another, "as many tensors, and another one"


def test_no_copy_is_made_and_a_write_is_noticed():
    parameter, optimizer, _, capture = parts()
    seen = []
    capture._consumer = type("Keeps", (), {"consume": lambda self, g: seen.append(g), "release": lambda self: None})()
    parameter.grad = torch.full((4,), 2.0)
    optimizer.step()
    assert seen[0].gradients[0].data_ptr() == parameter.grad.data_ptr()
    assert seen[0].changed() == ()
    parameter.grad.mul_(2)
    assert seen[0].changed() == ("w",)


def test_copies_stay_and_know_what_was_written_to_before_them():
    parameter, optimizer, _, capture = parts()
    seen = []
    capture._consumer = type("Keeps", (), {"consume": lambda self, g: seen.append(g)})()
    for written in (False, True):
        parameter.grad = torch.full((4,), 2.0)
        optimizer.step()
        if written:
            parameter.grad.mul_(2)
        copies = seen[-1].apart_from_training(dropped=False)
        parameter.grad.zero_()
        assert copies.apart_from_training(dropped=False) is copies
        assert copies.gradients[0].tolist() == [4.0 if written else 2.0] * 4
        assert copies.changed() == (("w",) if written else ())


@pytest.mark.parametrize("buffered", [False, True], ids=["by itself", "in a buffer"])
def test_a_gradient_that_its_parameter_only_loses_is_copied_if_it_is_a_part_of_a_buffer(buffered):
    """DDP with ``gradient_as_bucket_view`` writes to the buffer again, whatever parameters have."""
    parameter, optimizer, _, capture = parts()
    taken = []

    class Keeps:
        def consume(self, gradients):
            self.gradients = gradients

        def release(self, *, dropped):
            taken.append((dropped, self.gradients.apart_from_training(dropped=dropped).gradients[0]))

    capture._consumer = Keeps()
    capture.release_before([optimizer], "zero_grad")
    for set_to_none in ((), (True,), (False,)):
        buffer = torch.full((8,), 2.0)
        parameter.grad = buffer[:4] if buffered else buffer[:4].clone()
        gradient = parameter.grad
        optimizer.step()
        optimizer.zero_grad(*set_to_none)
        dropped, kept = taken[-1]
        assert dropped is (set_to_none != (False,))
        assert (kept is gradient) is (dropped and not buffered)
        buffer.fill_(7.0)
        assert kept.tolist() == [2.0] * 4


def test_gradients_are_let_go_before_they_are_zeroed():
    parameter, optimizer, copier, capture = parts(late=True)
    capture.release_before([optimizer], "zero_grad")
    parameter.grad = torch.full((4,), 2.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    [(_, _, [gradient])] = copier.take()
    assert gradient.tolist() == [2.0] * 4
    assert copier.releases == 1


def test_a_fused_optimizer_that_unscales_says_that_gradients_do_not_stay():
    parameter, optimizer, copier, _ = parts(late=True, fused=True)
    scaler = torch.amp.GradScaler("cpu", 8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.grad.tolist() == [1.0] * 4, "the kernel writes the unscaled gradient back"
    [(update, _, [gradient])] = copier.take()
    assert gradient.tolist() == [8.0] * 4
    assert (float(update.grad_scale), float(update.found_inf)) == (8.0, 0.0)


def test_closing_takes_every_hook_away():
    parameter, optimizer, copier, capture = parts()
    capture.release_before([optimizer], "zero_grad")
    capture.close()
    capture.close()
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.zero_grad()
    assert copier.take() == []
    assert "zero_grad" not in vars(optimizer)


def test_recorded_hyperparameters_do_not_change_with_the_run():
    parameter, optimizer, copier, _ = parts()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    optimizer.param_groups[0]["betas"] = (0.1, 0.1)
    [(update, _, _)] = copier.take()
    assert (float(update.groups[0]["lr"]), update.groups[0]["betas"]) == (0.5, (0.9, 0.999))
    assert "params" not in update.groups[0]


def test_what_travels_beside_tensors_is_plain_data():
    """The step's facts and the units can be stored without pickle, and come back equal."""
    run = Run(KINDS["adamw-fused-scaler"])
    for at in range(1, 4):
        run.step(at)
    update, kind, unit = run.log.made[2][0], run.log.kinds[0], run.log.units[3]
    for given in (update, kind, unit):
        plain = dict([kind]) if given is kind else {field.name: getattr(given, field.name) for field in fields(given)}
        if given is update:
            plain["parameters"] = list(update.parameters)
        if given is unit:
            plain["pieces"] = [(p.parameter, p.box.offsets, p.box.shape, p.stride, p.start) for p in unit.pieces]
        encoded, tensors = encode_tree(plain)
        assert are_plain_states_equal(decode_tree(json.loads(json.dumps(encoded)), tensors.__getitem__), plain)


def test_blocks_of_another_cut_are_put_together():
    """Anchors and gradients cut by rows fill a unit that holds them all; what is given is read once."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(6, 3))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    unit = whole_unit("w", 0, 0, parameter)
    tensors = {(0, "w"): parameter}
    gradient = torch.randn(6, 3)
    rows = [[Span("w", 0, 2)], [Span("w", 2, 5)], [Span("w", 5, 6)]]
    replay = detached_optimizers([kind_of(optimizer)], [unit])
    for spans in rows:
        load(replay, (b for b in copied(state_blocks([optimizer], tensors, [unit], spans)) if b.box is not None))
    copier = Copier()
    GradientCapture([optimizer], lambda n, g, p: unit, copier)
    parameter.grad = gradient
    optimizer.step()
    [(update, units, copies)] = copier.take()
    assert replay.step(update, [b for spans in rows for b in gradient_blocks(units, copies, spans)]) == {(0, "w")}
    whole = [Span("w")]
    again = state_blocks(replay.optimizers, replay.tensors, replay.units, whole)
    assert differing({"w": state_blocks([optimizer], tensors, [unit], whole)}, {"w": again}) == []
