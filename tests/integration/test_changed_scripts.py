"""A run that another script goes on with: what differs is named, at the start and where a window cannot be repeated."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.policies import Dense, MoEvement
from tests.integration.test_hooks_and_state import fit, same, seeded
from tests.support.tiny_moe import TinyMoE, loader, state_of

ACCUMULATED = "trainer accumulate_grad_batches 1 -> 2"


def test_another_accumulation_is_named_where_a_window_cannot_be_repeated(tmp_path):
    fit(tmp_path, seeded(dropout=0.2), MoEvement(window=3), stop=7)
    with pytest.raises(ReplayDivergedError, match=f"the run's, which may be the cause: {ACCUMULATED}") as raised:
        fit(tmp_path, seeded(dropout=0.2), MoEvement(window=3), accumulate_grad_batches=2)
    assert raised.value.changed == ACCUMULATED


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"accumulate_grad_batches": 2}, ACCUMULATED),
        ({"limit_train_batches": 5}, "trainer limit_train_batches 1.0 -> 5"),
        ({"gradient_clip_val": 0.5}, "trainer gradient_clip_val None -> 0.5"),
        ({"precision": "bf16-mixed"}, "trainer precision '32-true' -> 'bf16-mixed'"),
    ],
)
@pytest.mark.quick(
    "setting0-trainer accumulate_grad_batches 1 -> 2", "setting3-trainer precision '32-true' -> 'bf16-mixed'"
)
def test_another_setting_of_the_trainer_is_said_at_the_start(tmp_path, caplog, setting, said):
    fit(tmp_path, seeded(), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, seeded(), Dense(1), max_steps=7, **setting)
    assert f"{said} (training continues with this script's)" in caplog.text


def test_a_part_that_is_compiled_now_is_said_at_the_start(tmp_path, caplog):
    fit(tmp_path, seeded(), Dense(1), stop=5)
    compiled = seeded()
    compiled.head = torch.compile(compiled.head, backend="eager")
    caplog.clear()
    fit(tmp_path, compiled, Dense(1), max_steps=7)
    assert "trainer torch.compile False -> True (training continues with this script's)" in caplog.text


def without_head() -> TinyMoE:
    model = seeded()
    model.head.requires_grad_(False)
    return model


def test_flags_of_parameters_that_the_checkpoint_overrules_are_said(tmp_path, caplog):
    fit(tmp_path, without_head(), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, seeded(), Dense(1), stop=6)
    assert "requires_grad of head.bias and 1 more" in caplog.text
    assert "False -> True (training continues with the checkpoint's)" in caplog.text


def test_the_same_script_is_told_nothing(tmp_path, caplog):
    fit(tmp_path, without_head(), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, without_head(), Dense(1), stop=6)
    assert "hyperparameters differ" not in caplog.text


@pytest.mark.parametrize("recoverable", [False, True])
def test_another_size_of_batches_is_said_where_the_position_counts_batches(tmp_path, caplog, recoverable):
    for batch, stop in ((2, 3), (2, 4), (4, 6)):
        caplog.clear()
        sampled = {"shuffle": False, "sampler": RecoverableDistributedSampler(range(32), 1, 0)} if recoverable else {}
        fit(tmp_path, seeded(), Dense(1), stop=stop, data=loader(32, batch, **sampled))
        said = "data loader batch_size 2 -> 4 (training continues with this script's)"
        assert (said in caplog.text) == (batch == 4 and not recoverable)


class SetsRate(pl.Callback):
    """Sets a learning rate when training begins, as users do who go on with a lower one."""

    def on_train_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 3e-4


class SetsOwnRate(TinyMoE):
    """The same in the module's hook, which comes after those of all callbacks."""

    def on_train_start(self):
        SetsRate().on_train_start(self.trainer, self)


@pytest.mark.parametrize("kind", [TinyMoE, SetsOwnRate])
@pytest.mark.parametrize("order", ["round_robin", "hard_count"])
@pytest.mark.quick("round_robin-TinyMoE", "hard_count-SetsOwnRate")
def test_a_rate_set_at_the_start_holds_once_a_window_is_computed_again(kind, order, tmp_path, caplog):
    """The state is then that of a run that was continued from the window's last step with that rate."""
    callbacks = [SetsRate()] if kind is TinyMoE else []
    fit(tmp_path / "window", seeded(dropout=0.2), MoEvement(window=3, order=order), stop=9)
    model = seeded(kind, dropout=0.2)
    trainer, checkpoint = fit(tmp_path / "window", model, MoEvement(window=3), callbacks=callbacks)
    assert "lr 0.009000000000000001 -> 0.0003. Its steps are computed with the run's" in caplog.text
    reference = seeded(kind, dropout=0.2)
    fit(tmp_path / "dense", seeded(dropout=0.2), Dense(1), stop=checkpoint.restored_step)
    whole, _ = fit(tmp_path / "dense", reference, Dense(1), callbacks=callbacks)
    assert whole.optimizers[0].param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"] < 3e-4
    assert same(state_of(reference, whole.optimizers[0]), state_of(model, trainer.optimizers[0])) == []


def test_a_rate_that_the_first_start_set_too_is_used_again(tmp_path, caplog):
    """The window of the first steps has the rate as it was before the module's hook."""
    whole, again = seeded(SetsOwnRate), seeded(SetsOwnRate)
    reference, _ = fit(tmp_path / "a", whole, Dense(1))
    fit(tmp_path / "b", seeded(SetsOwnRate), MoEvement(window=8), stop=4)
    trainer, _ = fit(tmp_path / "b", again, MoEvement(window=8))
    assert "hyperparameters" not in caplog.text
    assert same(state_of(whole, reference.optimizers[0]), state_of(again, trainer.optimizers[0])) == []


class Unscheduled(TinyMoE):
    lr = 0.01

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Slower(Unscheduled):
    lr = 0.002


def test_the_value_that_is_said_of_the_checkpoint_is_the_one_in_force(tmp_path, caplog):
    """A callback had set another rate than the script's in the meantime."""
    fit(tmp_path, seeded(Unscheduled), Dense(1), stop=5)
    fit(tmp_path, seeded(Unscheduled), Dense(1), stop=7, callbacks=[SetsRate()])
    caplog.clear()
    fit(tmp_path, seeded(Slower), Dense(1), stop=8)
    assert "optimizer lr 0.0003 -> 0.002 (training continues with the checkpoint's)" in caplog.text


def falling(step: int) -> float:
    return 0.9**step


def constant(step: int) -> float:
    return 1.0


class Scheduled(Unscheduled):
    schedule = staticmethod(falling)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)]


class ScheduledOtherwise(Scheduled):
    schedule = staticmethod(constant)


def test_another_schedule_is_said_which_its_state_does_not_show(tmp_path, caplog):
    fit(tmp_path, seeded(Scheduled), Dense(1), stop=5)
    caplog.clear()
    fit(tmp_path, seeded(ScheduledOtherwise), Dense(1), stop=6)
    said = "trainer schedules ['LambdaLR(falling)'] -> ['LambdaLR(constant)'] (training continues with this script's)"
    assert said in caplog.text
