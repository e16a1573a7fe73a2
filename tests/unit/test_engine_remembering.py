"""What the training thread remembers from one snapshot to the next is used only where it is still true."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents, SnapshotPlan, WindowPlace
from moe_ckpt.core.window import Window, slot_plan
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.ledger.coverage import PRIME, cover_sum
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.ports import StateTensor
from moe_ckpt.run.run_ledger import expert_indices
from moe_ckpt.slices import compiling
from moe_ckpt.slices.compiling import CompiledPlan, PlanCompiler
from moe_ckpt.slices.copying import run_copy_steps, slice_view
from moe_ckpt.slices.snapshot import copy_at_once, parts_in
from tests.unit.builders import catalog, entries_of, is_replay

MODEL = catalog(2, 4)


def state(*, sharded: bool = True) -> list[StateTensor]:
    """This rank's weights and moments. sharded: nobody else holds them."""
    return [
        StateTensor(key, name, torch.rand(shape), (0,) * len(shape), shape, replicated=not sharded)
        for name, shape in MODEL.parameters.items()
        for key in (f"model/{name}", f"optim/0/{name}/exp_avg")
    ]


def compiler() -> PlanCompiler:
    return PlanCompiler(MODEL, everywhere(MODEL.layers, 1), 0, 1)


def contents(operators, held=(), frozen=()) -> Contents:
    window = WindowPlace(1, 2, 0) if frozen else None
    return Contents(tuple(operators), tuple(held), tuple(frozen), window=window)


SIDE = SliceEntry("side/0/x", "", "F32", (0,), (1,), (1,))


def entries(plan: CompiledPlan) -> list[SliceEntry]:
    return [entry for _, part in plan.parts for entry in entries_of(part)]


def test_the_same_request_gets_the_same_plan_at_every_step():
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    first = made.compile(contents(MODEL.everything), tensors, specs, [SIDE])
    assert made.compile(contents(tuple(MODEL.everything)), list(tensors), specs, [SIDE]) is first
    assert made.compile(contents(MODEL.everything[:3]), tensors, specs, [SIDE]) is not first
    assert made.compile(contents(MODEL.everything), tensors, specs, [SIDE]) is first


def test_a_layout_that_is_listed_anew_and_says_the_same_is_the_same():
    tensors, made = state(), compiler()
    types = dict.fromkeys(MODEL.parameters, "BF16")
    slot, longer = (contents(MODEL.everything[:n], (), MODEL.everything[n:]) for n in (3, 4))
    first = made.compile(slot, tensors, specs_of(tensors), (), compute_types=types)
    assert made.compile(slot, tensors, list(specs_of(tensors)), (), compute_types=dict(types)) is first
    other = made.compile(longer, tensors, specs_of(tensors), (), compute_types=dict(types))
    assert other.claims is first.claims
    known = {id(cut) for _, part in first.parts for cut in part.cuts}
    assert all(id(cut) in known for _, part in other.parts for cut in part.cuts if is_replay(cut)), "described once"
    specs = [replace(spec, dtype="BF16") for spec in specs_of(tensors)]
    assert made.compile(slot, tensors, specs, (), compute_types=types) is not first


def test_slots_of_a_window_come_back_to_their_own_plans():
    half = len(MODEL.everything) // 2
    slots = MODEL.everything[:half], MODEL.everything[half:]
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    first = [made.compile(contents(slots[0], (), slots[1]), tensors, specs, ())]
    first += [made.compile(contents(slots[1]), tensors, specs, ())]
    again = [made.compile(contents(slots[0], (), slots[1]), tensors, specs, ())]
    again += [made.compile(contents(slots[1]), tensors, specs, ())]
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_what_every_plan_saves_is_laid_out_once():
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    shared = tuple(op.id for op in MODEL.always_saved)
    plans = [made.compile(contents((*shared, op.id)), tensors, specs, [SIDE]) for op in MODEL.experts[:3]]
    parts = [[part for _, part in plan.parts if part.kind == "non_expert"] for plan in plans]
    assert parts[0][0] is parts[1][0] is parts[2][0]


def test_frozen_weights_follow_a_change_of_their_types():
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    wide = made.compile(contents((), (), MODEL.everything), tensors, specs, ())
    types = dict.fromkeys(MODEL.parameters, "BF16")
    narrow = made.compile(contents((), (), MODEL.everything), tensors, specs, (), compute_types=types)
    assert {entry.dtype for entry in entries(wide)} == {"F32"}
    assert {entry.dtype for entry in entries(narrow)} == {"BF16"}


