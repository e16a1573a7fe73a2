"""``recipes/launch``: its programs, started by its script for one machine, go on after ``kill -9`` of a rank."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("accelerate")

from moe_ckpt import newest_step

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
PROGRAMS = {"trainer": LAUNCH, "loop": LAUNCH, "titan_launched": ROOT / "tests" / "support"}
STEPS = 60


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("trainer", {}),
        ("loop", {"FSDP": "1"}),
        ("titan_launched", {}),
        pytest.param("loop", {}, marks=pytest.mark.slow),
    ],
    ids=["trainer", "fsdp2", "titan", "ddp"],
)
def test_a_rank_is_killed_and_all_go_on(name: str, more: dict[str, str], tmp_path: Path):
    if name == "titan_launched" and importlib.util.find_spec("torchtitan") is None:
        pytest.skip("without torchtitan")
    words = {"RUN": str(tmp_path), "STEPS": str(STEPS), "NPROC": "2", "PYTHON": sys.executable, **more}
    environment = os.environ | words | {"PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT / "examples")])}
    said = tmp_path / "said"
    with said.open("wb") as file:
        command = [str(LAUNCH / "torchrun.sh"), str(PROGRAMS[name] / f"{name}.py")]
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 200
        while (newest_step(tmp_path / "checkpoints") or 0) < 20 and job.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        ranks = [each for each in psutil.Process(job.pid).children() if f"{name}.py" in " ".join(each.cmdline())]
        os.kill(ranks[-1].pid, signal.SIGKILL)
        assert job.wait(200) == 0, said.read_text()[-4000:]
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(60)
    assert said.read_text().count("moe_ckpt: resumed at step") == 1, said.read_text()[-4000:]
    assert newest_step(tmp_path / "checkpoints") == STEPS
