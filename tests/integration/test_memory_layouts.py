"""Lightning on two ranks, DDP and FSDP2, each a node with a copy on the other: killed in every phase and anywhere."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    events,
    forget,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    shards_read,
)
from tests.integration.test_memory_kills import DENSE, in_memory, left, retry
from tests.integration.test_memory_rarely_stored import RARELY, restored, stored
from tests.support.deleting import delete_tree
from tests.support.spoiled import slots_of, spoil_slot

DDP = replace(DENSE, ranks=2, replicas=1)
FSDP2 = replace(DDP, sharded=True)
LAYOUTS = {"ddp": DDP, "fsdp2": FSDP2}
POLICIES = {
    "gemini": {"policy": ("gemini", 2), "epochs": 4},
    "moevement": {"policy": ("moevement", 3), "epochs": 4},
    "checkfreq": {"policy": ("checkfreq", 2), "options": {"max_overhead": 0.9, "max_interval": 2}, "epochs": 4},
    "gradient-log": {"policy": ("gradient-log", 3), "epochs": 4},
}
CASES = LAYOUTS | {
    f"{layout}-{policy}": replace(run, **given) for policy, given in POLICIES.items() for layout, run in LAYOUTS.items()
}
"""Dense where no policy is named."""
IN_MEMORY = [("reserve", 3), ("copy", 7), ("seal", 12), ("sealed", 12), ("unseal", 4), ("send", 20), ("verified", 5)]
IN_MEMORY += [("acknowledge", 5), ("compute", 9)]
LATER = {"ddp": [("seal", 24), ("send", 60)], "fsdp2": [("seal", 16), ("send", 60)]}
"""Of policies that do not save everything at each step. Under DDP plain states are sealed apart, too."""
REST = [("reserve", 3), ("copy", 7), ("sealed", 20), ("unseal", 8), ("verified", 9), ("acknowledge", 9)]
REST += [("compute", 9)]
"""The other phases of memory, of such policies."""
IN_STORAGE = [("write", 6), ("fsync", 12), ("rename", 12), ("manifest", 5), ("gc", 3)]


def in_turn(phases: Sequence[tuple[str, int]]) -> list[Any]:
    """Each policy in each phase, under one layout and the other in turn: which of both ranks' nodes is lost, too."""
    found = []
    for at, policy in enumerate(POLICIES):
        for number, (phase, n) in enumerate(phases):
            name, lost = f"{list(LAYOUTS)[(at + number) % 2]}-{policy}", (None, 0, 1)[(at + number // 2) % 3]
            found.append(pytest.param(phase, n, name, lost, id=f"{phase}-{name}-{lost}"))
    return found


PAIRED = [f"{list(LAYOUTS)[at % 2]}-{policy}" for at, policy in enumerate(POLICIES)]
"""Each policy once."""


def each_layout(policy: str) -> list[str]:
    return [f"{layout}-{policy}" for layout in LAYOUTS]


def lose(run: Run, node: int) -> None:
    """With its memory. What comes in its place has an empty one."""
    delete_tree(Path(run.memory, f"node_{node}"))


def under_way(run: Run) -> set[int]:
    """The batch that each rank had not logged when it died: survivors may have ended its step, and it comes no more."""
    logs = [events(run, rank) for rank in range(run.ranks)]
    return {max((line["index"] for line in log if line["event"] == "batch"), default=0) + 1 for log in logs}


def ends_alike(run: Run, unwritten: Collection[int] = ()) -> None:
    """The last life, which nobody kills."""
    assert live_ranks(run) == [0] * run.ranks, output(run)
    assert_same_run(run, unwritten)
    assert_store_sound(run, ended=True)
    assert left(run) == [], output(run)


def some_fast(*fast: str) -> pytest.MarkDecorator:
    """Every case; all but those named are slow."""
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in fast)) for n in CASES])


