"""Memory under Megatron, two nodes of two ranks with a copy of each other: killed in every phase and anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.megatron.exactness import (
    LIFE_SECS,
    WARM,
    Case,
    Ended,
    finish,
    kill,
    life_of,
    require_exact,
    require_killed,
    shards_read,
    start_life,
)
from tests.megatron.running import Running
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED, dense, moevement
from tests.megatron.test_memory import COPIES, GEMINI, left, newest
from tests.megatron.test_random_kills import NEVER, ended, killed, retry
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import live
from tests.support.processes import start_ranks
from tests.support.spoiled import slots_of, spoil_slot

PIPELINE = Case(Setup(**PIPELINE_EXPERTS), dense(1), (), steps=8, memory=True, copies=COPIES)
DATA = replace(PIPELINE, setup=Setup(**EXPERTS_DATA, **SHARDED))
LAYOUTS = {"pp2-ep2": PIPELINE, "ep2-dp2": DATA}
MEMORY = [("reserve", 3), ("copy", 4), ("seal", 8), ("sealed", 8), ("unseal", 3), ("send", 20), ("verified", 5)]
MEMORY += [("acknowledge", 5), ("train", 5), ("forward", 5)]
STORAGE = [("write", 3), ("fsync", 3), ("rename", 3), ("manifest", 3), ("gc", 4)]
LIVES, STEPS = 5, 24
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
CHECKFREQ = ("CheckFreq", {"profile_steps": 2, "max_overhead": 0.9, "max_interval": 2})
LOG = ("GradientLog", {"window": 3})
POLICIES = {"dense": dense(1), "gemini": GEMINI, "windows": moevement(2), "checkfreq": CHECKFREQ, "log": LOG}
WINDOWS = 6
"""Iterations of two windows or rounds, the most that a return goes back to begin again."""
LATER = {"send": 40, "seal": 10}
"""Phases of policies that do not save everything at each step."""
REST = [("reserve", 3), ("copy", 6), ("sealed", 10), ("unseal", 3), ("verified", 5), ("acknowledge", 5), ("train", 7)]
REST += [("forward", 7)]
"""Their other phases. See ``integration/test_memory_layouts`` for all of storage's."""


