"""A resumed run is the uninterrupted run: losses, validations, epochs, wherever in the loops it stopped."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.policies import Dense, MoEvement
from tests.support.tiny_moe import TinyMoE, Tokens, loader, state_of


class Stopped(Exception):
    pass


class Validated(TinyMoE):
    """Keeps every validation loss by (global step, batch)."""

    def on_fit_start(self):
        self.validations = {}

    def validation_step(self, batch, batch_idx):
        torch.rand(3), random.random(), np.random.rand()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.validations[self.trainer.global_step, batch_idx] = loss.item()
        self.log("val_loss", loss)


class StopAt(pl.Callback):
    def __init__(self, step: int, where: str) -> None:
        self.step, self.where = step, where

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.where == "batch" and trainer.global_step == self.step:
            raise Stopped

    def on_validation_start(self, trainer, pl_module):
        if self.where == "validation" and trainer.global_step == self.step:
            raise Stopped


class Accumulates(pl.callbacks.GradientAccumulationScheduler):
    """Three batches to a step from the second epoch on."""

    def __init__(self):
        super().__init__({0: 1, 1: 3})


class FromSeveral(Validated):
    """Trains on what the first loader gives and, where it gives something, the second."""

    def training_step(self, batch, batch_idx):
        parts = [part for part in batch if part is not None]
        return super().training_step([torch.cat(columns) for columns in zip(*parts, strict=True)], batch_idx)


class Plateau(Validated):
    """The learning rate falls at the end of each epoch whose validation was no better."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def train(
    dirpath,
    stop: StopAt | None = None,
    ckpt_path=None,
    policy=None,
    kind: type[Validated] = Validated,
    beside=(),
    training=None,
    **options,
):
    pl.seed_everything(7, verbose=False)
    model = kind()
    checkpoint = MoECheckpoint(policy or Dense(1), dirpath, when_busy="wait")
    trainer = pl.Trainer(
        callbacks=[checkpoint, *beside, *([stop] if stop else [])],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **options},
    )
    try:
        if isinstance(training, pl.LightningDataModule):
            trainer.fit(model, datamodule=training, ckpt_path=ckpt_path)
        else:
            data = loader(32) if training is None else training
            trainer.fit(model, data, loader(8, shuffle=False), ckpt_path=ckpt_path)
    except Stopped:
        assert stop is not None
    else:
        assert stop is None, "the run ended before it was to be stopped"
    return model, trainer, checkpoint


def position(trainer) -> tuple[int, ...]:
    return (
        trainer.global_step,
        trainer.current_epoch,
        trainer.fit_loop.epoch_loop._batches_that_stepped,
        trainer.fit_loop.epoch_loop.total_batch_idx,
    )


def assert_same(reference, resumed, before) -> None:
    model, trainer, _ = reference
    expected = state_of(model, trainer.optimizers[0])
    found = state_of(resumed[0], resumed[1].optimizers[0])
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert {**before[0].losses, **resumed[0].losses} == model.losses
    assert {**before[0].validations, **resumed[0].validations} == model.validations
    assert position(resumed[1]) == position(trainer)


CASES = [
    ({}, 3, "batch"),
    ({}, 8, "batch"),  # the first batch of the second epoch
    ({}, 8, "validation"),  # after the last batch of an epoch
    ({"val_check_interval": 4}, 4, "batch"),
    ({"val_check_interval": 4}, 12, "validation"),  # mid-epoch
    ({"check_val_every_n_epoch": None, "val_check_interval": 6}, 12, "validation"),
    ({"limit_train_batches": 5}, 5, "batch"),  # the loader is not exhausted at the end of the epoch
    ({"limit_train_batches": 5}, 10, "validation"),
    ({"check_val_every_n_epoch": 2}, 8, "batch"),  # an epoch that ends without validation
    ({"accumulate_grad_batches": 3}, 3, "validation"),  # 8 batches: the last step accumulates only two
    ({"num_sanity_val_steps": 0}, 17, "batch"),
]


