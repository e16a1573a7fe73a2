"""Memory slots: copy into one beside memcpy, and coming back from own memory beside storage, after ``kill -9``.

Every life is a process of its own on the same synthetic MoE, dense checkpoints, storage in the page cache. What is
timed is ``resume_newest`` of the second life: from its call to the live tensors being what they were.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import numpy as np
import torch
import xxhash
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import report
from benchmarks.copy_speed import compiled
from benchmarks.synthetic import StillState, synthetic
from moe_ckpt import Memory
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.placement import everywhere
from moe_ckpt.memory.arena import Arena, Buffer
from moe_ckpt.policies import Dense
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices.checksums import Checker
from moe_ckpt.slices.snapshot import parts_in
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock

_EXAMPLE = "example: python benchmarks/memory_slots.py --mib 256 --rounds 5 --write"
_GIVEN_BACK = 5 / 7
"""Of a slot of a gradient log in rounds of 5: the gradients (4 bytes per parameter and step of 5.6)."""
_STEPS, _LAYERS, _EXPERTS = 3, 6, 8


def room(path: Path, nbytes: int) -> torch.Tensor:
    """Memory of an arena that is made for it."""
    arena = Arena(nbytes, path=path)
    arena.grow(nbytes)
    [buffer] = arena.take([nbytes]) or []
    return buffer.memory


def copies(mib: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Name -> seconds of each round, in turns."""
    nbytes = mib << 20
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    warm = room(directory / "warm", nbytes)
    results: dict[str, list[float]] = {}

    def move(into: torch.Tensor) -> None:
        ctypes.memmove(into.data_ptr(), source.data_ptr(), nbytes)

    def cold() -> None:
        move(room(directory / "cold", nbytes))
        (directory / "cold").unlink()

    # What would be left of a gradient log's slot if gradients that no operator needs any more were given back.
    sparse = room(directory / "sparse", nbytes)
    hole = int(nbytes * _GIVEN_BACK) // mmap.PAGESIZE * mmap.PAGESIZE

    def give_back() -> None:
        address, libc = sparse.data_ptr(), ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(hole), mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), "pages cannot be given back")

    plan, memory = compiled(_state(mib).catalog, _state(mib).tensors())
    parts = parts_in(plan, [Buffer(0, memory)])

    def checked(threads: int) -> Callable[[], object]:
        checker = Checker(threads)
        return lambda: checker.check(parts, lambda key: True, lambda number, end: None)

    move(warm)
    move(sparse)
    contestants: dict[str, Callable[[], object]] = {
        "memcpy, warm": lambda: move(target),
        "into a warm slot": lambda: move(warm),
        "reserve a slot and copy into it": cold,
        "give back 5/7 of a slot's pages": give_back,
        "into what is left of it": lambda: move(sparse),
        "XXH3-64 of it": lambda: xxhash.xxh3_64_digest(warm.numpy().data),
        "sealed: checksums and a look for NaN": checked(1),
        "the same by two threads": checked(2),
    }
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            results.setdefault(name, []).append(time.perf_counter() - began)
    for name in ("warm", "sparse"):
        (directory / name).unlink()
    return results


def _state(mib: int) -> StillState:
    live = synthetic(_LAYERS, _EXPERTS, (mib << 20) // (3 * 4 * _LAYERS * _EXPERTS))
    return StillState(live.catalog, live.tensors())


def _session(store: str, memory: str | None, mib: int) -> tuple[CheckpointSession, StillState]:
    state = _state(mib)
    storage = LocalStorage(store)
    comm = SoloCommunicator()
    run = RunContext(
        storage=storage,
        policy=Dense(),
        catalog=state.catalog,
        state=state,
        comm=comm,
        settings=Settings(when_busy="wait", memory=None if memory is None else Memory(directory=memory)),
        placement=everywhere(state.catalog.layers, comm.world_size),
        lock=StoreLock(storage, "a run"),
    )
    session = CheckpointSession(run)
    session.open()
    return session, state


def first_life(store: str, memory: str | None, mib: int) -> None:
    """Saves a few steps, waits until they are durable, and dies."""
    session, state = _session(store, memory, mib)
    tokens = StepTokens(np.ones((_LAYERS, _EXPERTS), dtype=np.int64))
    for step in range(1, _STEPS + 1):
        session.before_update()
        session.after_update(step, Deferred(lambda: tokens), state.plain, updated=False)
    session.drain(_STEPS)
    os.kill(os.getpid(), signal.SIGKILL)


def second_life(store: str, memory: str | None, mib: int, sender: Any) -> None:
    """Comes back, and tells how long that took."""
    session, state = _session(store, memory, mib)
    for tensor in state.tensors():
        tensor.local.zero_()
    began = time.perf_counter()
    restored = resume_newest(session._run.storage, session.comm, state, session.tier)
    secs = time.perf_counter() - began
    sender.send((secs, None if restored is None else restored.manifest.step))
    session.close()


def recovery_secs(mib: int, directory: Path, *, memory: bool) -> float:
    """Seconds of one recovery, of a process that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.memory_slots"])  # to start a life in a tenth of a second, not in five
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        slots = str(Path(scratch, "memory")) if memory else None
        if slots is not None:
            os.mkdir(slots)
        store = str(Path(scratch, "store"))
        first = context.Process(target=first_life, args=(store, slots, mib))
        first.start()
        first.join()
        receiver, sender = context.Pipe(duplex=False)
        second = context.Process(target=second_life, args=(store, slots, mib, sender))
        second.start()
        secs, step = receiver.recv()
        second.join()
        if first.exitcode != -signal.SIGKILL or step != _STEPS:
            raise RuntimeError(f"the first life ended with {first.exitcode}, the second came back to step {step}")
        return float(secs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog=_EXAMPLE)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for slots and store")
    parser.add_argument("--write", action="store_true", help="keep every measurement in benchmarks/results")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        result = copies(args.mib, args.rounds, Path(scratch))
        recoveries: dict[str, list[float]] = {"own memory": [], "storage in the page cache": []}
        for _ in track(range(args.rounds), "kill and come back", console=Console(stderr=True), transient=True):
            for name, secs in recoveries.items():
                secs.append(recovery_secs(args.mib, Path(scratch), memory=name == "own memory"))
    console = Console()
    _show(console, f"{args.mib} MiB, median of {args.rounds}", result, result["memcpy, warm"])
    _show(console, "resume_newest after kill -9", recoveries, recoveries["storage in the page cache"])
    if args.write:
        facts = {"machine": report.machine(), "mib": args.mib, "copies": result, "recoveries": recoveries}
        (report.RESULTS / "memory_slots.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def _show(console: Console, title: str, results: dict[str, list[float]], reference: list[float]) -> None:
    table = Table(title=title)
    for head in ("", "ms", "of the reference"):
        table.add_column(head, justify="left" if not head else "right")
    for name, secs in results.items():
        table.add_row(name, f"{1000 * median(secs):.1f}", f"{median(secs) / median(reference):.2f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