def test_host_only_operators_move_to_their_own_part_and_back():
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    expert = MODEL.experts[0].id
    rest = tuple(op for op in MODEL.everything if op != expert)
    plans = [
        made.compile(contents(operators, held), tensors, specs, ())
        for operators, held in ((MODEL.everything, ()), (rest, (expert,)), (MODEL.everything, ()))
    ]
    kinds = [[part.kind for _, part in plan.parts] for plan in plans]
    assert kinds == [["expert", "non_expert"], ["expert", "non_expert", "held"], ["expert", "non_expert"]]
    assert plans[0] is plans[2]
    [held] = [part for _, part in plans[1].parts if part.kind == "held"]
    assert {entry.operator for entry in entries_of(held)} == {expert}
    assert plans[1].cover_difference == 0, "what stays in memory is no part of the claim"


def test_side_tensors_of_each_time_are_copied():
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    for value in (1.0, 2.0):
        plan = made.compile(contents(MODEL.everything), tensors, specs, [SIDE])
        memory = torch.zeros(plan.nbytes, dtype=torch.uint8)
        copy_at_once(parts_in(plan, [Buffer(0, memory)]), [(SIDE, torch.tensor([value]))])
        [(base, part)] = [(base, part) for base, part in plan.parts if part.side]
        assert slice_view(entries_of(part)[part.side[0]], memory[base : base + part.nbytes]).tolist() == [value]


def test_another_tensor_object_of_the_same_name_makes_another_plan():
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    first = made.compile(contents(MODEL.everything), tensors, specs, ())
    tensors = [replace(tensors[0], local=tensors[0].local.clone()), *tensors[1:]]
    second = made.compile(contents(MODEL.everything), tensors, specs, ())
    assert second is not first
    memory = torch.zeros(second.nbytes, dtype=torch.uint8)
    tensors[0].local.fill_(3.0)
    run_copy_steps(
        [(step, memory[base : base + part.nbytes]) for base, part in second.parts for step in part.copies.steps]
    )
    [found] = [
        slice_view(entry, memory[base : base + part.nbytes])
        for base, part in second.parts
        for entry in entries_of(part)
        if entry.key == tensors[0].key and entry.operator == MODEL.home[tensors[0].parameter]
    ][:1]
    assert (found == 3.0).all()


def test_memory_of_tensors_that_are_gone_is_let_go():
    tensors, made = state(), compiler()
    seen = [weakref.ref(tensor.local) for tensor in tensors]
    made.compile(contents(MODEL.everything), tensors, specs_of(tensors), ())
    made.compile(contents(MODEL.everything[:3]), tensors, specs_of(tensors), ())
    other = state()
    made.compile(contents(MODEL.everything), other, specs_of(other), ())
    del tensors
    assert not any(one() is not None for one in seen)


def test_few_plans_are_kept_of_a_large_model(monkeypatch):
    monkeypatch.setattr(compiling, "_MOST_SLICES", 40)
    tensors, made = state(), compiler()
    specs = specs_of(tensors)
    for op in MODEL.experts:
        made.compile(contents((op.id,)), tensors, specs, ())
    assert 1 <= sum(len(entries(plan)) for plan in made._plans.values()) <= 40
    assert made.compile(contents((MODEL.experts[-1].id,)), tensors, specs, ()) is [*made._plans.values()][-1]


@pytest.mark.parametrize("saved", ["everything", "some"])
def test_the_differences_of_all_ranks_add_up_to_nothing(saved):
    """And to something, if a rank leaves a slice out or writes one twice."""
    ranks = 3
    operators = MODEL.everything if saved == "everything" else MODEL.everything[::2]
    plans = []
    for rank in range(ranks):
        tensors = state(sharded=False)
        made = PlanCompiler(MODEL, everywhere(MODEL.layers, ranks), rank, ranks)
        plans.append(made.compile(contents(operators), tensors, specs_of(tensors), ()))
    differences = [plan.cover_difference for plan in plans]
    assert sum(differences) % PRIME == 0
    (_, part), *_ = plans[0].parts
    lost = cover_sum(part.boxes[:1])
    assert (sum(differences) - lost) % PRIME != 0
    assert (sum(differences) + lost) % PRIME != 0


def test_a_plan_is_true_where_it_saves_anything():
    window = Window(1, (("a", "b"), ("c",)))
    for plan in (
        SnapshotPlan(3, ("a",)),
        SnapshotPlan(3, (), memory_only=("c",)),
        slot_plan(window, 0, 1),
        SnapshotPlan(3, gradients=("a",)),
    ):
        assert plan
    assert not SnapshotPlan(3, ())
    assert not SnapshotPlan(3)


def test_places_of_everything_are_those_of_its_operators():
    listed = tuple(op.id for op in MODEL.operators)
    assert listed == MODEL.everything
    assert listed is not MODEL.everything
    assert expert_indices(MODEL, MODEL.everything).tolist() == expert_indices(MODEL, listed).tolist()
    assert expert_indices(MODEL, ()).shape == (0, 2)
