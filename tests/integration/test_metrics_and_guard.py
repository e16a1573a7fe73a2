"""Under real Lightning: what reaches loggers and metrics, and a guard that ends training in good order."""

from __future__ import annotations

import csv
import os
import time

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.callbacks.step_log import StepLog
from moe_ckpt.callbacks.update_watch import UpdateWatch
from moe_ckpt.core.tokens import normalized_hhi
from moe_ckpt.driver.run import Driver
from moe_ckpt.metrics import CheckpointMetrics, facts_of
from moe_ckpt.modeling.routing import TrainingPasses
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies import Guarded, MoC, MoEvement
from moe_ckpt.reading.reader import open_step
from moe_ckpt.run.events import StepEnded
from tests.support import run_ranks
from tests.support.clocks import Clock
from tests.support.tiny_moe import TinyMoE, loader


class Killed(Exception):
    pass


class Kill(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Killed


def fit(
    dirpath, policy=None, *, kill=None, logger=False, val=None, checkpoint=None, others=(), max_steps=14, **options
):  # fmt: skip
    pl.seed_everything(5, verbose=False)
    limits = {name: options.pop(name) for name in ("save_last",) if name in options}
    checkpoint = checkpoint or MoECheckpoint(policy or MoC(1), dirpath, when_busy="wait", **limits)
    trainer = pl.Trainer(
        callbacks=[checkpoint, *others, *([Kill(kill)] if kill else [])], accelerator="cpu", logger=logger,
        max_steps=max_steps, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    try:
        trainer.fit(TinyMoE(), loader(32), val)
    except Killed:
        assert kill is not None
    return trainer, checkpoint


def complete(dirpath) -> int:
    """The newest step, of which nothing may be older."""
    manifest = open_step(dirpath)[1]
    assert {record.step for record in manifest.operators.values()} == {manifest.step}
    return manifest.step


# --- loggers and metrics ---

REPLAYED = ("moe_ckpt/replayed", "epoch")
"""What a logger hears of a step that is computed again."""


class Notes(pl.Callback):
    """What a user's callback sees of the step before."""

    def __init__(self) -> None:
        self.records, self.computed = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        checkpoint = trainer.callbacks[-1]
        if checkpoint.last is not None:
            self.records.append(checkpoint.last)
            self.computed.append(checkpoint.metrics.compute())


def test_a_csv_logger_gets_every_number_and_the_metrics_agree(tmp_path):
    fit(tmp_path / "store", kill=5)
    notes = Notes()
    checkpoint = MoECheckpoint(MoC(1, plt_budget=0.5), tmp_path / "store", when_busy="wait")
    trainer = pl.Trainer(
        callbacks=[checkpoint, notes], logger=CSVLogger(tmp_path, name="", version=""), max_steps=13,
        log_every_n_steps=3, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TinyMoE(), loader(32))
    with open(tmp_path / "metrics.csv") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file) if row["moe_ckpt/plt"]}
    assert sorted(rows) == [6, 9, 12]
    tokens = open_step(tmp_path / "store")[1].tokens
    seen = {record.step: (record, computed) for record, computed in zip(notes.records, notes.computed, strict=True)}
    for step, row in rows.items():
        record, computed = seen[step]
        told = {name.removeprefix("moe_ckpt/"): float(value) for name, value in row.items() if "moe_ckpt" in name}
        fields = {
            "k": record.k, "plt": record.plt, "plt_budget_left": 0.5 - record.plt,
            "plt_if_failed_now": record.at_risk_plt,
            "mlt_if_failed_now": record.at_risk_mlt, "mlt_newest": record.mlt_newest, "mlt_worst": record.mlt_worst,
            "oldest_expert_steps": record.oldest_expert_steps, "lost_tokens": record.lost_tokens,
            "routed_tokens": record.routed_tokens, "bytes": record.nbytes, "experts_saved": record.experts_saved,
            "committed_step": record.committed_step, "begun": 1, "skipped": 0, "skips": 0, "failed_checkpoints": 0,
            "waited": record.waited, "waits": record.waits, "stall_ms": record.stall_secs * 1e3,
            "agree_ms": record.agree_secs * 1e3, "bytes_full": record.nbytes, "bytes_compute": 0, "replayed": 0,
            "window_age": step - record.committed_step,
        }  # fmt: skip
        assert {name: told[name] for name in fields} == pytest.approx(
            {name: float(value) for name, value in fields.items()}
        )
        assert set(told) == {*fields, "skewness"}
        assert 0 < told["skewness"] < 1
        assert told["lost_tokens"] > 0
        assert computed["plt"] == pytest.approx(told["plt"])
        assert computed["at_risk"] == pytest.approx(told["plt_if_failed_now"] - told["plt"])
        for name in ("mlt_if_failed_now", "mlt_newest", "mlt_worst"):
            assert computed[name] == pytest.approx(told[name])
        ((_, lost, _, routed),) = tokens["faults"]  # of two layers that route equally many
        assert told["mlt_newest"] == told["mlt_worst"] == tokens["mlt"][0] == pytest.approx(lost / routed)
        assert computed["k"] == told["k"]
        assert computed["oldest_expert_steps"] == computed["expert_ages"].max() == told["oldest_expert_steps"]
        assert computed["stall_ms_worst"] >= told["stall_ms"] * 0.999
        assert computed["bytes"] == np.mean([r.nbytes for r in notes.records if r.step <= step])
        assert computed["unsaved_tokens"].shape == (2, 4)
    assert checkpoint.metrics["expert_ages"].plot()[1].images[0].get_array().shape == (2, 4)


