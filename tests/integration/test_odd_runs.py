"""Runs that nobody had thought of: idle experts, state that comes late, odd parameters, other policies, several fits.

Each is interrupted by an exception, started again, and compared with a run that was not.
"""

from __future__ import annotations

import threading
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn

import moe_ckpt
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.driver import run as driver_run
from moe_ckpt.driver.states import State
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, GradientLog, MoEvement
from moe_ckpt.storage import open_storage
from tests.support.tiny_moe import TinyMoE, loader, state_of
from tests.support.verifying import verify_store
from tests.support.waiting import retry_until


class Interrupted(Exception):
    pass


class At(pl.Callback):
    """Calls what belongs to a step when it has ended."""

    def __init__(self, **events) -> None:
        self._events = {int(name.removeprefix("step")): event for name, event in events.items()}

    def on_train_batch_start(self, trainer, *_):
        self._events.pop(trainer.global_step, lambda: None)()


def interrupt():
    raise Interrupted


def trainer_of(checkpoint, *callbacks, **limits) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(max_epochs=-1, callbacks=[*callbacks, checkpoint], **quiet, **limits)


def fit(store: Path, policy, module=TinyMoE, *callbacks, max_steps: int = 20, **settings):
    """(module, trainer, callback) of one start."""
    pl.seed_everything(3, verbose=False)
    checkpoint = MoECheckpoint(policy, store, **{"when_busy": "wait", **settings})
    model, trainer = module(), trainer_of(checkpoint, *callbacks, max_steps=max_steps)
    trainer.fit(model, loader(32))
    return model, trainer, checkpoint


def same(one, other) -> bool:
    first, second = (state_of(model, trainer.optimizers[0]) for model, trainer, _ in (one, other))
    for number, parameter in enumerate(one[0].parameters()):
        if not parameter.numel():  # whatever its optimizer has counted is of no use to anybody
            first.pop(f"optim.{number}.step", None)
            second.pop(f"optim.{number}.step", None)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def require_exact(tmp_path: Path, policy, module, *callbacks, at: int = 9, **settings):
    """Interrupts a run at a step, and requires that the next start ends as a run that was not interrupted."""
    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", policy, module, At(**{f"step{at}": interrupt}), *callbacks, **settings)
    assert verify_store(open_storage(str(tmp_path / "cut"))) == []
    resumed, whole = fit(tmp_path / "cut", policy, module), fit(tmp_path / "whole", policy, module)
    assert resumed[2].restored_step is not None
    assert same(resumed, whole)


class Collapsing(TinyMoE):
    """From a step on no token goes to some experts: listed ones, whose parameters get no gradient then."""

    def __init__(self, until: int = 6, later: int = 10**9) -> None:
        super().__init__(experts=8, stacked=False)
        self._idle = until, later

    def training_step(self, batch, batch_idx):
        begin, end = self._idle
        idle = begin <= self.trainer.global_step < end
        for block in self.blocks:
            gate = block.moe.gate

            def scores(x, gate=gate):
                found = nn.functional.linear(x, gate.weight)
                if idle:
                    found = found - torch.tensor([0.0] * 4 + [1e9] * 4)
                return found.softmax(-1).topk(gate.top_k, dim=-1)

            gate.forward = scores
        return super().training_step(batch, batch_idx)


def test_a_slot_of_experts_that_got_no_tokens_is_not_stale(tmp_path):
    _, _, checkpoint = fit(tmp_path, MoEvement(window=3), Collapsing, max_steps=40)
    assert checkpoint.last.failed_checkpoints == 0
    assert checkpoint.last.committed_step == 40


def test_a_window_that_ends_because_optimizer_state_came_is_not_continued_later(tmp_path, monkeypatch):
    """The first slot of the next one finds no room, since storage is slow; the old one would have a step less then."""
    storage = threading.Event()
    storage.set()

    class FirstTokensAtStep3(Collapsing):
        def __init__(self) -> None:
            super().__init__(until=0, later=2)

    class Slow(pl.Callback):
        """Storage answers before step 1, and again once step 3 has found no room."""

        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 0:
                storage.clear()
            elif trainer.global_step == 3:
                storage.set()
                fit = trainer.callbacks[-1]._fit
                assert fit.driver.last.skipped, "step 3 found room"
                assert retry_until(lambda: not fit.session._snapshots.pipeline.room.is_short)

    monkeypatch.setattr(driver_run, "on_phase", lambda phase: phase != "write" or storage.wait(60.0))
    require_exact(tmp_path, MoEvement(window=3), FirstTokensAtStep3, Slow(), at=6, when_busy="skip")


class WithoutElements(TinyMoE):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x):
        return super().forward(x + self.nothing.sum())


class WithASlash(TinyMoE):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleDict({"en/de": nn.Linear(16, 16)})

    def forward(self, x):
        return super().forward(x + self.pairs["en/de"](x))


@pytest.mark.parametrize("policy", [Dense(), MoEvement(window=3)], ids=["dense", "moevement"])
@pytest.mark.parametrize("module", [WithoutElements, WithASlash])
@pytest.mark.quick("WithoutElements-dense", "WithASlash-moevement")
def test_odd_parameters(tmp_path, module, policy):
    require_exact(tmp_path, policy, module)


class WithoutExperts(TinyMoE):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.moe = nn.Linear(16, 16)


@pytest.mark.parametrize(
    "policy", [Dense(), MoEvement(window=3), GradientLog(window=3)], ids=["dense", "window", "log"]
)
def test_a_model_without_experts(tmp_path, policy):
    memory = moe_ckpt.Memory(directory=str(tmp_path), storage_every=1000)
    settings = {"memory": memory} if isinstance(policy, GradientLog) else {}
    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", policy, WithoutExperts, At(step9=interrupt), **settings)
    resumed = fit(tmp_path / "cut", policy, WithoutExperts, **settings)
    assert resumed[2].restored_step is not None
    assert same(resumed, fit(tmp_path / "whole", Dense(), WithoutExperts))


