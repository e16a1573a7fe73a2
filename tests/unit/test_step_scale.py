"""``benchmarks/step_scale.py`` runs, saves at every step, and ends with a table whatever fails."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("lightning")
pytest.importorskip("rich")

from benchmarks import step_scale
from benchmarks.step_fits import Clock, Sample, Turn, in_turns, rows

QUICK = "--rounds 1 --steps 4 --warm 2 --secs 1"


@pytest.mark.usefixtures("warm_programs")  # the slow tests below start fresh interpreters
@pytest.mark.parametrize("kind", step_scale.KINDS)
def test_every_policy_saves_at_every_step(tmp_path, capfd, kind):
    out = tmp_path / "out.json"
    options = f"{QUICK} --layouts lightning --shapes 2x6 --experts {kind} --dir {tmp_path} --json {out}"
    assert step_scale.main(options.split()) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    (case,) = json.loads(out.read_text())["cases"]
    found = {row["policy"]: row for row in case["rows"]}
    assert tuple(found) == step_scale.POLICIES
    assert case["failed"] == {}
    assert all(row["n"] == 4 and row["iteration_ms"] > 0 and row["cpu_ms"] > 0 for row in found.values())
    none = found.pop("none")
    assert none["hook_cpu_ms"] == none["kib"] == 0
    assert all(0 < row["hook_cpu_ms"] < row["thread_cpu_ms"] for row in found.values())
    # E/6 is one of six experts here, as is k=1: MoEtion saves the same tensors as MoC.
    assert 0 < found["moc"]["kib"] == found["moetion"]["kib"] < found["dense"]["kib"]
    assert found["moevement"]["kib"] < found["dense"]["kib"]
    assert "MoEvement W=4" in capfd.readouterr().out


@pytest.mark.usefixtures("warm_programs")
def test_a_case_that_fails_is_named_below_the_table(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(step_scale, "RANKS", {"lightning": 1})
    options = f"{QUICK} --layouts lightning --shapes 0x0,2x4 --policies none,moc --dir {tmp_path}"
    assert step_scale.main(options.split()) == 1
    said = capfd.readouterr().out
    assert sum("failed" in line for line in said.splitlines() if line.startswith("│")) == 1
    assert "failed: lightning, stacked, 0x0: moc: " in said
    assert "lightning, stacked, 2x4" in said


def test_a_process_that_dies_is_named(tmp_path):
    heard = []
    ranks = ["print('> one'); print('two')", "print('> three'); 1 / 0"]
    why = step_scale.follow([[sys.executable, "-c", program] for program in ranks], tmp_path, 400, heard.append)
    assert why == "rank 1: exit code 1: ZeroDivisionError: division by zero"
    assert heard == ["one"]


def test_a_process_that_hangs_is_ended(tmp_path):
    why = step_scale.follow([[sys.executable, "-c", "import time; time.sleep(60)"]], tmp_path, 0.5, print)
    assert why == "rank 0: not ready after 0 s: (it said nothing)"


def test_one_policy_that_fails_gets_no_further_turn():
    def once(name, number):
        if name == "moc":
            raise OSError(28, "No space left on device")
        return Sample(name, [0.1, 0.2, 0.3], [0.2] * 3, [0.1] * 3, [0.05] * 3, [2048] * 3)

    kept = []
    found = in_turns(["none", "moc", "dense"], 2, once, lambda what: None, kept.append)
    assert [sample["policy"] for sample in found["samples"]] == ["none", "dense", "dense", "none"]
    assert list(found["failed"]) == ["moc"]
    assert len(kept) == 5
    assert kept[-1] == found


def test_rows_compare_with_iterations_without_checkpoints():
    samples = [
        Sample("dense", [0.5, 0.5, 0.8], [0.7] * 3, [0.4] * 3, [0.2, 0.1, 0.2], [1024] * 3),
        Sample("none", [0.1], [0.1], [0.1], [0.0], [0]),
    ]
    none, dense = rows(["dense", "none"], samples)
    assert (none["policy"], none["extra_iteration_ms"]) == ("none", 0)
    assert (dense["iteration_ms"], dense["mean_ms"], dense["kib"]) == (500.0, 600.0, 1.0)
    assert dense["hook_cpu_ms"] == 200.0
    assert (dense["extra_iteration_ms"], dense["extra_cpu_ms"], dense["extra_thread_cpu_ms"]) == (400.0, 600.0, 300.0)


def test_a_turn_ends_with_a_window():
    sample = Sample("none")
    clock = Clock(Turn(warm=2, counted=5, secs=1e9), sample)
    assert [clock.tick(7) for _ in range(11)] == [False] * 10 + [True]
    assert len(sample.secs) == len(sample.cpu) == len(sample.thread_cpu) == len(sample.hook_cpu) == 8
    assert sample.nbytes == [7] * 8
    clock = Clock(Turn(warm=0, counted=100, least=4, secs=0.0), sample := Sample("none"))
    while not clock.tick(0):
        pass
    assert len(sample.secs) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [("--shapes 48", "48x128"), ("--layouts slurm", "choose from lightning"), ("--policies all", "choose from none")],
)
def test_what_is_no_case_is_refused(options, said):
    with pytest.raises(SystemExit, match=said):
        step_scale.main(options.split())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "megatron"])
def test_other_layouts_are_measured(tmp_path, layout):
    if layout == "megatron":
        pytest.importorskip("megatron.core.package_info")
    out = tmp_path / "out.json"
    options = f"{QUICK} --layouts {layout} --shapes 2x8 --dir {tmp_path} --json {out}"
    assert step_scale.main(options.split()) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert [row["policy"] for row in case["rows"]] == list(step_scale.POLICIES)
    assert case["ranks"] == (1 if layout == "megatron" else 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_eight_acted_megatron_ranks_is_measured(tmp_path, monkeypatch):
    pytest.importorskip("megatron.core.package_info")
    monkeypatch.setattr(step_scale, "ALONE", 0)
    out = tmp_path / "out.json"
    options = f"{QUICK} --layouts megatron --shapes 2x16 --dir {tmp_path} --json {out}"
    assert step_scale.main(options.split()) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["failed"] == {}
    assert [row["policy"] for row in case["rows"]] == list(step_scale.POLICIES)
