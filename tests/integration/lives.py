"""Lives of the program in ``crash_run``: start it in a real process, kill it, read what it left.

The processes are forked from a server that has imported torch and Lightning already: they are as real
as any, but start in a tenth of a second instead of ten.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import open_storage
from tests.integration import crash_run
from tests.integration.crash_run import Run
from tests.support import warm
from tests.support.deleting import delete_tree
from tests.support.opened import shards_opened

KILLED = -signal.SIGKILL
LIFE_SECS = 400.0

PRELOAD = "tests.integration.lives_warm"
CGROUP = "MOE_CKPT_TEST_CGROUP"
ABOUT_CHECKPOINTS = (
    *("store", "log", "out", "policy", "options", "crash", "kills", "memory", "to_storage", "replicas"),
    *("memory_options", "callback", "slow_copy_secs", "watched", "sabotage", "networks", "logged", "bad_disk"),
    "prior_mtbf_secs",
)
"""Fields of ``Run`` that training does not depend on, but for these options of policies:"""
TRAIN_DIFFERENTLY = {"grad_dtype"}
SAVES_NOTHING = Run(None, policy=("dense", 10**6))


def start(run: Run, rank: int = 0, environment: Mapping[str, str] | None = None) -> warm.Started:
    """One process of the program, started."""
    return warm.start(PRELOAD, _life, run, rank, dict(environment or {}))


def _life(run: Run, rank: int, environment: Mapping[str, str]) -> None:
    if run.log is not None:
        descriptor = os.open(f"{run.log}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    os.environ.update(environment)
    if CGROUP in environment:
        Path(environment[CGROUP], "cgroup.procs").write_text(str(os.getpid()))
    crash_run.main(run)


def exit_code(run: Run) -> int:
    """Exit code of one life that nobody kills, whatever it is."""
    process = start(run)
    try:
        process.join(LIFE_SECS)
        assert not process.is_alive(), f"still running after {LIFE_SECS} s\n{output(run)}"
        return int(process.exitcode)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def live(run: Run, kill_after_secs: float | None = None, kill_after_lines: int = 1) -> int:
    """Exit code of one life; ``kill_after_secs`` after so many lines of its log it is killed from outside."""
    before = len(events(run))
    process = start(run)
    deadline = time.monotonic() + LIFE_SECS
    try:
        if kill_after_secs is not None:
            while process.is_alive() and len(events(run)) < before + kill_after_lines and time.monotonic() < deadline:
                time.sleep(0.002)
            process.join(kill_after_secs)
            process.kill()
        process.join(max(0.0, deadline - time.monotonic()))
        assert not process.is_alive(), f"still running after {LIFE_SECS} s\n{output(run)}"
        code = process.exitcode
        assert code in (0, KILLED), f"exit code {code}\n{output(run)}"
        return code
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


@contextlib.contextmanager
def started_ranks(
    run: Run, crash_of: Callable[[int], Any] | None = None, cgroup: Path | None = None
) -> Iterator[list[warm.Started]]:
    """All ranks of a run without torchrun (and so without restarts); whoever is still alive at the end is killed.

    crash_of: Gives a rank's ``Run.crash``; None: the run's, on all of them.
    cgroup: That they join before they do anything.
    """
    environment = {
        "WORLD_SIZE": str(run.ranks),
        "LOCAL_WORLD_SIZE": str(run.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "lives",
        "GROUP_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if cgroup is not None:
        environment[CGROUP] = str(cgroup)
    processes: list[warm.Started] = []
    try:
        for rank in range(run.ranks):
            mine = run if crash_of is None else replace(run, crash=crash_of(rank))
            processes.append(start(mine, rank, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        yield processes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def live_ranks(
    run: Run,
    kill: tuple[int, float] | None = None,
    cgroup: Path | None = None,
) -> list[int]:
    """Exit codes of all ranks of a run; see ``started_ranks``.

    When one rank is killed, the others are killed too, wherever they are: as a launcher does, but at once.

    kill: (rank, seconds): it is killed from outside, so long after the first line of rank 0's log.
    cgroup: See ``started_ranks``.
    """
    before = len(events(run))
    with started_ranks(run, cgroup=cgroup) as processes:
        deadline = time.monotonic() + LIFE_SECS
        at = deadline
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if kill is not None and at == deadline and len(events(run)) > before:
                at = time.monotonic() + kill[1]
            if kill is not None and time.monotonic() >= at:
                processes[kill[0]].kill()
                processes[kill[0]].join()
            if any(process.exitcode == KILLED for process in processes):
                break
            time.sleep(0.01)
        for process in processes:
            process.kill()  # nothing is left to kill after an ordinary end
            process.join()
        return [process.exitcode for process in processes]


def killed_at_random(run: Run, rng: random.Random, *, kills: int, most_secs: float) -> None:
    """Lives killed from outside up to ``most_secs`` after their begin: so many, or until one comes to its end first.

    At least one is killed: where the very first was too quick, all begins anew.
    """
    died = 0
    while not died:
        while died < kills and live(run, rng.uniform(0.0, most_secs)) == KILLED:
            died += 1
            assert_store_sound(run, ended=False)
        if not died:
            forget(run)


def forget(run: Run) -> None:
    """Remove all that a run left, as if it had never been."""
    delete_tree(run.store)
    for path in (run.log, run.out):
        for found in Path(path).parent.glob(f"{Path(path).name}*"):
            found.unlink()


def free_port() -> int:
    """None of those that the system deals out by itself: another process might have it before rank 0 does."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [*range(10_000, first), *range(last + 1, 1 << 16)]
    random.SystemRandom().shuffle(ports)
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")


