"""When the newest step may be sealed, and that nothing changes weights while it is."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from moe_ckpt.driver.states import Moment
from moe_ckpt.errors import PeerLostError
from moe_ckpt.survivors.newest_step import Patience, Survived
from moe_ckpt.survivors.stopping import Surviving


class Recorder:
    """Stands for ``survivors.newest_step.Survivor``: says when it seals, and seals until it is told to be done."""

    def __init__(self) -> None:
        self.began, self.done = threading.Event(), threading.Event()
        self.sealed = self.noted = 0
        self.is_unchanged: bool | Exception = False

    def note_weights(self) -> None:
        self.noted += 1

    def has_noted_weights(self) -> bool:
        if isinstance(self.is_unchanged, Exception):
            raise self.is_unchanged
        return self.is_unchanged

    def seal(self, secs: float) -> Survived:
        self.began.set()
        assert self.done.wait(secs)
        self.sealed += 1
        return Survived(7, nbytes=1)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def surviving(recorder):
    found = Surviving(recorder, 0, SimpleNamespace(unit="step"), secs=20)
    with found.booking():
        assert not found.is_whole
        assert found.ends_soon
    return found


def test_a_peer_that_is_missed_at_the_join_is_missed_between_two_steps(surviving, recorder):
    recorder.done.set()

    def join() -> None:
        with surviving.joining(update=True):
            assert surviving.moment is Moment.REDUCING
            raise PeerLostError(1, "the agreement", 5, "nobody came")

    with pytest.raises(PeerLostError):
        join()
    surviving.survive("PeerLostError")
    assert recorder.sealed == 1


@pytest.mark.parametrize("update", [True, False])
def test_after_the_join_weights_may_be_others(surviving, recorder, update):
    with surviving.joining(update=update):
        assert surviving.is_whole
    assert surviving.ends_soon == update
    surviving.survive("an exception")
    assert not recorder.began.is_set()


@pytest.mark.parametrize("is_unchanged", [True, False, RuntimeError("a tensor is gone")])
def test_weights_that_others_may_change_are_sealed_if_nobody_has(surviving, recorder, is_unchanged):
    """A validation, and the hooks of an epoch's end: each joins, and the first one counts."""
    recorder.done.set()
    for _ in range(2):
        with surviving.joining(update=False):
            pass
    assert (surviving.moment, recorder.noted) == (Moment.EXPOSED, 1)
    recorder.is_unchanged = is_unchanged
    surviving.survive("RuntimeError")
    assert recorder.sealed == int(is_unchanged is True)


def test_in_the_middle_of_an_update_weights_are_not_noted(surviving, recorder):
    with surviving.joining(update=True):
        pass
    with surviving.joining(update=False):
        pass
    assert (surviving.moment, recorder.noted) == (Moment.UNKNOWN, 0)


def test_a_second_optimizers_join_does_not_make_a_half_written_step_whole(surviving):
    with surviving.joining(update=True):
        pass
    with surviving.joining(update=True):
        assert surviving.moment is Moment.WRITING


@pytest.mark.parametrize("counts", [True, False, None])
def test_an_update_that_is_made_is_sealed_once_somebody_can_count_its_step(recorder, counts):
    def count() -> bool:
        if counts is None:
            raise ValueError("the loop is another one")
        return counts

    recorder.done.set()
    surviving = Surviving(recorder, 0, SimpleNamespace(unit="step", step=6, count_update=count), secs=20)
    surviving.enter(Moment.WRITTEN)
    assert surviving.ends_soon
    assert not surviving.is_whole
    surviving.survive("RuntimeError")
    assert recorder.sealed == int(counts is True)


