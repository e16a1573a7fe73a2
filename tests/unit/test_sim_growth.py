"""The benchmark of what the simulator costs runs, and the cost does not grow with GPUs, iterations or duration."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("hydra")
pytest.importorskip("rich")
pytest.importorskip("lightning")

from benchmarks import sim_growth

EVEN = ("load=even", "policy=moevement_peers")
"""Without changes of the load, which a run takes time for, too."""


def plans(name, at):
    """How often the policy was asked in a row of the benchmark; its work beside that is a few additions."""
    return sim_growth.one([*sim_growth.GROWTH[name][1][at], *EVEN])


@pytest.mark.parametrize("name", ["gpus", "iterations", "duration"])
def test_cost_does_not_grow_with_what_repeats(name):
    first, last = plans(name, 0), plans(name, -1)
    grown = last["gpus"] * last["iterations"] / (first["gpus"] * first["iterations"])
    assert grown > 60
    assert last["failures"] == first["failures"] > 10
    assert last["plans"] <= 1.5 * first["plans"] + 5


def test_cost_grows_with_failures():
    few, many = plans("failures", 0), plans("failures", -1)
    assert many["failures"] > 20 * few["failures"]
    assert few["plans"] < many["plans"] <= few["plans"] + 3 * many["failures"]


def test_the_benchmark_runs(tmp_path, capfd, monkeypatch):
    rows = [("setup=tiny", f"failures.mtbf_secs={secs}", "duration_secs=3600") for secs in (600, 300)]
    monkeypatch.setattr(sim_growth, "GROWTH", {**sim_growth.GROWTH, "failures": ("few", rows)})
    assert sim_growth.main(f"--only failures --policies dense --write --out {tmp_path}".split()) == 0
    found = json.loads((tmp_path / "sim_growth.json").read_text())
    assert [row["system"] for row in found["failures"]] == ["dense", "dense"]
    assert all(0 < row["cpu_secs"] < 60 and 50 < row["peak_mb"] < 1000 for row in found["failures"])
    assert "few" in capfd.readouterr().out


def test_a_row_that_cannot_be_simulated_ends_it():
    with pytest.raises(SystemExit, match="no such choice"):
        sim_growth.measure(["policy=nothing"])
