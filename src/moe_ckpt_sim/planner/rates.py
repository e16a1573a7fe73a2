"""What this machine's links give: copies into host memory, the network between ranks, storage.

Each is measured on the way that checkpoints take: the copier and its buffers, gloo, and the storage of a store with its
fsync. A rate is the median of several repeats after one that is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.errors import ConfigError, StoreError, StoreUnwritableError
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.slices.copier import Copier
from moe_ckpt.slices.copying import CopyProgram
from moe_ckpt.slices.cuts import Shelf, SliceSource
from moe_ckpt.storage import LocalStorage, open_storage
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.local import free_bytes
from moe_ckpt.tiers.buffers import BufferPool

MIB = 1 << 20
Progress = Callable[[str, int, int], None]
"""(what is measured, repeats done, repeats in all)"""
_PATIENCE_SECS = 120.0
"""Longest wait for another rank or process, which may have failed."""
_PIECE_BYTES = 8 * MIB


@dataclass(frozen=True)
class Rate:
    """One measurement.

    Attributes:
        how: What was measured, in words.
        nbytes: Moved per repeat.
        bytes_per_sec: Median of the repeats.
        slowest_bytes_per_sec: Of the repeats.
        fastest_bytes_per_sec: Likewise.
        repeats: How many counted.
    """

    how: str
    nbytes: int
    bytes_per_sec: float
    slowest_bytes_per_sec: float
    fastest_bytes_per_sec: float
    repeats: int


@dataclass(frozen=True)
class Rates:
    """Of one rank, with all others at the same work where there are others.

    Attributes:
        copy: From where tensors are into host memory.
        network: Out of one rank, while it receives as much.
        storage_write: Until it is durable.
        storage_read: Back, from the disk and not from memory where the system allows.
    """

    copy: Rate
    network: Rate
    storage_write: Rate
    storage_read: Rate

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure(
    directory: str | os.PathLike[str],
    *,
    copy_bytes: int = 256 * MIB,
    network_bytes: int = 64 * MIB,
    file_bytes: int = 256 * MIB,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Rates:
    """Measure this machine. A collective of all ranks where a process group of several is set up.

    Args:
        directory: On the storage that checkpoints are to go to, a path or an fsspec URL; nothing stays in it.
        copy_bytes: Moved per repeat.
        network_bytes: Likewise.
        file_bytes: Likewise.
        repeats: That count.
        progress: Called as the work advances.

    Raises:
        ConfigError: A number that is not above 0, or a directory that is none.
        StoreUnwritableError: The directory cannot be written, or has no room for ``file_bytes``.
        StoreError: Two local processes could not talk to each other.
    """
    sizes = {"copy_bytes": copy_bytes, "network_bytes": network_bytes, "file_bytes": file_bytes, "repeats": repeats}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"measure({name}={value!r}): {name} must be a whole number of at least 1")
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PATIENCE_SECS)) if _several() else None
    storage = _storage(directory, file_bytes * (1 if group is None else dist.get_world_size()))
    tell = progress or (lambda what, done, total: None)
    network = _network(network_bytes, repeats, tell, group)
    copy = _copy(copy_bytes, repeats, tell, group)
    return Rates(copy, network, *_storage_rates(storage, file_bytes, repeats, tell, group))


# --- storage ---


def _storage(directory: str | os.PathLike[str], nbytes: int) -> Storage:
    """nbytes: that all ranks together are going to write there, at most."""
    storage = open_storage(directory)
    if isinstance(storage, LocalStorage):
        if not os.path.isdir(storage.root):
            raise ConfigError(f"measure(directory={os.fspath(directory)!r}): is not a directory; create it first")
        storage.probe()
        free = free_bytes(storage.root)
        if free < 2 * nbytes:  # a run that is under way on the same disk must not find it full
            raise StoreUnwritableError(
                f"{storage.root} has {free:,} bytes left, but measuring needs twice the {nbytes:,} that it writes. "
                "Make room, or give a smaller file_bytes"
            )
        return storage
    storage.probe()
    return storage


def _storage_rates(
    storage: Storage, nbytes: int, repeats: int, tell: Progress, group: dist.ProcessGroup | None
) -> tuple[Rate, Rate]:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().data  # nothing that a disk could compress
    written, read = list[float](), list[float]()
    for repeat in range(repeats + 1):
        tell("storage", repeat, repeats + 1)
        name = f"moe_ckpt_rate_{secrets.token_hex(8)}"
        _together(group)
        try:
            began = time.perf_counter()
            storage.write(name, [data])
            written.append(time.perf_counter() - began)
            _forget(storage, name)
            began = time.perf_counter()
            for offset in range(0, nbytes, _PIECE_BYTES):
                storage.read(name, offset, _PIECE_BYTES)
            read.append(time.perf_counter() - began)
        except OSError as error:
            raise StoreUnwritableError(
                f"{storage.root} could not write a file of {nbytes:,} bytes and read it again: {error}. Make room, or "
                "give a smaller file_bytes"
            ) from error
        finally:
            storage.delete(name)
    tell("storage", repeats + 1, repeats + 1)
    where = f"{type(storage).__name__} at {storage.root}"
    return _rate(f"write and fsync, {where}", nbytes, written), _rate(f"read back, {where}", nbytes, read)


def _forget(storage: Storage, name: str) -> None:
    """Ask the system to drop the file from its memory, so that reading it means the disk. Not all systems can."""
    if isinstance(storage, LocalStorage) and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.join(storage.root, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# --- copy ---


def _copy(nbytes: int, repeats: int, tell: Progress, group: dist.ProcessGroup | None) -> Rate:
    """By the trainer's own copier: its thread, and its stream where there is a GPU."""
    cuda = torch.cuda.is_available()
    source = torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if cuda else "cpu").fill_(1)
    pool = BufferPool(2 * nbytes, pinned=cuda)
    buffers = pool.acquire([nbytes])
    if buffers is None:
        raise ConfigError(f"measure(copy_bytes={nbytes}): no buffer of that size")
    entry = SliceEntry("model/rate", "", "U8", (0,), (nbytes,), (nbytes,), 0, nbytes)
    shelf, first = Shelf(), np.zeros(1, dtype=np.int64)
    shelf.add("", [SliceSource(entry, source, source)], {})
    program = CopyProgram(shelf, first, shelf.table(first), first)
    secs = list[float]()
    copier = Copier()
    try:
        for repeat in range(repeats + 1):
            tell("copy", repeat, repeats + 1)
            _together(group)
            copy = copier.start([(program, buffers[0].memory)])
            copy.join()
            copy.wait_on_host()
            secs.append(copy.secs)
    finally:
        copier.close()
    tell("copy", repeats + 1, repeats + 1)
    how = f"{torch.cuda.get_device_name()} to page-locked host memory" if cuda else "host memory to host memory, 1 core"
    return _rate(how, nbytes, secs)


