"""Processes forked from one that has imported what they need: a start in a tenth of a second instead of ten.

A tree of servers, one for each module that is to be imported beforehand, each a fork of the server in ``PARENTS``. They
are started when first asked for, shared by all processes of one run of pytest, and end with the last of these. They
have no threads, so forking them is safe, and their forks are processes as real as any. What only a fresh interpreter
shows (another order of sets of strings, imports that are missing) they do not show.

* ``launch``: ranks that share a process group, for ``processes.start_ranks``.
* ``start``: a function in one process, which the test may kill.
* ``python``: a stand-in for ``sys.executable``, for programs that tests start, and that those start in turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.warm_python import receive, request, send

ROOT = Path(__file__).resolve().parents[2]
WARM = "tests.support.torch_warm"
"""What most forks need; and what all servers are forked from."""
MEGATRON = "tests.support.megatron_warm"
PARENTS = {"tests.support.megatron_lm_warm": MEGATRON}
"""Of the servers that need more than ``WARM``."""
MARGIN_SECS = 180.0
"""For importing, and for what ``processes.launch`` does after its own time is up."""

_ENVIRONMENT = dict(os.environ)
"""That of no test."""
_present: dict[str, socket.socket] = {}
"""By module: the connection that keeps its server, in this process."""


def launch(preload: str, payload: bytes, world_size: int, timeout: float, grace: float) -> Any:
    """``processes.launch`` in a fork of the server that has imported ``preload``: one ``Outcome`` per rank."""
    numbers = {"world_size": world_size, "timeout": timeout, "grace": grace}
    with request(_server(preload), {"kind": "ranks", **numbers}, payload) as connection:
        connection.settimeout(max(0.0, timeout + MARGIN_SECS))
        with contextlib.suppress(TimeoutError, BlockingIOError):
            if (answer := receive(connection)) is not None:
                return pickle.loads(answer[1])
            raise AssertionError(f"the fork of the server of {preload} ended without an answer")
    raise AssertionError(f"the server of {preload} did not answer in {timeout + MARGIN_SECS} s")


def start(preload: str, function: Callable[..., None], *arguments: Any) -> Started:
    """``function(*arguments)``, which must be picklable, in a fork of the server that has imported ``preload``."""
    payload = pickle.dumps((function, arguments))
    return Started(request(_server(preload), {"kind": "call"}, payload))


class Started:
    """A process that ``start`` has started, as ``multiprocessing.Process`` shows its own. Closed, it is killed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._code: int | None = None
        self.pid = self._answer()["pid"]

    def _answer(self) -> dict[str, Any]:
        answer = receive(self._connection)
        if answer is None:
            raise AssertionError("the server's fork ended without an answer")
        return answer[0]

    @property
    def exitcode(self) -> int | None:
        self.join(0)
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        if self._code is None and select.select([self._connection], [], [], timeout)[0]:
            self._code = self._answer()["exit"]

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self.is_alive():
            with contextlib.suppress(BrokenPipeError):  # it has just ended
                send(self._connection, {"signal": number})

    def close(self) -> None:
        self._connection.close()


def python(preload: str = WARM) -> str:
    """The name of a program that does what the interpreter does, in a fork of the server that has imported ``preload``.

    A program that it runs takes it for ``sys.executable``. See ``warm_python``.
    """
    path = Path(f"{_server(preload)}.python")
    with _locked(preload):
        if not path.exists():
            text = Path(__file__).with_name("warm_python.py").read_text()
            path.write_text(f"#!{sys.executable} -IS\n{text}")
            path.chmod(0o700)
    return str(path)


def _directory() -> Path:
    """One for all processes of this run of pytest."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    path = Path(tempfile.gettempdir(), f"moe_ckpt_warm_{run[:12]}")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextlib.contextmanager
def _locked(preload: str) -> Iterator[None]:
    descriptor = os.open(_directory() / f"{preload.rpartition('.')[2]}.lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _server(preload: str) -> str:
    """Where the server listens that has imported ``preload``. From now on it lives as long as this process."""
    path = str(_directory() / preload.rpartition(".")[2])
    if preload in _present and _ended(_present[preload]):
        _present.pop(preload).close()
    if preload not in _present:
        with _locked(preload):
            _present[preload] = _join(path) or _begin(preload, path)
    return path


def _ended(connection: socket.socket) -> bool:
    """A server says nothing more to those who are present."""
    return bool(select.select([connection], [], [], 0)[0])


def _join(path: str) -> socket.socket | None:
    """None where no server is."""
    try:
        connection = request(path, {"kind": "present"})
    except (FileNotFoundError, ConnectionError):
        return None
    if receive(connection) is None:
        connection.close()
        return None
    return connection


def _begin(preload: str, path: str) -> socket.socket:
    """Start the server."""
    Path(path).unlink(missing_ok=True)
    process = None
    if preload == WARM:
        environment = {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(ROOT), _ENVIRONMENT.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "tests.support.warm_server", path]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    else:
        order = {"kind": "serve", "module": preload, "path": path}
        with request(_server(PARENTS.get(preload, WARM)), order) as connection:
            connection.settimeout(MARGIN_SECS)
            if receive(connection) is None:
                raise AssertionError(f"the server of {preload} did not start; why is on the standard error")
    deadline = time.monotonic() + MARGIN_SECS
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        if (connection := _join(path)) is not None:
            _keep(process)
            return connection
        time.sleep(0.01)
    raise AssertionError(f"the server of {preload} did not start; what it said is on the standard error")


_kept: list[Any] = []


def _keep(process: Any) -> None:
    """A server may outlive the process that started it, and is never waited for."""
    _kept.append(process)
