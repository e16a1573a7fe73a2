"""Storage's dense checkpoints made in the background from the log that memory keeps, while training continues."""

from __future__ import annotations

import errno
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.cli.main import main
from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.driver import run as driver_run
from moe_ckpt.gradients import own_log
from moe_ckpt.gradients.own_log import OwnLog
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.recovery.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import LocalStorage, open_storage
from tests.integration.crash_run import Run, build, loaders
from tests.integration.lives import (
    KILLED,
    PRELOAD,
    assert_same_run,
    events,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.integration.test_densify import keep_all, require_same_step, truth
from tests.integration.test_gradient_log import VARIATIONS, logged
from tests.support.processes import run_ranks

KEPT = {"when_busy": "wait"}
FROM_LOG = Run(None, policy=("gradient-log", 3), options={"dense_from": "log"}, to_storage=4, callback=KEPT)
EVERY_FOURTH = [4, 8, 12, 16, 20]


def train(run: Run) -> StoreReader:
    trainer, module, _ = build(run, 0, retention=RetentionPolicy(keep_last=1000))
    trainer.fit(module, *loaders(run))
    return StoreReader(open_storage(run.store))


def stored(reader: StoreReader) -> dict[int, str]:
    """Step -> directory, the oldest first."""
    return {reader.manifest(name).step: name for name in reversed(reader.directories())}


def from_log(reader: StoreReader) -> list[int]:
    """Steps that were made from a log: what training saves under the policy has its updates in it."""
    found = {step: reader.manifest(name) for step, name in stored(reader).items()}
    return [step for step, manifest in found.items() if "gradient_log" not in reader.state(manifest, 0)]


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory) -> StoreReader:
    """A checkpoint of each step of the same run, copied by training."""
    run = placed(replace(FROM_LOG, policy=("dense", 1), options={}), tmp_path_factory.mktemp("dense"))
    return train(run)


def require_equal(ours: StoreReader, truth: StoreReader) -> None:
    for step in from_log(ours):
        require_same_step(ours, truth, step)


def test_what_storage_gets_is_what_the_run_had(place, dense_run):  # noqa: F811
    """Nothing is copied for it, the log goes on, and what the process hooks to optimizers hears of no replay."""
    stepped = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    try:
        ours = train(logged(FROM_LOG, place))
    finally:
        handle.remove()
    assert from_log(ours) == EVERY_FOURTH
    assert list(stored(ours)) == [1, *EVERY_FOURTH]
    require_equal(ours, dense_run)
    assert len(stepped) == 20


def test_a_learning_rate_that_is_a_tensor_is_that_of_each_update_for_all_tensors(place, monkeypatch):  # noqa: F811
    """As of a model of more than 16 MiB, whose tensors are not replayed all at once."""
    monkeypatch.setattr(own_log, "_AT_ONCE", 0)
    run = logged(replace(FROM_LOG, kind="tensor-rate", epochs=1), place)
    ours = train(run)
    assert from_log(ours) == [4, 8]
    require_equal(ours, truth(replace(run, options={}), place))


def test_it_would_be_seen_if_an_update_were_left_out(place, dense_run, monkeypatch):  # noqa: F811
    def lazy(self, update, gradients):
        return sum(block.values.numel() for block in gradients)

    monkeypatch.setattr(OptimizerReplay, "step", lazy)
    ours = train(logged(FROM_LOG, place))
    assert from_log(ours) == [], "step counts tell"


class Spoiled(OwnLog):
    """Of the first log that is opened, a slot is damaged."""

    opened = 0

    def __init__(self, slots) -> None:
        if not Spoiled.opened:
            slots[-1].memory[::97] ^= 1
        Spoiled.opened += 1
        super().__init__(slots)


def test_after_a_damaged_slot_the_next_one_is_copied_from_training(place, dense_run, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(Spoiled, "opened", 0)
    monkeypatch.setattr(driver_run, "OwnLog", Spoiled)
    ours = train(logged(FROM_LOG, place))
    steps = list(stored(ours))
    assert 4 not in steps
    assert steps[1] in (5, 6, 7), "as soon as the ranks know of it"
    assert from_log(ours) == steps[2:], "and from the log again"
    require_equal(ours, dense_run)
    assert "the checkpoint of step 4 was not committed; training continues" in caplog.text
    assert "checksum mismatch" in caplog.text
    assert "The next one is copied in full from training" in caplog.text


@pytest.mark.slow
def test_a_full_disk_fails_one_checkpoint_and_leaves_nothing(place, dense_run, monkeypatch, caplog):  # noqa: F811
    write, calls = LocalStorage.write_placed, []

    def full(self, path, nbytes, pieces):
        def some():
            for number, piece in enumerate(pieces):
                if len(calls) == 1 and number == 3:
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield piece

        calls.append(path)
        write(self, path, nbytes, some())

    monkeypatch.setattr(LocalStorage, "write_placed", full)
    run = logged(FROM_LOG, place)
    ours = train(run)
    assert 4 not in stored(ours)
    assert not Path(run.store, "step_00000004").exists()
    assert "No space left on device" in caplog.text
    require_equal(ours, dense_run)
    assert from_log(ours)[-1] == 20


@pytest.mark.slow
def test_what_takes_long_is_not_waited_for(place, dense_run, monkeypatch):  # noqa: F811
    """Training goes on, and so does the log; the checkpoint that would have been due meanwhile is left out."""
    others = threading.Event()

    class Slow(OwnLog):
        def __init__(self, slots) -> None:
            assert slots[-1].header.step != 4 or others.wait(60.0)
            super().__init__(slots)

    class Tells(pl.Callback):
        def on_train_batch_start(self, trainer, *_) -> None:
            if trainer.global_step == 10:
                others.set()

    monkeypatch.setattr(driver_run, "OwnLog", Slow)
    run = logged(replace(FROM_LOG, callback={}), place)
    trainer, module, _ = build(run, 0, retention=RetentionPolicy(keep_last=1000))
    trainer.callbacks.insert(0, Tells())
    trainer.fit(module, *loaders(run))
    ours = StoreReader(open_storage(run.store))
    [callback] = [each for each in trainer.callbacks if isinstance(each, MoECheckpoint)]
    made = from_log(ours)
    assert made[0] == 4
    assert 8 not in made
    assert made[1] > 10
    assert callback.last.skips >= 1
    require_equal(ours, dense_run)


def test_the_last_state_is_saved_though_its_replay_fails(place, dense_run, monkeypatch):  # noqa: F811
    class Fails(OwnLog):
        def __init__(self, slots) -> None:
            if slots[-1].header.step == 20:
                raise RuntimeError("no")
            super().__init__(slots)

    monkeypatch.setattr(driver_run, "OwnLog", Fails)
    ours = train(logged(FROM_LOG, place))
    assert list(stored(ours))[-1] == 20
    assert from_log(ours) == [4, 8, 12, 16]
    step = ours.manifest(stored(ours)[20])
    check_checkpoint(ours, step)
    theirs = dense_run.manifest(stored(dense_run)[20])
    for key in ours.index(step).tensors:
        assert torch.equal(ours.tensor(step, key), dense_run.tensor(theirs, key))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 20, 60])
