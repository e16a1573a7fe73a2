"""Stands in for the interpreter, for programs that tests start: a fork of a warm server runs what it is told to run.

``warm.python`` writes this file, with the interpreter's name in front, beside the server's socket. It is a process like
the program's own: it has its standard streams, environment and directory, hands on signals, and ends as it does, also
by a signal; and when it is killed, the program is. What it does not understand it leaves to the interpreter itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def send(connection: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    head = json.dumps(message).encode()
    connection.sendall(len(head).to_bytes(4, "big") + len(payload).to_bytes(8, "big") + head + payload)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """A message and what goes with it; None where the other side has ended."""
    lengths = _exactly(connection, 12)
    if lengths is None:
        return None
    head = _exactly(connection, int.from_bytes(lengths[:4], "big"))
    payload = _exactly(connection, int.from_bytes(lengths[4:], "big"))
    return None if head is None or payload is None else (json.loads(head), payload)


def _exactly(connection: socket.socket, nbytes: int) -> bytes | None:
    parts = []
    while nbytes:
        part = b""
        with contextlib.suppress(ConnectionResetError):
            part = connection.recv(min(nbytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def request(path: str, message: dict[str, Any], payload: bytes = b"") -> socket.socket:
    """A connection to the server at ``path`` with the message sent, and this process's standard streams with it."""
    connection = connect(path)
    try:
        socket.send_fds(connection, [b"f"], [0, 1, 2])
        send(connection, message, payload)
    except BaseException:
        connection.close()
        raise
    return connection


def understood(arguments: list[str]) -> dict[str, Any] | None:
    """The interpreter's options -u, -W, -m and -c, or a file; None for all else."""
    found: dict[str, Any] = {"unbuffered": False, "warnings": []}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if option == "-u":
            found["unbuffered"] = True
        elif option == "-W" and rest:
            found["warnings"].append(rest.pop(0))
        elif option in ("-m", "-c") and rest:
            return found | {"how": option, "what": rest[0], "arguments": rest[1:]}
        elif option.startswith("-"):
            return None
        else:
            return found | {"how": "file", "what": option, "arguments": rest}
    return None


def main(path: str, arguments: list[str]) -> None:
    program = understood(arguments)
    if program is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    place = {"directory": os.getcwd(), "environment": dict(os.environ), "executable": path}
    connection = request(path.removesuffix(".python"), {"kind": "program", **program, **place})
    for number in HANDED_ON:
        signal.signal(number, lambda number, frame: send(connection, {"signal": number}))
    code = None
    while code is None:
        answer = receive(connection)
        if answer is None:
            sys.exit(f"{path}: the server ended")
        code = answer[0].get("exit")
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[0]), sys.argv[1:])
