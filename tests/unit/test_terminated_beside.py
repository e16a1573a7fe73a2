"""SIGTERM where somebody else handles it, as Lightning does, under ``torchrun``: a rank that stands still is sealed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
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
from tests.support.standstill import never_returns
from tests.unit.engine_parts import Life

GRACE_SECS, SEALING_SECS = 7.0, 3.0
"""Of torchrun here, and of ``survivor_secs``."""
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


def train(place: str, how: str) -> None:
    """A training process, at step 3, that somebody terminates."""
    termination.TORCHRUN_GRACE_SECS = GRACE_SECS
    signal.signal(signal.SIGTERM, raises if how == "raises" else handler)
    memory = Memory(directory=Path(place, "memory"), storage_every=100)
    with Life(LocalStorage(Path(place, "store")), policy=Dense(every_n_steps=100), memory=memory) as life:
        surviving = Surviving(life.session.follow(Survivor), 0, SimpleNamespace(unit="step"), SEALING_SECS)
        surviving.termination.watch()
        life.go(3, settle=True)
        surviving.enter(Moment.RESTING)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if how == "raises":
            try:
                busy(GRACE_SECS)
            except Stopped:
                surviving.survive("Stopped")
            busy(GRACE_SECS)  # whatever else there is to do at the end
        elif how == "over":
            busy(1.0)
            surviving.termination.unwatch()
            busy(GRACE_SECS)
        elif how == "busy":
            busy(2 * GRACE_SECS)
        else:
            never_returns()
        os._exit(ENDED)


def outcome(how: str, timeout: float = 60.0, **environment: str) -> tuple[int | None, str, float]:
    """(exit code, None if it was killed; what it said; seconds)."""
    code = "import sys; from tests.unit.test_terminated_beside import train; train(*sys.argv[1:])"
    log = "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stderr); "
    with tempfile.TemporaryDirectory(dir=DEFAULT_ROOT) as place, open(Path(place, "said"), "w+") as said:
        Path(place, "memory").mkdir()
        began = time.monotonic()
        given = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"} | environment
        with subprocess.Popen(
            [sys.executable, "-c", log + code, place, how], stderr=said, stdout=said, env=given, start_new_session=True
        ) as process:
            try:
                ended = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                ended = None
        secs = time.monotonic() - began
        said.seek(0)
        return ended, said.read(), secs


@pytest.mark.parametrize(
    ("how", "code", "why"),
    [
        ("stands still", EXIT_CODE, "SIGTERM"),
        ("busy", EXIT_CODE, "SIGTERM"),
        ("raises", ENDED, "Stopped"),
        ("over", ENDED, None),
    ],
)
def test_a_step_is_sealed_before_torchrun_kills(how, code, why):
    ended, said, _ = outcome(how, TORCHELASTIC_RUN_ID="a job")
    assert ended == code, said
    assert said.count(SEALED) == (why is not None), said
    assert why is None or f"training stops ({why})" in said
    assert ("handled" in said) == (how in ("busy", "over")), "it stays with whoever had it"


def test_without_torchrun_nobody_knows_when_it_is_too_late():
    ended, said, _ = outcome("stands still", 20.0)
    assert ended is None, said
    assert SEALED not in said
