"""SIGTERM where somebody else handles it, as Lightning does, under ``torchrun``: a rank that stands still is sealed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_ckpt import Memory
from moe_ckpt.driver.states import Moment
from moe_ckpt.memory.options import DEFAULT_ROOT
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
from moe_ckpt.survivors import termination
from moe_ckpt.survivors.newest_step import Survivor
from moe_ckpt.survivors.stopping import Surviving
from moe_ckpt.survivors.termination import EXIT_CODE
from tests.support import warm
from tests.support.standstill import never_returns
from tests.support.waiting import retry_until
from tests.unit.engine_parts import Life

GRACE_SECS, LAST_SECS, SEALING_SECS = 4.0, 1.0, 1.5
"""Of torchrun here, of it what is left when a step must be sealed, and ``survivor_secs``."""
SIGNALLED = "the signal comes"
ALONE = "stands still without torchrun"
LATE = "sets its handler later, without torchrun"
SEALED = "keeps its state of step 3 in memory"
ENDED = 9


class Stopped(Exception):
    """What a handler raises."""


def handler(*_: object) -> None:
    print("handled", flush=True)


def raises(*_: object) -> None:
    raise Stopped


def busy(secs: float) -> None:
    until = time.monotonic() + secs
    while time.monotonic() < until:
        sum(range(100))


def terminate() -> None:
    print(SIGNALLED, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def train(place: str, how: str) -> None:
    """A training process, at step 3, that somebody terminates."""
    termination.TORCHRUN_GRACE_SECS, termination.LAST_SECS = GRACE_SECS, LAST_SECS
    if how != LATE:
        signal.signal(signal.SIGTERM, raises if how == "raises" else handler)
    memory = Memory(directory=Path(place, "memory"), storage_every=100)
    with Life(LocalStorage(Path(place, "store")), policy=Dense(every_n_steps=100), memory=memory) as life:
        surviving = Surviving(life.session.follow(Survivor), 0, SimpleNamespace(unit="step"), SEALING_SECS)
        surviving.termination.watch()
        if how == LATE:
            signal.signal(signal.SIGTERM, handler)
        life.go(3, settle=True)
        surviving.enter(Moment.RESTING)
        threading.Timer(0.5, terminate).start()
        if how == "raises":
            try:
                busy(GRACE_SECS)
            except Stopped:
                surviving.survive("Stopped")
            time.sleep(GRACE_SECS)  # whatever else there is to do at the end
        elif how == "over":
            busy(1.0)
            surviving.termination.unwatch()
            time.sleep(GRACE_SECS)
        elif how in ("busy", LATE):
            busy(2 * GRACE_SECS)
        else:
            never_returns()
        os._exit(ENDED)


class Job:
    """A training process."""

    def __init__(self, place: Path, how: str, run_id: str | None) -> None:
        code = "import sys; from tests.unit.test_terminated_beside import train; train(*sys.argv[1:])"
        log = "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stderr); "
        environment = os.environ | {"TORCHELASTIC_RUN_ID": run_id or ""}
        if run_id is None:
            del environment["TORCHELASTIC_RUN_ID"]
        (place / "memory").mkdir(parents=True)
        self._log = place / "said"
        with self._log.open("w") as said:
            self._process = subprocess.Popen(
                [warm.python(), "-c", log + code, str(place), how], stdout=said, stderr=said, env=environment
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for_signal(self, patience_secs: float) -> None:
        """It may live on so long after that."""
        retry_until(lambda: self._process.poll() is not None or SIGNALLED in self.said, 60.0)
        self._until = time.monotonic() + patience_secs

    def end(self) -> int | None:
        """Its exit code, None if it was killed because it lived on."""
        try:
            return self._process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Job]]:
    """All at once, since they mostly wait."""
    with tempfile.TemporaryDirectory(dir=DEFAULT_ROOT) as root, contextlib.ExitStack() as ends:
        started = {}
        for how in ("stands still", "busy", "raises", "over", ALONE, LATE):
            run_id = None if how in (ALONE, LATE) else "a job"
            started[how] = Job(Path(root, how.replace(" ", "_")), how, run_id)
            ends.callback(started[how].kill)
        for how, job in started.items():
            job.wait_for_signal(2 * GRACE_SECS if how == ALONE else 60.0)
        yield started


@pytest.mark.parametrize(
    ("how", "code", "why"),
    [
        ("stands still", EXIT_CODE, "SIGTERM"),
        ("busy", EXIT_CODE, "SIGTERM"),
        ("raises", ENDED, "Stopped"),
        ("over", ENDED, None),
    ],
)
def test_a_step_is_sealed_before_torchrun_kills(how, code, why, jobs):
    ended, said = jobs[how].end(), jobs[how].said
    assert ended == code, said
    assert said.count(SEALED) == (why is not None), said
    assert why is None or f"training stops ({why})" in said
    assert ("handled" in said) == (how in ("busy", "over")), "it stays with whoever had it"


def test_without_torchrun_nobody_knows_when_it_is_too_late(jobs):
    ended, said = jobs[ALONE].end(), jobs[ALONE].said
    assert ended is None, said
    assert SIGNALLED in said
    assert SEALED not in said


def test_a_handler_that_is_set_later_ends_the_process_when_it_wants_to(jobs):
    ended, said = jobs[LATE].end(), jobs[LATE].said
    assert ended == ENDED, said
    assert "handled" in said
    assert SEALED not in said
