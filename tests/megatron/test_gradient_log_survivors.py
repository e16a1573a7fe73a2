"""Survivors beside a gradient log under Megatron: only who lost something comes along it, and the others read none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.memory.slot import Slot
from tests.megatron.exactness import finish, kill, require_exact
from tests.megatron.test_gradient_log import CASES, COPIES
from tests.support import counted_return
from tests.support.deleting import delete_tree
from tests.support.spoiled import bytes_of

RANKS = {0, 1, 2, 3}
REMAKING = {
    "ep2-dp2": set(),
    "ep2-dp2-sharded": {1},
    "ep2-dp2-overlapped": {1},
    "ep2-dp2-bf16": set(),
    "pp2-ep2": {1},
    "tp2-ep2-skipped": {1},
}
"""Who makes updates once more when rank 1 is lost: itself, unless data-parallel ranks hold all that it had."""
FAST = ("ep2-dp2-sharded", "ep2-dp2")


def survived(name: str, at: tuple[int, int, str] = (1, 7, "forward"), **more):
    return replace(CASES[name], kills=(at,), survives=True, **more)


def require_spared(err: str, remaking: set[int]) -> None:
    """Who makes no update has read nothing of the log; who makes some, has."""
    counts = counted_return.told(err)
    assert counts.keys() == RANKS, err[-3000:]
    for rank, found in counts.items():
        if rank in remaking:
            assert found["updates"] > 0, (rank, found)
            assert found["gradients"] > 0, (rank, found)
        else:
            assert found["sealed"] > 0, (rank, found)
            assert (found["updates"], found["gradients"], found["anchors"]) == (0, 0, 0), (rank, found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in REMAKING]
)
def test_ranks_that_lived_on_make_no_update(name, tmp_path, capfd):
    case, remaking = survived(name), REMAKING[name]
    kill(case, tmp_path)
    ended = finish(case, tmp_path, counted_return.count)
    err = capfd.readouterr().err
    assert ended.resumed == [6]
    assert {result["remaking"] for result in ended.results} == {tuple(sorted(remaking))}
    require_spared(err, remaking)
    if remaking:
        by = "by rank 1 of 4; the others keep what they sealed of step 6"
        assert f"repeated, from the consumed gradients, {by}" in ended.said
    else:
        assert [result["remade"] for result in ended.results] == [None] * 4
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ep2-dp2-sharded", "pp2-ep2"])
def test_a_lost_node_alone_comes_along_the_log_of_its_peers(name, tmp_path, capfd):
    """Ranks 0 and 1 die with the memory of their node, and with it under a pipeline a whole stage."""
    case = survived(name, (0, 7, "forward"), together=(1,), copies=COPIES)
    case = replace(case, setup=replace(case.setup, tied=False))
    kill(case, tmp_path)
    delete_tree(tmp_path / "memory" / "node_0")
    ended = finish(case, tmp_path, counted_return.count)
    err = capfd.readouterr().err
    assert ended.resumed == [6]
    lost = {0, 1}
    assert {result["remaking"] for result in ended.results} == {(0, 1)}
    require_spared(err, lost)
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
def test_killed_in_the_replay_the_others_still_keep_theirs(tmp_path, capfd):
    case = survived("ep2-dp2-sharded")
    case = replace(case, kills=(*case.kills, (2, 0, "resume")))
    kill(case, tmp_path)
    ended = finish(case, tmp_path, counted_return.count)
    assert ended.resumed[-1] == 6
    require_exact(case, tmp_path, ended)
    assert counted_return.told(capfd.readouterr().err).keys() == RANKS


@pytest.mark.slow
def test_what_survivors_sealed_of_a_newer_step_is_said(tmp_path):
    """Rank 1 dies while its copy of iteration 6 is made: the others end that iteration, and it has not."""
    case = survived("ep2-dp2-sharded", (1, 6, "copy"))
    kill(case, tmp_path)
    kept = [header.step for header in own_of(tmp_path)]
    ended = finish(case, tmp_path, counted_return.count)
    if kept and max(kept) > ended.resumed[0]:
        assert f"kept step {max(kept)} when training stopped" in ended.said
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
def test_a_damaged_seal_costs_its_rank_the_updates(tmp_path, capfd):
    case = survived("ep2-dp2-sharded")
    kill(case, tmp_path)
    [path] = [path for path, header in sealed(tmp_path) if header.rank == header.sealer == 2]
    spoil(path)
    ended = finish(case, tmp_path, counted_return.count)
    err = capfd.readouterr().err
    assert "is damaged: it is set aside, and not used" in ended.said
    assert ended.resumed == [6]
    assert {result["remaking"] for result in ended.results} == {(1, 2)}
    require_spared(err, {1, 2})
    require_exact(case, tmp_path, ended)


def sealed(directory):
    """(path, header) of what survivors sealed."""
    found = (directory / "memory").rglob("*.head")
    headers = [(path, Slot.open(path)[1]) for path in found]
    return [(path, header) for path, header in headers if header.sealer is not None]


def own_of(directory):
    return [header for _, header in sealed(directory) if header.sealer == header.rank]


def spoil(data) -> None:
    """Flips a bit in each part of a slot."""
    header = Slot.open(data)[1]
    path, first, _ = bytes_of(data)
    with path.open("r+b") as file:
        for part in header.parts:
            entry = header.slices(part, str(data))[0]
            file.seek(first + part.begin + entry.begin)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