UNVALIDATED = {"limit_train_batches": 5, "limit_val_batches": 0}
CASES += [
    (UNVALIDATED, 5, "batch"),  # an epoch that ends neither with the loader nor with a validation
    ({**UNVALIDATED, "max_epochs": -1, "max_steps": 14}, 10, "batch"),
    ({"limit_train_batches": 5, "check_val_every_n_epoch": 2}, 5, "batch"),
]


@pytest.mark.parametrize(("options", "step", "where"), CASES, ids=lambda v: str(v).replace(" ", ""))
@pytest.mark.quick(
    "{}-8-batch",
    "{}-8-validation",
    "{'val_check_interval':4}-12-validation",
    "{'accumulate_grad_batches':3}-3-validation",
    "{'num_sanity_val_steps':0}-17-batch",
    "{'limit_train_batches':5,'limit_val_batches':0,'max_epochs':-1,'max_steps':14}-10-batch",
)
def test_automatic_resume_is_exact(tmp_path, options, step, where):
    reference = train(tmp_path / "whole", **options)
    before = train(tmp_path / "broken", StopAt(step, where), **options)
    resumed = train(tmp_path / "broken", **options)
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


@pytest.mark.parametrize(("options", "step"), [({"limit_val_batches": 0}, 8), (UNVALIDATED, 5), (UNVALIDATED, 7)])
@pytest.mark.quick("options0-8", "options2-7")
def test_a_sampler_that_keeps_its_position_begins_the_next_epoch_anew(tmp_path, options, step):
    """It takes up its position when it is first asked, also where the epoch has no batch left."""

    def training():
        dataset = Tokens(32)
        sampler = StatefulDistributedSampler(dataset, 1, 0, shuffle=True, seed=3)
        return StatefulDataLoader(dataset, batch_size=4, sampler=sampler)

    options = {**options, "use_distributed_sampler": False}
    reference = train(tmp_path / "whole", training=training(), **options)
    before = train(tmp_path / "broken", StopAt(step, "batch"), training=training(), **options)
    resumed = train(tmp_path / "broken", training=training(), **options)
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("step", [3, 8, 11])
@pytest.mark.quick("3-0", "8-1", "11-0")
def test_a_loader_that_was_given_a_generator_draws_the_orders_that_it_would_have(tmp_path, workers, step):
    def training():
        drawing = {"shuffle": True, "generator": torch.Generator().manual_seed(3), "num_workers": workers}
        return StatefulDataLoader(Tokens(32), batch_size=4, **drawing)

    options = {"limit_val_batches": 0}
    reference = train(tmp_path / "whole", training=training(), **options)
    before = train(tmp_path / "broken", StopAt(step, "batch"), training=training(), **options)
    resumed = train(tmp_path / "broken", training=training(), **options)
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: RandomSampler(data),
        lambda data: RandomSampler(data, generator=torch.Generator()),
        lambda data: SubsetRandomSampler(range(len(data))),
        lambda data: WeightedRandomSampler([1.0] * len(data), len(data)),
    ],
)
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.quick("False-<lambda>0", "True-<lambda>1", "False-<lambda>2", "True-<lambda>3")
def test_a_sampler_that_draws_a_new_order_after_a_resume_is_named_before(tmp_path, caplog, sampler, batched):
    """A stateful loader counts the samples of such a sampler, and nobody knows which these were."""
    data = Tokens(32)
    order = sampler(data)
    how = {"batch_sampler": BatchSampler(order, 4, False)} if batched else {"sampler": order, "batch_size": 4}
    train(tmp_path / "store", training=StatefulDataLoader(data, **how), max_steps=1)
    said = f"the {type(order).__name__} in StatefulDataLoader draws a new order after a resume (give the loader shuffle"
    assert said in caplog.text
    with pytest.raises(ConfigError, match=type(order).__name__):
        train(tmp_path / "windows", policy=MoEvement(window=2), training=StatefulDataLoader(data, **how), max_steps=1)


