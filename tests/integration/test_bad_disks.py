"""Disks that are full for a moment, hang, or are emptied, under every policy and real Lightning: training goes on.

At its end, or when it is started again, every checkpoint that is there verifies.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.driver import run as driver_run
from moe_ckpt.errors import SaveFailedError
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import CheckFreq, Dense, MoC, MoEtion
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    assert_store_sound,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    shards_read,
    started_ranks,
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import lose, under_way
from tests.integration.test_memory_rarely_stored import restored, stored
from tests.support.bad_disks import BAD, HangingDisk, SlowDisk, SmallDisk
from tests.support.bad_disks import PATIENCE_SECS as BAD_PATIENCE_SECS
from tests.support.constants import with_constants
from tests.support.deleting import delete_tree
from tests.support.tiny_moe import TinyMoE, loader, state_of
from tests.support.waiting import retry_until

POLICIES = {
    "dense": Dense(),
    "checkfreq": with_constants(CheckFreq, profile_steps=3, max_interval=3)(),
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
    host_memory.release_host_memory()
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
@pytest.mark.quick("moc")
def test_a_disk_that_is_full_for_a_moment(policy, place, monkeypatch):  # noqa: F811
    disk = SmallDisk(place / "store", float("inf"))

    def fill():
        disk.capacity_bytes = disk.used_bytes

    def empty():
        disk.capacity_bytes = float("inf")

    # "wait": at each step, so that the disk is met while it is full
    trainer, callback, _ = fit(monkeypatch, disk, policy, {14: fill, 18: empty}, when_busy="wait")
    assert trainer.global_step == STEPS
    assert disk.full, "nothing was tried meanwhile"
    assert callback.last.failed_checkpoints >= 1
    assert verified(disk.root)[-1] == STEPS
    directories = {path.name for path in Path(disk.root).glob("step_*")}
    assert len(directories) <= 6, "files of failed steps are left"


@every_policy
@pytest.mark.quick("moevement")
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
@pytest.mark.quick("moc")
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
@pytest.mark.quick("moevement")
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
    host_memory.release_host_memory()
    found = verified(disk.root)
    assert found, "nothing to come back to"
    assert found[0] >= 15
    assert "gone" in caplog.text
    trainer, callback, _ = fit(monkeypatch, disk, policy)
    assert callback.restored_step >= 18
    assert trainer.global_step == STEPS
    assert verified(disk.root)[-1] == STEPS


ALONE = Run(None, policy=("dense", 1), samples=1200, epochs=1, logged=True, watched=True)
ALONE = replace(ALONE, callback={"host_memory_bytes": 750_000})
"""Room for eight dense checkpoints: those that wait for a bad disk would take all of it."""
IN_MEMORY = {
    "dense": ALONE,
    "moc": replace(ALONE, policy=("moc", 1), options={"snapshot_k": 4}),
    "moevement": replace(ALONE, policy=("moevement", 3)),
    "fsdp2": replace(ALONE, ranks=2, replicas=1, sharded=True, samples=2400),
}
BEHIND = {"dense": 2, "moc": 2, "moevement": 7, "fsdp2": 3}
"""Steps from the newest that memory is known to have to the newest of all, but for a moment: a window and a half with
MoEvement."""
BAD_FROM, BAD_STEPS = 60, 120


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "dense")) for n in IN_MEMORY])
def test_a_disk_that_stays_bad_costs_memory_nothing(name, how, place):  # noqa: F811
    """Training goes on at its speed, with each checkpoint in memory; after kill -9 all of it comes from there.

    Under FSDP2 from a peer: a node is lost as well.
    """
    run = in_memory(IN_MEMORY[name], place)
    with started_ranks(replace(run, bad_disk=(how, BAD_FROM))) as processes:

        def reached() -> int:
            return max((line["step"] for line in events(run) if line["event"] == "batch"), default=0)

        wanted = BAD_FROM + BAD_STEPS
        came = retry_until(lambda: reached() >= wanted or not all(p.is_alive() for p in processes), 180.0)
        assert came, f"training stands still at step {reached()}\n{output(run)}"
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            assert process.exitcode == KILLED, output(run)
    lines = [line for line in events(run) if line["event"] == "metrics"]
    secs = {b["step"]: b["at"] - a["at"] for a, b in pairwise(lines)}
    well = [took for step, took in secs.items() if 20 <= step < BAD_FROM]
    bad = [took for step, took in secs.items() if step >= BAD_FROM + 5]
    assert len(bad) > BAD_STEPS - 10
    assert sorted(bad)[len(bad) // 10] < 3 * sorted(well)[len(well) // 10], "at its speed"
    assert max(bad) < 4.0, "no step waits for the disk"
    kept = {line["step"]: line["memory_step"] for line in lines if line["step"] >= BAD_FROM}
    late = {step: has for step, has in kept.items() if step - has > BEHIND[name]}
    assert len(late) < len(kept) / 10, late
    assert max(step - has for step, has in kept.items()) <= BEHIND[name] + 5, late
    assert stored(run) < BAD_FROM
    assert how == "hangs" or lines[-1]["failed_checkpoints"] > 5, "it was tried again and again"
    assert how == "full" or "stays in memory only" in output(run)
    newest, unwritten = lines[-1]["memory_step"], under_way(run)
    if run.replicas:
        lose(run, 1)
    assert live_ranks(run) == [0] * run.ranks, output(run)
    assert newest <= restored(run) <= lines[-1]["step"] + 1
    assert shards_read(run) == [[]] * run.ranks, "all of it comes from memory"
    assert_same_run(run, unwritten)
    assert_store_sound(run, ended=True)
    assert stored(run) == run.samples // 4 // run.ranks, "storage has its last step, now that it answers"
    assert left(run) == []
