"""A rank is killed under the real torchrun: its agent starts all ranks again, and the job ends well by itself."""

from __future__ import annotations

import pytest

from tests.megatron.elastic_rank import ended, telling, write_job
from tests.megatron.exactness import Case, differing, require_losses, split_lives, uninterrupted
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal
from tests.support.torchrun import torchrun

CASES = {
    "dense": Case(
        Setup(ep=2, num_microbatches=2, precision="bf16", grouped=True, dist_opt=True),
        ("Dense", {"every_n_steps": 1}),
        ((1, 4, "train"),),
        ranks=2,
        steps=6,
    ),
    "windows": Case(
        Setup(pp=2, ep=2, num_microbatches=2, precision="bf16", dist_opt=True),
        ("MoEvement", {"window": 3}),
        ((1, 8, "train"), (2, 1, "replay"), (0, 8, "manifest")),
        steps=10,
    ),
    "survivors": Case(
        Setup(ep=2, num_microbatches=2),
        ("MoC", {"k": 1}),
        ((1, 6, "forward"), (2, 9, "forward")),
        steps=11,
        memory=True,
        copies={"storage_every": 1000},
        survives=True,
    ),
    "stages": Case(
        Setup(pp=2, ep=2, num_microbatches=2, precision="bf16", dist_opt=True),
        ("MoEvement", {"window": 3}),
        ((0, 6, "forward"), (3, 9, "forward")),
        steps=11,
        memory=True,
        copies={"storage_every": 1000, "upstream_bytes": 1 << 24},
        survives=True,
    ),
}
KEPT = {"survivors": [[5, 8]] * 4, "stages": [[None, 8], [None, 8], [5, None], [5, None]]}
"""Iteration that each rank resumed after where others lived on: no expert is stale; stages that lost nothing stay, and
the others (None) go back behind them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_agent_starts_all_ranks_again(name, tmp_path):
    case = CASES[name]
    expected = uninterrupted(case.setup, case.ranks, case.steps)
    write_job(case, tmp_path)
    said = torchrun(
        "tests.megatron.elastic_rank", str(tmp_path), ranks=case.ranks, restarts=len(case.kills), timeout_secs=500
    )
    lives = split_lives(Journal(str(tmp_path / "journal"), case.ranks - 1).lines())
    assert len(lives) == len(case.kills) + 1, said[-6000:]
    assert said.count("exitcode: -9") >= len(case.kills), said[-6000:]
    warned = [line for line in said.splitlines() if "Warning" in line and "pynvml" not in line]  # which torch imports
    assert warned == [], said
    for rank, (one, other) in enumerate(zip(expected, ended(tmp_path, case.ranks), strict=True)):
        for what, value in telling(one).items():
            assert differing(value, other[what]) == [], f"rank {rank}: {what}"
    if name in KEPT:
        every = [split_lives(Journal(str(tmp_path / "journal"), rank).lines()) for rank in range(case.ranks)]
        for mine, kept in zip(every, KEPT[name], strict=True):
            for life, step, newest in zip(mine[1:], kept, (5, 8), strict=True):
                assert life[0]["resumed"] == step if step is not None else life[0]["resumed"] < newest
    require_losses(expected[-1]["losses"], lives, case.steps)