def test_orders_that_a_stateful_loader_brings_back_are_not_warned_of(tmp_path, caplog):
    train(tmp_path / "store", training=StatefulDataLoader(Tokens(32), batch_size=4, shuffle=True), max_steps=1)
    train(tmp_path / "other", training=StatefulDataLoader(Tokens(32), batch_size=4), max_steps=1)
    assert "will not be exact" not in caplog.text


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
@pytest.mark.parametrize(("lengths", "options", "step"), [((8, 8), {}, 8), ((8, 4), {}, 8), ((8, 8), UNVALIDATED, 5)])
@pytest.mark.quick("lengths0-options0-8-max_size_cycle", "lengths1-options1-8-min_size", "lengths2-options2-5-max_size")
def test_of_several_loaders_none_begins_the_next_epoch_twice(tmp_path, mode, lengths, options, step):
    """Each keeps a generator of its own, which draws an order whenever its loader is begun."""
    if mode == "min_size" and lengths[0] != lengths[1]:
        step = 4

    def training():
        drawing = {"batch_size": 4, "shuffle": True}
        loaders = [
            StatefulDataLoader(Tokens(4 * length), generator=torch.Generator().manual_seed(seed), **drawing)
            for seed, length in enumerate(lengths)
        ]
        return CombinedLoader(loaders, mode)

    options = {**options, "limit_val_batches": 0}
    reference = train(tmp_path / "whole", kind=FromSeveral, training=training(), **options)
    before = train(tmp_path / "broken", StopAt(step, "batch"), kind=FromSeveral, training=training(), **options)
    resumed = train(tmp_path / "broken", kind=FromSeveral, training=training(), **options)
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


@pytest.mark.parametrize(("step", "where"), [(8, "batch"), (10, "batch"), (11, "batch")])
@pytest.mark.quick("8-batch", "11-batch")
def test_as_many_batches_are_accumulated_as_in_any_other_epoch(tmp_path, step, where):
    """Lightning's callback says how many at the start of an epoch, which a run that resumes in its middle has not."""
    reference = train(tmp_path / "whole", beside=[Accumulates()])
    before = train(tmp_path / "broken", StopAt(step, where), beside=[Accumulates()])
    resumed = train(tmp_path / "broken", beside=[Accumulates()])
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)


@pytest.mark.parametrize(("step", "where"), [(8, "batch"), (8, "validation"), (11, "batch"), (16, "validation")])
@pytest.mark.quick("8-validation", "11-batch")
def test_a_learning_rate_that_goes_by_validations_falls_as_if_nothing_had_happened(tmp_path, step, where):
    """Lightning leaves plateau schedulers as they are at the end of an epoch that was resumed in its middle."""
    reference = train(tmp_path / "whole", kind=Plateau)
    assert reference[1].optimizers[0].param_groups[0]["lr"] < 0.01
    before = train(tmp_path / "broken", StopAt(step, where), kind=Plateau)
    resumed = train(tmp_path / "broken", kind=Plateau)
    assert_same(reference, resumed, before)
    assert resumed[1].optimizers[0].param_groups[0]["lr"] == reference[1].optimizers[0].param_groups[0]["lr"]


