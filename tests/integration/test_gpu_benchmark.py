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


@pytest.mark.parametrize(
    ("device", "version", "problem"),
    [
        ("cpu", "0.19.2", "not on a CPU: CUDA captures graphs"),
        ("cuda", "0.16.1", "megatron-core 0.16.1 has no cuda_graph_modules, which 0.18 has"),
    ],
)
def test_where_there_are_no_cuda_graphs_it_says_so(tmp_path, monkeypatch, device, version, problem):
    monkeypatch.setattr(lives, "version", lambda package: version)
    case = lives._case(device, tmp_path, float("inf"), (lives.GRAPHS, "dense", "fp32"))
    assert case == {"case": "megatron with CUDA graphs, dense, fp32", "problem": problem}


@pytest.mark.parametrize("token", ["", "other"])
def test_graphs_are_compared_with_a_run_without(tmp_path, monkeypatch, token):
    """As of a run in each of whose processes the same comes out, or other tokens with graphs."""

    def start(arguments, expected=0):
        tokens = [[3, 5], [4, 4 + bool(token and lives.GRAPHS in arguments)]]
        return {"digests": {"w": "7"}, "step": 5, "tokens": tokens, "has_captured": lives.GRAPHS in arguments}

    monkeypatch.setattr(lives, "_start", start)
    monkeypatch.setattr(lives, "_no_graphs", lambda device: "")
    said = []
    monkeypatch.setattr(lives, "cases", lambda: [(lives.GRAPHS, "dense", "fp32")])
    lives.exact("cuda", tmp_path, float("inf"), lambda case, text: said.append((case, text)))
    [(case, text)] = said
    assert (case["tensors that differ"], case["token counts that differ"]) == (0, len(token) // 5)
    assert f"the tokens of {len(token) // 5} experts from those without graphs" in text


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
