"""Plain state before an update, brought past it by what the update changed on another rank."""

from __future__ import annotations

import copy
import json
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.engine.agreement import StepTokens
from moe_ckpt.engine.deferred import Deferred
from moe_ckpt.engine.snapshot import side_tensors
from moe_ckpt.engine.state_keeping import StateKeeper
from moe_ckpt.format.foreseen import AFTER, Lesson, brought_on, changes, foreseen, replaced
from moe_ckpt.format.fragment import Fragment
from moe_ckpt.format.sealed import unseal
from moe_ckpt.format.slot import decode_slot
from moe_ckpt.memory.files import MemoryFiles

ALIKE = {"step": 3, "lr": 0.1, "loops": {"done": [1, 2, 3], "epoch": 0}}


def state(seed: int, **more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(ALIKE), "rng": [seed, seed + 1], **more}


def update(tree: dict[str, Any]) -> dict[str, Any]:
    after = copy.deepcopy(tree)
    after["step"] += 1
    after["lr"] *= 0.9
    after["loops"]["done"][1] += 5
    after["loops"]["done"].append(0)
    return after


def lesson(before: Any, after: Any, changed: tuple[str, ...] = (), tensors: Any = None) -> dict[str, Any]:
    found = Lesson(changes(before, after), tensors or {}).encoded(changed)
    return json.loads(json.dumps(found))


def test_what_was_alike_is_alike_and_what_an_update_leaves_alone_is_as_it_was():
    dead, lives = state(7), state(40)
    found = brought_on(foreseen(dead, ()), {}, lesson(lives, update(lives)))
    assert found == update(dead)
    assert dead == state(7), "nothing is changed in place"


def test_what_changed_and_was_another_is_not_known():
    lives = state(40)
    after = update(lives) | {"rng": [41, 42]}
    with pytest.raises(ValueError, match=r"rng/0 changed in the update, and was not the same"):
        brought_on(foreseen(state(7), ()), {}, lesson(lives, after))
    assert brought_on(foreseen(state(40), ()), {}, lesson(lives, after)) == after


def test_what_is_on_one_rank_alone_is_not_known():
    lives = state(40, own={"seen": 1})
    after = {**update(lives), "own": {"seen": 2}}
    with pytest.raises(ValueError, match=r"own/seen changed in the update"):
        brought_on(foreseen(state(7), ()), {}, lesson(lives, after))


def test_what_has_changed_on_the_dead_rank_alone_before_is_not_known():
    lives = state(40)
    told = lesson(lives, update(lives), changed=("step", "lr"))
    with pytest.raises(ValueError, match="own/seen changes in its updates, and not in those of the rank that lived on"):
        brought_on(foreseen(state(7), {"step", "own/seen"}), {}, told)
    brought_on(foreseen(state(7), {"step"}), {}, told)


def test_without_a_step_of_that_life_nothing_is_known():
    lives = state(40)
    with pytest.raises(ValueError, match="had not ended a step"):
        brought_on(foreseen(state(7), None), {}, lesson(lives, update(lives)))
    with pytest.raises(ValueError, match="does not know what the update changed"):
        brought_on(foreseen(state(7), ()), {}, {})


def test_tensors_that_were_alike_come_from_the_other_rank():
    ema = {"$": "tensor", "v": "ema"}
    mean = {"$": "array", "v": ["mean", "float64"]}
    lives = state(40, ema=ema, mean=mean, own={"$": "tensor", "v": "own"})
    told = lesson(lives, lives, tensors={"ema": "aa", "mean": "bb"})
    mine = foreseen(state(7, ema=ema, mean=mean, own={"$": "tensor", "v": "own"}), ())
    found = brought_on(mine, {"ema": "aa", "mean": "bb", "own": "cc"}, told)
    assert found["ema"]["v"] == "ema" + AFTER
    assert found["mean"]["v"] == ["mean" + AFTER, "float64"]
    assert found["own"]["v"] == "own"
    with pytest.raises(ValueError, match="ema changed in the update"):
        brought_on(mine, {"ema": "dd", "mean": "bb"}, told)