def test_training_waits_while_another_thread_seals(surviving, recorder):
    sealing = threading.Thread(target=surviving.survive, args=("SIGTERM",))
    sealing.start()
    assert recorder.began.wait(20)
    came = threading.Event()

    def goes_on() -> None:
        surviving.enter(Moment.WRITING)
        came.set()

    training = threading.Thread(target=goes_on)
    training.start()
    assert not came.wait(0.2)
    recorder.done.set()
    sealing.join(20)
    training.join(20)
    assert came.is_set()
    assert recorder.sealed == 1


def test_an_exception_that_nobody_catches(surviving, recorder, monkeypatch):
    """Launchers see the process end as without us; whoever has replaced the hook meanwhile still calls ours."""
    said: list[str] = []
    before = lambda kind, error, trace: said.append(str(error))  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", before)
    recorder.done.set()
    surviving.termination.watch()
    wrapped = sys.excepthook
    sys.excepthook(RuntimeError, RuntimeError("a peer is gone"), None)
    assert (said, recorder.sealed) == (["a peer is gone"], 1)
    surviving.termination.unwatch()
    assert sys.excepthook is before
    wrapped(RuntimeError, RuntimeError("another"), None)
    assert said == ["a peer is gone", "another"]
    assert recorder.sealed == 1


class Sealing:
    """Seals a snapshot so long after an update would begin, and counts what updates waited."""

    def __init__(self) -> None:
        self.late_secs = 0.0
        self.waited: list[float] = []

    @property
    def in_flight(self) -> int:
        return int(self.late_secs > 0)

    def wait(self, left: int, timeout_secs: float) -> bool:
        assert left == 0
        self.waited.append(timeout_secs)
        return self.late_secs <= timeout_secs


def test_updates_wait_for_sealing_only_where_that_is_of_use():
    sealing, patience, now = Sealing(), Patience(0.0), 0.0
    waits = []
    for late in (0.0, 0.01, 0.04, 5.0, 5.0, 0.01, 0.0, 0.01):
        sealing.late_secs, sealing.waited = late, []
        now += 1.0
        patience.update_begins(now, sealing)
        waits.append(sealing.waited)
    once = [0.05]
    assert waits == [[], once, once, once, [], [], [], once], "after one in vain none, until one was in time by itself"


class Terminated(Exception):
    """What a launcher's handler of SIGTERM raises."""


def test_what_is_kept_is_said_although_the_launcher_stops_the_rank_meanwhile(surviving, recorder, caplog):
    def terminate(number: int, _: object) -> None:
        raise Terminated(number)

    def seal(secs: float) -> Survived:
        signal.raise_signal(signal.SIGTERM)
        return Survived(7, nbytes=1)

    recorder.seal = seal
    former = signal.signal(signal.SIGTERM, terminate)
    try:
        with caplog.at_level(logging.INFO, "moe_ckpt"), pytest.raises(Terminated):
            surviving.survive("RuntimeError")
    finally:
        signal.signal(signal.SIGTERM, former)
    assert "rank 0 keeps its state of step 7 in memory" in caplog.text


def test_a_second_signal_while_weights_are_compared_waits_for_the_seal(surviving, recorder):
    """SLURM and torchrun each send one."""

    def compared() -> bool:
        signal.raise_signal(signal.SIGTERM)
        return True

    def terminate(number: int, _: object) -> None:
        raise Terminated(number)

    recorder.has_noted_weights = compared
    recorder.done.set()
    with surviving.joining(update=False):
        pass
    former = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(Terminated):
            surviving.survive("SIGTERM")
    finally:
        signal.signal(signal.SIGTERM, former)
    assert recorder.sealed == 1


def test_a_signal_while_the_session_saves_is_acted_on_when_it_has(surviving, recorder, monkeypatch):
    ended: list[Moment] = []
    monkeypatch.setattr(surviving.termination, "settle", lambda: ended.append(surviving.moment))
    with surviving.booking(ended=False):
        assert surviving.ends_soon
        surviving.survive("SIGTERM")
        assert not recorder.began.is_set(), "its locks may be the session's"
        assert not ended
    assert ended == [Moment.RESTING]