def test_a_sparse_window_is_told_slot_by_slot_and_its_replay_apart(tmp_path):
    policy = MoEvement(window=3)
    fit(tmp_path / "store", policy, kill=9)
    checkpoint = MoECheckpoint(policy, tmp_path / "store", when_busy="wait")
    trainer = pl.Trainer(
        callbacks=[checkpoint], logger=CSVLogger(tmp_path, name="", version=""), max_steps=14,
        log_every_n_steps=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TinyMoE(), loader(32))
    with open(tmp_path / "metrics.csv") as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file) if row["moe_ckpt/replayed"]}
    again = [step for step, row in rows.items() if float(row["moe_ckpt/replayed"])]
    assert len(again) == policy.window - 1  # of a window its first step is not computed
    assert not any(rows[step][name] for step in again for name in rows[step] if name not in ("step", *REPLAYED))
    restored, new = max(again), [step for step in rows if step not in again]
    assert new == list(range(restored + 1, 15))
    names = ("bytes", "bytes_full", "bytes_compute", "window_size", "window_slot", "window_age")
    told = {step: {name: float(rows[step][f"moe_ckpt/{name}"]) for name in names} for step in new}
    assert [(told[step]["window_size"], told[step]["window_slot"]) for step in new] == [
        (3, (step - restored - 1) % 3) for step in new
    ]
    for step, values in told.items():
        assert values["bytes_full"] + values["bytes_compute"] == values["bytes"]
        assert values["bytes_full"] > 0
        assert (values["bytes_compute"] > 0) == (values["window_slot"] < 2)  # in the last slot nothing is left to come
        assert values["window_age"] == step - float(rows[step]["moe_ckpt/committed_step"])
        assert 1 <= values["window_age"] <= 2 * policy.window
    found = checkpoint.metrics.compute()
    assert found["bytes_compute"] == pytest.approx(np.mean([values["bytes_compute"] for values in told.values()]))
    assert found["bytes_full"] == pytest.approx(np.mean([values["bytes_full"] for values in told.values()]))
    assert [found[name] for name in names[3:]] == [told[14][name] for name in names[3:]]
    assert 0 < found["skewness"] < 1


def test_a_trainer_that_logs_nothing_gets_nothing_logged(tmp_path):
    trainer, checkpoint = fit(tmp_path, logger=CSVLogger(tmp_path), log_every_n_steps=0, max_steps=3)
    assert trainer.global_step == 3
    assert not trainer.logger.experiment.metrics
    assert checkpoint.metrics["plt"].compute() == 0


