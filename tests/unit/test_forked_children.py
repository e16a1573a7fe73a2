"""Children of a training process that handles SIGTERM: neither they nor what ends them is taken for training's end."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ckpt import Memory
from moe_ckpt.driver.states import Moment
from moe_ckpt.memory.options import DEFAULT_ROOT
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
from moe_ckpt.survivors.newest_step import Survivor
from moe_ckpt.survivors.stopping import Surviving
from moe_ckpt.survivors.termination import EXIT_CODE
from tests.support import warm
from tests.support.standstill import never_returns
from tests.unit.engine_parts import Life

CHILDREN = 20
"""Each of which is ended as soon as it is there, most of them before they have run a line."""
QUIET_SECS = 2.0
"""By then a signal that was taken for the parent's has ended it."""
PATIENCE_SECS = 120.0
SEALED = "keeps its state of step 3 in memory"


def double(number: int) -> int:
    return 2 * number


def idle(ready: Any) -> None:
    ready.set()
    time.sleep(PATIENCE_SECS)


def ended(child: Callable[[], object]) -> int:
    """How a plain fork ends that does this."""
    pid = os.fork()
    if not pid:
        child()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def pool() -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as workers:
        return workers.map(double, range(3))


def terminated(*, running: bool) -> list[int | None]:
    context, codes = multiprocessing.get_context("fork"), []
    for _ in range(1 if running else CHILDREN):
        ready = context.Event()
        child = context.Process(target=idle, args=(ready,))
        child.start()
        assert not running or ready.wait(PATIENCE_SECS)
        child.terminate()
        child.join(PATIENCE_SECS)
        codes.append(child.exitcode)
    return codes


def program_is_terminated() -> int:
    child = subprocess.Popen(["sleep", str(PATIENCE_SECS)])
    child.terminate()
    return child.wait(PATIENCE_SECS)


def train(place: str) -> None:
    """A training process, at step 3; says what became of each child, and gets SIGTERM itself in the end."""
    logging.basicConfig(level=logging.INFO, format="%(process)d %(message)s", stream=sys.stderr)
    print(os.getpid(), flush=True)
    memory = Memory(directory=Path(place, "memory"), storage_every=100)
    with Life(LocalStorage(Path(place, "store")), policy=Dense(every_n_steps=100), memory=memory) as life:
        surviving = Surviving(life.session.follow(Survivor), 0, SimpleNamespace(unit="step"), 20.0)
        surviving.termination.watch()
        life.go(3, settle=True)
        surviving.enter(Moment.RESTING)
        error = RuntimeError("a child's")
        for name, do in {
            "pool": pool,
            "running": lambda: terminated(running=True),
            "new": lambda: terminated(running=False),
            "program": program_is_terminated,
            "uncaught": lambda: ended(lambda: sys.excepthook(RuntimeError, error, None)),
            "survives": lambda: ended(lambda: surviving.survive("a child")),
            "closes": lambda: ended(surviving.termination.unwatch),
            # As a handler of the user's own does that was set later, and hands on what it gets.
            "handed on": lambda: ended(lambda: surviving.termination._handle(signal.SIGTERM, None)),
        }.items():
            print(json.dumps([name, do()]), flush=True)
        time.sleep(QUIET_SECS)
        print(json.dumps(["goes on", sorted(each.suffix for each in Path(place).glob("memory/**/*.head"))]), flush=True)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        never_returns()


@pytest.fixture(scope="module")
def outcome() -> tuple[int, str, dict[str, Any], str]:
    """(exit code, process, what it said, its log)."""
    with tempfile.TemporaryDirectory(dir=DEFAULT_ROOT) as place:
        Path(place, "memory").mkdir()
        code = "import sys; from tests.unit.test_forked_children import train; train(sys.argv[1])"
        done = subprocess.run(
            [warm.python(), "-c", code, place],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECS,
            start_new_session=True,
        )
    pid, *lines = done.stdout.splitlines()
    return done.returncode, pid, dict(map(json.loads, lines)), done.stderr


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        ("pool", [0, 2, 4]),
        ("running", [-signal.SIGTERM]),
        ("new", [-signal.SIGTERM] * CHILDREN),
        ("program", -signal.SIGTERM),
        ("uncaught", 0),
        ("survives", 0),
        ("closes", 0),
        ("handed on", -signal.SIGTERM),
        ("goes on", []),
    ],
)
def test_a_child_ends_alone_and_seals_nothing(outcome, child, expected):
    _, _, said, log = outcome
    assert said.get(child, log) == expected


def test_its_parent_still_seals_when_it_is_ended_itself(outcome):
    code, pid, _, log = outcome
    assert code == EXIT_CODE, log
    assert [line.split()[0] for line in log.splitlines() if SEALED in line] == [pid], log