def in_turn(phases: Sequence[tuple[str, int]], policies: Sequence[str], every: int = 1) -> list[Any]:
    """The policies in the phases, every one or every second, under the layouts in turn: which node is lost, too."""
    found = []
    for at, policy in enumerate(policies):
        for number, (phase, n) in enumerate(phases):
            if (at + number) % every == 0:
                layout, lost = list(LAYOUTS)[(at + number // every) % 2], (None, 0, 1)[(at + number // 2) % 3]
                found.append(pytest.param(phase, n, policy, layout, lost, id=f"{phase}-{policy}-{layout}-{lost}"))
    return found


def lose(directory: Path, node: int) -> None:
    """With its memory. What comes in its place has an empty one."""
    delete_tree(directory / "memory" / f"node_{node}")


def ends_alike(case: Case, directory: Path) -> Ended:
    """The last life, which nobody kills."""
    ended = finish(case, directory)
    require_exact(case, directory, ended)
    assert left(directory) == []
    return ended


def comes_back(case: Case, directory: Path, phase: str, lost: int | None) -> None:
    """The job ends as if nothing had been, and from a newer step than storage's first.

    Memory is reserved before training: the first commit may come later, and a job that has nothing starts anew, with
    the other weights of its next life.
    """
    stored = [int(step.split("_")[1]) for step in StoreReader(open_storage(directory / "store")).directories()]
    if lost is not None:
        lose(directory, lost)
    ended = finish(case, directory)
    assert left(directory) == []
    if phase == "reserve" and not stored and ended.resumed == [0]:
        return
    require_exact(case, directory, ended)
    assert phase == "reserve" or ended.resumed > stored[:1] > [], "storage has what the run began with"


def comes_back_from_memory(life: Running) -> int:
    """The iteration that all resume from; they then end as if nothing had been."""
    [resumed] = ends_alike(life.case, life.directory).resumed
    assert shards_read(life.case, life.directory) == [[]] * 4
    return resumed


@pytest.mark.slow
@layouts
def test_nodes_that_are_numbered_anew_come_back_from_memory(layout, tmp_path):
    """The ranks of each node start on the other one: without copies, what they had lies there alone."""
    copies = {"replicas": 0, "storage_every": 1000}
    case = replace(layout, copies=copies, kills=((2, 5, "train"),))
    kill(case, tmp_path)
    before = newest(tmp_path)
    nodes = [tmp_path / "memory" / f"node_{node}" for node in (0, 1)]
    away = [node.rename(node.with_suffix(".away")) for node in nodes]
    for node, other in zip(away, reversed(nodes), strict=True):
        node.rename(other)
    assert ends_alike(case, tmp_path).resumed > [int(before.split("_")[1])]


@pytest.mark.slow
@layouts
def test_a_node_that_comes_back_with_memory_of_an_earlier_start_is_not_gone_on_from(layout, tmp_path):
    """Its steps are newer than those of the start that went on without it, from storage, with a spare in its place."""
    copies = {"replicas": 1, "storage_every": 8}
    case = replace(layout, copies=copies, steps=20, kills=((2, 15, "train"), (2, 11, "train")))
    kill(replace(case, kills=case.kills[:1]), tmp_path)
    nodes, away = [tmp_path / "memory" / f"node_{node}" for node in (0, 1)], tmp_path / "away"
    away.mkdir()
    for node in nodes:
        node.rename(away / node.name)
    before = int(newest(tmp_path).split("_")[1])
    second = replace(life_of(case, tmp_path), kill=case.kills[1], seed=2, number=1)
    require_killed(start_life(case, second), case.kills[1])
    lose(tmp_path, 1)
    (away / nodes[1].name).rename(nodes[1])
    ended = ends_alike(case, tmp_path)
    assert before == 8
    assert ended.resumed[0] == before
    assert before < ended.resumed[1] <= 10, "of the start that went on, and not of the one that got further"


@pytest.mark.slow
@layouts
@pytest.mark.parametrize("lost", [None, 0, 1])
@pytest.mark.parametrize(("phase", "n"), MEMORY, ids=[phase for phase, _ in MEMORY])
def test_killed_in_a_phase_of_memory(phase, n, lost, layout, tmp_path):
    """One rank of the second node dies; then its node may be lost, or the other one."""
    case = replace(layout, kills=((2, n, phase),))
    kill(case, tmp_path)
    comes_back(case, tmp_path, phase, lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "n", "policy", "layout", "lost"),
    [
        pytest.param(*each, policy, layout, lost, id=f"{each[0]}-{policy}-{layout}-{lost}")
        for policy in ("gemini", "windows")
        for layout in LAYOUTS
        for each in LATER.items()
        for lost in (0, 1)
    ]
    + in_turn(REST, ["gemini", "windows"], every=2)
    + in_turn([*LATER.items(), *REST], ["checkfreq", "log"]),
)
def test_killed_in_a_phase_of_rarer_checkpoints(phase, n, policy, layout, lost, tmp_path):
    """Gemini and CheckFreq every other step, windows of two, and a log of gradients with anchors."""
    often = 2 if policy == "log" else 1  # slots are small, and many
    case = replace(LAYOUTS[layout], policy=POLICIES[policy], steps=16, kills=((2, often * n, phase),))
    kill(case, tmp_path)
    comes_back(case, tmp_path, phase, lost)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "n", "policy", "layout", "lost"),
    [pytest.param(*each, "dense", name, None, id=f"{each[0]}-{name}") for name in LAYOUTS for each in STORAGE]
    + in_turn(STORAGE, [policy for policy in POLICIES if policy != "dense"], every=2),
)
def test_killed_in_a_phase_of_storage(phase, n, policy, layout, lost, tmp_path):
    copies = {"replicas": 1, "storage_every": 3 if policy == "log" else 1}
    case = replace(LAYOUTS[layout], policy=POLICIES[policy], kills=((0, n, phase),), copies=copies)
    kill(case, tmp_path)
    if lost is not None:
        lose(tmp_path, lost)
    ends_alike(case, tmp_path)


TAKEN_OVER = [("remove", 1), ("sweep", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "n", "policy", "layout", "lost"),
    [pytest.param(*each, "dense", name, None, id=f"{each[0]}-{name}") for name in LAYOUTS for each in TAKEN_OVER]
    + in_turn(TAKEN_OVER, [policy for policy in POLICIES if policy != "dense"], every=2),
)
def test_killed_while_what_an_earlier_life_left_is_taken_over(phase, n, policy, layout, lost, tmp_path):
    at = 5 if policy == "dense" else 7
    case = replace(LAYOUTS[layout], policy=POLICIES[policy], kills=((1, at, "train"), (2, n, phase)))
    kill(case, tmp_path)
    if lost is not None:
        lose(tmp_path, lost)
    before = newest(tmp_path)
    assert ends_alike(case, tmp_path).resumed[-1] > int(before.split("_")[1])


