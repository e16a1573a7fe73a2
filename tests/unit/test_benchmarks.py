"""The benchmarks still run, and their numbers mean what they say."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import time
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("rich")

import lightning.pytorch as pl
import torch
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks import (
    agreement,
    agreement_stall,
    contestants,
    copy_speed,
    failure_trace,
    lost_tokens,
    megatron_prepare,
    memory_slots,
    memory_tiers,
    moevement,
    peers,
    stall,
    stopwatch,
    tokens_at_risk,
    torchrun_restarts,
)
from benchmarks.contestants import Contestant, Gate, HookClock, Reference, Saving
from benchmarks.failing import Failures, reason
from moe_ckpt.storage import LocalStorage
from tests.support.clocks import Clock

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("recipes/*/*.py")])
    if "ArgumentParser(" in path.read_text()
]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_names_the_file(name, capfd):
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(["--help"])
    assert ended.value.code == 0
    said = capfd.readouterr().out
    assert "example" in said
    assert f"python {name.replace('.', '/')}.py" in said.partition("example")[2]


def test_the_docs_say_what_checkpoints_cost_beside_others():
    rows = json.loads((ROOT / "benchmarks" / "results" / "stall_memory.json").read_text())["rows"]
    by_name = {row["name"]: row for row in rows}
    page, readme = ((ROOT / name).read_text() for name in ("docs/benchmarks.md", "README.md"))
    for row in rows:
        cells = [f"{1e3 * row['hook']:.1f}", f"{row['hook_per_memcpy']:.2f}", f"{1e3 * row['extra_cpu']:.0f}"]
        assert f"| {row['name']}{'' if row['durable'] else ' *'} | {' | '.join(cells)} | " in page
    for title, name in (
        ("`Dense()`", "moe_ckpt Dense, async"),
        ("`MoC(k=1)`", "moe_ckpt MoC, K=1"),
        ("`torch_checkpointing`", "torch_checkpointing"),
        ("`dcp.async_save`, async staging", "dcp.async_save, async staging"),
    ):
        stall, longer = by_name[name]["hook_per_memcpy"], by_name[name]["per_iteration"]
        assert f"| {title} | {stall:{'.2f' if stall < 1 else '.1f'}} | {100 * longer:.0f} % |" in readme
    for policy, kept in (("Dense", "moe_ckpt Dense, async"), ("MoC", "moe_ckpt MoC, K=1")):
        default = by_name[f"moe_ckpt {policy}, default retention"]
        assert round(default["per_iteration"], 2) == round(by_name[kept]["per_iteration"], 2), "the README says so"


def test_stall_runs_and_finds_what_was_written(tmp_path, capfd):
    out = tmp_path / "out"
    names = ["no checkpoint", "moe_ckpt", "AsyncCheckpointIO"]
    code = stall.main(
        [*f"--size tiny --iterations 2 --rounds 1 --write --dir {tmp_path} --out {out}".split(), "--only", *names]
    )
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = json.loads((out / "stall_disk_tiny.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == 7
    assert found["not_run"] == found["failed"] == {}
    dense, moc = rows["moe_ckpt Dense, async"], rows["moe_ckpt MoC, K=1"]
    assert all(row["saved"] == 1.0 for name, row in rows.items() if name != "no checkpoint")
    assert rows["no checkpoint"]["nbytes"] == rows["no checkpoint"]["hook"] == 0
    assert found["state_nbytes"] < dense["nbytes"] < 1.5 * found["state_nbytes"] + 200_000
    assert moc["nbytes"] < 0.8 * dense["nbytes"]
    assert "moe_ckpt MoC" in capfd.readouterr().out


@pytest.mark.parametrize("listed", [False, True])
def test_stall_measures_models_so_small_that_only_python_counts(tmp_path, monkeypatch, listed):
    monkeypatch.setitem(stall.SHAPES, "48x128", (2, 4, listed))
    out = tmp_path / "out"
    options = f"--size 48x128 --iterations 1 --rounds 1 --write --dir {tmp_path} --out {out}".split()
    assert stall.main([*options, "--only", "moe_ckpt Dense, async", "AsyncCheckpointIO"]) == 0
    found = json.loads((out / "stall_disk_48x128.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert len(rows) == 2
    assert all(row["saved"] == 1.0 and row["hook"] > 0 for row in rows.values())


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


class Killed(peers.DCP):
    """The real one, whose writing process is killed while training goes on."""

    def _save(self, trainer, step):
        super()._save(trainer, step)
        children = multiprocessing.active_children()
        assert children, "it writes in a process of its own"
        for child in children:
            child.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_contestant_whose_process_is_killed_is_named_and_the_others_go_on(tmp_path, capfd, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # to be put back
    peers.need_process_group()
    try:
        monkeypatch.setattr(contestants, "own", lambda: [Killed("process"), Reference()])
        options = f"--size tiny --iterations 2 --rounds 1 --dir {tmp_path}".split()
        monkeypatch.setattr(peers, "available", lambda home, wanted: ([], {}))
        assert stall.main([*options, "--only", "dcp.async_save, process", "no checkpoint"]) == 1
    finally:
        torch.distributed.destroy_process_group()
    said = capfd.readouterr().out.splitlines()
    table = [line for line in said if line.startswith("│")]
    assert any("no checkpoint" in line for line in table)
    assert any("dcp.async_save, process" in line and "failed" in line for line in table)


def test_draining_waits_until_all_is_written(tmp_path, monkeypatch):
    slow_secs, real = 0.1, LocalStorage.write

    def write(self, *args, **kwargs):
        time.sleep(slow_secs)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LocalStorage, "write", write)
    name = "moe_ckpt Dense, async"
    options = f"--size tiny --iterations 1 --rounds 1 --write --dir {tmp_path} --out {tmp_path / 'out'}".split()
    assert stall.main([*options, "--only", name]) == 0
    (sample,) = json.loads((tmp_path / "out" / "stall_disk_tiny.json").read_text())["samples"]
    assert sample["drain_ms"] > 1e3 * slow_secs  # a checkpoint is several files, and one was under way


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


def test_moevement_goes_on_without_what_fails(tmp_path, capfd, monkeypatch):
    real = moevement.windows_cost.run_once

    def run_once(name, *args):
        if name == "dense":
            raise OSError(28, "No space left on device")
        return real(name, *args)

    monkeypatch.setattr(moevement.windows_cost, "run_once", run_once)
    monkeypatch.setattr(moevement.windows_recovery.killed_lives, "killed_at", lambda *args: 1 / 0)
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
    assert found["copies_ms"].keys() >= {"memcpy, warm", "moe_ckpt copy program", "xxh3 checksum", "write + fsync"}
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


def test_tokens_at_risk_compares_the_orders(tmp_path):
    assert tokens_at_risk.main(f"--seeds 1 --steps 20 --shapes 1 --write --out {tmp_path}".split()) == 0
    rows = json.loads((tmp_path / "tokens_at_risk.json").read_text())["rows"]
    assert all(0 < row["popular_over_round_robin"] < 1.02 for row in rows)
    assert rows[-1]["popular_over_round_robin"] < 0.5  # the most skewed load


def test_failure_trace_is_written_where_it_is_told(tmp_path):
    failure_trace.main(["--out", str(tmp_path / "trace.csv")])
    assert (tmp_path / "trace.csv").read_bytes() == failure_trace.PATH.read_bytes()


def test_memory_slots_copies_and_leaves_nothing(tmp_path):
    found = memory_slots.copies(2, 2, tmp_path)
    assert {len(secs) for secs in found.values()} == {2}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_memory_slots_comes_back_from_memory_and_from_storage(tmp_path, capfd):
    assert memory_slots.main(["--mib", "2", "--rounds", "1", "--directory", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "own memory" in capfd.readouterr().out


@pytest.mark.slow
def test_memory_tiers_costs_and_comes_back_from_where_it_says(tmp_path, capfd):
    """A source that gave another step than it has would have raised."""
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    options = f"--mib 2 --recovery-mib 2 3 --rounds 1 --iterations 2 --compute-ms 10 --directory {home} --out {out}"
    assert memory_tiers.main([*options.split(), "--write"]) == 0
    assert list(home.iterdir()) == []
    found = json.loads((out / "memory_tiers.json").read_text())
    written = {name: sample["to_storage"] for name, [sample] in found["stalls"].items()}
    assert written.pop("no checkpoint") == 0
    assert written.pop("private memory, storage") == 2
    assert {name for name, count in written.items() if not count} == {name for name in written if "no storage" in name}
    assert list(found["recoveries"]) == ["2", "3"]
    for of_sources in found["recoveries"].values():
        assert all(sample["total"] > sample["open + resume"] > 0 for [sample] in of_sources.values())
    said = capfd.readouterr().out
    assert "a peer's memory" in said
    assert "Memory(replicas=1), no storage" in said


@pytest.mark.usefixtures("warm_programs")
def test_memory_tiers_ends_its_ranks_and_removes_its_files_if_one_fails(tmp_path, monkeypatch):
    monkeypatch.setitem(memory_tiers.WAYS, memory_tiers.PRIVATE, {"replicas": -1})
    options = f"--mib 2 --rounds 1 --iterations 1 --compute-ms 0 --directory {tmp_path}"
    with pytest.raises(RuntimeError, match="the ranks ended with"):
        memory_tiers.main(options.split())
    assert list(tmp_path.iterdir()) == []


def test_memory_tiers_compares_with_private_memory_and_storage():
    stalls = {memory_tiers.IDLE: (0.0, 0.1), memory_tiers.PRIVATE: (0.2, 0.3), "other": (0.1, 0.2)}
    told = {name: [{"stall_secs": s, "cpu_secs": c, "to_storage": 0}] for name, (s, c) in stalls.items()}
    columns = [list(column.cells) for column in memory_tiers.stall_table(told, "").columns]
    assert columns[2] == columns[5] == ["-", "1.00", "0.50"]
    spans = dict.fromkeys((*memory_tiers.SPANS, memory_tiers.BACK, memory_tiers.STARTED, "total"), 1.0)
    slower = {key: 4 * secs for key, secs in spans.items()}
    columns = [
        list(c.cells) for c in memory_tiers.recovery_table({"own": [spans], memory_tiers.STORAGE: [slower]}, "").columns
    ]
    assert columns[-1] == columns[-2] == columns[-3] == ["0.25", "1.00"]


@pytest.mark.slow
def test_agreement_is_measured_on_two_ranks():
    found = agreement.agreement_secs(repeats=1)
    assert set(found) == {"0 x 0", "6 x 8", "48 x 128"}
    assert all(0 < secs < 1 for secs in found.values())


@pytest.mark.slow
def test_a_delay_is_charged_to_all_reduces_once():
    delay_secs = 0.2
    found = agreement_stall.measure(2, delay_secs, iteration_secs=0.5, steps=4)
    assert found["late"] < delay_secs  # the messages were on their way while the ranks computed
    assert 4 * delay_secs <= found["waited for"] < 5 * delay_secs  # 2 all-reduces of 2 messages each


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixteen_processes_wait_for_no_message_of_a_step(tmp_path):
    """With 50 ms added to every message, hops of the tree alone are 400 ms, and two all-reduces 3 s."""
    out = tmp_path / "out.json"
    agreement_stall.main(f"--ranks 16 --delay-ms 0,50 --iteration-ms 1000 --steps 6 --json {out}".split())
    plain, delayed = json.loads(out.read_text())["rows"]
    assert (plain["ranks"], delayed["ranks"], delayed["hops"]) == (16, 16, 8)
    assert delayed["late_ms"] < 50, "less than one message"
    assert delayed["waited_ms"] >= 4 * 15 * 50


def test_docs_have_what_was_measured_of_agreement():
    told, text = json.loads(agreement_stall.KEPT.read_text()), (ROOT / "docs" / "scale.md").read_text()
    assert [row["ranks"] for row in told["rows"]] == [2, 2, 16, 16]
    for row in told["rows"]:
        assert f"| {' | '.join(agreement_stall.cells(row))} |" in text
    assert f"load average {told['machine']['load_average_1min']:.0f})" in text


def test_hook_clock_counts_time_in_hooks_only(monkeypatch):
    time = Clock()
    monkeypatch.setattr(contestants, "time", time)

    class Slow(pl.Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.02)

    slow = Slow()
    clock = HookClock([slow])
    time.sleep(0.02)
    slow.on_train_batch_end(None, None, None, None, 0)
    assert clock.take() == pytest.approx(0.02)
    assert clock.take() == 0.0


def test_gate_is_closed_at_first():
    assert not Gate().is_open


def test_unknown_contestant_is_refused():
    with pytest.raises(SystemExit, match="no contestant has such a name"):
        stall.main(["--only", "nonesuch", "--rounds", "1"])


def test_moevement_measures_cost(tmp_path, capfd):
    options = f"--size tiny --only cost --rounds 1 --iterations 3 --threads 1 --dir {tmp_path} --write"
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


def test_megatron_prepare_ends_with_a_table_when_ranks_are_killed(tmp_path, capfd, monkeypatch):
    """One before it has found anything, one while the peer saves: what is kept by then is shown."""
    kept = json.loads((ROOT / "benchmarks" / "results" / "megatron_prepare.json").read_text())["cases"][-1]
    kept["case"] |= {"precision": "bf16"}
    del kept["peer"]
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$3" in *bf16*) cp {tmp_path}/kept.json "$4";; esac\nkill -9 $$\n')
    python.chmod(0o700)
    monkeypatch.setattr(megatron_prepare.sys, "executable", str(python))
    assert megatron_prepare.main(["--grid", "61x256", "--ep", "8", "--dir", str(tmp_path)]) == 1
    said = capfd.readouterr().out
    assert said.count("exit code -9") == 2
    assert "| 61 x 256 | 8 | bf16 |" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [("--grid 48", "48x128"), ("--grid 4x8 --ep 3", "divisor"), ("--grid 4x8 --ep 1", "at least 2")],
)
def test_megatron_prepare_refuses_what_is_no_case(options, said):
    with pytest.raises(SystemExit, match=said):
        megatron_prepare.main(options.split())


@pytest.mark.parametrize("policy", ["MoC, K=1, sequential", "MoEvement, W=3", "Dense"])
def test_what_megatron_prepare_takes_apart_is_there(policy):
    pytest.importorskip("megatron.core.package_info")
    from benchmarks import megatron_ours

    for watched in (megatron_ours.ATTACH, megatron_ours.watched(megatron_ours.POLICIES[policy])):
        with stopwatch.Stopwatch().watching(watched):
            pass


def test_stopwatch_charges_each_function_for_itself_only(monkeypatch):
    time = Clock()
    monkeypatch.setattr(stopwatch, "time", time)

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
    assert taken == pytest.approx({"outer": 0.02, "inner": 0.05})
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


def test_docs_have_what_a_megatron_rank_costs():
    """Medians of wall time, as the table of docs/megatron.md has them."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "megatron_prepare.json").read_text())["cases"]
    text = (ROOT / "docs" / "megatron.md").read_text()
    cases = [case for case in cases if case["case"]["precision"] == "bf16" and case["case"]["layers"] >= 12]
    assert [(case["case"]["layers"], case["case"]["ep"]) for case in cases] == [(12, 8), (24, 8), (48, 8), (61, 8)]
    for case in cases:
        ours = [case["ours"]["policies"][name] for name in ("MoC, K=1, sequential", "MoEvement, W=3", "Dense")]
        quickest = min(case["peer"].values(), key=lambda way: way["wall_ms"]["median"])
        medians = [way["wall_ms"]["median"] for way in (*ours, quickest, case["peer"]["default"])]
        cells = " | ".join(f"{msecs:,.{1 if msecs < 20 else 0}f} ms" for msecs in medians)
        assert f"| {case['case']['layers']} \N{MULTIPLICATION SIGN} {case['case']['experts']} | {cells} |" in text