def test_killed_in_the_middle_of_it(n, place):  # noqa: F811
    """The run goes on from memory, and where that is lost from the newest whole checkpoint on storage."""
    run = logged(FROM_LOG, place)
    assert live(replace(run, crash=("remade", n))) == KILLED, output(run)
    reader = StoreReader(open_storage(run.store))
    there = stored(reader)
    for name in there.values():
        check_checkpoint(reader, reader.manifest(name))
    if n == 60:
        shutil.rmtree(run.memory)
        Path(run.memory).mkdir()
    assert live(run) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] >= max(there) + (n != 60)
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [400_000, 250_000])
@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_with_little_room_training_goes_on(nbytes, when_busy, place):  # noqa: F811
    """What is read stays in memory, which then has no room for some steps; whatever is on storage is right."""
    run = logged(replace(FROM_LOG, callback={"when_busy": when_busy, "host_memory_bytes": nbytes}), place)
    assert live(replace(run, crash=("compute", 11))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    reader = StoreReader(open_storage(run.store))
    for name in reader.directories():
        check_checkpoint(reader, reader.manifest(name))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_times(seed, place):  # noqa: F811
    rng = random.Random(seed)
    options = {"policy": ("gradient-log", rng.randint(2, 5)), "to_storage": rng.randint(1, 4), "epochs": 3}
    run = logged(replace(FROM_LOG, **options, callback={"when_busy": rng.choice(["wait", "skip"])}), place)
    for kill_after_secs in (*(rng.uniform(0.02, 0.4) for _ in range(8)), None):
        assert main(["memory", "retry", "--directory", run.memory]) == 0
        if live(run, kill_after_secs) != KILLED:
            break
    assert_same_run(run)
    reader = StoreReader(open_storage(run.store))
    for name in reader.directories():
        check_checkpoint(reader, reader.manifest(name))


THESE = (
    *("clipped", "bf16", "bf16-mixed", "accumulated", "fused", "forloop", "sgd", "adafactor", "experts-without-tokens"),
    *("fp16-overflowing", "manual", "two-optimizers", "averaged", "biased-routers", "rounded", "odd"),
    "odd-nadam",
    "the-policy-biased-experts",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", THESE)
def test_however_a_run_is_set_up(name, place):  # noqa: F811
    words = VARIATIONS[name]
    options = {**words.options, "dense_from": "log"}
    run = logged(replace(words, policy=("gradient-log", 3), to_storage=3, options=options), place)
    ours = train(run)
    assert len(from_log(ours)) >= 3
    if name == "rounded":  # the same policy, for it changes training
        dense = {**words.options, "dense_from": "training"}
        train(apart := replace(placed(run, place, "truth"), options=dense, to_storage=1))
        require_equal(ours, StoreReader(open_storage(apart.store)))
    else:
        require_equal(ours, truth(replace(run, options={}), place))


@pytest.mark.slow
def test_two_ranks_of_fsdp2(place):  # noqa: F811
    run = logged(replace(FROM_LOG, ranks=2, sharded=True, to_storage=3), place)
    run_ranks(keep_all, run.ranks, run.to_json(), timeout=300.0, preload=PRELOAD)
    ours = StoreReader(open_storage(run.store))
    assert from_log(ours) == [3, 6, 9]
    require_equal(ours, truth(replace(run, options={}), place))


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_in_the_middle_of_it(place):  # noqa: F811
    run = logged(replace(FROM_LOG, ranks=2, sharded=True), place)
    assert KILLED in live_ranks(replace(run, crash=("remade", 30))), output(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert_same_run(run)


@pytest.mark.slow
def test_ranks_that_share_an_update_are_refused_by_name(place):  # noqa: F811
    run = logged(replace(FROM_LOG, ranks=2), place)
    assert live_ranks(run) == [1, 1]
    said = output(run)
    assert "ConfigError: dense_from='log': " in said
    assert "is held by 2 ranks, of which each logs a part of its gradients (DDP" in said
    assert "dense_from='training' copies such a step in full, in any layout" in said
