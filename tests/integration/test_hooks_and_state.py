"""Who else changes weights, and when: the module's own hooks, averaging, thawing, a second fit."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, StochasticWeightAveraging

from moe_ckpt.callbacks import MoECheckpoint, MoECheckpointIO
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.reading.reader import open_step
from moe_ckpt.slices import copying
from tests.support.tiny_moe import TinyMoE, loader, state_of


class Stopped(Exception):
    pass


class Stop(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Stopped


@pytest.fixture
def slow_copy(monkeypatch):
    """Every copy takes longer than a step, so that whatever does not wait for it tears it."""
    quick = copying.run_copy_steps

    def slow(moves):
        for move in moves:
            time.sleep(0.03)
            quick([move])

    monkeypatch.setattr(copying, "run_copy_steps", slow)


def fit(
    dirpath, model, policy, *, stop=None, callbacks=(), trainer=None, val=None, ckpt_path=None, data=None, **options
):
    checkpoint = MoECheckpoint(policy, dirpath, when_busy="wait")
    trainer = trainer or pl.Trainer(
        callbacks=[checkpoint, *callbacks, *([Stop(stop)] if stop else [])],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": 14, **options},
    )
    pl.seed_everything(5, verbose=False)
    try:
        trainer.fit(model, data or loader(32), val, ckpt_path=ckpt_path)
    except Stopped:
        assert stop is not None
    return trainer, checkpoint


def seeded(kind=TinyMoE, **options):
    pl.seed_everything(5, verbose=False)
    return kind(**options)


def same(a, b) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


class Decays(TinyMoE):
    """Changes a parameter and a buffer in its own on_train_batch_end, which runs after all callbacks."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.head.weight.mul_(0.99)
            self.blocks[0].norm.running_mean.add_(0.01)


def test_what_the_modules_own_hook_changes_is_part_of_the_step(tmp_path, slow_copy):
    whole, broken, resumed = seeded(Decays), seeded(Decays), seeded(Decays)
    reference, _ = fit(tmp_path / "a", whole, Dense(1))
    fit(tmp_path / "b", broken, Dense(1), stop=5)
    again, checkpoint = fit(tmp_path / "b", resumed, Dense(1))
    assert checkpoint.restored_step == 5
    assert same(state_of(whole, reference.optimizers[0]), state_of(resumed, again.optimizers[0])) == []
    assert "on_train_batch_end" not in vars(resumed)  # nothing of ours stays on the module


class Target(TinyMoE):
    """A frozen copy of the head that follows it within training_step, as momentum encoders do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.target = torch.nn.Linear(16, 8).requires_grad_(False)

        self.second_step = threading.Event()

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.target.weight.lerp_(self.head.weight, 0.1)
        if batch_idx:
            self.second_step.set()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def test_a_torn_snapshot_is_never_committed_and_the_next_is_whole(tmp_path, monkeypatch, caplog):
    """Weights that change while they are copied: that step is refused by name, later ones copy them at once."""
    whole, broken, resumed = seeded(Target), seeded(Target), seeded(Target)
    reference, _ = fit(tmp_path / "a", whole, Dense(1))
    quick = copying.run_copy_steps

    def after_the_next_change(moves):
        assert broken.second_step.wait(120)
        quick(moves)

    monkeypatch.setattr(copying, "run_copy_steps", after_the_next_change)
    fit(tmp_path / "b", broken, Dense(1), stop=6)
    assert "model/target.weight changed while step 1 was being copied" in caplog.text
    assert "from now on training waits until they are copied" in caplog.text
    assert not (tmp_path / "b" / "step_00000001" / "MANIFEST.json").exists()
    again, checkpoint = fit(tmp_path / "b", resumed, Dense(1))
    assert checkpoint.restored_step == 6
    assert same(state_of(whole, reference.optimizers[0]), state_of(resumed, again.optimizers[0])) == []


class Thaws(TinyMoE):
    """Experts are frozen at first: their optimizer state comes into being in the middle of the run."""

    def on_train_batch_start(self, batch, batch_idx):
        for block in self.blocks:
            block.moe.experts.requires_grad_(self.trainer.global_step >= 5)

    def training_step(self, batch, batch_idx):
        self.on_train_batch_start(batch, batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("stacked", [True, False])
def test_partial_checkpoints_stay_whole_when_optimizer_state_appears(tmp_path, stacked):
    fit(tmp_path, seeded(Thaws, stacked=stacked), MoC(1), stop=8)
    _, checkpoint = fit(tmp_path, seeded(Thaws, stacked=stacked), MoC(1))
    assert checkpoint.restored_step == 8


def test_the_last_checkpoint_holds_the_weights_that_training_goes_on_with(tmp_path, slow_copy):
    """Not the averages that an averaging callback leaves in the module when training ends."""
    whole, first, second = seeded(), seeded(), seeded()

    def average():
        return EMAWeightAveraging(decay=0.9)

    reference, _ = fit(tmp_path / "a", whole, MoC(1), callbacks=[average()], max_steps=14)
    fit(tmp_path / "b", first, MoC(1), callbacks=[average()], max_steps=9)
    again, checkpoint = fit(tmp_path / "b", second, MoC(1), callbacks=[average()], max_steps=14)
    assert checkpoint.restored_step == 9
    assert checkpoint.last.lost_tokens == 0
    assert same(state_of(whole, reference.optimizers[0]), state_of(second, again.optimizers[0])) == []


class SkipsRestOfEpoch(TinyMoE):
    """Ends an epoch where no hook of the last batch could tell."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


