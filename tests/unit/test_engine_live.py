"""Where the tensors lie that a plan saves is looked at before they are copied, and where all the others do is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.window import OperatorBytes, Window
from moe_ckpt.ledger.ledger import Ledger
from moe_ckpt.modeling.discover import build_catalog
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies import Dense, Guarded, MoEtion, Policy, Wrapper
from moe_ckpt.policies.base import Measured, Needs, PolicyContext, Sends
from moe_ckpt.run.options import Settings
from moe_ckpt.run.planning import LiveState, Planner, gradient_factor
from moe_ckpt.slices.assignment import coupled_operators
from tests.integration.kinds import BiasedExpertsMoE, FlatExpertsMoE
from tests.support.tiny_moe import TinyMoE
from tests.unit.builders import context, memory

CHOSEN, OTHER = "expert/0/1", "expert/0/2"


class Run:
    """A model with its optimizer, as the engine sees them."""

    def __init__(self, *, stacked: bool = False) -> None:
        self.model = TinyMoE(experts=8, stacked=stacked)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()
        self.catalog = build_catalog(self.model)
        self.ledger = Ledger(self.catalog)
        state = TorchTrainingState(self.model, [self.optimizer])
        self.live = LiveState(self.ledger, state, everywhere(self.catalog.layers, 1))
        self.parameters = dict(self.model.named_parameters())

    def parameter_of(self, operator: str) -> str:
        return self.catalog.by_id[operator].spans[0].parameter

    def next_step(self) -> None:
        self.live.forget()

    def address(self, plan: SnapshotPlan, key: str) -> int:
        """Where the engine would read it."""
        tensors, _ = self.live.describe_for(plan)
        return next(tensor.local.data_ptr() for tensor in tensors if tensor.key == key)

    def move(self, name: str) -> None:
        self.parameters[name].data = self.parameters[name].data.clone()


@pytest.mark.parametrize("kind", [BiasedExpertsMoE, FlatExpertsMoE])
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.AdamW])
def test_what_an_optimizer_keeps_of_a_stack_and_not_of_an_expert_is_coupled_with_the_experts(kind, make):
    model = kind(layers=2, experts=3)
    optimizer = make(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    specs = TorchTrainingState(model, [optimizer]).specs()
    expected = {frozenset({f"gate/{at}", *(f"expert/{at}/{e}" for e in range(3))}) for at in range(2)}
    assert set(coupled_operators(build_catalog(model), specs)) == (
        expected if make is torch.optim.Adafactor else frozenset()
    )


def plan_of(kind: str, run: Run) -> SnapshotPlan:
    if kind == "stored":
        return SnapshotPlan(3, (CHOSEN,))
    if kind == "in memory":
        return SnapshotPlan(3, (OTHER,), memory_only=(CHOSEN,))
    if kind == "owed":
        run.ledger.owe([CHOSEN], 1)
        return SnapshotPlan(3, (OTHER,))
    if kind == "all":
        return SnapshotPlan(3, run.catalog.everything)
    return SnapshotPlan(3, (OTHER,), compute=(CHOSEN,), window=Window(3, ((OTHER,), (CHOSEN,))), slot=0)


@pytest.mark.parametrize("asked_before", [False, True], ids=["", "as a window does"])
@pytest.mark.parametrize("kind", ["stored", "in memory", "owed", "compute weights", "all"])
def test_what_a_plan_saves_is_read_where_it_lies_now(kind, asked_before):
    run = Run()
    plan, name = plan_of(kind, run), run.parameter_of(CHOSEN)
    run.address(plan, f"model/{name}")
    run.move(name)
    run.next_step()
    if asked_before:
        run.live.weigh()
    assert run.address(plan, f"model/{name}") == run.parameters[name].data_ptr()


def test_a_step_count_that_is_saved_with_the_gate_is_read_where_it_lies_now():
    run = Run(stacked=True)
    name = run.parameter_of(CHOSEN)
    plan, key = SnapshotPlan(3, (run.catalog.home[name],)), f"optim/0/{name}/step"
    run.address(plan, key)
    count = run.optimizer.state[run.parameters[name]]["step"]
    count.data = count.data.clone()
    run.next_step()
    assert run.address(plan, key) == count.data_ptr()


def test_what_a_plan_does_not_save_is_not_looked_at_until_one_does():
    run = Run()
    plan, name = SnapshotPlan(3, (CHOSEN,)), run.parameter_of(OTHER)
    assert name != run.parameter_of(CHOSEN)
    before = run.address(plan, f"model/{name}")
    run.move(name)
    run.next_step()
    assert run.address(plan, f"model/{name}") == before
    run.next_step()
    assert run.address(SnapshotPlan(4, (OTHER,)), f"model/{name}") == run.parameters[name].data_ptr()


def test_state_that_appears_is_noticed_whatever_the_plan():
    run = Run()
    plan = SnapshotPlan(3, (CHOSEN,))
    before, specs = run.live.describe_for(plan)
    run.live.note_layout(specs)
    parameter = run.parameters[run.parameter_of(OTHER)]
    run.optimizer.state[parameter]["largest"] = torch.zeros_like(parameter)
    run.next_step()
    found, specs = run.live.describe_for(plan)
    assert len(found) == len(before) + 1
    assert OTHER in run.live.note_layout(specs)


class Logs:
    """Anchors one expert, and logs the gradients of all others."""

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        rest = tuple(op for op in context.model.catalog.everything if op != CHOSEN)
        return SnapshotPlan(context.run.step, (CHOSEN,), gradients=rest)

    def check(self, catalog):
        """Serves any model."""

    def describe(self):
        return {"name": "logs"}

    @property
    def needs(self) -> Needs:
        return Needs(gradients="as_consumed", sizes=True, warning=self.warning)

    def warning(self, context: PolicyContext) -> str | None:
        return None if context.measured.copy_bytes() is None else "gradients do not fit"


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_do_not_fit_are_said_once_when_rates_are_known(rank, caplog):
    run = Run()
    planner = Planner(Logs(), run.live, rank, Settings())
    known = Measured(recent_iteration_secs=1.0, copy_bytes_per_sec=1e9)
    said = []
    for step, measured in enumerate([Measured(), known, known], 1):
        planner.plan(context(run.catalog, step, measured=measured))
        said.append(caplog.text.count("gradients do not fit"))
    assert said == ([0, 1, 1] if rank == 0 else [0, 0, 0])


ALIKE = memory(storage_due=False, replicas=1, sends=Sends(experts=False))


class Warns(Wrapper):
    """From step 2 on, of anything that it cannot do."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, warning=lambda at: f"cannot, at {at.run.step}" if at.run.step > 1 else None)


