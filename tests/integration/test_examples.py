"""The programs of examples/ do what their first lines say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOISE = r"(?:(?!exit code).*\n)*"
TWICE_KILLED = (
    NOISE + NOISE.join(rf"exit code {code}\n" for code in (0, -9, -9, 0)) + "the same bits as without kills: True\n"
)
NEEDS = {"with_torchtitan": "torchtitan", "with_bridge": "megatron.bridge"}
"""Program -> a package that not every environment has."""
HELPERS = ("lives", "bridge_on_cpu", "torchtitan_on_cpu")
PRINTED = {
    "with_lightning": r"exit code 0\nexit code -9\nexit code 0\nthe same bits as without a kill: True\n",
    **dict.fromkeys(("with_pytorch", "with_fabric", "with_transformers", *NEEDS), TWICE_KILLED),
    "with_megatron": r"trained from iteration 0 .*( \S+)\nexit code 0\nexit code -9\ntrained .*\1\nexit code 0\n",
    "policy": r"exit code -9\nresumed at step [12]\d, \d+ pairs of token and expert lost\nexit code 0\n",
    "storage": r"began at step 0; .*\nbegan at step 25; .*: shelf://my_run/step_00000040\S*\nthe shelf has .*\n",
    "memory": r"exit code -9\nnewest step on storage: 1\n9 operators .* from this node, step [12]\d\nexit code 0\n",
}


def test_all_of_them_are_short_and_tried_below():
    lines = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines.keys() == {*PRINTED, *HELPERS}
    assert max(lines[name] for name in PRINTED) <= 60


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.usefixtures("warm_programs")
def test_it_runs_without_arguments(name, tmp_path):
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"without {NEEDS[name]}")
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[name], done.stdout), done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
