"""Disks that are full for a moment, hang, or are emptied, under every policy and real Lightning: training goes on.

At its end, or when it is started again, every checkpoint that is there verifies.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.driver import run as driver_run
from moe_ckpt.engine import host_tier
from moe_ckpt.errors import SaveFailedError
from moe_ckpt.policies import CheckFreq, Dense, MoC, MoEtion
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.recovery.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import LocalStorage
from tests.integration.lives import place  # noqa: F401 - a fixture
from tests.support.bad_disks import PATIENCE_SECS as BAD_PATIENCE_SECS
from tests.support.bad_disks import HangingDisk, SlowDisk, SmallDisk
from tests.support.deleting import delete_tree
from tests.support.tiny_moe import TinyMoE, loader, state_of
from tests.support.waiting import retry_until

POLICIES = {
    "dense": Dense(),
    "checkfreq": CheckFreq(profile_steps=3, max_interval=3),
    "moc": MoC(k=1),
    "moetion": MoEtion(),
    "moevement": MoEvement(window=6),
}
STEPS = 40
FAST = ("moc", "moevement")
every_policy = pytest.mark.parametrize(
    "policy",
    [pytest.param(each, id=name, marks=() if name in FAST else pytest.mark.slow) for name, each in POLICIES.items()],
)


@pytest.fixture(autouse=True)
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    host_tier.release_host_memory()
    torch.set_num_threads(threads)


class At(pl.Callback):
    """Does what ``events`` says at the end of a step."""

    def __init__(self, events):
        self.events = events
        self.states = {}
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(trainer.global_step)
        self.states[trainer.global_step] = state_of(pl_module, trainer.optimizers[0])
        self.events.get(trainer.global_step, lambda: None)()


def fit(monkeypatch, disk, policy, events=None, steps=STEPS, **settings):
    """(trainer, callback, what was seen) of one life."""
    monkeypatch.setattr(driver_run, "open_storage", lambda path, on_phase=None, **options: disk)
    pl.seed_everything(11, verbose=False)
    at = At(events or {})
    settings = {"retention": RetentionPolicy(keep_last=2), "timeout_secs": 60, **settings}
    callback = MoECheckpoint(policy, disk.root, **settings)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[at, callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyMoE(), loader(64))
    return trainer, callback, at


def verified(root: str | Path) -> list[int]:
    """Steps of all checkpoints, each of which has been read and verified."""
    reader = StoreReader(LocalStorage(root))
    found = [reader.manifest(directory) for directory in reversed(reader.directories())]
    for manifest in found:
        check_checkpoint(reader, manifest)
    return [manifest.step for manifest in found]


@every_policy
def test_a_disk_that_is_full_for_a_moment(policy, place, monkeypatch):  # noqa: F811
    disk = SmallDisk(place / "store", float("inf"))

    def fill():
        disk.capacity_bytes = disk.used_bytes

    def empty():
        disk.capacity_bytes = float("inf")

    # "wait": at each step, so that the disk is met while it is full
    trainer, callback, _ = fit(monkeypatch, disk, policy, {14: fill, 18: empty}, when_busy="wait", max_failures=10)
    assert trainer.global_step == STEPS
    assert disk.full, "nothing was tried meanwhile"
    assert callback.last.failed_checkpoints >= 1
    assert verified(disk.root)[-1] == STEPS
    directories = {path.name for path in Path(disk.root).glob("step_*")}
    assert len(directories) <= 6, "files of failed steps are left"


@every_policy
def test_a_disk_that_hangs_for_a_while(policy, place, monkeypatch, caplog):  # noqa: F811
    disk = HangingDisk(place / "store")
    events = {8: disk.answers.clear, 30: disk.answers.set}
    trainer, callback, _ = fit(monkeypatch, disk, policy, events, steps=60)
    assert trainer.global_step == 60
    assert callback.last.skips > 0
    assert callback.last.failed_checkpoints == 0
    assert callback.last.committed_step > 30, "checkpoints are made again"
    assert verified(disk.root)[-1] == 60
    if isinstance(policy, MoEvement):
        assert "is given up" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("policy", [MoEvement(window=12), Dense()], ids=["moevement", "dense"])
def test_a_disk_that_sets_the_pace_of_training_is_named_once(policy, place, monkeypatch, caplog):  # noqa: F811
    """Slots of a window wait for it; a dense checkpoint is skipped instead."""
    trainer, callback, _ = fit(monkeypatch, SlowDisk(place / "store", secs=0.05), policy, steps=200)
    assert trainer.global_step == 200
    assert caplog.text.count("training waits for storage") == isinstance(policy, MoEvement)
    assert bool(callback.last.waits) or not isinstance(policy, MoEvement)


@every_policy
def test_a_disk_that_never_answers_again(policy, place, monkeypatch):  # noqa: F811
    """Training reaches its last step, waits for as long as it may, and says what it could not save."""
    disk, last = HangingDisk(place / "store"), []
    events = {12: disk.answers.clear, STEPS: lambda: last.append(time.monotonic())}
    with pytest.raises(SaveFailedError, match=r"did not finish within 1 s.*newest checkpoint") as caught:
        fit(monkeypatch, disk, policy, events, timeout_secs=1)
    assert caught.value.step == STEPS
    assert time.monotonic() - last[0] < BAD_PATIENCE_SECS / 2, "one wait of timeout_secs, and a little"
    disk.answers.set()
    # The writer of the first life lets go of the store when it is through.
    assert retry_until(lambda: "moe_ckpt-persist" not in {thread.name for thread in threading.enumerate()}, 60.0)
    trainer, callback, _ = fit(monkeypatch, disk, policy, steps=STEPS + 5)
    assert callback.restored_step is not None
    assert trainer.global_step == STEPS + 5
    assert verified(disk.root)[-1] == STEPS + 5


@every_policy
def test_a_store_that_is_deleted_during_training(policy, place, monkeypatch, caplog):  # noqa: F811
    """And a fault a few steps later: what is in the directory by then opens, and training goes on from it."""
    disk = LocalStorage(place / "store")

    class Fault(RuntimeError):
        pass

    def fault():
        raise Fault

    events = {15: lambda: delete_tree(disk.root), 24: fault}
    with pytest.raises(Fault):
        fit(monkeypatch, disk, policy, events, when_busy="wait")
    host_tier.release_host_memory()
    found = verified(disk.root)
    assert found, "nothing to come back to"
    assert found[0] >= 15
    assert "gone" in caplog.text
    trainer, callback, _ = fit(monkeypatch, disk, policy)
    assert callback.restored_step >= 18
    assert trainer.global_step == STEPS
    assert verified(disk.root)[-1] == STEPS
