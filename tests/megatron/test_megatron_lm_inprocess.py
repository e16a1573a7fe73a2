"""Megatron-LM's own pretrain_gpt.py with one line in it, under its own ``--inprocess-restart``.

A rank is killed; the other goes on in its process, and a spare in the dead one's place, as if nobody had died.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.test_megatron_lm import line, lives, steps_of
from tests.support import warm
from tests.support.inprocess_job import launch, logs, needs_extension
from tests.support.megatron_lm import MODEL, WARM, Journal, Life, live, require_megatron_lm
from tests.support.processes import run_ranks

RANKS, STEPS = 2, 9
QUICKLY = (
    "--inprocess-monitor-thread-interval 0.2 --inprocess-monitor-process-interval 0.2 --inprocess-last-call-wait 0.5 "
    "--inprocess-heartbeat-interval 5 --inprocess-heartbeat-timeout 30 --inprocess-soft-timeout 40 "
    "--inprocess-hard-timeout 50"
)
SCRIPT = f"{MODEL} --pipeline-model-parallel-size 2 --train-iters {STEPS} --distributed-timeout-minutes 1"
RESTARTS = f"--inprocess-restart --inprocess-granularity rank --inprocess-active-world-size {RANKS} {QUICKLY}"


@needs_extension
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["update", "end"])
def test_the_rank_that_lives_on_goes_on_in_its_process(where: str, tmp_path: Path) -> None:
    require_megatron_lm()
    (tmp_path / "memory").mkdir()
    memory = f", memory=Memory(directory={str(tmp_path / 'memory')!r}, storage_every=1000)"
    told = {"arguments": f"{SCRIPT} {RESTARTS}", "line": line("Dense(every_n_steps=1)", tmp_path, memory)}
    told |= {"kill": [1, 7, where]}
    codes = launch("tests.support.megatron_lm_inprocess", told, RANKS + 1, tmp_path, warm.python(WARM))
    assert [code != 0 for code in codes] == [False, True, False], logs(tmp_path)

    alone = str(tmp_path / "alone")
    nothing = line("Dense(every_n_steps=1000000)", tmp_path / "other", ", save_last=False")
    run_ranks(live, RANKS, Life(SCRIPT, alone, nothing), timeout=300.0, preload=WARM)
    survivor, spare = lives(tmp_path, 0), lives(tmp_path, 2)
    assert len(survivor) == 2, "its training was entered again, in the same process"
    assert survivor[0][0]["begin"] == 0
    assert 7 - 2 <= survivor[1][0]["begin"] == spare[0][0]["begin"] <= 6
    for rank, found in ((0, survivor), (1, spare)):
        [one] = Journal(f"{alone}.{rank}").lives()
        for life in found:
            for step, each in steps_of(life).items():
                assert each == steps_of(one)[step], f"rank {rank}, iteration {step}"
        ends = [next(each for each in life if "end" in each) for life in (found[-1], one)]
        assert ends[0]["end"] == ends[1]["end"], f"rank {rank}"
        assert ends[0]["counted"] == ends[1]["counted"], f"rank {rank}"