class Averaged(Validated):
    """Logs its losses' mean over each epoch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("epochs", 1.0)


@pytest.mark.parametrize(("step", "is_said"), [(11, True), (8, False)])
def test_means_over_an_epoch_that_was_resumed_in_its_middle_are_said_to_be_partial(tmp_path, caplog, step, is_said):
    train(tmp_path, StopAt(step, "batch"), kind=Averaged)
    caplog.clear()
    resumed = train(tmp_path, kind=Averaged)
    assert resumed[2].restored_step == step
    said = [record.message for record in caplog.records if "for this whole epoch" in record.message]
    assert ["(train_loss) leaves out the batches before" in each for each in said] == [True] * is_said


class PlateauOfTraining(Validated):
    """The learning rate falls after each batch whose loss was no better."""

    strict = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        config = {"scheduler": scheduler, "monitor": "train_loss", "interval": "step", "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": config}


def test_a_learning_rate_that_no_restart_can_go_on_with_is_refused_at_the_start(tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"interval='step'.*'train_loss'.*strict=False"):
        train(tmp_path / "refused", kind=PlateauOfTraining)
    monkeypatch.setattr(PlateauOfTraining, "strict", False)
    train(tmp_path / "broken", StopAt(8, "validation"), kind=PlateauOfTraining)
    resumed = train(tmp_path / "broken", kind=PlateauOfTraining)
    assert resumed[2].restored_step == 8


@pytest.mark.parametrize("step", [8, 11])
@pytest.mark.parametrize("other_store", [False, True])
@pytest.mark.quick("False-11", "True-8")
def test_resume_by_ckpt_path_is_exact(tmp_path, step, other_store):
    reference = train(tmp_path / "whole")
    before = train(tmp_path / "broken", StopAt(step, "batch"))
    target = tmp_path / ("other" if other_store else "broken")
    resumed = train(target, ckpt_path=tmp_path / "broken" / f"step_{step:08d}")
    assert resumed[2].restored_step == step
    assert_same(reference, resumed, before)
    assert (tmp_path / "broken" / f"step_{step:08d}").exists() == other_store  # its own store moved on


def test_dense_run_starts_from_an_ordinary_lightning_checkpoint(tmp_path):
    """ckpt_path of another kind wins over what is in dirpath, and token books go on."""
    first = train(tmp_path / "a", StopAt(6, "batch"))
    first[1].save_checkpoint(tmp_path / "plain.ckpt")
    resumed = train(tmp_path / "a", ckpt_path=tmp_path / "plain.ckpt")
    assert resumed[2].restored_step is None
    assert resumed[1].global_step == 24
    assert resumed[2].last.routed_tokens == train(tmp_path / "b")[2].last.routed_tokens


# --- random numbers, with the callback and without ---


def losses_of(*callbacks, workers: int = 0, **options) -> dict[int, float]:
    """Of a run with dropout and validations that draw random numbers."""
    pl.seed_everything(7, verbose=False)
    model = Validated()
    trainer = pl.Trainer(
        max_epochs=3, val_check_interval=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(callbacks), callbacks=list(callbacks), **options,
    )  # fmt: skip
    validation = DataLoader(Tokens(8), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    trainer.fit(model, DataLoader(Tokens(32), 4, shuffle=True), validation)
    return model.losses


def test_validations_draw_no_numbers_of_trainings(tmp_path):
    without = losses_of()
    isolated = losses_of(MoECheckpoint(Dense(1), tmp_path / "b"))
    assert {i for i in without if isolated[i] != without[i]} == set(range(4, 24)), "from the first validation on"
    assert losses_of(MoECheckpoint(Dense(1), tmp_path / "c"), limit_val_batches=0) == isolated


def test_numbers_after_an_evaluation_are_left_alone(tmp_path):
    """``trainer.validate`` after a fit is none of training's."""
    model, trainer, _ = train(tmp_path)
    torch.manual_seed(3)
    trainer.validate(model, loader(8, shuffle=False), verbose=False)
    after = torch.rand(1)
    torch.manual_seed(3)
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, MoECheckpoint)]
    trainer.validate(model, loader(8, shuffle=False), verbose=False)
    assert torch.equal(after, torch.rand(1))


class Counting(Validated):
    """A buffer counts the batches of validations, the sanity check's too."""

    def __init__(self):
        super().__init__(layers=1)
        self.register_buffer("validated", torch.zeros((), dtype=torch.long))

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        super().validation_step(batch, batch_idx)


def test_the_sanity_check_is_not_made_again_before_the_first_step(tmp_path):
    """Windows have a checkpoint of the state before the first step, which the sanity check has changed."""
    counted = []
    for step in (1, 99):
        pl.seed_everything(3, verbose=False)
        module, checkpoint = Counting(), MoECheckpoint(MoEvement(window=3), tmp_path, when_busy="wait")
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[checkpoint, StopAt(step, "batch")],
        )  # fmt: skip
        if step == 1:
            with pytest.raises(Stopped):
                trainer.fit(module, StatefulDataLoader(Tokens(64), 4), DataLoader(Tokens(16), 4))
        else:
            trainer.fit(module, StatefulDataLoader(Tokens(64), 4), DataLoader(Tokens(16), 4))
        counted.append(int(module.validated))
    assert checkpoint.restored_step == 0
    assert counted == [2, 2]
