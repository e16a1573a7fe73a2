"""``recipes/launch``: the flags of published models are Megatron-LM's, and its own script saves and resumes by ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ckpt import newest_step
from tests.integration.lives import free_port
from tests.support.megatron_lm import MODEL, require_megatron_lm

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "recipes" / "launch"
PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
import tests.support.megatron_lm_warm
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""What the script asks CUDA for is answered as for the other tests of Megatron-LM."""
COMMENTS = (LAUNCH / "qwen3_30b_a3b.args").read_text().splitlines()
LARGER = " ".join(line.lstrip("# ") for line in COMMENTS if line.startswith("#   --"))
"""Of Qwen3-235B-A22B, as the file says."""


@pytest.fixture(autouse=True)
def tree() -> str:
    return require_megatron_lm()


def launched(*words: str, gpus: int = 1, **more: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "WORLD_SIZE": str(gpus), **more}
    command = [sys.executable, "-c", PROGRAM, str(LAUNCH / "pretrain_gpt.py"), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "gpus", "layout"),
    [
        (
            "@deepseek_v3.args",
            1024,
            "data 32 x tensor 2 x pipeline 16 x context 1; 256 experts over 64 ranks, 4 on each",
        ),
        (
            "@qwen3_30b_a3b.args",
            32,
            "data 16 x tensor 1 x pipeline 2 x context 1; 128 experts over 16 ranks, 8 on each",
        ),
        (f"@qwen3_30b_a3b.args {LARGER}", 256, "data 4 x tensor 4 x pipeline 16 x context 1; 128 experts over 8 ranks"),
    ],
    ids=["deepseek", "qwen", "larger qwen"],
)
def test_megatron_lm_takes_the_flags_of_published_models(words: str, gpus: int, layout: str):
    assert layout in launched("--dry-run", *words.split(), "--mock-data", gpus=gpus)


def test_its_own_script_saves_and_resumes(tmp_path: Path):
    one = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "RUN": str(tmp_path)}
    words = [*MODEL.split(), "--train-iters", "5"]
    assert "training starts from scratch" in launched(
        *words, "--exit-interval", "3", **one, MASTER_PORT=str(free_port())
    )
    assert newest_step(tmp_path / "checkpoints") == 3
    assert "resumed at iteration 3" in launched(*words, **one, MASTER_PORT=str(free_port()))
    assert newest_step(tmp_path / "checkpoints") == 5
