"""Measures this machine's links: copies into host memory, the network between ranks, storage.

Each is measured by the path that checkpoints take: the copier and its buffers, gloo, and a store's storage with its
fsync. A rate is the median of several repeats after a first one that does not count.
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
from moe_ckpt.slices.copying import Copier, CopyProgram
from moe_ckpt.slices.cuts import Shelf, SliceSource
from moe_ckpt.storage import LocalStorage, open_storage
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.local import free_bytes
from moe_ckpt.tiers.buffers import BufferPool

MIB = 1 << 20
Progress = Callable[[str, int, int], None]
"""A callback that gets the name of the measurement, the repeats done and all repeats."""
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
        slowest_bytes_per_sec: Slowest of the repeats.
        fastest_bytes_per_sec: Fastest of the repeats.
        repeats: Number of repeats that counted.
    """

    how: str
    nbytes: int
    bytes_per_sec: float
    slowest_bytes_per_sec: float
    fastest_bytes_per_sec: float
    repeats: int


@dataclass(frozen=True)
class Rates:
    """The rates of one rank, while all other ranks do the same work.

    Attributes:
        copy: From the tensors' device into host memory.
        network: Out of one rank, while it receives as much.
        storage_write: To storage, until the data is durable.
        storage_read: From storage; from the disk, not from memory, if the system allows.
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
    """Measure this machine. With a process group of several ranks, this is a collective of all of them.

    Args:
        directory: A path or an fsspec URL on the storage that checkpoints go to; nothing stays in it.
        copy_bytes: Bytes to copy per repeat.
        network_bytes: Bytes to send per repeat.
        file_bytes: Bytes to write per repeat.
        repeats: Number of repeats that count.
        progress: Called as the work advances.

    Raises:
        ConfigError: A number is not above 0, or the directory does not exist.
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
    """Open the storage and check that all ranks together can write ``nbytes`` there."""
    storage = open_storage(directory)
    if isinstance(storage, LocalStorage):
        if not os.path.isdir(storage.root):
            raise ConfigError(f"measure(directory={os.fspath(directory)!r}): is not a directory; create it first")
        storage.probe()
        free = free_bytes(storage.root)
        if free < 2 * nbytes:  # a run on the same disk must not find it full
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
    """Ask the system to drop the file from its cache, so that reading it uses the disk. Not all systems can."""
    if isinstance(storage, LocalStorage) and hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            descriptor = os.open(os.path.join(storage.root, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# --- copy ---


def _copy(nbytes: int, repeats: int, tell: Progress, group: dist.ProcessGroup | None) -> Rate:
    """Measure copies by the trainer's own copier, with its thread and, on a GPU, its stream."""
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
    """Wait for all ranks, so that they work at the same time as in a run; a rank by itself is faster."""
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
    """Send ``nbytes`` from every rank to the next. This is a collective; it returns the slowest rank's seconds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Ones touch every page before the clock runs; pages of zeros would be allocated on arrival.
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
    """Measure between two new processes, which leave the caller's process groups alone."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_rate_") as directory:
        meeting = os.path.join(directory, "meeting")
        commands = [
            [sys.executable, "-m", "moe_ckpt_sim.planner.rates", meeting, str(rank), str(nbytes), str(repeats)]
            for rank in (0, 1)
        ]
        with _started(commands) as processes:
            try:
                outputs = [process.communicate(timeout=_PATIENCE_SECS) for process in processes]
            except subprocess.TimeoutExpired as error:
                raise StoreError(f"two local processes did not finish in {_PATIENCE_SECS:g} s") from error
            if any(process.returncode for process in processes):
                lines = b"\n".join(errors for _, errors in outputs).decode(errors="replace").strip().splitlines()
                raise StoreError(f"two local processes could not communicate: {' '.join(lines[-3:])}")
    secs: list[float] = json.loads(outputs[0][0])
    return secs


@contextlib.contextmanager
def _started(commands: list[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes, and end them on exit in any case."""
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
    """The rate of all repeats but the first, which paid for fresh memory and connections."""
    rates = [nbytes / max(one, 1e-9) for one in secs[1:]]
    return Rate(how, nbytes, median(rates), min(rates), max(rates), len(rates))


def _main(meeting: str, rank: int, nbytes: int, repeats: int) -> None:
    """Run one of two processes that meet in the file ``meeting``; print the seconds of a first and of each repeat."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        print(json.dumps([_exchange_secs(nbytes) for _ in range(repeats + 1)]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
