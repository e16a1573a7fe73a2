"""``python -m benchmarks.gpu`` runs as a whole without a GPU, small, so that it is ready where there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import costs, lives, peers, training
from moe_ckpt.policies import Dense
from tests.support.acted_gpu import ActedGPU


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(costs, "POLICIES", {"MoC(k=1)": costs.POLICIES["MoC(k=1)"]})
    monkeypatch.setattr(peers, "PEERS", {name: peers.PEERS[name] for name in ("dcp, thread", "DLRover, memory")})
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(benchmark._SIZES, device, (1 << 20, 2, 2))


def test_it_measures_on_a_cpu(tmp_path: Path, monkeypatch, capsys, small):
    monkeypatch.setattr(lives, "cases", lambda: [("gpt", "dense", "fp32")])
    monkeypatch.setattr(lives, "_STEPS", 6)
    monkeypatch.setattr(lives, "_KILLS", 1)
    out = tmp_path / "gpu.json"
    assert benchmark.main(["--device", "cpu", "--minutes", "9", "--dir", str(tmp_path), "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["machine"]["gpu"] == "none"
    assert results["rates"]["copying from host to host"] > 0
    [ours, dcp, dlrover] = results["costs"]
    assert ours["problem"] == ""
    assert ours["begun"] == 2
    assert ours["sealed_secs"] >= 0
    assert ours["settling"] > 0
    assert dcp["begun"] + dcp["left_out"] == 2
    assert "dlrover" in dlrover["problem"], "what is not installed is named"
    own, stored, peers_own = (results["restart"][source]["step"] for source in lives.SOURCES)
    assert stored == 2
    assert 0 < own <= 8, "it resumes after kill -9, from the newest step that was sealed by then"
    assert 0 < peers_own <= 3
    [case] = results["exact"]
    assert case["tensors that differ"] == 0
    assert 0 < case["resumed"] <= case["kills"][0]
    assert "From kill -9" in capsys.readouterr().out


def test_a_part_that_fails_is_named_and_ends_no_other(tmp_path: Path, monkeypatch, capsys):
    """What there was by then is written, also of the part that failed."""

    def breaks(*_):
        raise RuntimeError("the bus is on strike")

    def half(training, directory, until, counts, say):
        say(costs.Cost("one", reference_ms=1.0))
        assert json.loads(out.read_text())["costs"][0]["name"] == "one", "written at once"
        breaks()

    out = tmp_path / "gpu.json"
    monkeypatch.setattr(benchmark.rates, "measure", breaks)
    monkeypatch.setattr(costs, "measure", half)
    monkeypatch.setattr(lives, "restart", breaks)
    monkeypatch.setattr(lives, "cases", lambda: [("gpt", "dense", "fp32"), ("megatron", "dense", "fp32")])
    monkeypatch.setattr(lives, "_start", breaks)
    monkeypatch.setattr(lives, "_is_installed", lambda package: package == "torch")
    assert benchmark.main(["--device", "cpu", "--dir", str(tmp_path), "--out", str(out)]) == 1
    results = json.loads(out.read_text())
    parts = ["rates", "costs", *(f"restart from {source}" for source in lives.SOURCES)]
    assert results["problems"] == [f"{part}: RuntimeError: the bus is on strike" for part in parts]
    assert [case["problem"] for case in results["exact"]] == [
        "RuntimeError: the bus is on strike",
        "megatron.core is not installed",
    ]
    assert "on strike" in capsys.readouterr().out


def test_the_first_half_runs_on_a_gpu_that_is_acted(tmp_path: Path, monkeypatch, small):
    """Its locking, its events and its copies; what a GPU computes is computed on the host."""
    monkeypatch.setattr(costs, "POLICIES", {"MoC(k=1)": costs.POLICIES["MoC(k=1)"], "Dense()": Dense()})
    monkeypatch.setattr(peers, "PEERS", {})
    monkeypatch.setitem(training.SHAPES, "cuda", training.SHAPES["cpu"])
    out = tmp_path / "gpu.json"
    with ActedGPU() as gpu:
        arguments = ["--device", "cuda", "--half", "first", "--dir", str(tmp_path), "--out", str(out)]
        assert benchmark.main(arguments) == 0
        assert gpu.lockers
    results = json.loads(out.read_text())
    assert results["machine"]["gpu"] == "an acted GPU"
    assert 0 < results["rates"]["locking pages"] < 2.6, "0.4 s for each GB"
    assert [(cost["problem"], cost["begun"]) for cost in results["costs"]] == [("", 2), ("", 2)]