def test_a_trainer_that_fits_on_has_lost_nothing(tmp_path):
    """Its newest checkpoint is partial, but its own experts are not older than its step."""
    trainer, checkpoint = fit(tmp_path, save_last=False, max_steps=6)
    assert checkpoint.last.at_risk_plt > 0
    trainer.fit_loop.epoch_loop.max_steps = 9
    trainer.fit(trainer.lightning_module, loader(32))
    assert (checkpoint.last.step, checkpoint.last.lost_tokens) == (9, 0)


def test_skewness_is_that_of_the_steps_routing(tmp_path):
    """Every token to the first two experts: of 4 with p = 1/2, 1/2, 0, 0 the skewness is 1/3."""

    class Skewed(TinyMoE):
        def training_step(self, batch, batch_idx):
            for block in self.blocks:
                block.moe.gate.forward = lambda x, gate=block.moe.gate: (
                    x.new_full((len(x), 2), 0.5), x.new_zeros(len(x), 2).long() + x.new_tensor([0, 1]).long()
                )  # fmt: skip
            return super().training_step(batch, batch_idx)

    checkpoint = MoECheckpoint(MoC(1), tmp_path, when_busy="wait")
    trainer = pl.Trainer(
        callbacks=[checkpoint], logger=False, max_steps=3, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Skewed(), loader(32))
    assert checkpoint.metrics["skewness"].compute() == pytest.approx(1 / 3)
    assert normalized_hhi(checkpoint.metrics["skewness"].popularity.numpy()).tolist() == pytest.approx([1 / 3, 1 / 3])


def test_a_k_that_rose_is_told_once_by_the_process_that_comes_back(tmp_path, caplog):
    caplog.set_level("INFO", "moe_ckpt")
    policy = MoC(1, plt_budget=0.02)
    fit(tmp_path, MoC(1), kill=6)  # loses more than that budget allows
    fit(tmp_path, policy, kill=9)
    first = [message for message in caplog.messages if "each checkpoint now saves" in message]
    assert [message.split(";")[0] for message in first] == [
        "step 7: each checkpoint now saves 4 experts per layer (before: 1)"
    ]
    caplog.clear()
    fit(tmp_path, policy)
    assert not [message for message in caplog.messages if "each checkpoint now saves" in message]


