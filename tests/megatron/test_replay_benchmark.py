"""The benchmark of Megatron's replayed iterations runs to its end with a tiny model, and keeps what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import megatron_replay

ROOT = Path(__file__).parents[2]


def test_two_replayed_steps_of_either_kind_are_compared(tmp_path: Path) -> None:
    """In a process of its own, since it makes process groups. More is left out in the first of the two steps."""
    words = ["benchmarks/megatron_replay.py", *["--hidden", "32", "--rounds", "2", "--write", "--out"], str(tmp_path)]
    ran = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / megatron_replay.RESULT).read_text())
    assert [row["step"] for row in found["rows"]] == [2, 3, 2, 3]
    first, second = (row["frozen"] for row in found["rows"] if "fp32" in row["experts"])
    assert 1 > first > second > 0
    assert all(len(row["ratios"]) == 2 and min(row["ratios"]) > 0 for row in found["rows"])
    printed = [line for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert printed == [megatron_replay.line(row, found["window"]) for row in found["rows"]]
