"""However training ends, nothing stays behind: no thread, no temporary file, no descriptor, no lock."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from moe_ckpt.errors import StoreInUseError
from tests.integration.crash_run import Run, StopHere, build, loaders
from tests.integration.lives import (
    assert_store_sound,
    committed,
    events,
    place,  # noqa: F401 - a fixture
    placed,
    start,
    temporaries,
)
from tests.support.waiting import retry_until

RUN = Run(None, samples=24, epochs=1)


def _fit(run: Run, at: int | None = None, action=None):
    """One life; ``action`` happens in the forward pass of batch ``at``. Returns what was raised."""
    trainer, module, _ = build(run)
    original = module.training_step

    def training_step(batch, batch_idx):
        loss = original(batch, batch_idx)
        if at is not None and trainer.fit_loop.epoch_loop.total_batch_idx == at:
            action()
        return loss

    module.training_step = training_step
    try:
        trainer.fit(module, *loaders(run))
    except BaseException as error:  # what pytest would take for its own (KeyboardInterrupt, SystemExit) included
        return error
    return None


def _assert_nothing_left(run: Run) -> None:
    gc.collect()
    assert retry_until(lambda: not _threads(), 60.0), _threads()
    assert temporaries(run.store) == []
    assert _descriptors(run.store) == []
    assert_store_sound(run, ended=True)
    # The lock is free: the next run may begin, and goes on.
    trainer, module, recorder = build(replace(run, epochs=2))
    trainer.fit(module, *loaders(run))
    assert recorder.lines[0]["step"]


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moe_ckpt")]


def _descriptors(root: str) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return [path for path in found if path.startswith(root)]


def _raise(error: BaseException):
    def action():
        raise error

    return action


def test_after_a_good_end(place):  # noqa: F811
    run = placed(RUN, place)
    assert _fit(run) is None
    _assert_nothing_left(run)


@pytest.mark.parametrize("error", [StopHere("in the forward pass"), MemoryError(), KeyboardInterrupt()])
def test_after_an_exception(error, place):  # noqa: F811
    """The user's exception comes through; what had been begun is finished."""
    run = placed(RUN, place)
    raised = _fit(run, 4, _raise(error))
    if isinstance(error, KeyboardInterrupt):
        assert isinstance(raised, (KeyboardInterrupt, SystemExit))
    else:
        assert raised is error
    assert "step_00000004" in committed(run.store)
    _assert_nothing_left(run)


def test_after_sigterm(place):  # noqa: F811
    run = placed(RUN, place)
    before = signal.getsignal(signal.SIGTERM)
    raised = _fit(run, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert raised is not None
    assert "SIGTERM" in type(raised).__name__.upper()
    assert signal.getsignal(signal.SIGTERM) is before
    assert committed(run.store)
    _assert_nothing_left(run)


def test_after_an_exception_before_the_first_step(place):  # noqa: F811
    run = placed(RUN, place)
    assert isinstance(_fit(run, 0, _raise(StopHere("at once"))), StopHere)
    assert committed(run.store) == []
    assert retry_until(lambda: not _threads(), 60.0)
    assert _descriptors(run.store) == []
    assert _fit(run) is None
    _assert_nothing_left(run)


def test_descriptors_stay_flat_over_many_runs(place):  # noqa: F811
    counts = []
    for number in range(4):
        assert _fit(placed(replace(RUN, samples=8), place, f"run_{number}")) is None
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0]


def test_a_second_run_is_refused_while_the_first_goes_on(place):  # noqa: F811
    """From another process: the first run is untouched, the second learns who holds the store."""
    run = placed(replace(RUN, epochs=10_000), place)
    first = start(run)
    try:
        assert retry_until(lambda: len(events(run)) > 4, 60.0)
        raised = _fit(replace(run, log=None))
        assert isinstance(raised, StoreInUseError)
        assert run.store in str(raised)
        assert f"process {first.pid}" in str(raised)
        assert _threads() == []
        seen = len(events(run))
        assert retry_until(lambda: len(events(run)) > seen + 3, 60.0), "the first run goes on"
    finally:
        first.kill()
        first.join()
        first.close()
    trainer, module, _ = build(replace(run, log=None, trainer={"max_steps": 1}))
    trainer.fit(module, *loaders(run))
    assert trainer.callbacks[-1].restored_step, "killed, it holds nothing any more"


def test_a_second_run_of_this_process_is_refused(place):  # noqa: F811
    run = placed(RUN, place)
    inner = []
    assert _fit(run, 3, lambda: inner.append(_fit(run))) is None
    assert isinstance(inner[0], StoreInUseError)
    assert f"in this same process {os.getpid()}" in str(inner[0])
    _assert_nothing_left(run)


def test_a_disk_that_hangs_keeps_no_exception_waiting(place, monkeypatch, caplog):  # noqa: F811
    """A user's exception waits for what is being written, but not for ever."""
    from moe_ckpt.driver import run as driver_run
    from moe_ckpt.storage import LocalStorage

    caplog.set_level(logging.WARNING, "moe_ckpt")
    release = threading.Event()

    class Hanging(LocalStorage):
        def write(self, path, chunks):
            if path.startswith("step_00000003"):
                release.wait(120)
            return super().write(path, chunks)

    monkeypatch.setattr(driver_run, "open_storage", Hanging)
    run = placed(replace(RUN, callback={"timeout_secs": 1.0}), place)
    began = time.monotonic()
    try:
        assert isinstance(_fit(run, 4, _raise(StopHere("enough"))), StopHere)
        assert time.monotonic() - began < 60
        assert "still being written; training does not wait for it" in caplog.text
    finally:
        release.set()
    assert retry_until(lambda: not _threads(), 60.0)
