"""Work on what is frozen is left out of a replay, under every strategy, and the run ends as if nobody had killed it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
)

CLIPPED = {"gradient_clip_val": 0.1}
ONE = Run(None, policy=("moevement", 4), epochs=3, callback={"when_busy": "wait"}, trainer=CLIPPED)
DDP = replace(ONE, ranks=2, samples=48)
FSDP2 = replace(DDP, sharded=True)


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        pytest.param(replace(ONE, kind="no-moe"), (), id="dense"),
        pytest.param(replace(ONE, model={"stacked": False}), (), id="listed"),
        pytest.param(DDP, (0,), id="ddp"),
        pytest.param(replace(DDP, kind="no-moe"), (0,), id="ddp-dense", marks=pytest.mark.slow),
        pytest.param(
            replace(DDP, trainer={"accumulate_grad_batches": 3}, epochs=8),
            (0,),
            id="ddp-accumulated",
            marks=pytest.mark.slow,
        ),
        pytest.param(replace(DDP, ranks=3, epochs=5), (), id="ddp-3", marks=pytest.mark.slow),
        pytest.param(FSDP2, (), id="fsdp2"),
        pytest.param(replace(FSDP2, ranks=3, epochs=5), (), id="fsdp2-3", marks=pytest.mark.slow),
        pytest.param(replace(FSDP2, kind="no-moe"), (), id="fsdp2-dense", marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_get_no_gradient(run, kept, place):  # noqa: F811
    """kept: replayed steps that leave nothing out; under DDP of two ranks the first, by which buckets are arranged."""
    run = placed(run, place)
    each = run.trainer.get("accumulate_grad_batches", 1)
    killed = replace(run, crash=("forward", 15 * each))
    codes = [live(killed)] if run.ranks == 1 else live_ranks(killed)
    assert KILLED in codes, output(run)
    last = replace(run, sabotage="spared told")
    assert set([live(last)] if run.ranks == 1 else live_ranks(last)) == {0}, output(run)
    assert_same_run(run)
    said = Path(f"{run.log}.txt").read_text()
    spares = not run.sharded or hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # newer than torch 2.10
    for rank in range(run.ranks):
        told = re.findall(rf"rank {rank} spared (\d+) of (\d+), reached \[(.*)\] of (\d+), needed \[(.*)\]\n", said)
        assert len(told) > 1
        spared = [spares and number not in kept for number in range(len(told))]
        assert [one == other for one, other, *_ in told] == spared
        assert all(other != "0" for _, other, *_ in told)
        for number, (_, _, reached, blocks, needed) in enumerate(told):
            everywhere = run.kind != "no-moe" or not spared[number]  # else it ends behind the last anchored layer
            assert reached == (", ".join(map(str, range(int(blocks)))) if everywhere else needed)
        if run.kind == "no-moe":
            assert len({needed for *_, needed in told[len(kept) :]}) > 1, "it ends in other layers from step to step"
