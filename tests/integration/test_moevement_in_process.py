"""Sparse windows without a new process: an exception and a fresh Trainer, or the same Trainer that fits on."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback

from tests.integration.crash_run import Run, StopHere, build, final_state, loaders
from tests.integration.lives import (
    assert_same_losses,
    assert_store_sound,
    differences,
    manifests,
    place,  # noqa: F401 - a fixture
)
from tests.integration.test_crash_variations import life
from tests.integration.test_memory_kills import in_memory
from tests.integration.test_memory_rarely_stored import RARELY
from tests.support.mapped import deleted_slots
from tests.support.tiny_moe import Tokens

W = 3
RUN = Run(None, policy=("moevement", W), epochs=2, callback={"when_busy": "wait"}, trainer={"gradient_clip_val": 0.1})


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_stopped_by_exceptions_also_during_the_replay(place):  # noqa: F811
    truth = life(replace(RUN, store=str(place / "truth")))
    run = replace(RUN, store=str(place / "store"))
    lines = life(run, stop_at=11).lines
    newest = manifests(run.store)[0]
    assert len(newest.slots) == W
    lines += life(run, stop_at=newest.slots[1].step).lines  # two batches into the replay
    assert manifests(run.store)[0].step == newest.step
    ended = life(run)
    assert ended.restored == newest.step
    found = list(differences(ended.state, truth.state))
    assert not found, found[:10]
    assert_same_losses(lines + ended.lines, truth.lines)
    assert_store_sound(run, ended=True)


def test_the_same_trainer_fits_on(place):  # noqa: F811
    """Each fit makes new optimizers, as Lightning has it; otherwise nothing is other than without checkpoints."""
    states = []
    for store in (str(place / "store"), None):
        run = replace(RUN, store=store)
        trainer, module, _ = build(run)
        train, _ = loaders(run)
        for limit in (1, 2):
            trainer.fit_loop.max_epochs = limit
            trainer.fit(module, train)
        states.append(final_state(trainer, module))
    found = list(differences(*states))
    assert not found, found[:10]
    run = replace(RUN, store=str(place / "store"))
    assert_store_sound(run, ended=True)
    assert [(manifest.step, len(manifest.slots)) for manifest in manifests(run.store)] == [(20, 1), (19, W)]


def test_what_a_replay_has_read_is_let_go_of(place):  # noqa: F811
    """Slots of the earlier life are deleted then, and take room for as long as somebody knows them."""
    run = in_memory(replace(RUN, to_storage=RARELY, epochs=4, memory_options={"survivor_secs": 0}), place)
    with suppress(StopHere):
        life(run, stop_at=11)
    trainer, module, _ = build(run)
    held = []

    class Looking(Callback):
        def on_train_batch_end(self, trainer, *_):
            gc.collect()  # of the life before, whose own mapping is of no interest
            held.append(deleted_slots(run.memory))

    trainer.callbacks.insert(0, Looking())
    trainer.fit(module, *loaders(run))
    assert len(held) > 20
    assert not held[-2], "long after the replay"


@pytest.mark.parametrize("in_memory_too", [False, True])
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.quick("True-False", "False-True")
def test_steps_computed_again_on_other_data_are_told(repeats, in_memory_too, place, caplog, monkeypatch):  # noqa: F811
    """The position in the data is the same, and nobody records what lies there."""
    run = replace(RUN, store=str(place / "store"))
    if in_memory_too:
        run = in_memory(replace(RUN, memory_options={"survivor_secs": 0}, to_storage=RARELY), place)
    life(run, stop_at=11)
    if not repeats:
        kept = Tokens.__getitem__
        monkeypatch.setattr(Tokens, "__getitem__", lambda data, i: (-kept(data, i)[0], kept(data, i)[1]))
    caplog.clear()
    life(run)
    assert "are computed again" in caplog.text
    told = "computed again, gave experts other numbers of tokens than the first time" in caplog.text
    assert told is not repeats