def output(run: Run) -> str:
    """The program's last messages."""
    try:
        return Path(f"{run.log}.txt").read_text()[-12000:]
    except FileNotFoundError:
        return "(no output)"


def events(run: Run, rank: int = 0) -> list[dict[str, Any]]:
    """What the program has logged so far; a line cut short by a kill is left out."""
    try:
        text = Path(run.log + (f".{rank}" if rank else "")).read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def shards_read(run: Run) -> list[list[str]]:
    """Shards of the store that each rank opened to read, in all lives; ``run`` is ``watched``."""
    return shards_opened(f"{run.log}.opened", run.ranks)


def split_lives(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each life that came as far as training."""
    found: list[list[dict[str, Any]]] = []
    for line in lines:
        if line["event"] == "start":
            found.append([])
        found[-1].append(line)
    return found


def placed(run: Run, directory: Path, name: str = "run") -> Run:
    """The run with its files under ``directory``."""
    return replace(
        run,
        store=str(directory / f"{name}_store"),
        log=str(directory / f"{name}.jsonl"),
        out=str(directory / f"{name}.pt"),
    )


@functools.cache
def _undisturbed(words: str) -> tuple[Any, list[Any]]:
    run = Run.from_json(words)
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_truth_", dir=fast_directory()) as directory:
        run = placed(run, Path(directory), "truth")
        codes = live_ranks(run) if run.ranks > 1 else [live(run)]
        assert codes == [0] * run.ranks, f"the run without failures failed\n{output(run)}"
        states = [load(run, rank) for rank in range(run.ranks)]
        return states, [events(run, rank) for rank in range(run.ranks)]


def undisturbed(run: Run) -> tuple[list[Any], list[list[dict[str, Any]]]]:
    """(final state, events) per rank of the same program, never killed: trained once for all runs that differ only in
    what is saved. It saves nothing before its end."""
    changed = run.options.keys() & TRAIN_DIFFERENTLY
    default = {name: getattr(SAVES_NOTHING, name) for name in ABOUT_CHECKPOINTS}
    if changed:
        default |= {"policy": run.policy, "options": run.options, "memory": run.memory}
    return _undisturbed(replace(run, **default).to_json())


def load(run: Run, rank: int = 0) -> Any:
    return torch.load(run.out + (f".{rank}" if rank else ""), weights_only=False)


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two states differ; equal means equal to the last bit (NaN equals NaN)."""
    if type(a) is not type(b):
        yield f"{path}: {type(a).__name__} is not {type(b).__name__}"
    elif isinstance(a, Mapping):
        if a.keys() != b.keys():
            yield f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"
        for key in a.keys() & b.keys():
            yield from differences(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{path}: length {len(a)}, {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{path}/{i}")
    elif torch.is_tensor(a):
        if not same_bits(a, b):
            yield f"{path}: tensors differ"
    elif isinstance(a, np.ndarray):
        if not np.array_equal(a, b):
            yield f"{path}: arrays differ"
    elif a != b and not (a != a and b != b):
        yield f"{path}: {a!r} is not {b!r}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def assert_same_run(run: Run, unwritten: Collection[int] = ()) -> None:
    """The run of ``run``, however often it was killed, ended as if nothing had happened.

    Final state and the loss of every batch, also of those that were computed more than once.

    Args:
        unwritten: Batches that need not be in a rank's log: it was killed between their loss and that.
    """
    states, logs = undisturbed(run)
    for rank in range(run.ranks):
        found = list(differences(load(run, rank), states[rank]))
        assert not found, f"rank {rank}: {found[:10]}"
        assert_same_losses(events(run, rank), logs[rank], unwritten)
    assert "other numbers of tokens than the first time" not in output(run)


def assert_same_losses(
    lines: list[dict[str, Any]], truth: list[dict[str, Any]], unwritten: Collection[int] = ()
) -> None:
    wanted = {line["index"]: (line["loss"], line["step"]) for line in truth if line["event"] == "batch"}
    seen = [line for line in lines if line["event"] == "batch"]
    wrong = {line["index"] for line in seen if (line["loss"], line["step"]) != wanted[line["index"]]}
    assert not wrong, f"losses of batches {sorted(wrong)} differ from the undisturbed run"
    assert [index for index in wanted.keys() - {line["index"] for line in seen} if index not in unwritten] == []


def assert_promises_kept(run: Run) -> None:
    """No life came back to less than an earlier one had been told was committed."""
    acked = 0
    for life in split_lives(events(run)):
        restored = life[0]["step"] or 0
        assert restored >= acked, f"step {acked} was reported committed, but the run came back to {restored}"
        acked = max([acked, *(line["acked"] or 0 for line in life if line["event"] == "batch")])


def recomputed(run: Run) -> list[int]:
    """Of each life but the first: optimizer steps computed again, before the run was back where it had been.

    The step that was under way when the kill came is not counted, for it had not been done.
    """
    found, reached = [], 0
    for number, life in enumerate(split_lives(events(run))):
        batches = [line for line in life if line["event"] == "batch"]
        steps = [line["step"] for line in batches]
        if number and steps:
            found.append(len({step for step in steps if step <= reached}))
        reached = max([reached, *steps])
    return found


def assert_store_sound(run: Run, *, ended: bool) -> None:
    """Every committed checkpoint verifies; at the end nothing else is left of dead writers."""
    storage = open_storage(run.store)
    reader = StoreReader(storage)
    for directory in reader.directories():
        check_checkpoint(reader, reader.manifest(directory))
    if ended:
        assert temporaries(run.store) == []


def temporaries(root: str | Path) -> list[str]:
    return sorted(str(path) for path in Path(root).rglob("*") if path.name.endswith(".tmp"))


def manifests(root: str | Path) -> list[Manifest]:
    """Committed manifests, newest first."""
    reader = StoreReader(open_storage(root))
    return [reader.manifest(directory) for directory in reader.directories()]


def committed(root: str | Path) -> list[str]:
    return sorted(path.parent.name for path in Path(root).glob(f"*/{MANIFEST_NAME}"))


def fast_directory() -> str | None:
    """Memory-backed, where there is such a place: kill -9 loses nothing there either, and fsync is free."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for stores, gone after the test."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_", dir=fast_directory()) as directory:
        yield Path(directory)


if sys.platform != "linux":  # pragma: no cover
    pytest.skip("these tests read /proc and kill processes", allow_module_level=True)
