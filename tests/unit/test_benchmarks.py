"""The benchmarks still run, and their numbers mean what they say."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("lightning")
pytest.importorskip("rich")

import lightning.pytorch as pl
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks import (
    agreement,
    contestants,
    copy_speed,
    lost_tokens,
    megatron_prepare,
    moevement,
    stall,
    stopwatch,
    torchrun_restarts,
)
from benchmarks.contestants import Contestant, Gate, HookClock, Reference, Saving
from benchmarks.failing import Failures, reason


@pytest.mark.timeout(120)
def test_stall_runs_and_finds_what_was_written(tmp_path, capfd):
    out = tmp_path / "out"
    names = ["no checkpoint", "moe_ckpt", "AsyncCheckpointIO"]
    code = stall.main(
        [*f"--size tiny --iterations 2 --rounds 1 --write --dir {tmp_path} --out {out}".split(), "--only", *names]
    )
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = json.loads((out / "stall_disk.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == 5
    assert found["not_run"] == found["failed"] == {}
    dense, moc = rows["moe_ckpt Dense, async"], rows["moe_ckpt MoC, K=1"]
    assert all(row["saved"] == 1.0 for name, row in rows.items() if name != "no checkpoint")
    assert rows["no checkpoint"]["nbytes"] == rows["no checkpoint"]["hook"] == 0
    assert found["state_nbytes"] < dense["nbytes"] < 1.5 * found["state_nbytes"] + 200_000
    assert moc["nbytes"] < 0.8 * dense["nbytes"]
    assert "moe_ckpt MoC" in capfd.readouterr().out


class CannotWrite(Contestant):
    """Fails as torch.distributed.checkpoint does on a full disk: with what is no ``Exception``."""

    def __init__(self, name, after_fits=0):
        self.name, self.left = name, after_fits

    def begin(self, gate, directory):
        self.trainer_options = {"enable_checkpointing": False}
        self.left -= 1
        self.directory = directory
        return [Saving(gate, self.save)]

    def save(self, trainer, step):
        (self.directory / f"step_{step}").write_bytes(b"x" * 1000)
        if self.left < 0:
            full = OSError(28, "No space left on device")
            raise CheckpointException("write", {0: (full, None)})

    def close(self):
        raise RuntimeError("cannot be closed either")


class WritesNothing(Contestant):
    name = "writes nothing"

    def begin(self, gate, directory):
        self.trainer_options = {"enable_checkpointing": False}
        return [Saving(gate, lambda trainer, step: (directory / f"step_{step}").mkdir())]

    def complete(self, entry):
        return False


@pytest.mark.timeout(120)
def test_a_contestant_that_cannot_write_is_named_and_the_others_go_on(tmp_path, capfd, monkeypatch):
    field = [CannotWrite("at once"), CannotWrite("later", 1), WritesNothing(), Reference()]
    monkeypatch.setattr(contestants, "own", lambda: field)
    kept = []
    monkeypatch.setattr(stall.report, "write_json", lambda path, content: kept.append(content))
    options = f"--size tiny --iterations 2 --rounds 2 --write --dir {tmp_path} --out {tmp_path / 'out'}".split()
    assert stall.main([*options, "--only", "at once", "later", "writes nothing", "no checkpoint"]) == 1
    fits = [[sample["contestant"] for sample in content["samples"]] for content in kept]
    assert fits[-1] == ["later", "no checkpoint", "no checkpoint"]  # the second round begins with another one
    assert [len(each) for each in fits] == [0, 1, 1, 2, 3, 3, 3]  # written after each turn, and at the end
    failed = kept[-1]["failed"]
    assert list(failed) == ["at once", "writes nothing", "later"]
    assert failed["at once"] == "CheckpointException: OSError: [Errno 28] No space left on device"
    assert "none of the 5 checkpoints" in failed["writes nothing"]
    said = capfd.readouterr().out
    table = [line for line in said.splitlines() if line.startswith("│")]
    assert sum("failed" in line for line in table) == 3
    assert sum("later" in line for line in table) == 2  # with the numbers of its first turn, and as failed
    assert f"failed: at once: {failed['at once']}" in said.splitlines()


def test_an_interrupted_comparison_still_shows_what_it_has(tmp_path, capfd, monkeypatch):
    class Interrupted(CannotWrite):
        def save(self, trainer, step):
            raise SystemExit(1)  # what Lightning makes of Ctrl-C

        def close(self):
            pass

    monkeypatch.setattr(contestants, "own", lambda: [Reference(), Interrupted("interrupted")])
    with pytest.raises(SystemExit):
        stall.main([*f"--size tiny --rounds 1 --dir {tmp_path}".split(), "--only", "no checkpoint", "interrupted"])
    assert any(line.startswith("│ no checkpoint") for line in capfd.readouterr().out.splitlines())


def test_a_reason_is_one_line():
    assert reason(ValueError("first\nsecond")) == "ValueError: first"
    assert reason(RuntimeError("")) == "RuntimeError: (no message)"
    wrapped = RuntimeError("oops\nTraceback (most recent call last)\n  File x\nKeyError: 'what it was'\n")
    assert reason(wrapped) == "RuntimeError: KeyError: 'what it was'"
    behind = RuntimeError("could not save")
    behind.__cause__ = OSError(28, "No space left on device")
    assert reason(behind) == "No space left on device (RuntimeError: could not save)"
    nested = RuntimeError("a" * 500 + " the cause")
    assert len(reason(nested)) < 260
    assert reason(nested).endswith(" the cause")


def test_copy_speed_goes_on_without_what_fails(capfd):
    failed = Failures()

    def full():
        raise OSError(28, "No space left on device")

    found = copy_speed.timed({"memcpy, warm": lambda: None, "write + fsync": full}, 2, failed)
    assert [len(times) for times in found.values()] == [2]
    copy_speed._show_copies(copy_speed.Console(width=100), found, failed, 1 << 20)
    assert "failed: write + fsync: OSError: [Errno 28] No space left on device" in capfd.readouterr().out


@pytest.mark.timeout(120)
def test_moevement_goes_on_without_what_fails(tmp_path, capfd, monkeypatch):
    real = moevement.windows_cost.run_once

    def run_once(name, *args):
        if name == "dense":
            raise OSError(28, "No space left on device")
        return real(name, *args)

    monkeypatch.setattr(moevement.windows_cost, "run_once", run_once)
    monkeypatch.setattr(moevement.windows_recovery, "_killed_at", lambda *args: 1 / 0)
    options = f"--size tiny --only cost recovery --rounds 1 --iterations 1 --threads 1 --dir {tmp_path} --write"
    assert moevement.main([*options.split(), "--out", str(tmp_path / "out")]) == 1
    found = json.loads((tmp_path / "out" / "moevement.json").read_text())
    assert set(found["failed"]) == {"dense", "dense every 10", "MoEvement, W=3"}
    assert "dense" not in {row["name"] for row in found["cost"]["rows"]} >= {"no checkpoint", "MoEvement, W=3"}
    assert "failed: dense: OSError: [Errno 28] No space left on device" in capfd.readouterr().out


def test_copy_speed_runs(tmp_path):
    options = f"--mib 2 --repeats 1 --largest 1 --alone --write --dir {tmp_path} --out {tmp_path}"
    assert copy_speed.main(options.split()) == 0
    found = json.loads((tmp_path / "copy_speed.json").read_text())
    assert found["copies_ms"].keys() >= {"memcpy, warm", "moe_ckpt copy_on_cpu", "xxh3 checksum", "write + fsync"}
    assert len(found["begin_ms"]) == 2


def test_lost_tokens_compares_the_selectors(tmp_path, capfd, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lost_tokens, "PLANNED", ((2, 8, 2),))
    picture = tmp_path / "picture.png"
    options = f"--seeds 1 --steps 60 --mtbf-steps 15 --shapes 1 --write --out {tmp_path} --picture {picture}"
    assert lost_tokens.main(options.split()) == 0
    found = json.loads((tmp_path / "lost_tokens.json").read_text())
    assert [row["wanted_skewness"] for row in found["rows"]] == list(lost_tokens.SKEWNESS)
    assert all(row["lost_over_sequential"].keys() == {"load_aware", "least_loss"} for row in found["rows"])
    assert found["dynamic_k"]["plt_budget = 0.05"]["plt"] <= 0.05 < found["dynamic_k"]["K = 1, no budget"]["plt"]
    assert picture.stat().st_size > 10_000
    assert "least_loss" in capfd.readouterr().out


@pytest.mark.slow
def test_agreement_is_measured_on_two_ranks():
    found = agreement.agreement_secs(repeats=1)
    assert set(found) == {"0 x 0", "6 x 8", "48 x 128"}
    assert all(0 < secs < 1 for secs in found.values())


def test_hook_clock_counts_time_in_hooks_only():
    class Slow(pl.Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.02)

    slow = Slow()
    clock = HookClock([slow])
    time.sleep(0.02)
    slow.on_train_batch_end(None, None, None, None, 0)
    assert 0.019 < clock.take() < 0.039 + 0.2
    assert clock.take() == 0.0


def test_gate_is_closed_at_first():
    assert not Gate().is_open


def test_unknown_contestant_is_refused():
    with pytest.raises(SystemExit, match="no contestant has such a name"):
        stall.main(["--only", "nonesuch", "--rounds", "1"])


@pytest.mark.timeout(120)
def test_moevement_measures_cost_and_replay(tmp_path, capfd):
    options = f"--size tiny --only cost replay --rounds 1 --iterations 3 --threads 1 --dir {tmp_path} --write"
    assert moevement.main([*options.split(), "--out", str(tmp_path / "out")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = json.loads((tmp_path / "out" / "moevement.json").read_text())
    rows = {row["name"]: row for row in found["cost"]["rows"]}
    state = found["cost"]["state_bytes"]
    assert rows["no checkpoint"]["bytes"] == 0
    assert state <= rows["dense"]["bytes"] < 1.01 * state
    windows = rows["MoEvement, W=3"]
    assert windows["window"] == [3, 3]
    assert windows["off_formula"] < 0.01
    assert 0 < windows["compute_bytes"] < windows["bytes"] < 0.6 * state
    assert {(row["experts"], row["replayed_iterations"]) for row in found["replay"]["rows"]} == {
        ("ModuleList", 2),
        ("stacked", 2),
    }
    left_out = {(row["experts"], row["leave_out"]): row["without_gradients"] for row in found["replay"]["rows"]}
    assert left_out["ModuleList", True] > 0.1
    assert left_out["ModuleList", False] == left_out["stacked", False] == 0
    assert "| MoEvement, W=3 |" in capfd.readouterr().out


@pytest.mark.slow
def test_moevement_counts_what_is_computed_again(tmp_path):
    options = f"--size tiny --only recovery --kills 2 --threads 1 --dir {tmp_path} --write --out {tmp_path}"
    assert moevement.main(options.split()) == 0
    found = json.loads((tmp_path / "moevement.json").read_text())["recovery"]
    dense, windows = found["dense every 10"], found["MoEvement, W=3"]
    assert len(dense["restarts"]) == len(windows["restarts"]) == 2
    assert all(0 <= restart["recomputed"] <= 12 for restart in dense["restarts"])
    assert all(2 <= restart["recomputed"] <= 7 for restart in windows["restarts"])
    assert all(restart["secs"] >= restart["loading_secs"] > 0 for restart in windows["restarts"])


@pytest.mark.slow
def test_megatron_prepare_measures_ours_and_the_peer(tmp_path, capfd):
    pytest.importorskip("megatron.core.package_info")
    out = tmp_path / "out"
    assert megatron_prepare.main(["--quick", "--write", "--dir", str(tmp_path), "--out", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    cases = json.loads((out / "megatron_prepare.json").read_text())["cases"]
    assert [case["case"]["precision"] for case in cases] == ["fp32", "bf16"]
    for case in cases:
        ours, peer = case["ours"], case["peer"]
        assert 4 <= ours["local_operators"] <= ours["operators"] - 7 * 4  # an expert of each layer is here
        assert all(policy["wall_ms"]["median"] > 0 for policy in ours["policies"].values())
        assert ours["policies"]["MoC, K=1, sequential"]["slices"] < ours["policies"]["Dense"]["slices"]
        assert ours["attach"]["received_bytes"] > 6 * ours["attach"]["told_bytes"]
        assert all("wall_ms" in way for way in peer.values()), peer
    assert "| 4 x 8 | 8 | bf16 |" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [("--grid 48", "48x128"), ("--grid 4x8 --ep 3", "divisor"), ("--grid 4x8 --ep 1", "at least 2")],
)
def test_megatron_prepare_refuses_what_is_no_case(options, said):
    with pytest.raises(SystemExit, match=said):
        megatron_prepare.main(options.split())


def test_stopwatch_charges_each_function_for_itself_only():
    class Work:
        def outer(self):
            time.sleep(0.02)
            self.inner()

        def inner(self):
            time.sleep(0.05)

    inner, watch = Work.inner, stopwatch.Stopwatch()
    with watch.watching([("outer", Work, "outer"), ("inner", Work, "inner")]):
        Work().outer()
    assert Work.inner is inner
    taken = watch.take()
    assert 0.019 < taken["outer"] < 0.05 <= taken["inner"] + 0.001
    assert watch.take() == {}


def test_restarts_are_counted_by_processes():
    """Two ranks, one kill; rank 0 fails to connect twice, rank 1 once, then both come back."""
    found = torchrun_restarts.Launch("x", (), False)
    lines = [("kill", 1, 11, 1.0), ("failed", 0, 10, 1.1)]  # that of the survivor, which had reduced before
    lines += [("begin", 0, 20, 2.0), ("begin", 1, 21, 2.0), ("failed", 0, 20, 4.0), ("failed", 1, 21, 4.5)]
    lines += [("begin", 0, 30, 5.0), ("begin", 1, 31, 5.0), ("failed", 0, 30, 6.0)]
    lines += [("begin", 0, 40, 7.0), ("begin", 1, 41, 7.0), ("reduced", 0, 40, 8.0), ("reduced", 1, 41, 8.5)]
    words = {"error": "RuntimeError: Gloo connectFullMesh failed with ..."}
    events = [{"event": e, "rank": r, "pid": p, "at": at} | (words if e == "failed" else {}) for e, r, p, at in lines]
    judged = torchrun_restarts.judge(found, 2, [{"code": 0, "events": events}, {"code": None, "events": []}])
    assert (judged.restarts, judged.failed, judged.gave_up, judged.hung) == (3, 2, 0, 1)
    assert judged.secs == [7.5]
    assert judged.errors == {"connectFullMesh": 2}


@pytest.mark.slow
def test_a_job_comes_back_with_the_command_line_of_the_docs(tmp_path, capfd):
    options = f"--only standalone --variable set --nodes 1 --ranks 2 --trials 1 --kills 2 --write --out {tmp_path}"
    assert torchrun_restarts.main(options.split()) == 0
    (row,) = json.loads((tmp_path / "torchrun_restarts.json").read_text())["rows"]
    assert (row["restarts"], row["failed"], row["gave_up"], row["hung"]) == (2, 0, 0, 0)
    assert len(row["secs"]) == 2
    assert "--standalone" in capfd.readouterr().out
