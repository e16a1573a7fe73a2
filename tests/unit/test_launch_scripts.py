"""The launch scripts: restarts that work, and a job that goes back into SLURM's queue before its time is up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SCRIPTS = sorted(RECIPES.glob("*/launch/*"))
BATCH = [script for script in SCRIPTS if script.suffix == ".sbatch"]


def ids(scripts):
    return [f"{script.parents[1].name}/{script.name}" for script in scripts]


def test_every_recipe_has_its_scripts():
    assert {script.name for script in SCRIPTS} == {"torchrun.sh", "slurm.sbatch"}
    assert len(SCRIPTS) == 4


@pytest.mark.parametrize("script", SCRIPTS, ids=ids(SCRIPTS))
def test_restarts_get_a_store_of_their_own(script):
    """See docs/torchrun.md: the variable alone is not enough."""
    commands = "\n".join(line for line in script.read_text().splitlines() if not line.startswith("#"))
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in commands
    assert "--standalone" in commands or "--rdzv-backend=c10d" in commands
    assert "--max-restarts" in commands
    assert "--master-port" not in commands


def cpus_per_task(script):
    """As SLURM tells a job what its script asks for."""
    return re.search(r"^#SBATCH --cpus-per-task=(\d+)$", script.read_text(), re.M)[1]


@pytest.fixture
def slurm(tmp_path):
    """``start(script, lasts, code)``: the script under a ``scontrol`` that notes what it is asked, and an ``srun`` that
    does what ``lasts`` says, in words of the shell, and exits with ``code``."""
    fakes = tmp_path / "bin"
    fakes.mkdir()
    asked = tmp_path / "asked"
    started = []

    def fake(name, text):
        (fakes / name).write_text(f"#!/bin/sh\n{text}\n")
        (fakes / name).chmod(0o755)

    def start(script, lasts, code):
        fake("scontrol", f'echo "$@" >> {asked}; [ "$1" = show ] && printf "node1\\nnode2\\n"; true')
        fake("srun", f'echo "$@" > {asked}.srun; {lasts}; exit {code}')
        words = {"SUBMIT_DIR": tmp_path, "JOB_ID": "77", "JOB_NAME": "run", "NNODES": "2", "JOB_NODELIST": "node[1-2]"}
        environment = {f"SLURM_{key}": str(value) for key, value in words.items()}
        environment["SLURM_CPUS_PER_TASK"] = cpus_per_task(script)
        environment["PATH"] = f"{fakes}:{os.environ['PATH']}"
        started.append(subprocess.Popen(["bash", str(script), "extra=1"], env=environment, start_new_session=True))
        deadline = time.monotonic() + 120
        while not Path(f"{asked}.srun").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return started[-1], asked

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("script", BATCH, ids=ids(BATCH))
def test_a_job_whose_time_is_nearly_up_is_requeued_and_goes_on_until_slurm_ends_it(script, slurm):
    assert "#SBATCH --signal=B:USR1@" in script.read_text()
    requeued = "until grep -q requeue asked; do sleep 0.05; done; sleep 0.3"
    process, asked = slurm(script, requeued, 0)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 0
    assert asked.read_text().splitlines() == ["show hostnames node[1-2]", "requeue 77"]
    arguments = Path(f"{asked}.srun").read_text()
    assert "--rdzv-endpoint=node1:29400" in arguments
    assert "run_dir=runs/run extra=1" in arguments


@pytest.mark.parametrize("script", BATCH, ids=ids(BATCH))
def test_a_job_that_fails_is_not_requeued_and_says_so_by_its_exit_code(script, slurm):
    process, asked = slurm(script, "true", 7)
    assert process.wait(120) == 7
    assert "requeue" not in asked.read_text()


@pytest.mark.parametrize("script", BATCH, ids=ids(BATCH))
def test_the_ranks_of_a_node_get_all_cores_that_the_job_asked_for(script, slurm):
    """Since SLURM 22.05 srun does not take ``--cpus-per-task`` from the job."""
    process, asked = slurm(script, "true", 0)
    assert process.wait(120) == 0
    assert f"--cpus-per-task={cpus_per_task(script)}" in Path(f"{asked}.srun").read_text().split()


def test_the_job_on_the_page_asks_for_what_the_recipes_ask_for():
    page = (RECIPES.parent / "docs" / "torchrun.md").read_text()
    [job] = re.findall(r"^```bash\n(#!/usr/bin/env bash\n.*?)^```", page, re.M | re.S)
    for script in BATCH:
        lines = re.findall(
            r"^(?:#SBATCH --(?:requeue|signal|cpus|open)|export TORCH_DIS|srun ).*$", script.read_text(), re.M
        )
        assert {line.partition("} ")[0] for line in lines} <= {line.partition("} ")[0] for line in job.splitlines()}