@pytest.mark.parametrize(
    ("policy", "rank", "said"),
    [
        (MoEtion(recompute=True), 0, "MoEtion(recompute=True) sends no gradients: the peers that hold copies train"),
        (MoEtion(), 0, None),
        (MoEtion(recompute=True), 1, None),
        (Logs(), 0, None),
        (Warns(Dense()), 0, "cannot, at 2"),
        (Guarded(Warns(Dense())), 0, "cannot, at 2"),
    ],
)
def test_what_a_policy_cannot_do_is_said_once_by_rank_0(policy: Policy, rank: int, said: str | None, caplog):
    run = Run()
    planner = Planner(policy, run.live, rank, Settings())
    for step in range(1, 5):
        planner.plan(context(run.catalog, step, ranks=2, last_step=step, memory=ALIKE))
    heard = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text[: len(said or "")] for text in heard] == ([] if said is None else [said])


def test_how_many_times_more_full_state_would_be():
    """One of three operators is sent in full, 12 bytes, and of the others the gradients, 4 bytes each."""
    sizes = {name: OperatorBytes(12, 4, 4) for name in "abc"}
    assert gradient_factor(SnapshotPlan(3, ("a",), gradients=("b", "c"), memory_only=("d",)), sizes) == 36 / 20
    assert gradient_factor(SnapshotPlan(3, ("a", "b", "c"), gradients=()), sizes) is None
    assert gradient_factor(SnapshotPlan(3, ("a", "b")), {}) is None
