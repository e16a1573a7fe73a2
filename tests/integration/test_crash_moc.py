"""MoC under kill -9: what came back, how old it is and what it lost, against a recount from the routers' log."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_store_sound,
    events,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.integration.recount import Recount, check_history
from tests.integration.test_crash_ddp import TWO_RANK_ORDER
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_rarely_stored import RARELY, restored, stored
from tests.support.deleting import delete_tree

WAIT = {"when_busy": "wait"}
MOC_1 = Run(None, policy=("moc", 1), epochs=4, hashes=True, callback=WAIT)
MOC_2 = replace(
    MOC_1, policy=("moc", 2), epochs=6, model={"stacked": False, "top_k": 1}, trainer={"accumulate_grad_batches": 2}
)
MOC_3_OF_6 = replace(MOC_1, policy=("moc", 3), model={"experts": 6, "layers": 3})


def _check(run: Run, *, every_step_saved: bool = True) -> Recount:
    experts = run.model.get("experts", 4)
    layers, stacked = run.model.get("layers", 2), run.model.get("stacked", True)
    recount = Recount(layers, experts, run.policy[1], tuple(range(experts)), stacked)
    check_history(recount, [split_lives(events(run))], every_step_saved=every_step_saved)
    assert _checked_counts(run) or stacked or len(recount.faults) < 2
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    return recount


def _checked_counts(run: Run) -> int:
    """Step counts of listed experts that came back older went on by the steps since. Returns how many did."""
    history: dict[int, dict[str, int]] = {}
    older = 0
    for life in split_lives(events(run)):
        step = life[0]["step"] or 0
        history = {at: counts for at, counts in history.items() if at <= step}
        for name, count in life[0].get("counts", {}).items():
            layer, expert = re.findall(r"\.(\d+)\.", name)[:2]
            version = life[0]["manifest"]["operators"][f"expert/{layer}/{expert}"][0]
            assert count == min(history[version].get(name, 0) + step - version, step), (name, version, step)
            older += version < step
        history |= {line["step"]: line["counts"] for line in life if line["event"] == "batch"}
    return older


def _killed_at_random(run: Run, seed: int, kills: int) -> Recount:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(kills):
        if live(run, kill_after_secs=rng.uniform(0.02, 0.2)) != KILLED:
            break
        assert_store_sound(run, ended=False)
    assert live(run) == 0 or events(run)[-1]["event"] == "end", output(run)
    return _check(run, every_step_saved=run.callback == WAIT)


def test_killed_in_several_phases(place):  # noqa: F811
    """Far enough into the run for experts of several ages, and two kills with no commit between them."""
    run = placed(MOC_1, place)
    for crash in [("manifest", 7), ("fsync", 20), ("compute", 1), ("copy", 1), ("rename", 16), ("gc", 9), ("write", 9)]:
        assert live(replace(run, crash=crash)) == KILLED, output(run)
        assert_store_sound(run, ended=False)
    assert live(run) == 0, output(run)
    recount = _check(run)
    assert len(recount.faults) >= 4
    assert recount.lost > 0
    ages = {life[0]["step"] - step for life in split_lives(events(run))[1:] for step in _versions(life[0])}
    assert ages == {0, 1, 2, 3}, "experts of every age that K = 1 of 4 can give"


def _versions(begin):
    return [record[0] for name, record in begin["manifest"]["operators"].items() if name.startswith("expert/")]


@pytest.mark.parametrize("run", [MOC_1, MOC_2], ids=["k-1", "k-2-listed-accumulated"])
@pytest.mark.quick("k-2-listed-accumulated")
def test_killed_at_random_times(run, place):  # noqa: F811
    _killed_at_random(placed(run, place), random.SystemRandom().randrange(1 << 32), kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize(
    "run",
    [MOC_1, MOC_2, MOC_3_OF_6, replace(MOC_1, callback={})],
    ids=["k-1", "k-2-listed-accumulated", "k-3-of-6", "k-1-skipping-when-busy"],
)
def test_killed_at_random_times_often(run, seed, place):  # noqa: F811
    _killed_at_random(placed(run, place), seed, kills=6)


def test_nothing_is_lost_when_all_experts_are_saved(place):  # noqa: F811
    run = placed(replace(MOC_1, policy=("moc", 4), epochs=2), place)
    assert live(replace(run, crash=("manifest", 5))) == KILLED
    assert live(run) == 0
    assert _check(run).lost == 0


NODES = replace(MOC_1, ranks=2, replicas=1, to_storage=RARELY)


@pytest.mark.parametrize(
    "lost", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.slow)]
)
def test_from_memory_experts_are_as_old_as_a_count_of_ones_own_says(lost, place):  # noqa: F811
    """Two nodes with copies of each other's; one is lost. Storage has the first checkpoint only, and loses far more."""
    run = in_memory(NODES, place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    before = stored(run)
    if lost is not None:
        delete_tree(Path(run.memory, f"node_{lost}"))
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) > before + 4, "every expert has been saved since"
    assert _check_nodes(run, every_step_saved=True).lost > 0
    assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"snapshot_k": 2}], ids=["k-1", "snapshot-k-2"])
def test_nodes_are_lost_one_after_the_other(options, place):  # noqa: F811
    """The first snapshot of each life holds what only slots have: the copies are whole again with it."""
    run = in_memory(replace(NODES, options=options), place)
    for crash, lost in ((9, 0), (6, 1), (5, 0)):
        assert KILLED in live_ranks(replace(run, crash=("compute", crash))), output(run)
        delete_tree(Path(run.memory, f"node_{lost}"))
    assert live_ranks(run) == [0, 0], output(run)
    recount = _check_nodes(run, every_step_saved=False)
    assert len(recount.faults) == 3
    assert recount.lost > 0
    assert left(run) == []


def _check_nodes(run: Run, *, every_step_saved: bool) -> Recount:
    lives = [split_lives(events(run, rank)) for rank in range(run.ranks)]
    recount = Recount(2, 4, 1, TWO_RANK_ORDER)
    check_history(recount, lives, every_step_saved=every_step_saved, in_memory=True)
    assert_store_sound(run, ended=True)
    return recount


@pytest.mark.parametrize("length", [{}, {"max_steps": 20}])
@pytest.mark.quick("length0")
def test_killed_at_the_end_stale_experts_get_to_storage_with_the_tokens_that_they_lost(length, place, capsys):  # noqa: F811
    """Of the last step there is a partial checkpoint only, and the next life has nothing left to train."""
    run = placed(replace(MOC_1, epochs=2, trainer=length), place)
    first = replace(run, crash=("train end", 1), callback={**run.callback, "save_last": False})
    assert live(first) == KILLED, output(run)
    assert live(run) == 0, output(run)
    reader = StoreReader(open_storage(run.store))
    newest = reader.manifest(max(reader.directories()))
    assert {record.step for record in newest.operators.values()} == {20}
    assert main(["inspect", run.store, "--json"]) == 0
    steps = {step["directory"]: step for step in json.loads(capsys.readouterr().out)["steps"]}
    now, before = steps[newest.directory], steps["step_00000020"]
    assert before["unsaved_tokens"] > 0
    assert (now["lost_tokens"], now["unsaved_tokens"], now["faults"]) == (before["unsaved_tokens"], 0, 1)
    [said] = re.findall(r"resumed at step 20 .*PLT (.*?)\)", output(run))
    assert said == f"{now['plt']:.2%}"
    assert live(run) == 0, output(run)
    assert "is finished" in output(run)
