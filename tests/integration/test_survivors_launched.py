"""Ranks of DDP that live on under real launchers: ``torchrun``, and our SLURM script with a stand-in for ``srun``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from moe_ckpt.testing import Kill, KillSchedule
from tests.integration.crash_run import Run
from tests.integration.lives import (
    LIFE_SECS,
    assert_same_run,
    events,
    free_port,
    place,  # noqa: F401 - a fixture
    recomputed,
    split_lives,
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_survivors import POLICIES
from tests.support import warm
from tests.support.srun import processes_of
from tests.support.torchrun import torchrun
from tests.support.waiting import retry_until

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "launch" / "slurm.sbatch"
SEALED = re.compile(r"training stops \((\w+)\): rank (\d) keeps its state of step (\d+) in memory")


def require_newest(run: Run, said: str, steps: list[int]) -> None:
    """Each start but the first resumed at the step that the survivor of the one before sealed."""
    assert [int(step) for _, _, step in SEALED.findall(said)] == steps, said[-6000:]
    for rank in range(run.ranks):
        lives = split_lives(events(run, rank))
        assert [life[0]["step"] for life in lives] == [None, *steps], said[-6000:]
        assert [life[0].get("lost", 0) for life in lives] == [0] * len(lives), "tokens of experts"
    assert max(recomputed(run)) == 0
    assert left(run) == []


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["moc", pytest.param("dense rarely", marks=pytest.mark.slow)])
def test_under_torchrun_the_restart_goes_on_from_what_the_survivor_sealed(policy, fresh, place):  # noqa: F811
    """Its agent ends the other rank by SIGTERM, and starts both again. fresh: in interpreters of their own."""
    kills = (Kill(7, 1, "compute"), Kill(13, 0, "compute"))
    schedule = KillSchedule(kills).to_json()
    run = replace(in_memory(replace(POLICIES[policy], ranks=2, epochs=4), place), kills=schedule)
    said = torchrun(
        "tests.integration.crash_run", run.to_json(), ranks=2, restarts=2, timeout_secs=500,
        python=sys.executable if fresh else warm.python(),
    )  # fmt: skip
    assert sorted(KillSchedule(kills).fired(f"{run.log}.kills")) == sorted(kills), said[-6000:]
    steps = [int(step) for _, _, step in SEALED.findall(said)]
    assert len(steps) == 2, said[-6000:]
    require_newest(run, said, steps)
    assert_same_run(run, unwritten=range(100))


def test_under_torchrun_a_rank_seals_that_waits_for_a_dead_one_for_ever(place):  # noqa: F811
    """Lightning's handler of SIGTERM does not run then, and torchrun kills the rank 30 s later."""
    soon = {"survivor_secs": 26.0}  # of the 30 s: whoever stands still for the others is not waited for
    run = replace(in_memory(replace(POLICIES["moc"], ranks=2, memory_options=soon), place), sabotage="stands still")
    program = "tests.integration.crash_run", run.to_json()
    said = torchrun(*program, ranks=2, restarts=1, timeout_secs=300, python=warm.python())
    assert SEALED.findall(said) == [("SIGTERM", "0", "6")], said[-6000:]
    require_newest(run, said, [6])
    assert_same_run(run, unwritten=range(100))


def stands_still(node: list[psutil.Process]) -> bool:
    """Whether a process of it has been stopped."""
    for process in node:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process.status() == psutil.STATUS_STOPPED:
                return True
    return False


@contextlib.contextmanager
def job(run: Run, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Our script as SLURM starts it, on two nodes of one rank each. It trains ``run`` in place of a recipe."""
    fakes = directory / "bin"
    fakes.mkdir(exist_ok=True)
    program = json.dumps(["tests.support.started", "tests.integration.crash_run", run.to_json()])
    texts = {
        "scontrol": "#!/bin/sh\necho 127.0.0.1\n",
        "srun": f'#!/bin/sh\nexec {sys.executable} -m tests.support.srun "$@"\n',
        "python": f"#!{sys.executable}\nimport os, sys\nat = sys.argv.index('the program')\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:at], *{program}])\n",
    }
    for name, text in texts.items():
        (fakes / name).write_text(text)
        (fakes / name).chmod(0o755)
    words = {"SUBMIT_DIR": directory, "JOB_ID": "77", "JOB_NAME": "run", "NNODES": "2", "JOB_NODELIST": "node[1-2]"}
    environment = {
        **os.environ,
        **{f"SLURM_{key}": str(value) for key, value in words.items()},
        "SLURM_GPUS_ON_NODE": "1",
        "RDZV_PORT": str(free_port()),
        "SRUN_TASKS": str(directory / "tasks"),
        "PATH": f"{fakes}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with open(directory / "said", "ab") as said:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), "-m", "the program"],
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for each in processes_of(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()


@pytest.mark.slow
def test_under_slurm_a_requeued_job_goes_on_from_what_the_survivor_sealed(place, tmp_path):  # noqa: F811
    """A node is gone, with all its processes: SLURM ends those of the other one, and the job comes back as it was.

    Here a node is a task and its memory outlives it, as where the machine did not go down with the job.
    """
    run = in_memory(replace(POLICIES["moc"], ranks=2), place)
    # Both stand still before a backward pass: a rank that dies in an update takes a step back (failures.md).
    with job(replace(run, crash=("stop", 9)), tmp_path) as process:
        tasks = tmp_path / "tasks"
        nodes = lambda: [processes_of(int(task)) for task in tasks.read_text().split()]  # noqa: E731
        waiting = lambda: tasks.exists() and all(map(stands_still, nodes()))  # noqa: E731
        assert retry_until(lambda: waiting() or process.poll() is not None, LIFE_SECS)
        assert process.poll() is None, (tmp_path / "said").read_text()[-6000:]
        alive, gone = nodes()
        for each in gone:
            os.kill(each.pid, signal.SIGKILL)
        for each in alive:
            os.kill(each.pid, signal.SIGCONT)
        assert process.wait(LIFE_SECS) == signal.SIGKILL
    with job(run, tmp_path) as process:
        assert process.wait(LIFE_SECS) == 0, (tmp_path / "said").read_text()[-6000:]
    said = (tmp_path / "said").read_text()
    steps = [int(step) for _, _, step in SEALED.findall(said)]
    assert steps == [8], said[-6000:]
    require_newest(run, said, steps)
    assert_same_run(run, unwritten=range(100))
