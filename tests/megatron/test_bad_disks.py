"""Megatron with a disk that hangs, or is full, and stays so: training and checkpoints in memory go on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.megatron.exactness import finish, life_of, require_exact, require_killed, shards_read, start_life
from tests.megatron.test_memory import REPLICATED, left, newest
from tests.support.bad_disks import BAD, spoil_disk
from tests.support.deleting import delete_tree

pytestmark = pytest.mark.slow

BAD_FROM, KILLED_AT, STEPS = 5, 20, 24


@pytest.mark.parametrize("name", ["pp2-ep2", "ep2-dp2-sharded", "pp2-ep2-windows"])
@pytest.mark.parametrize("how", BAD)
def test_a_disk_that_stays_bad_costs_memory_nothing(how, name, tmp_path):
    """On every rank, while the store is to get each checkpoint. Then a rank is killed, and its node is lost: what was
    made meanwhile comes from memory."""
    at = (2, KILLED_AT, "train")
    case = replace(REPLICATED[name], copies={"replicas": 1}, steps=STEPS, kills=(at,), options={"when_busy": "skip"})
    life = replace(life_of(case, tmp_path), kill=at, sabotage=partial(spoil_disk, how, BAD_FROM))
    require_killed(start_life(case, life), at)
    assert int(newest(tmp_path).split("_")[1]) < BAD_FROM
    delete_tree(tmp_path / "memory" / "node_1")
    ended = finish(case, tmp_path)
    assert KILLED_AT - (7 if "windows" in name else 4) <= ended.resumed[0] < KILLED_AT
    assert shards_read(case, tmp_path) == [[]] * case.ranks
    require_exact(case, tmp_path, ended)
    assert newest(tmp_path).startswith(f"step_{STEPS:08d}"), "storage has its last step, now that it answers"
    assert left(tmp_path) == []
