"""Rates of this machine's memory: locking it, copying to and from the device, checksums by threads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

_PIECE = 64 << 20
Rates = dict[str, float]
"""What was done -> GB a second."""


def measure(device: str, directory: Path, nbytes: int) -> Rates:
    """Measures every rate once warm.

    Args:
        device: "cuda" or "cpu"; without a GPU nothing is locked, and copies stay on the host.
        directory: On the tmpfs that holds checkpoints in memory.
        nbytes: Moved each time.
    """
    rates: Rates = {}

    def timed(name: str, move: Callable[[], object]) -> None:
        began = time.perf_counter()
        move()
        rates[name] = nbytes / (time.perf_counter() - began) / 1e9

    with tempfile.TemporaryFile(dir=directory) as file:
        file.truncate(nbytes)
        host = torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)
        timed("touching new pages of tmpfs", lambda: host.fill_(1))
        source = torch.empty(nbytes, dtype=torch.uint8, device=device)
        source.fill_(2)
        if device == "cuda":
            _on_gpu(timed, host, source)
        else:
            timed("copying from host to host", lambda: host.copy_(source))
        for threads in (1, 4, 8):
            timed(f"checksums by {threads} threads", partial(_checksums, host, threads))
    return rates


def _on_gpu(timed: Callable[[str, Callable[[], object]], None], host: torch.Tensor, source: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def moved(target: torch.Tensor, origin: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(origin, non_blocking=True)
        stream.synchronize()

    moved(host, source)
    timed("copying from device to pageable host", lambda: moved(host, source))
    timed("locking pages", lambda: torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)))
    try:
        moved(host, source)
        timed("copying from device to locked host", lambda: moved(host, source))
        timed("copying from locked host to device", lambda: moved(source, host))
    finally:
        timed("unlocking pages", lambda: torch.cuda.check_error(runtime.cudaHostUnregister(host.data_ptr())))


def _checksums(host: torch.Tensor, threads: int) -> None:
    pieces = [host[at : at + _PIECE].numpy() for at in range(0, host.numel(), _PIECE)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(xxhash.xxh3_64_intdigest, pieces))
