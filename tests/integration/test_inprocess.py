"""Lightning under the resiliency extension: survivors of a kill -9 fit on in the same processes, a spare with them."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    assert_same_run,
    place,  # noqa: F401 - a fixture
)
from tests.integration.test_memory_kills import in_memory
from tests.support import warm
from tests.support.inprocess_job import launch, lines, logs, needs_extension, require_one_process

DDP = Run(None, policy=("dense", 1), epochs=4, ranks=2, to_storage=1000, callback={"timeout_secs": 12.0})
FSDP2 = replace(DDP, sharded=True)


@needs_extension
@pytest.mark.parametrize(
    ("run", "kills", "spares", "most_lost"),
    [
        pytest.param(DDP, ((1, 8, 0),), 1, 1, id="ddp"),
        pytest.param(replace(DDP, policy=("dense", 100)), ((1, 8, 0),), 1, 1, id="ddp-rarely", marks=pytest.mark.slow),
        pytest.param(FSDP2, ((1, 5, 0), (3, 14, 1)), 2, 2, id="fsdp2-twice", marks=pytest.mark.slow),
        pytest.param(replace(DDP, policy=("moevement", 3)), ((1, 9, 0),), 1, 6, id="windows", marks=pytest.mark.slow),
    ],
)
def test_survivors_fit_on_in_their_processes(run, kills, spares, most_lost, place: Path):  # noqa: F811
    run = in_memory(run, place)
    told = {"run": asdict(run), "ranks": run.ranks, "kills": kills}
    codes = launch("tests.support.inprocess_lightning", told, run.ranks + spares, place, warm.python())
    killed = {rank for rank, _, _ in kills}
    assert [code != 0 for code in codes] == [rank in killed for rank in range(len(codes))], logs(place)
    assert_same_run(run)
    require_one_process(lines(place, 0), 1 + len(kills), most_lost)