# --- network ---


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _together(group: dist.ProcessGroup | None) -> None:
    """All ranks at the same time, as they are in a run; each by itself is faster than that."""
    if group is not None:
        dist.barrier(group)


def _network(nbytes: int, repeats: int, tell: Progress, group: dist.ProcessGroup | None) -> Rate:
    if group is not None:
        secs = []
        for repeat in range(repeats + 1):
            tell("network", repeat, repeats + 1)
            secs.append(_exchange_secs(nbytes, group))
        tell("network", repeats + 1, repeats + 1)
        return _rate(f"gloo, each of {dist.get_world_size()} ranks to the next", nbytes, secs)
    tell("network", 0, 1)
    secs = _loopback(nbytes, repeats)
    tell("network", 1, 1)
    return _rate("gloo, two processes of this machine over loopback: no network", nbytes, secs)


def _exchange_secs(nbytes: int, group: dist.ProcessGroup | None = None) -> float:
    """Every rank sends ``nbytes`` to the next one and receives as much. A collective; the slowest rank's seconds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Both are touched before the clock runs: zeros would be given pages only when they arrive.
    sent, received = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    dist.barrier(group)
    began = time.perf_counter()
    sending = dist.isend(sent, (rank + 1) % ranks, group)
    dist.recv(received, (rank - 1) % ranks, group)
    if sending is not None:
        sending.wait()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, group)
    return float(took)


def _loopback(nbytes: int, repeats: int) -> list[float]:
    """Two processes of their own, so that nothing of the caller's process groups is touched."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_rate_") as directory:
        meeting = os.path.join(directory, "meeting")
        commands = [
            [sys.executable, "-m", "moe_ckpt_sim.planner.rates", meeting, str(rank), str(nbytes), str(repeats)]
            for rank in (0, 1)
        ]
        with _started(commands) as processes:
            try:
                said = [process.communicate(timeout=_PATIENCE_SECS) for process in processes]
            except subprocess.TimeoutExpired as error:
                raise StoreError(f"two local processes did not finish in {_PATIENCE_SECS:g} s") from error
            if any(process.returncode for process in processes):
                lines = b"\n".join(errors for _, errors in said).decode(errors="replace").strip().splitlines()
                raise StoreError(f"two local processes could not communicate: {' '.join(lines[-3:])}")
    found: list[float] = json.loads(said[0][0])
    return found


@contextlib.contextmanager
def _started(commands: list[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are gone afterwards, whatever happened."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = list[subprocess.Popen[bytes]]()
    try:
        for command in commands:
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _rate(how: str, nbytes: int, secs: list[float]) -> Rate:
    """The first repeat paid for fresh memory and connections, and is not counted."""
    rates = [nbytes / max(one, 1e-9) for one in secs[1:]]
    return Rate(how, nbytes, median(rates), min(rates), max(rates), len(rates))


def _main(meeting: str, rank: int, nbytes: int, repeats: int) -> None:
    """One of two processes that meet in the file ``meeting``; prints the seconds of each repeat and one before."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        print(json.dumps([_exchange_secs(nbytes) for _ in range(repeats + 1)]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
