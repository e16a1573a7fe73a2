"""A run that is started again: what it says, and what a finished one does with the same script and with another."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, WeightAveraging

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.storage import StoreLock
from tests.support import warm
from tests.support.tiny_moe import TinyMoE, loader, state_of

ROOT = Path(__file__).parents[2]


class Rated(TinyMoE):
    """``lr`` is a hyperparameter of the module and of the optimizer, ``rate`` of the optimizer only."""

    def __init__(self, lr: float = 0.01, rate: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["rate"])
        self.rate = rate
        self.validated = 0

    def on_validation_start(self):
        self.validated += 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr * self.rate)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]


class Broken(Exception):
    pass


class At(pl.Callback):
    """Raises, or asks for the end, at a step."""

    def __init__(self, step: int, where: str) -> None:
        self.step, self.where = step, where

    def on_train_batch_end(self, trainer, *_):
        if self.where == "stop" and trainer.global_step == self.step:
            trainer.should_stop = True

    def on_validation_end(self, trainer, pl_module):
        if self.where == "validation" and trainer.global_step == self.step:
            raise Broken


class Life:
    """One start of the script."""

    def __init__(self, root, *callbacks, lr=0.01, rate=1.0, resume="auto", policy=None, **options):
        pl.seed_everything(7, verbose=False)
        self.model = Rated(lr, rate)
        self.checkpoint = MoECheckpoint(policy or Dense(4), root / "store", resume=resume, when_busy="wait")
        self.best = ModelCheckpoint(root / "best", monitor="val_loss", save_top_k=-1, save_last=True)
        self.trainer = pl.Trainer(
            callbacks=[*callbacks, self.best, self.checkpoint], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
            **{"max_epochs": 2, **options},
        )  # fmt: skip
        self.error: Exception | None = None
        try:
            self.trainer.fit(self.model, loader(32), loader(8, shuffle=False))  # 8 steps in an epoch
        except (Broken, ConfigError) as error:
            self.error = error
        self.saved = sorted(path.name for path in (root / "best").iterdir())
        self.state = state_of(self.model, self.trainer.optimizers[0]) if self.trainer.optimizers else {}


def same(a: Life, b: Life) -> bool:
    return a.state.keys() == b.state.keys() and all(torch.equal(a.state[name], b.state[name]) for name in a.state)


def contents(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and ".lock" not in path.name)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


LENGTHS = [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 16}, {"max_epochs": -1, "max_steps": 13}]
"""The end of an epoch by either, and the middle of one."""


@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_a_finished_run_trains_nothing_and_nobody_saves_once_more(tmp_path, caplog, length):
    caplog.set_level(logging.WARNING, "moe_ckpt")
    first = Life(tmp_path, **length)
    before = contents(tmp_path)
    caplog.clear()
    again = Life(tmp_path, **length)
    assert contents(tmp_path) == before
    assert (again.model.losses, again.model.validated, again.error) == ({}, 0, None)
    assert same(again, first)
    assert (again.trainer.global_step, again.trainer.current_epoch) == (
        first.trainer.global_step,
        first.trainer.current_epoch,
    )
    assert again.best.best_model_path == first.best.best_model_path
    assert again.best.best_k_models == first.best.best_k_models
    said = [record for record in caplog.records if record.name == "moe_ckpt"]
    assert [record.levelname for record in said] == ["WARNING"]
    step = first.trainer.global_step
    assert re.search(rf"store is finished \(max_\w+=\d+, at step {step}, PLT 0.00%\): nothing is left", said[0].message)
    assert "choose another dirpath" in said[0].message


@pytest.mark.parametrize("longer", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 22}], ids=str)
@pytest.mark.parametrize("length", [LENGTHS[0], LENGTHS[2]], ids=str)
@pytest.mark.quick(
    "{'max_epochs': 2}-{'max_epochs': 3}", "{'max_epochs': -1, 'max_steps': 13}-{'max_epochs': -1, 'max_steps': 22}"
)
def test_a_longer_run_goes_on_as_if_it_had_been_so_long_from_the_start(tmp_path, caplog, length, longer):
    straight = Life(tmp_path / "straight", **longer)
    Life(tmp_path / "parts", **length)
    caplog.clear()
    extended = Life(tmp_path / "parts", **longer)
    assert (
        "is extended: training continues to " + ", ".join(f"{k}={v}" for k, v in longer.items() if v > 0) in caplog.text
    )
    assert same(extended, straight)
    assert extended.model.losses == {i: loss for i, loss in straight.model.losses.items() if i in extended.model.losses}
    assert [name for name in extended.saved if "-v1" in name] == []
    assert set(straight.saved) <= set(extended.saved)  # a stop in the middle of an epoch has its own


def test_other_hyperparameters_are_refused_and_named(tmp_path):
    Life(tmp_path)
    before = contents(tmp_path)
    for options in ({"lr": 0.1}, {"rate": 10.0}, {"rate": 10.0, "max_epochs": 3}):
        refused = Life(tmp_path, **options)
        assert isinstance(refused.error, ConfigError)
        assert "optimizer lr 0.01 -> 0.1" in str(refused.error)
        assert ("module.lr 0.01 -> 0.1" in str(refused.error)) == ("lr" in options)
        kept = "the old values of: optimizer lr 0.01 -> 0.1"
        assert re.search(r"another dirpath.*weights_from='.*store'.*resume='extend'", str(refused.error))
        assert re.search(r"as they were, with " + re.escape(kept) + r"\.$", str(refused.error))
        assert refused.model.losses == {}
        assert contents(tmp_path) == before


def test_a_finished_run_of_another_policy_is_refused_by_both_names(tmp_path, caplog):
    """As another job of a sweep finds it that was given the same directory. Longer runs go on with the new policy."""
    Life(tmp_path)
    for policy, said in ((MoC(k=1), "policy dense -> moc"), (Dense(3), "policy dense every_n_steps 4 -> 3")):
        refused = Life(tmp_path, policy=policy)
        assert isinstance(refused.error, ConfigError)
        assert f"this script differs from it: {said}. To use" in str(refused.error)
        assert refused.model.losses == {}
    assert Life(tmp_path, policy=MoC(k=1), resume="extend").error is None
    assert sorted(Life(tmp_path, policy=MoC(k=1), max_epochs=3).model.losses) == list(range(16, 24))


def test_extend_goes_on_with_the_stored_optimizer_and_says_so(tmp_path, caplog):
    Life(tmp_path)
    caplog.clear()
    life = Life(tmp_path, rate=10.0, max_epochs=3, resume="extend")
    assert sorted(life.model.losses) == list(range(16, 24))
    assert "optimizer lr 0.01 -> 0.1 (training continues with the checkpoint's)" in caplog.text
    assert life.trainer.optimizers[0].param_groups[0]["initial_lr"] == 0.01
    caplog.clear()
    assert Life(tmp_path, rate=10.0, max_epochs=3, resume="extend").model.losses == {}
    assert "nothing is left to train" in caplog.text


def test_an_unfinished_run_goes_on_and_names_what_is_different(tmp_path, caplog):
    Life(tmp_path, At(11, "stop"))
    caplog.clear()
    life = Life(tmp_path, lr=0.1, max_epochs=2)
    assert life.error is None
    assert sorted(life.model.losses) == list(range(11, 16))
    (changed,) = [message for message in caplog.messages if "hyperparameters differ" in message]
    assert "optimizer lr 0.01 -> 0.1 (training continues with the checkpoint's)" in changed
    assert "module.lr 0.01 -> 0.1 (training continues with this script's)" in changed
    assert [message for message in caplog.messages if message.startswith("resumed at step 11 from ")]


def test_an_end_that_was_not_reached_is_made_up_for(tmp_path):
    """A failure in the last validation: it is made again, and what is saved after it."""
    assert isinstance(Life(tmp_path, At(16, "validation")).error, Broken)
    life = Life(tmp_path)
    assert (life.model.losses, life.model.validated) == ({}, 1)
    assert life.saved == ["epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt", "last.ckpt"]


def test_the_end_is_noted_before_anybody_else_may_open_the_store(tmp_path, monkeypatch):
    noted = []
    release = StoreLock.release

    def releasing(lock):
        noted.append((tmp_path / "store" / "finished.json").exists())
        release(lock)

    monkeypatch.setattr(StoreLock, "release", releasing)
    Life(tmp_path)
    assert noted
    assert all(noted)


def test_early_stopping_ends_a_run_until_it_is_made_longer(tmp_path):
    patience = {"monitor": "val_loss", "patience": 1, "min_delta": 100.0}
    first = Life(tmp_path, EarlyStopping(**patience), max_epochs=5)
    assert first.trainer.global_step == 16
    again = Life(tmp_path, EarlyStopping(**patience), max_epochs=5)
    assert (again.model.losses, again.model.validated) == ({}, 0)
    assert again.saved == first.saved
    assert Life(tmp_path, max_epochs=5).trainer.global_step == 40, "what had ended the run was taken away"


def test_the_result_of_a_finished_run_is_what_averaging_made_of_it(tmp_path):
    first = Life(tmp_path, WeightAveraging(), policy=MoC(k=1))
    again = Life(tmp_path, WeightAveraging(), policy=MoC(k=1))
    assert again.model.losses == {}
    for (name, ours), theirs in zip(first.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


SCRIPT = """
import logging, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from tests.integration.test_finished_runs import At, Life
root = Path(sys.argv[1])
for number, (callbacks, options) in enumerate(
    [((At(5, "stop"),), {}), ((), {}), ((), {}), ((), {"rate": 10.0}), ((), {"resume": "never"})]
):
    print("life", number, file=sys.stderr, flush=True)
    Life(root, *callbacks, max_epochs=1, **options)
