"""What the training thread remembers from one snapshot to the next is used only where it is still true."""

from __future__ import annotations

import weakref

import pytest
import torch

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.plan import Fidelity, PlanItem, SnapshotPlan, Tier, save_full
from moe_ckpt.core.window import Window, slot_plan
from moe_ckpt.engine.arranging import Arranger
from moe_ckpt.engine.books import places
from moe_ckpt.engine.pieces import LocalState, Piece, cut, cut_replay
from moe_ckpt.engine.shares import Sharder
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.ports import StateTensor
from tests.unit.builders import catalog

MODEL = catalog(2, 4)
OWN_TYPES: dict[str, str] = {}


def state(*, sharded: bool = True) -> list[StateTensor]:
    """This rank's weights and moments. sharded: nobody else holds them."""
    return [
        StateTensor(key, name, torch.rand(shape), (0,) * len(shape), shape, replicated=not sharded)
        for name, shape in MODEL.parameters.items()
        for key in (f"model/{name}", f"optim/0/{name}/exp_avg")
    ]


def begun(local: LocalState, operators, frozen=(), compute=OWN_TYPES) -> list[Piece]:
    dealt = Sharder(MODEL, everywhere(MODEL.layers, 1), "adaptive").deal(operators, local.tensors, frozen, compute)
    pieces = cut(local, frozenset(operators), dealt, 0)
    return pieces + cut_replay(local, frozenset(operators), frozenset(frozen), dealt, 0, compute)


def test_slices_are_the_same_objects_again_and_arranged_once():
    local, arranger = LocalState(MODEL, state()), Arranger(MODEL)
    pieces, again = begun(local, MODEL.everything), begun(local, MODEL.everything)
    assert all(one is other for one, other in zip(pieces, again, strict=True))
    parts = arranger.arrange(pieces).parts
    assert [part is same for part, same in zip(parts, arranger.arrange(again).parts, strict=True)] == [True] * 2


def test_slots_of_a_window_come_back_to_their_own_arrangement():
    half = len(MODEL.everything) // 2
    slots = MODEL.everything[:half], MODEL.everything[half:]
    local, arranger = LocalState(MODEL, state()), Arranger(MODEL)
    first = [arranger.arrange(begun(local, slots[0], slots[1])), arranger.arrange(begun(local, slots[1]))]
    second = [arranger.arrange(begun(local, slots[0], slots[1])), arranger.arrange(begun(local, slots[1]))]
    assert [one.parts for one in first] == [one.parts for one in second]
    assert first[0].parts != first[1].parts
    assert second[0].parts[0] is first[0].parts[0]


def test_frozen_weights_follow_a_change_of_their_types():
    local = LocalState(MODEL, state())
    wide = begun(local, (), MODEL.everything, {})
    narrow = begun(local, (), MODEL.everything, dict.fromkeys(MODEL.parameters, "BF16"))
    assert {piece.entry.dtype for piece in wide} == {"F32"}
    assert {piece.entry.dtype for piece in narrow} == {"BF16"}
    assert {piece.entry.dtype for piece in begun(local, (), MODEL.everything, {})} == {"F32"}


def test_held_operators_move_to_their_own_part_and_back():
    pieces, arranger = begun(LocalState(MODEL, state()), MODEL.everything), Arranger(MODEL)
    expert = MODEL.experts[0].id
    kinds = [[part.kind for part in arranger.arrange(pieces, held).parts] for held in ((), (expert,), ())]
    assert kinds == [["expert", "non_expert"], ["expert", "non_expert", "held"], ["expert", "non_expert"]]


def test_side_tensors_of_each_time_are_copied():
    pieces, arranger = begun(LocalState(MODEL, state()), MODEL.everything), Arranger(MODEL)
    for value in (1.0, 2.0):
        side = Piece(SliceEntry("side/0/x", "", "F32", (0,), (1,), (1,)), torch.tensor([value]))
        placed = arranger.arrange(pieces, (), [side]).placed
        assert [source.item() for entry, source, _ in placed if entry.key == "side/0/x"] == [value]


def test_memory_of_tensors_that_are_gone_is_let_go():
    tensors, arranger = state(), Arranger(MODEL)
    local = LocalState(MODEL, tensors)
    pieces = begun(local, MODEL.everything)
    arranger.arrange(pieces)
    arranger.arrange(begun(local, MODEL.everything[:3]))
    seen = [weakref.ref(piece.source) for piece in pieces]
    del tensors, local, pieces
    arranger.forget()
    assert not any(one() is not None for one in seen)


def test_a_ledger_refuses_to_go_back_for_what_is_newer_only():
    ledger = Ledger()
    ledger.record(Tier.STORAGE, 5, ["a"])
    ledger.record(Tier.STORAGE, 3, ["b"])
    with pytest.raises(ValueError, match="a is recorded at step 5, cannot go back to step 4"):
        ledger.record(Tier.STORAGE, 4, ["b", "a"])
    assert {op: version.step for op, version in ledger.versions().items()} == {"a": 5, "b": 3}


def test_plans_answer_what_their_items_say():
    window = Window(1, (("a", "b"), ("c",)))
    for plan in (save_full(3, ("a", "b"), host_only=("c",)), slot_plan(window, 0, 1), slot_plan(window, 1, 2)):
        plain = SnapshotPlan(plan.step, plan.items)
        assert [plan.operators(tier) for tier in Tier] == [plain.operators(tier) for tier in Tier]
        assert plan.compute_only == plain.compute_only
    assert slot_plan(window, 0, 1).items[-1] == PlanItem("c", Fidelity.COMPUTE)


def test_places_of_everything_are_those_of_its_operators():
    listed = tuple(op.id for op in MODEL.operators)
    assert listed == MODEL.everything
    assert listed is not MODEL.everything
    assert places(MODEL, MODEL.everything).tolist() == places(MODEL, listed).tolist()
    assert places(MODEL, ()).shape == (0, 2)