def test_a_new_tensor_is_the_other_ranks():
    lives = state(40)
    after = {**lives, "norms": [{"$": "tensor", "v": "norms/0"}]}
    lives = {**lives, "norms": []}
    told = lesson(lives, after, tensors={"norms/0": None})
    found = brought_on(foreseen(state(7, norms=[]), ()), {}, told)
    assert found["norms"] == [{"$": "tensor", "v": "norms/0" + AFTER}]
    with pytest.raises(ValueError, match="norms/0 changed"):
        brought_on(foreseen(state(7, norms=[]), ()), {"norms/0": "aa"}, told)


def test_fragments_are_compared_by_what_they_are():
    one, same, other = (Fragment(words) for words in (["a", "b"], ["a", "b"], ["a"]))
    assert changes({"frozen": one}, {"frozen": same}) == []
    assert changes({"frozen": one}, {"frozen": other}) == [(["frozen"], one, other)]


def test_types_count():
    assert changes({"a": 1, "b": True}, {"a": 1.0, "b": 1}) == [(["a"], 1, 1.0), (["b"], True, 1)]


@pytest.mark.parametrize("seed", range(50))
def test_random_trees(seed):
    """Where a state is made up at all, it is the one that the rank would have had."""
    rng = random.Random(seed)
    names = [f"k{at}" for at in range(12)]
    alike = {name: rng.randint(0, 2) for name in names}
    ranks = [{name: alike[name] if rng.random() < 0.7 else rng.randint(0, 9) for name in names} for _ in range(2)]
    moved = {name for name in names if rng.random() < 0.3}
    after = [{name: value * 3 + 1 if name in moved else value for name, value in tree.items()} for tree in ranks]
    try:
        found = brought_on(foreseen(ranks[0], ()), {}, lesson(ranks[1], after[1]))
    except ValueError:
        assert any(ranks[0][name] != ranks[1][name] for name in moved)
    else:
        assert found == after[0]


def test_replaced_shares_the_rest():
    tree = {"a": {"b": 1, "c": [2]}, "d": [3]}
    found = replaced(tree, ("a", "b"), 9)
    assert found == {"a": {"b": 9, "c": [2]}, "d": [3]}
    assert found["d"] is tree["d"]
    assert tree["a"]["b"] == 1
    with pytest.raises(KeyError):
        replaced(tree, ("a", "x"), 9)


def of_step(number: int, at: int, **more: Any) -> tuple[Any, Any]:
    """Plain state of a rank; ``at`` is where its generator stands."""
    generator = torch.Generator().manual_seed(at)
    return side_tensors({"step": number, "rng": generator.get_state(), **more}, 0)


def piece(at: int) -> list[Any]:
    generator = torch.Generator().manual_seed(at)
    return [(("rng",), side_tensors(generator.get_state(), 0, "rng"))]


TOKENS = Deferred(lambda: StepTokens(np.array([[3, 4]])))


@pytest.fixture
def keeper(tmp_path):
    files = MemoryFiles(str(tmp_path), "a-run", 1, "a-life", 0, "a-store")
    keeper = StateKeeper(files, 2)
    yield keeper
    keeper.close(10.0)


def sealed(keeper: StateKeeper) -> dict[tuple[int, str], Any]:
    """(step, what it is) -> header, once the thread has done all."""
    keeper.lesson(0, 1, 10.0)
    headers = [decode_slot(path.read_bytes(), str(path)) for path in keeper._files.path.glob("*.head")]
    return {(header.step, header.only): header for header in headers}


def test_two_steps_and_what_comes_before_an_update_are_kept(keeper):
    for step in range(1, 5):
        keeper.keep(step, 0, of_step(step, step), TOKENS)
        steps = [(each, "state") for each in (step - 1, step) if each]
        assert sealed(keeper).keys() == set(steps)
        keeper.keep_before(step + 1, 0, piece(step + 1), TOKENS)
        found = sealed(keeper)
        assert found.keys() == {*steps, (step + 1, "before")}
    header = found[5, "before"]
    assert header.facts.own.tolist() == [[3, 4]]
    body = unseal(header.state, "")["state"]
    assert body["state"]["step"] == 4, "the update moves it"
    assert body["changed"] == ["step"]