@some_fast("fsdp2")
def test_a_lost_node_comes_back_from_its_peer(name, place):  # noqa: F811
    """Under FSDP2 every tensor is divided: of what the lost rank had, the other one has nothing but the copy."""
    run = in_memory(replace(CASES[name], to_storage=RARELY, watched=True), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 7))), output(run)
    before = stored(run)
    lose(run, 1)
    ends_alike(run)
    assert restored(run) > before
    assert shards_read(run) == [[], []]


_TWICE = {"ranks": 3, "replicas": 2, "to_storage": RARELY, "watched": True}
THREE = {name: replace(case, **_TWICE) for name, case in CASES.items()}
"""Each rank's share lies on all three nodes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_nodes_that_are_numbered_anew_come_back_from_memory(name, place):  # noqa: F811
    """Each of three ranks starts where another one was: what it had lies on other nodes now."""
    run = in_memory(replace(THREE[name], replicas=1), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 7))), output(run)
    before = stored(run)
    nodes = [Path(run.memory, f"node_{node}") for node in range(3)]
    away = [node.rename(node.with_suffix(".away")) for node in nodes]
    for number, node in enumerate(away):
        node.rename(nodes[(number + 1) % 3])
    ends_alike(run)
    assert restored(run) > before
    assert shards_read(run) == [[]] * 3


@some_fast("fsdp2")
def test_two_of_three_nodes_may_be_lost_with_two_copies(name, place):  # noqa: F811
    run = in_memory(THREE[name], place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 7))), output(run)
    before = stored(run)
    for node in (0, 2):
        lose(run, node)
    ends_alike(run)
    assert restored(run) > before
    assert shards_read(run) == [[]] * 3


SOME = ("fsdp2", "ddp-gemini", "fsdp2-moevement", "ddp-checkfreq", "fsdp2-gradient-log")


@pytest.mark.parametrize("name", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in SOME)])
def test_with_the_third_node_the_run_goes_on_from_storage_and_says_what_is_lost(name, place):  # noqa: F811
    run = in_memory(THREE[name], place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 7))), output(run)
    before = stored(run)
    for node in range(3):
        lose(run, node)
    ends_alike(run)
    assert restored(run) == before
    assert all(shards_read(run))
    assert "no node has a checkpoint of an earlier start in memory" in output(run)
    assert f"steps after {before} that were only in memory" in output(run)


def test_what_a_rank_left_that_died_at_the_very_end_is_removed(place):  # noqa: F811
    """All of the last step: its own share and the copy of the other one's, so that the next start goes on from it."""
    run = in_memory(DDP, place)
    assert KILLED in live_ranks(replace(run, crash=("end", 1))), output(run)
    lose(run, 0)
    ends_alike(run)
    assert "nothing is left to train" in output(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "n", "name", "lost"),
    [
        pytest.param(phase, n, name, lost, id=f"{phase}-{name}-{lost}")
        for name in CASES
        for phase, n in (IN_MEMORY if name in LAYOUTS else LATER[name.split("-")[0]])
        for lost in (None, 0, 1)
    ]
    + in_turn(REST),
)
def test_killed_in_a_phase_of_memory(phase, n, name, lost, place):  # noqa: F811
    """Both ranks reach it, and one dies; then its node may be lost, or the other one."""
    run = in_memory(replace(CASES[name], to_storage=RARELY, watched=True), place)
    assert KILLED in live_ranks(replace(run, crash=(phase, n))), output(run)
    before = stored(run)
    if lost is not None:
        lose(run, lost)
    ends_alike(run)
    if phase != "reserve":
        assert restored(run) > before, "storage has only what the first life began with"
        assert shards_read(run) == [[], []], "neither rank reads a tensor from there"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "n", "name", "lost"),
    [pytest.param(*each, name, None, id=f"{each[0]}-{name}") for name in LAYOUTS for each in IN_STORAGE]
    + in_turn(IN_STORAGE),
)
def test_killed_in_a_phase_of_storage(phase, n, name, lost, place):  # noqa: F811
    """A node that is lost besides may have had steps that were told to be on storage, and those are there."""
    logs = name.endswith("gradient-log")  # none of which go to storage
    run = in_memory(replace(CASES[name], to_storage=3 if logs else 1), place)
    assert KILLED in live_ranks(replace(run, crash=(phase, n))), output(run)
    if lost is not None:
        lose(run, lost)
    ends_alike(run)
    assert_promises_kept(run)


