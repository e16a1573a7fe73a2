"""The benchmark of localized recovery runs to its end with the smallest setting, and its numbers fit one another."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benchmarks import localized
from benchmarks.localized_rank import WAYS

SMALLEST = "--rounds 1 --microbatches 4 --width 32 --experts 2 --window 2 --act-ms 1 --cycles 1 --json --write"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_phase_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    assert localized.main([*shlex.split(SMALLEST), "--directory", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads((out / "localized.json").read_text())
    assert found == json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    again = {way: rounds[0]["again"] for way, rounds in found["found"].items()}
    everyone, one_stage, nobody = (again[way] for way in WAYS)
    assert everyone == localized.STAGES * one_stage > 0
    assert nobody == 0
    for rounds in found["found"].values():
        [one] = rounds
        phases = ("start_secs", "load_secs", "again_secs")
        assert all(one[phase] > 0 for phase in phases)
        assert one["secs"] == pytest.approx(sum(one[phase] for phase in phases)), "from the kill itself"
    assert found["log"]["nbytes"] >= found["formula"]
    assert sum(found["log"]["nbytes"]) == pytest.approx(sum(found["formula"]), rel=0.05)
    assert found["log"]["of_none"] > 0
