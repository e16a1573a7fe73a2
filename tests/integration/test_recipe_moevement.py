"""The recipe from the command line under MoEvement: killed, started again by the same command, equal in every bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.demonstrating import read_lines
from recipes.gpt_moe_lightning.summary import RunSummary, summarise

ROOT = Path(__file__).parents[2]
WINDOW, STEPS, EPOCH = 4, 16, 6


def life(tmp_path: Path, name: str, *overrides: str) -> int:
    """Run the recipe to its end or death; the exit code."""
    command = [
        sys.executable, "-m", "recipes.gpt_moe_lightning.train", "moe_ckpt/policy=moevement",
        f"moe_ckpt.policy.window={WINDOW}", f"run_dir={tmp_path / name}", "data=wikitext",
        f"data.path={tmp_path / 'text.txt'}", "data.batch_size=4", f"trainer.max_steps={STEPS}",
        "trainer.progress_bar=false", "trainer.val_batches=1", "model.hidden=32", "model.layers=2", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def write_text(path: Path) -> None:
    """Enough random words for ``EPOCH`` batches of 4 windows of 128 bytes, and for validation."""
    drawn = random.Random(1)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randrange(2, 9))) for _ in range(300)]
    text = " ".join(drawn.choices(words, k=2000))[: 128 * 4 * EPOCH + 400]
    path.write_text("\n".join(text[i : i + 60] for i in range(0, len(text), 60)))


def finished(run: RunSummary) -> tuple[object, object, dict[int, set[float]]]:
    return run.parameters, run.val_loss, run.losses


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_before_the_first_window_is_complete_and_where_one_crosses_an_epoch(tmp_path, workers):
    write_text(tmp_path / "text.txt")
    loading = f"data.num_workers={workers}"
    assert life(tmp_path, "whole", loading) == 0
    faults = ("faults=seeded", "faults.kills=2", "faults.seed=1")
    codes = [life(tmp_path, "killed", loading, *faults) for _ in range(3)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [kill["step"] for kill in read_lines(tmp_path / "killed" / "kills.jsonl")] == [4, 11]
    whole, killed = summarise("whole", tmp_path / "whole"), summarise("killed", tmp_path / "killed")
    assert [r["windows"] // 4 for r in whole.records if r.get("event") == "corpus"] == [EPOCH]
    # Back to step 0, which was saved whole, and then to step 5, whose window reaches into the second epoch.
    assert [r["from_step"] for r in killed.records if r.get("event") == "training"] == [0, 0, 5]
    assert [r["step"] for r in killed.records if r.get("moe_ckpt/replayed")] == [6, 7, 8]
    assert (killed.recomputed, killed.replayed, killed.lost_tokens) == (3 + 3 + 2, 3, 0)
    assert whole.steps == STEPS
    assert finished(killed) == finished(whole)
