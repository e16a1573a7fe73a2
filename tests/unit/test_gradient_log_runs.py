"""The benchmark of a gradient log beside windows and dense checkpoints: its arithmetic, and what docs say of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import gradient_log_runs as runs

DOC = Path(__file__).parents[2] / "docs" / "gradient_log.md"


def life(begin, loaded, *steps, held=100.0):
    at = begin + 1.0
    lines = [{"event": "begin", "step": 0, "at": begin}, {"event": "loaded", "step": loaded, "at": at}]
    return lines + [
        {"event": "step", "step": step, "at": at + number, "stall": 0.5, "held": held, "saved": 10.0 * step}
        for number, step in enumerate(steps, start=1)
    ]


def test_facts_count_what_is_computed_again():
    lives = [life(0.0, 0, 1, 2, 3, 4, 5), life(100.0, 3, 4, 5, 6), life(200.0, 6, 7)]
    found = runs.facts(lives, [], ("log", 2), [0.5, 1.0])
    assert found["again"] == [2, 0]
    assert found["back_secs"] == [3.0, 1.0]
    assert found["loading_secs"] == [1.0, 1.0]
    assert found["slower"] == [2.0, 1.0]
    assert found["step_bytes"] == [45, 55], "of steps 4 and 5, and 5 and 6"
    assert found["held_bytes"] == 100.0


def test_a_step_weighs_a_whole_window_or_a_share_of_a_dense_checkpoint():
    assert runs.per_step("windows", 2, {1: (8, 1), 2: (4, 1), 3: (7, 3)}) == 6
    assert runs.per_step("dense", 10, {10: (50, None), 20: (60, None)}) == 6
    assert runs.per_step("dense", 10, {}) is None


def test_a_window_of_one_step_is_a_dense_checkpoint_and_longer_ones_freeze_what_comes_last():
    assert runs.windows_bytes(1, "tiny") == 12.0
    assert 12.0 / 4 + 4.0 * 3 / 4 > runs.windows_bytes(4, "tiny") > 12.0 / 4


def test_docs_have_the_table_of_the_results():
    assert runs.markdown(json.loads(runs.RESULTS.read_text())) in DOC.read_text()


@pytest.mark.parametrize("kind", ["log", "log, bf16", "windows", "dense"])
def test_bytes_are_those_of_the_formula(kind):
    told = json.loads(runs.RESULTS.read_text())
    measured = mean(told["found"][kind]["step_bytes"]) / told["parameters"]
    assert measured == pytest.approx(runs.formula(kind, told["order"]), rel=0.01)
