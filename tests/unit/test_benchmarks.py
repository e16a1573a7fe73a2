"""The benchmarks still run, and their numbers mean what they say."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("lightning")
pytest.importorskip("rich")

import lightning.pytorch as pl

from benchmarks import agreement, copy_speed, lost_tokens, megatron_prepare, moevement, stall, stopwatch
from benchmarks.contestants import Gate, HookClock


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
    assert found["not_run"] == {}
    dense, moc = rows["moe_ckpt Dense, async"], rows["moe_ckpt MoC, K=1"]
    assert all(row["saved"] == 1.0 for name, row in rows.items() if name != "no checkpoint")
    assert rows["no checkpoint"]["nbytes"] == rows["no checkpoint"]["hook"] == 0
    assert found["state_nbytes"] < dense["nbytes"] < 1.5 * found["state_nbytes"] + 200_000
    assert moc["nbytes"] < 0.8 * dense["nbytes"]
    assert "moe_ckpt MoC" in capfd.readouterr().out


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