TAKEN_OVER = [("remove", 1), ("sweep", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "n", "name", "lost"),
    [pytest.param(*each, name, None, id=f"{each[0]}-{name}") for name in LAYOUTS for each in TAKEN_OVER]
    + in_turn(TAKEN_OVER),
)
def test_killed_while_what_an_earlier_life_left_is_taken_over(phase, n, name, lost, place):  # noqa: F811
    run = in_memory(replace(CASES[name], to_storage=RARELY), place)
    for crash in (("compute", 9), (phase, n)):
        assert KILLED in live_ranks(replace(run, crash=crash)), output(run)
    before = stored(run)
    if lost is not None:
        lose(run, lost)
    ends_alike(run)
    assert restored(run) > before


HOW = ("flip", "truncate", "header", "header cut")
LESS = [name for policy in ("checkfreq", "gradient-log") for name in each_layout(policy)]
damaged = pytest.mark.parametrize(
    ("how", "name"), [(how, name) for name in CASES for how in (HOW[:2] if name in LESS else HOW)]
)


@pytest.mark.slow
@damaged
def test_a_damaged_slot_is_replaced_by_its_copy(how, name, place):  # noqa: F811
    run = in_memory(replace(CASES[name], to_storage=RARELY), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    before = stored(run)
    own = slots_of(Path(run.memory, "node_1"), 1)
    assert own
    for path in own:
        spoil_slot(path, how)
    ends_alike(run)
    assert restored(run) > before
    assert "is damaged: it is set aside, and not used" in output(run)


@pytest.mark.slow
@damaged
def test_a_damaged_copy_of_a_lost_node_leaves_storage(how, name, place):  # noqa: F811
    run = in_memory(replace(CASES[name], to_storage=RARELY), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9))), output(run)
    before = stored(run)
    copies = slots_of(Path(run.memory, "node_0"), 1)
    assert copies
    for path in copies:
        spoil_slot(path, how)
    lose(run, 1)
    ends_alike(run)
    assert restored(run) == before, "of what node 1 had, memory has no copy that is sound"
    assert "is damaged: it is set aside, and not used" in output(run)


MOMENTS, SEEDS, RUNS = 200, range(20), 20
EACH = MOMENTS // (len(LAYOUTS) * len(SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_times(seed, layout, place):  # noqa: F811
    """Up to ten lives of a run are killed; after some of them a node is lost, too. As many runs as it takes for
    ``EACH`` kills: those of all cases are ``MOMENTS``."""
    rng = random.Random(seed)
    run = in_memory(replace(layout, to_storage=rng.choice([1, 3, RARELY]), epochs=3), place)
    kills = [killed_often(run, rng)]
    while sum(kills) < EACH and len(kills) < RUNS:
        forget(run)
        kills.append(killed_often(run, rng))
    print(f"{kills} lives were killed")
    assert sum(kills) >= EACH


def killed_often(run: Run, rng: random.Random) -> int:
    """A run whose lives are killed, and which ends alike. Returns how many were killed."""
    kills, unwritten = 0, set[int]()
    while not kills:
        while kills < 10 and KILLED in live_ranks(run, (rng.randrange(2), rng.uniform(0.02, 0.4))):
            kills += 1
            unwritten |= under_way(run)
            if rng.random() < 0.3:
                lose(run, rng.randrange(2))
            retry(run)
        if not kills:  # the first life came to its end before it was killed: all begins anew
            forget(run)
    ends_alike(run, unwritten)
    assert_promises_kept(run)
    return kills


def test_the_random_moments_of_all_cases_are_as_many_as_said():
    assert EACH * len(LAYOUTS) * len(SEEDS) == MOMENTS == 200