class Flips(pl.Callback):
    """Has other weights in the module for a moment at the end of an epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            parameter.data.neg_()
        time.sleep(0.05)
        for parameter in pl_module.parameters():
            parameter.data.neg_()

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == trainer.max_epochs - 1:
            raise Stopped


def test_weights_put_in_at_the_end_of_an_epoch_are_never_copied(tmp_path, slow_copy):
    model = seeded(SkipsRestOfEpoch)
    fit(tmp_path, model, Dense(1), callbacks=[Flips()], stop=99, max_steps=-1, max_epochs=2)
    stored = seeded(SkipsRestOfEpoch)
    pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, plugins=[MoECheckpointIO()]).validate(
        stored, loader(8, shuffle=False), ckpt_path=str(tmp_path / "step_00000003"), verbose=False
    )
    assert same(dict(model.named_parameters()), dict(stored.named_parameters())) == []


def test_a_run_that_was_stopped_early_can_be_extended(tmp_path):
    val = loader(8, shuffle=False)
    whole, first, second = seeded(), seeded(), seeded()
    options = {"max_steps": -1, "max_epochs": 3, "val_check_interval": 4}
    reference, _ = fit(tmp_path / "a", whole, MoC(1), val=val, **options)
    stopper = EarlyStopping("val_loss", stopping_threshold=100.0, mode="min")  # stops at the first validation
    stopped, _ = fit(tmp_path / "b", first, MoC(1), val=val, callbacks=[stopper], **options)
    assert stopped.global_step == 4
    again, checkpoint = fit(tmp_path / "b", second, MoC(1), val=val, **options)
    assert checkpoint.restored_step == 4
    assert again.global_step == reference.global_step == 24
    assert same(state_of(whole, reference.optimizers[0]), state_of(second, again.optimizers[0])) == []


@pytest.mark.parametrize("policy", [Dense(1), MoC(1)])
def test_a_second_fit_of_the_same_trainer_goes_on(tmp_path, policy):
    val = loader(8, shuffle=False)
    model = seeded()
    trainer, checkpoint = fit(tmp_path, model, policy, val=val, max_steps=-1, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader(32), val)
    assert (trainer.global_step, trainer.current_epoch) == (16, 2)
    assert checkpoint.last.routed_tokens == 16 * 4 * 2 * 2
    assert open_step(tmp_path)[1].step == 16


def test_a_dry_run_leaves_nothing_behind(tmp_path):
    fit(tmp_path / "store", seeded(), Dense(1), fast_dev_run=True)
    assert not Path(tmp_path / "store").exists()


class Raw(TinyMoE):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_steps_that_lightning_does_not_count_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="global_step did not"):
        fit(tmp_path, seeded(Raw), Dense(1), max_steps=-1, max_epochs=1)


def test_a_step_can_be_evaluated_with_and_without_the_callback(tmp_path):
    val = loader(8, shuffle=False)
    model = seeded()
    trainer, checkpoint = fit(tmp_path, model, MoC(1))
    step = checkpoint.last_model_path
    expected = trainer.validate(model, val, verbose=False)
    assert trainer.validate(seeded(), val, ckpt_path=step, verbose=False) == expected
    bare = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, plugins=[MoECheckpointIO()])
    assert bare.validate(seeded(), val, ckpt_path=step, verbose=False) == expected


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Dense(4), "training stopped at step 7. The newest checkpoint is of step 4: 3 steps will be computed again"),
        (Dense(6), "training stopped at step 7. The newest checkpoint is of step 6: one step will be computed again"),
        (Dense(9), "training stopped at step 7. There is no checkpoint: 7 steps will be computed again"),
        (MoEvement(window=5), "training stopped at step 7. The newest checkpoint is of step 5: 2 steps will"),
        (Dense(1), ""),
    ],
)
def test_a_stop_says_what_is_saved(tmp_path, caplog, policy, said):
    fit(tmp_path, seeded(), policy, stop=7)
    assert said in caplog.text
    assert ("training stopped" in caplog.text) == bool(said)


def test_the_checkpoint_of_step_0_is_one_at_a_stop(tmp_path, caplog):
    fit(tmp_path, seeded(), MoEvement(window=5), stop=3)
    assert "training stopped at step 3. The newest checkpoint is of step 0: 3 steps will" in caplog.text


def test_a_finished_run_of_averaged_weights_and_batch_norms_is_started_again(tmp_path):
    """In its last epoch, that of the batch norms, Lightning's callback keeps what it asks for at the end."""
    ends = []
    for _ in range(2):
        module = seeded()
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
        fit(tmp_path, module, Dense(1), callbacks=[averaging], max_steps=-1, max_epochs=2)
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    assert same(*ends) == []


class StopsAtTheEnd(pl.Callback):
    def on_train_epoch_end(self, trainer, *_):
        if trainer.global_step == 14:
            raise Stopped


def test_a_run_that_was_stopped_after_its_last_step_ends_with_the_averaged_weights(tmp_path):
    """Lightning, which has nothing left to train then, calls no hook of the end."""
    ends = []
    for store, more in (("whole", []), ("stopped", [StopsAtTheEnd()]), ("stopped", []), ("stopped", [])):
        module = seeded()
        averaging = EMAWeightAveraging(decay=0.5)
        fit(tmp_path / store, module, Dense(1), stop=99, callbacks=[averaging, *more])
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    whole, stopped, again, finished = ends
    assert same(whole, stopped) != []
    assert same(whole, again) == same(whole, finished) == []
