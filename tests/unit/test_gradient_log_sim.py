"""Logs of gradients beside sparse windows: the sentence, the break-even, and a row of the documentation."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from benchmarks import gradient_log_sim
from moe_ckpt.policies import Dense, GradientLog, MoEvement
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.planner.log_or_windows import Cost, break_even_secs, report_of, sentences
from moe_ckpt_sim.planner.planner import recommend
from moe_ckpt_sim.run.system import System
from tests.sim.builders import scenario

DOCS = Path(__file__).parents[2] / "docs" / "gradient_log.md"
LOG = System("log", GradientLog(), "peers", 1, 300.0)
WINDOWS = System("windows", MoEvement(), "peers", 1, 300.0)


def said(**cluster):
    tried = scenario(failures=Poisson(120.0), cluster=cluster, duration_secs=1200.0)
    plan = recommend(tried, [LOG, WINDOWS, System("dense", Dense(5))], seeds=1)
    return sentences(tried, plan.candidates)


def test_a_log_that_fits_is_set_beside_the_windows():
    [one] = said()
    assert one.startswith("log beside windows: W = ")
    assert "sent per iteration" in one
    assert "at any rate of failures" in one or "min apart" in one


def test_gradients_that_do_not_fit_are_named_with_what_would():
    """A rank has 8 kB of gradients, and 5 kB can be copied."""
    first, second = said(pcie_bytes_per_sec=5e3)
    assert "the gradients alone have" in first
    assert "use MoEvement" in first
    assert "windows cost no more at any rate of failures" in second or "the log costs less where failures are" in second


def test_without_either_there_is_nothing_to_say():
    tried = scenario(failures=Poisson(120.0), duration_secs=600.0)
    assert sentences(tried, recommend(tried, [LOG], seeds=1).candidates) == []
    assert report_of(tried, WINDOWS) is None
    assert report_of(replace(tried), LOG).fits


def test_the_break_even_is_where_both_cost_alike():
    log, windows = Cost(0.01, 10.0), Cost(0.0, 40.0)
    apart = break_even_secs(log, windows)
    assert apart == pytest.approx(3000.0)
    assert log.running + log.failure_secs / apart == pytest.approx(windows.running + windows.failure_secs / apart)
    assert break_even_secs(Cost(0.0, 1.0), Cost(0.0, 2.0)) == inf


KEPT = json.loads(gradient_log_sim.KEPT.read_text())
DEEPSEEK = {tuple(cells[:2]): cells for cells in KEPT["moevement_deepseek"]["rows"]}
"""(links, system) -> cells."""


def test_the_docs_have_every_row_of_the_results():
    text = DOCS.read_text()
    assert list(KEPT) == list(gradient_log_sim.SETUPS)
    rows = gradient_log_sim.beside(KEPT["moevement_deepseek"]["rows"])
    assert gradient_log_sim.markdown(gradient_log_sim.BESIDE, rows) in text
    assert gradient_log_sim.markdown(gradient_log_sim.WINS, gradient_log_sim.compared(KEPT)) in text


def test_with_nominal_links_no_system_stalls():
    """So that the table in the docs has no column for it."""
    assert {row[4] for row in KEPT["moevement_deepseek"]["rows"] if row[0] == "nominal"} == {"0.0%"}


@pytest.mark.parametrize("system", ["windows, the failed stage alone", "windows", "log, gradients of 4 bytes"])
@pytest.mark.quick("log, gradients of 4 bytes")
def test_rows_of_the_results_are_what_is_simulated(system):
    assert list(gradient_log_sim.row("moevement_deepseek", "nominal", system).cells) == DEEPSEEK["nominal", system]


@pytest.mark.slow
@pytest.mark.parametrize("setup", gradient_log_sim.SETUPS)
def test_all_results_are_what_is_simulated(setup):
    assert gradient_log_sim.measure(setup) == KEPT[setup]