@pytest.mark.slow
@layouts
@pytest.mark.parametrize(
    ("policy", "how"),
    [(name, how) for name in POLICIES for how in (("flip", "truncate", "header") if name == "dense" else ("flip",))],
)
@pytest.mark.parametrize("lost", [False, True], ids=["own", "copy"])
def test_damage_is_found_and_the_next_source_taken(lost, how, policy, layout, tmp_path):
    """Of a rank's own slots, whose copies are taken; or of the copies of a rank whose node is lost: then of storage."""
    case = replace(layout, policy=POLICIES[policy], kills=((2, 7, "train"),))
    kill(case, tmp_path)
    before = int(newest(tmp_path).split("_")[1])
    damaged = slots_of(tmp_path / "memory" / f"node_{0 if lost else 1}", 2)
    assert damaged
    for path in damaged:
        spoil_slot(path, how)
    if lost:
        lose(tmp_path, 1)
    [resumed] = ends_alike(case, tmp_path).resumed
    assert resumed == before if lost else resumed > before


@pytest.mark.slow
@layouts
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_both_nodes_lost_costs_what_storage_does_not_have(policy, layout, tmp_path):
    """One more than there are copies. The message names what may be lost, and why."""
    case = replace(layout, policy=policy, kills=((2, 7, "train"),))
    kill(case, tmp_path)
    before = int(newest(tmp_path).split("_")[1])
    for node in (0, 1):
        lose(tmp_path, node)
    ended = ends_alike(case, tmp_path)
    assert ended.resumed == [before]
    none = "no node has a checkpoint of an earlier start in memory"
    lost = f"{none}: iterations after {before} that were only in memory are lost"
    said = [text for text in ended.results[0]["said"] if none in text]
    assert [lost in text for text in said] == [True], ended.results[0]
    assert not any("no node has" in text for rank in ended.results[1:] for text in rank["said"]), "rank 0 alone"


MOMENTS, SEEDS, RUNS = 200, range(10), 10
SOME = {name: POLICIES[name] for name in ("dense", "windows")}


@pytest.mark.slow
@pytest.mark.parametrize("policy", SOME.values(), ids=SOME)
@layouts
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_times(seed, layout, policy, tmp_path):
    """``LIVES`` are killed, of as many runs as that takes; after some of them a node is lost, too."""
    rng = random.Random(seed)
    copies = {"replicas": 1, "storage_every": rng.choice([1, 3, 1000])}
    case = replace(layout, policy=policy, copies=copies, steps=STEPS, reseed=False)
    kills = list[int]()
    while sum(kills) < LIVES and len(kills) < RUNS:
        directory = tmp_path / f"run_{len(kills)}"
        directory.mkdir()
        kills.append(killed_often(case, directory, rng, LIVES - sum(kills)))
    print(f"seed {seed}: {kills} kills")
    assert kills[0]
    assert sum(kills) == LIVES


def killed_often(case: Case, directory: Path, rng: random.Random, lives: int) -> int:
    """A run, up to so many ``lives`` of which are killed, and which ends alike. Returns how many were killed."""
    kills = 0
    for number in range(lives):
        at = (rng.randrange(case.ranks), rng.randrange(20, 1500), "anywhere")
        life = replace(life_of(case, directory), kill=at, number=number)
        outcomes = start_ranks(live, case.ranks, life, timeout=LIFE_SECS, grace=1.0, preload=WARM)
        kills += at[0] in killed(outcomes)
        if all(outcome.ok for outcome in outcomes):  # it came to its end first
            found = ended(case, directory, outcomes)
            break
        retry(directory)
        if rng.random() < 0.3:
            lose(directory, rng.randrange(2))
    else:
        found = finish(replace(case, kills=(NEVER,) * lives), directory)
    require_exact(case, directory, found)
    assert left(directory) == []
    return kills


def test_the_random_moments_of_all_cases_are_as_many_as_said():
    assert LIVES * len(LAYOUTS) * len(SOME) * len(SEEDS) == MOMENTS == 200
