"""A server of ``warm``: ``python -m tests.support.warm_server <path of its socket>``.

It is a process with a single thread, which imports, listens, and forks for each request.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.support import processes, warm
from tests.support.imports import import_for_good
from tests.support.warm_python import receive, send

_PATHS = sys.path[1 + os.environ.get("PYTHONPATH", os.pathsep).count(os.pathsep) + 1 :]
"""Of the interpreter and the environment, without the current directory and PYTHONPATH."""


def main(path: str, module: str, asked_by: socket.socket | None = None) -> None:
    """Serve until the last of those who were present has ended.

    asked_by: learns that it serves; it waits, and learns that it does not when the process ends.
    """
    import_for_good(module)
    threads = [Path(f"/proc/self/task/{each}/comm").read_text().strip() for each in os.listdir("/proc/self/task")]
    assert len(threads) == 1, f"{module} starts threads: {threads}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    if asked_by is not None:
        with contextlib.suppress(ConnectionError):
            send(asked_by, {"ready": True})
        asked_by.close()
    present: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, *present], [], [], None if present else warm.MARGIN_SECS)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # forks of which nobody asks how they ended
                pass
        for gone in [each for each in present if each in ready]:
            present.remove(gone)
            gone.close()
        if listener in ready:
            _accept(listener, present)
        elif not present:
            break
    for name in (path, f"{path}.python", f"{path}.lock"):
        Path(name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other servers have files there
        os.rmdir(os.path.dirname(path))


def _accept(listener: socket.socket, present: list[socket.socket]) -> None:
    client, _ = listener.accept()
    streams: list[int] = []
    with contextlib.suppress(ConnectionError):  # a client that was killed
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        if (received := receive(client)) is not None:
            if received[0]["kind"] == "present":
                send(client, {"ready": True})
                present.append(client)
                client = None
            elif os.fork() == 0:
                _fork(listener, present, client, streams, *received)
    if client is not None:
        client.close()
    for descriptor in streams:
        os.close(descriptor)


def _fork(
    listener: socket.socket,
    present: list[socket.socket],
    client: socket.socket,
    streams: list[int],
    message: dict[str, Any],
    payload: bytes,
) -> NoReturn:
    """What a fork of the server does, to its end."""
    try:
        for each in (listener, *present):
            each.close()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if message["kind"] == "serve":
            main(message["path"], message["module"], client)
        elif message["kind"] == "ranks":
            numbers = (message[name] for name in ("world_size", "timeout", "grace"))
            outcomes = processes.launch("fork", payload, *numbers)
            with contextlib.suppress(ConnectionError):  # it has given up on us
                send(client, {}, pickle.dumps(outcomes))
        elif message["kind"] == "call":
            _watched(client, lambda: _call(payload))
        else:
            _watched(client, lambda: _program(message))
    except BaseException:  # a process boundary
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _watched(client: socket.socket, body: Callable[[], object]) -> None:
    """Run ``body`` in a fork of its own, which dies when the client does, and tell the client how it ends."""
    pid = os.fork()
    if pid == 0:
        client.close()
        os.setsid()
        _run(body)
    end = os.pidfd_open(pid)
    with contextlib.suppress(ConnectionError):
        send(client, {"pid": pid})
    listening = [client]
    while end not in select.select([end, *listening], [], [])[0]:
        received = receive(client)
        if received is not None:
            os.kill(pid, received[0]["signal"])
            continue
        listening.clear()
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ConnectionError):
        send(client, {"exit": code})


def _run(body: Callable[[], object]) -> NoReturn:
    """As the interpreter runs a program and ends, but for destroying everything that was ever imported."""
    code = 0
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as in a fresh process; torch always begins with the same, and Python's own looks itself
    try:
        body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _of_the_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Without what is above the program's own frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _call(payload: bytes) -> None:
    function, arguments = pickle.loads(payload)
    function(*arguments)


def _program(message: dict[str, Any]) -> None:
    """What ``python -u -W ... -m module ...``, ``-c code ...`` or ``file ...`` does; see ``warm_python.understood``."""
    os.chdir(message["directory"])
    os.environ.clear()
    os.environ.update(message["environment"])
    sys.executable = message["executable"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as the others, made for the streams that are there now
    unbuffered = message["unbuffered"] or "PYTHONUNBUFFERED" in os.environ
    sys.stdout = open(1, "w", closefd=False, buffering=1 if unbuffered else -1)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    warnings._processoptions(message["warnings"])  # type: ignore[attr-defined]
    how, what = message["how"], message["what"]
    first = {"-m": message["directory"], "-c": "", "file": str(Path(what).resolve().parent)}[how]
    told = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *told, *_PATHS]
    sys.argv[:] = [what if how == "file" else how, *message["arguments"]]
    if how == "-m":
        sys.modules.pop(what, None)  # it is to run as a program, and anew
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how == "file":
        runpy.run_path(what, run_name="__main__")
    else:
        sys.modules["__main__"] = program = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), program.__dict__)


if __name__ == "__main__":
    from tests.support import warm_server

    warm_server.main(sys.argv[1], warm.WARM)