def _ddp(rank: int, world_size: int, root: str) -> dict:
    from lightning.pytorch.strategies import DDPStrategy

    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")

    class Both(Notes):
        """Rank 0 alone computes the callback's metrics, at every step; all ranks compute others at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.together = CheckpointMetrics()
            self.popularity = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            checkpoint = trainer.callbacks[-1]
            if checkpoint.last is None:
                return
            run_ledger = checkpoint._fit.session.run_ledger
            self.records.append(checkpoint.last)
            self.popularity.append(run_ledger.activity.newest.copy())
            self.together.update(**facts_of(checkpoint.last, run_ledger))
            if rank == 0:
                self.computed.append(checkpoint.metrics.compute())

        def on_train_end(self, trainer, pl_module):
            self.result = self.together.compute()

    pl.seed_everything(7, verbose=False)
    notes = Both()
    checkpoint = MoECheckpoint(MoC(1), root, when_busy="wait")
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=8,
        logger=False, callbacks=[notes, checkpoint], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TinyMoE(), loader(64, shuffle=False))
    return {
        "together": {name: value.nan_to_num(-1).tolist() for name, value in notes.result.items()},
        "own": {name: value.tolist() for name, value in notes.computed[-1].items()} if rank == 0 else {},
        "bytes": [record.nbytes for record in notes.records],
        "stall_ms": [record.stall_secs * 1e3 for record in notes.records],
        "routed": notes.records[-1].routed_tokens,
        "routed in all": checkpoint.last.routed_tokens,
        "skewness": float(normalized_hhi(sum(notes.popularity)).mean()),
    }


def test_over_two_ddp_ranks_the_metrics_reduce_rightly(tmp_path):
    ranks = run_ranks(_ddp, 2, str(tmp_path))
    together = ranks[0]["together"]
    assert together == ranks[1]["together"]
    assert (together["window_size"], together["window_slot"], together["bytes_compute"]) == (
        -1,
        -1,
        0,
    )  # NaN: no window
    steps = 7
    assert ranks[0]["bytes"] != ranks[1]["bytes"]  # the experts are shared out, so a sum is more than twice the one
    assert together["bytes"] == pytest.approx(sum(sum(rank["bytes"]) for rank in ranks) / steps)
    assert together["stall_ms_worst"] == pytest.approx(max(max(rank["stall_ms"]) for rank in ranks), rel=1e-4)
    assert together["stall_ms_mean"] == pytest.approx(max(sum(rank["stall_ms"]) for rank in ranks) / steps, rel=1e-4)
    assert together["skewness"] == pytest.approx(ranks[0]["skewness"])
    own = ranks[0]["own"]
    same = ("plt", "at_risk", "k", "skewness", "oldest_expert_steps", "expert_ages", "unsaved_tokens")
    assert {name: own[name] for name in same} == {name: together[name] for name in same}
    assert own["bytes"] == pytest.approx(np.mean(ranks[0]["bytes"]))
    each = 4 * 2 * 2 * 2  # batch, k, layers, ranks: each token once
    assert ranks[0]["routed"] == (steps - 1) * each, "the ranks agree on a step while they compute the next"
    assert ranks[0]["routed in all"] == (steps + 1) * each


# --- the stall ---


@pytest.mark.parametrize(
    ("owner", "name", "most"),
    [
        (TrainingPasses, "include", 20),  # in a hook of each router
        (UpdateWatch, "_rates_now", 1),  # in a hook of the optimizer
        (Driver, "note", 2),  # at the start of a batch, and behind its update
        (TorchTrainingState, "plain", 3),
        (CheckpointMetrics, "note", 1),
        (StepLog, "_values", 1),
        (CSVLogger, "log_metrics", 1),  # whose values we give it
    ],
)
def test_every_moment_in_which_a_hook_keeps_the_training_thread_is_part_of_the_stall(
    tmp_path, monkeypatch, owner, name, most
):
    clock, happened = Clock(), []
    told = StepLog.__call__

    def ended(log, event):
        if isinstance(event, StepEnded):
            happened.append(event.record.stall_secs)
        told(log, event)

    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(StepLog, "__call__", ended)
    clock.slow(owner, name, lambda: happened.append(None), monkeypatch.setattr)
    logger = CSVLogger(tmp_path, name="", version="")
    fit(tmp_path / "store", max_steps=6, logger=logger, log_every_n_steps=1)
    stalls, since = [], 0
    for secs in happened:  # what comes after a record is part of the next
        if secs is None:
            since += 1
        else:
            stalls.append((secs, since))
            since = 0
    assert [secs for secs, _ in stalls[1:]] == [calls for _, calls in stalls[1:]]
    assert all(1 <= calls <= most for _, calls in stalls[1:])


# --- the guard ---


def test_a_guard_whose_budget_is_used_up_saves_more_and_lets_the_run_go_on(tmp_path):
    fit(tmp_path, kill=8)
    trainer, checkpoint = fit(tmp_path, Guarded(MoC(1), 0.01))
    assert checkpoint.last.plt > 0.01
    assert trainer.global_step == 14
    assert checkpoint.last.at_risk_plt == checkpoint.last.plt  # nothing more may be lost, and nothing would be


def test_a_budget_of_mlt_bounds_what_one_failure_loses(tmp_path):
    """MoC alone would leave every expert of both layers 3 steps old on average: a multiple of the budget."""
    policy = Guarded(MoC(1), None, mlt_budget=0.1)
    fit(tmp_path, policy, kill=8)
    trainer, checkpoint = fit(tmp_path, policy)
    assert trainer.global_step == 14
    assert 0 < checkpoint.last.mlt_newest <= 0.1
    assert checkpoint.last.at_risk_mlt <= 0.1
