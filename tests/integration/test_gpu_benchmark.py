"""``python -m benchmarks.gpu`` runs as a whole without a GPU, small, so that it is ready where there is one."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu import costs, lives, peers


def test_it_measures_on_a_cpu(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(costs, "POLICIES", {"MoC(k=1)": costs.POLICIES["MoC(k=1)"]})
    monkeypatch.setattr(peers, "PEERS", {name: peers.PEERS[name] for name in ("dcp, thread", "DLRover, memory")})
    monkeypatch.setattr(lives, "POLICIES", ())
    monkeypatch.setitem(benchmark._SIZES, "cpu", (1 << 20, 2, 2))
    out = tmp_path / "gpu.json"
    assert benchmark.main(["--device", "cpu", "--minutes", "9", "--dir", str(tmp_path), "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["machine"]["gpu"] == "none"
    assert results["rates"]["copying from host to host"] > 0
    [ours, dcp, dlrover] = results["costs"]
    assert ours["problem"] == ""
    assert ours["begun"] == 2
    assert dcp["begun"] + dcp["left_out"] == 2
    assert "dlrover" in dlrover["problem"], "what is not installed is named"
    assert results["restart"]["step"] > 0, "from memory, after kill -9"
    assert "From kill -9" in capsys.readouterr().out
