"""Ranks forked from a process that has imported what they need: a start in a tenth of a second instead of ten.

One server process for each module that is to be imported beforehand, started when first asked for. It has no threads,
so forking it is safe, and the ranks are as real as any. What only a fresh interpreter shows (another order of sets of
strings, imports that are missing) they do not show.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from tests.support.imports import import_for_good

MARGIN_SECS = 180.0
"""For importing, and for what ``processes.launch`` does after its own time is up."""

_servers: dict[str, Connection] = {}


def launch(preload: str, payload: bytes, world_size: int, timeout: float, grace: float) -> Any:
    """``processes.launch`` in the server that has imported ``preload``: one ``Outcome`` per rank."""
    if preload not in _servers:
        _servers[preload] = _serve(preload)
    connection = _servers[preload]
    try:
        connection.send((payload, world_size, timeout, grace))
        if connection.poll(timeout + MARGIN_SECS):
            return connection.recv()
    except BaseException:  # such as a test's own time limit: the answer to come belongs to nobody
        _servers.pop(preload).close()
        raise
    _servers.pop(preload).close()
    raise AssertionError(f"the server of {preload} did not answer in {timeout + MARGIN_SECS} s")


def _serve(preload: str) -> Connection:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_server_main, args=(there, preload), name=f"server of {preload}")
    process.start()
    there.close()
    atexit.register(here.close)  # before multiprocessing's own hook, which waits for the server to end
    return here


def _server_main(connection: Connection, preload: str) -> None:
    from tests.support import processes

    import_for_good(preload)
    with contextlib.suppress(EOFError, ConnectionError):  # pytest has ended, or has given up on us
        while True:
            payload, world_size, timeout, grace = connection.recv()
            connection.send(processes.launch("fork", payload, world_size, timeout, grace))
