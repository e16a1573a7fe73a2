"""The docs have what the committed runs of ``moevement.py`` found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import windows_report
from benchmarks.moevement import RESULT, result_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SMALL, LARGE = (result_of(["replay"], size) for size in ("small", "default"))
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


@pytest.mark.parametrize(
    ("row", "suffix"),
    [(row, suffix) for name, suffix in ((SMALL, ", small"), (LARGE, ", 408 MiB")) for row in rows_of(name, "replay")],
)
def test_the_docs_have_replayed_iterations(row, suffix):
    """Not the times of whole iterations, which ordinary ones do not have alike."""
    _, way, *cells = (cell.strip() for cell in row.split("|"))
    assert f"| Lightning, {way}{suffix} | {' | '.join(cells[:3])} |" in DOCS


def test_the_docs_say_what_is_saved():
    said = " ".join(DOCS.split())
    for name in (SMALL, LARGE):
        ratios = {(row["experts"], row["leave_out"]): row["compute_ratio"] for row in kept(name)["replay"]["rows"]}
        for experts in ("ModuleList", "stacked"):
            assert f"{ratios[experts, True]:.2f} instead of {ratios[experts, False]:.2f}" in said


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_the_docs_say_how_replays_were_measured(name):
    assert f"\n{kept(name)['facts']['command']}\n" in DOCS
    assert f"(../benchmarks/results/{name}), {kept(name)['facts']['rounds']} rounds" in DOCS


def test_replays_alone_have_a_file_of_their_own():
    assert result_of(["replay"], "small") == "moevement_replay_small.json"
    assert {result_of(only, "small") for only in (["cost"], ["cost", "replay"])} == {RESULT}
