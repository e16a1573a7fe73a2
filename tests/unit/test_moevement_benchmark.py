"""The docs have what the committed runs of ``moevement.py`` found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import windows_report
from benchmarks.moevement import RESULT

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = (ROOT / "docs" / "moevement.md").read_text()


def kept(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def rows_of(name: str, part: str) -> list[str]:
    """Of a part of what ``moevement.py`` found, as it prints them, without the head."""
    found = kept(name)
    printed = windows_report.lines({"facts": found["facts"], part: found[part]})
    return [each for each in printed if each.startswith("| ")][1:]


@pytest.mark.parametrize("row", [*rows_of(RESULT, "cost"), *rows_of(RESULT, "recovery")])
def test_the_docs_have_costs_and_recoveries(row):
    """``Dense`` and ``MoC`` are in docs/benchmarks.md, from a run that keeps every checkpoint."""
    assert (row in DOCS) != row.startswith(("| dense |", "| MoC"))