"""


def test_without_logging_set_up_every_start_says_what_it_found_and_where_it_begins(tmp_path):
    done = subprocess.run(
        [warm.python(), "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=500, check=True,
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lives = [life.strip().splitlines()[1:] for life in done.stderr.split("life ")[1:]]
    said = [[line for line in life if line.startswith("moe_ckpt: ")] for life in lives]
    store = re.escape(str(tmp_path / "store"))
    setup = (
        r"moe_ckpt: Dense\(every_n_steps=4\): 2 MoE layers of 4 experts, 6,744 parameters on 1 rank\. Checkpoints go "
        rf"to {store}, about 7\d\.\d KiB where all is saved \(with Adam\); memory that outlives the process: off"
    )
    expected = [
        [rf"moe_ckpt: training starts from scratch: {store} holds no checkpoint yet"],
        [rf"moe_ckpt: resumed at step 5 from {store}/step_00000005: all experts are of that step \(PLT 0\.00%\)"],
        [rf"moe_ckpt: WARNING: the run in {store} is finished \(max_epochs=1, at step 8, PLT 0\.00%\): nothing is .*"],
        [],  # an error
        [rf"moe_ckpt: training starts from scratch, because resume='never' is set; the checkpoints in {store} stay"],
    ]
    assert [len(life) for life in said] == [1 + len(life) for life in expected], done.stderr
    assert all(re.fullmatch(setup, life.pop(0)) for life in said), done.stderr
    for found, wanted in zip(said, expected, strict=True):
        assert all(re.fullmatch(*pair) for pair in zip(wanted, found, strict=True)), found


class Elsewhere(pl.Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, *_):
        os.chdir(self.directory)


def test_a_relative_store_stays_where_it_was_when_training_changes_the_directory(tmp_path, monkeypatch):
    for directory in ("run", "other"):
        (tmp_path / directory).mkdir()
    monkeypatch.chdir(tmp_path / "run")
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[
            MoECheckpoint(Dense(4), "store", when_busy="wait"),
            EarlyStopping("val_loss", stopping_threshold=1e9),
            Elsewhere(tmp_path / "other"),
        ],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyMoE(), loader(), loader())
    assert (tmp_path / "run" / "store" / "finished.json").exists()
    assert list((tmp_path / "other").iterdir()) == []