class Growing(TinyMoE):
    """A persistent buffer with a row for each batch, which decides what the next batch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 16))

    def forward(self, x):
        out = super().forward(x + self.seen.mean(0))
        self.seen = torch.cat([self.seen, x.detach().reshape(-1, 16)[:1]])
        return out


@pytest.mark.parametrize("policy", [Dense(), MoEvement(window=3)], ids=["dense", "moevement"])
def test_a_buffer_that_grows(tmp_path, policy):
    require_exact(tmp_path, policy, Growing)


def test_a_window_is_computed_again_under_a_gradient_log(tmp_path):
    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", MoEvement(window=3), TinyMoE, At(step9=interrupt))
    memory = moe_ckpt.Memory(directory=str(tmp_path), storage_every=1000)
    resumed = fit(tmp_path / "cut", GradientLog(), TinyMoE, memory=memory)
    assert resumed[2].restored_step is not None
    assert same(resumed, fit(tmp_path / "whole", Dense()))


class Tuned(TinyMoE):
    """With a learning rate that a finder may set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class FindsInTheMiddle(LearningRateFinder):
    """At the begin of the second epoch, whose first step is the ninth."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=16, early_stop_threshold=None, min_lr=1e-3)

    def on_fit_start(self, *_):
        pass

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def test_a_search_for_a_learning_rate_in_the_middle_is_no_part_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Interrupted):
        fit(tmp_path / "cut", Dense(), Tuned, At(step10=interrupt), FindsInTheMiddle())
    assert verify_store(open_storage(str(tmp_path / "cut"))) == []
    resumed = fit(tmp_path / "cut", Dense(), Tuned, FindsInTheMiddle())
    whole = fit(tmp_path / "whole", Dense(), Tuned, FindsInTheMiddle())
    assert resumed[2].restored_step == 10, "not the search's last, 24"
    assert same(resumed, whole)
    rates = [each[1].optimizers[0].param_groups[0]["lr"] for each in (resumed, whole)]
    assert rates[0] == rates[1] != 0.01, "what was found"
    tokens = [each[2]._fit.session.run_ledger.tokens.routed_tokens for each in (resumed, whole)]
    assert tokens == [20 * 4 * 2 * 2] * 2, "batches of 4, the best 2 experts, 2 layers"


class Sized(Tuned):
    """Its trainer searches for a batch size: in ``train_dataloader``, where that is read from."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self):
        return loader(64, self.batch_size)


SEARCHES = {
    "rate": lambda: LearningRateFinder(num_training_steps=16, early_stop_threshold=None, min_lr=1e-3),
    "size": lambda: BatchSizeFinder(max_trials=1, steps_per_trial=2),
}


@pytest.mark.parametrize("policy", [Dense(), MoEvement(window=3)], ids=["dense", "moevement"])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.quick("rate-moevement", "size-dense")
def test_after_a_search_before_the_first_step_the_run_is_resumed(search, policy, tmp_path, monkeypatch, caplog):
    """Which every start makes, on the state that it begins with, before the checkpoint is loaded."""
    monkeypatch.chdir(tmp_path)

    def start(name, *callbacks):
        pl.seed_everything(3, verbose=False)
        checkpoint = MoECheckpoint(policy, tmp_path / name, when_busy="wait")
        model, trainer = Sized(), trainer_of(checkpoint, *callbacks, search(), max_steps=20, limit_val_batches=0)
        trainer.fit(model)
        return model, trainer, checkpoint

    with pytest.raises(Interrupted):
        start("cut", At(step10=interrupt))
    resumed, whole = start("cut"), start("whole")
    assert resumed[2].restored_step in (9, 10)
    assert "ckpt_path" not in caplog.text
    assert same(resumed, whole)
    assert start("cut")[1].fit_loop.epoch_loop.total_batch_idx == whole[1].fit_loop.epoch_loop.total_batch_idx


def test_a_search_in_the_middle_is_refused_where_steps_are_computed_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"MoEvement and a learning rate.*use Dense or MoC"):
        fit(tmp_path / "store", MoEvement(window=3), Tuned, FindsInTheMiddle())


def two_fits(store: Path, *callbacks):
    pl.seed_everything(3, verbose=False)
    checkpoint = MoECheckpoint(Dense(), store, when_busy="wait")
    model, trainer = TinyMoE(), trainer_of(checkpoint, *callbacks, max_steps=8)
    trainer.fit(model, loader(32))
    trainer.fit_loop.epoch_loop.max_steps = 16
    trainer.fit(model, loader(32))
    return model, trainer, checkpoint


def test_a_run_of_two_fits_that_is_interrupted_in_the_second(tmp_path):
    """The first finds nothing left to train; Lightning makes optimizers anew for the second, which was interrupted."""
    with pytest.raises(Interrupted):
        two_fits(tmp_path / "cut", At(step13=interrupt))
    assert same(two_fits(tmp_path / "cut"), two_fits(tmp_path / "whole"))


def test_a_limit_before_the_window_is_told(tmp_path, caplog):
    with pytest.raises(Interrupted):
        fit(tmp_path, MoEvement(window=3), TinyMoE, At(step14=interrupt))
    caplog.clear()
    _, _, checkpoint = fit(tmp_path, MoEvement(window=3), max_steps=3)
    assert "was computed again: nothing was saved" in caplog.text
    assert checkpoint._fit.driver.lifecycle.state is State.ENDED
