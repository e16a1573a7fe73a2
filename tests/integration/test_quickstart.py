"""The first program of the README: killed and started again, it ends with the bits of a run that nobody killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_ckpt
from recipes.quickstart import Model
from tests.support.waiting import retry_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "quickstart.py"
STEPS = 60


def command(store: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--dir", str(store)]


def weights(store: Path) -> dict[str, torch.Tensor]:
    return dict(moe_ckpt.load_from_checkpoint(Model, str(store)).state_dict())


@pytest.mark.usefixtures("warm_programs")
def test_killed_and_started_again_it_ends_with_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), check=True, capture_output=True, timeout=300)
    with subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        assert retry_until(lambda: moe_ckpt.newest_step(str(killed)) or first.poll() is not None)
        first.kill()
    assert first.returncode == -9, "the run ended before it could be killed"
    second = subprocess.run(command(killed), check=True, capture_output=True, text=True, timeout=300)

    resumed = re.search(r"moe_ckpt: .* at step (\d+)", second.stdout + second.stderr)
    assert resumed is not None
    assert 0 < int(resumed[1]) < STEPS
    expected, found = weights(whole), weights(killed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_readme_shows_the_lines_of_the_script():
    lines = [line.strip() for line in SCRIPT.read_text().splitlines()]
    section = (ROOT / "README.md").read_text().split("## Five minutes", 1)[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)
    assert code is not None
    imports = [line for line in code[1].splitlines() if line.startswith("from")]
    assert imports
    assert set(imports) <= set(lines)