def test_the_end_of_training_does_not_wait_for_a_device_that_gives_nothing(keeper, caplog):
    gone = threading.Event()
    keeper.keep(1, 0, of_step(1, 1), Deferred(lambda: (gone.wait(60), StepTokens(np.array([[3, 4]])))[1]))
    keeper.close(0.1)
    assert "still not in memory" in caplog.text
    gone.set()


def test_the_lesson_is_what_the_update_changed(keeper):
    keeper.keep(1, 0, of_step(1, 1, same=torch.ones(2)), TOKENS)
    keeper.keep_before(2, 0, piece(2), TOKENS)
    assert keeper.lesson(1, 1, 10.0) == ({}, []), "there was nothing before the first"
    keeper.keep(2, 0, of_step(2, 2, same=torch.ones(2)), TOKENS)
    told, side = keeper.lesson(2, 1, 10.0)
    assert told == {"changes": [[["step"], 1, 2]], "tensors": {}, "changed": ["step"]}
    assert side == []
    keeper.keep_before(3, 0, piece(3), TOKENS)
    keeper.keep(3, 0, of_step(3, 99, same=torch.zeros(2)), TOKENS)
    told, side = keeper.lesson(3, 1, 10.0)
    assert told["tensors"].keys() == {"rng", "same"}
    assert told["changed"] == ["rng", "same", "step"]
    assert {entry.key for entry, _ in side} == {"side/1/rng" + AFTER, "side/1/same" + AFTER}
    assert keeper.lesson(2, 1, 10.0) == ({}, []), "of another step"


def test_a_step_that_was_left_out_leaves_nothing_before_the_next(keeper):
    keeper.keep(1, 0, of_step(1, 1), TOKENS)
    keeper.keep_before(3, 0, piece(3), TOKENS)
    assert sealed(keeper).keys() == {(1, "state")}


def test_a_part_that_is_not_there_is_said_once(keeper, caplog):
    for step in (1, 2, 3):
        keeper.keep(step, 0, of_step(step, 1), TOKENS)
        keeper.keep_before(step + 1, 0, [(("nowhere",), side_tensors(1, 0, "nowhere"))], TOKENS)
    assert sealed(keeper).keys() == {(2, "state"), (3, "state")}
    said = [record.getMessage() for record in caplog.records]
    assert said == ["memory does not hold the plain state of step 2 before its update: KeyError: 'nowhere'"]


def test_where_hooks_may_have_changed_anything_all_of_it_is_kept(keeper):
    """In a start's first step there is nothing before; by what its update changes the next one is known."""
    keeper.keep_before(1, 0, [((), of_step(0, 7))], TOKENS).wait(10.0)
    header = sealed(keeper)[1, "before"]
    assert unseal(header.state, "")["state"]["changed"] is None
    keeper.keep_before(2, 0, [((), of_step(1, 8))], TOKENS).wait(10.0)
    assert sealed(keeper).keys() == {(2, "before")}, "the update before was left out"
    keeper.keep(2, 0, of_step(2, 8), TOKENS)
    keeper.keep_before(3, 0, [((), of_step(20, 9))], TOKENS).wait(10.0)
    found = sealed(keeper)
    assert found.keys() == {(2, "state"), (3, "before")}
    body = unseal(found[3, "before"].state, "")["state"]
    assert (body["state"]["step"], body["changed"]) == (20, ["step"])


def test_who_waits_for_a_state_hears_also_that_it_cannot_be_kept(keeper):
    keeper.keep(1, 0, of_step(1, 1), TOKENS)
    assert keeper.keep_before(2, 0, [(("nowhere",), side_tensors(1, 0, "nowhere"))], TOKENS).wait(10.0)
    assert sealed(keeper).keys() == {(1, "state")}
