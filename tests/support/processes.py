"""Run a function in N real processes that share a gloo process group.

Use from a test, with a module-level function of the test's own::

    def body(rank: int, world_size: int, greeting: str) -> str:
        dist.barrier()
        return f"{greeting} {rank}"

    def test_it():
        assert run_ranks(body, 2, "hello") == ["hello 0", "hello 1"]

``start_ranks`` is the same for tests in which ranks are meant to fail or to be killed: it raises nothing and
returns one ``Outcome`` per rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import warm

WARM = warm.WARM
"""Imported once, for ranks that name nothing else."""
PATIENCE_SECS = 400.0
"""For ranks that are to come to an end by themselves, on a machine that may be busy."""
GRACE_SECS = 15.0
"""How long the others may go on after the first rank has failed, before they are killed."""
ENDING_SECS = 60.0
"""How long a rank that has answered may take to end."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. ``exitcode`` is negative for a signal; ``error`` is the traceback's text."""

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


class RanksFailed(AssertionError):
    """At least one rank did not return."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        bad = [o for o in outcomes if not o.ok]
        parts = [f"--- rank {o.rank} (exit code {o.exitcode}):\n{o.error or 'ended without a result'}" for o in bad]
        super().__init__("\n".join([f"{len(bad)} of {len(outcomes)} ranks failed", *parts]))
        self.outcomes = outcomes


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = PATIENCE_SECS, preload: str | None = WARM
) -> list[Any]:
    """Results of ``fn(rank, world_size, *args)`` on every rank, in rank order.

    ``fn``, ``args`` and the results must be picklable (tensors are copied). A process group is initialised
    before and destroyed after; ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set.

    preload: a module to import once per run of pytest, in a server process of which each rank is then a fork: see
        ``tests.support.warm``. None: each rank is a fresh interpreter.

    Raises:
        RanksFailed: with every failed rank's traceback, also when ``timeout`` seconds have passed.
    """
    outcomes = start_ranks(fn, world_size, *args, timeout=timeout, preload=preload)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = PATIENCE_SECS,
    grace: float = GRACE_SECS,
    preload: str | None = WARM,
) -> list[Outcome]:
    """Like ``run_ranks``, but returns how each rank ended instead of raising.

    grace: seconds that the others may go on after the first rank has failed or was killed.
    """
    payload = pickle.dumps((fn, args))
    if preload is None:
        return launch("spawn", payload, world_size, timeout, grace)
    found: list[Outcome] = warm.launch(preload, payload, world_size, timeout, grace)
    return found


def launch(method: str, payload: bytes, world_size: int, timeout: float, grace: float) -> list[Outcome]:
    """Start the ranks and wait for them. method: of ``multiprocessing``; payload: the pickled (fn, args)."""
    context: Any = multiprocessing.get_context(method)
    processes: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_ranks_") as directory:
        store = str(Path(directory) / "rendezvous")
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(sender, payload, rank, world_size, store), name=f"rank {rank}"
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(processes, pipes, timeout, grace)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(processes: list[Any], pipes: list[Connection], timeout: float, grace: float) -> list[Outcome]:
    """Wait for all ranks; after a first failure only ``grace`` seconds more."""
    messages: dict[int, tuple[str, Any]] = {}
    open_ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while open_ranks and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(open_ranks), left):
            rank = open_ranks.pop(pipe)
            try:
                messages[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                messages[rank] = ("error", "the process died without a result")
            if messages[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + grace)
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(ENDING_SECS if rank in messages else 0)
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        kind, value = messages.get(rank, ("error", "still running when time was up; killed"))
        if hung and kind == "ok":
            kind, value = "error", "returned a result, but the process did not end (a thread left behind?)"
        ok = kind == "ok"
        outcomes.append(Outcome(rank, value if ok else None, None if ok else value, process.exitcode))
    return outcomes


def _rank_main(sender: Connection, payload: bytes, rank: int, world_size: int, store: str) -> None:
    """Body of a child process: process group, the function, its result or traceback."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(payload)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        dist.barrier()  # a rank that is through at once must not end before the others have found it
        value = fn(rank, world_size, *args)
        message = pickle.dumps(("ok", value))
    except BaseException:  # a process boundary: the parent raises it
        sender.send_bytes(pickle.dumps(("error", traceback.format_exc())))
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # peers may hang in a collective; a clean teardown would wait for them
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    sender.send_bytes(message)
    sender.close()
