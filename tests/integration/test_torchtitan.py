"""``moe_ckpt.torchtitan``: real Trainers, killed and started again, with the bits of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan.trainer", exc_type=ImportError)

from tests.integration import torchtitan_run
from tests.integration.test_plain_loop import require_alike
from tests.integration.torchtitan_run import STEPS, Run
from tests.support.processes import start_ranks

WARM = "tests.support.torchtitan_warm"
WINDOWS, LOG = ("MoEvement", {"window": 3}), ("GradientLog", {})


def life(root: Path, run: Run, ranks: int = 1, kill_at: int | None = None) -> dict[str, Any]:
    """The end of a life; of one in which rank 0 was killed, nothing."""
    root.mkdir(exist_ok=True)
    outcomes = start_ranks(torchtitan_run.lived, ranks, str(root), run, kill_at, preload=WARM)
    assert outcomes[0].exitcode == (0 if kill_at is None else -9), outcomes[0].error
    return outcomes[0].value if kill_at is None else {}


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (Run(validate=True, optimizers=2), 1),
        (Run(WINDOWS, accumulate=2), 1),
        (Run(LOG, memory=True), 1),
        (Run(memory=True, workers=2), 1),
        (Run(WINDOWS, memory=True, validate=True), 2),
    ],
    ids=["dense", "windows", "log", "workers", "windows-fsdp2"],
)
def test_killed_at_random_it_ends_with_the_same_bits(tmp_path: Path, run: Run, ranks: int):
    undisturbed = life(tmp_path / "whole", run, ranks)
    assert any(bias.any() for bias in undisturbed["bias"]), "which changes before the update"
    kills = sorted({5, random.randrange(2, STEPS), random.randrange(6, STEPS), 20})
    for kill_at in kills:
        life(tmp_path / "killed", run, ranks, kill_at)
    resumed = life(tmp_path / "killed", run, ranks)
    assert resumed["restored"], kills
    require_alike(undisturbed, resumed)
    assert resumed["at_end"] == undisturbed["at_end"]
    assert resumed["losses"].items() <= undisturbed["losses"].items()
