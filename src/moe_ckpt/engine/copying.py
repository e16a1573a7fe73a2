"""Copy live tensors into a host buffer behind the next forward and backward pass.

One thread per rank. The caller may change the live tensors again only after ``Copy.join``. On the CPU
the bytes move by ``memmove`` outside the GIL on one core, so that the training threads keep theirs; on a
GPU they move on a side stream, and the join makes the training stream wait, not the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moe_ckpt.engine.pieces import Piece
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.shard import SliceEntry

Placed = tuple[SliceEntry, torch.Tensor, int]
"""(laid-out entry, live source, byte offset of the shard inside the buffer)."""


class _Watch:
    """Notices tensors that were changed in place while they were being copied, by torch's version counters."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = placed
        self._versions = [source._version for _, source, _ in placed]

    def changed(self) -> tuple[str, ...]:
        if self._versions == [source._version for _, source, _ in self._placed]:
            return ()
        found = zip(self._placed, self._versions, strict=True)
        keys = (entry.key for (entry, source, _), seen in found if entry.operator and source._version != seen)
        return tuple(dict.fromkeys(keys))


_Issued = tuple[torch.cuda.Event | None, tuple[str, ...], float]
"""(event at the end of the copies on a device, what was seen to change, when the host was through)."""


class Copy:
    """A copy under way. ``join`` on the training thread; ``wait_on_host`` on the persist thread.

    changed: keys of tensors that something changed before the copy was done: the snapshot is torn. Known
    once ``join`` or ``wait_on_host`` has returned.
    secs: how long it took. Known once ``wait_on_host`` has returned.
    """

    def __init__(self, issued: Future[_Issued], watch: _Watch) -> None:
        self._issued = issued
        self._watch = watch
        self._joined = threading.Event()
        self._began = time.perf_counter()
        self.changed: tuple[str, ...] = ()
        self.secs = 0.0

    @property
    def done(self) -> bool:
        return self._issued.done()

    def join(self) -> None:
        """Return when the live tensors may change. Raises what the copying thread raised."""
        event, self.changed, _ = self._issued.result()
        if event is not None:
            # The device may still be copying, but what the host has asked for so far can be seen here.
            self.changed = self._watch.changed()
            torch.cuda.current_stream().wait_event(event)
        self._joined.set()

    def wait_on_host(self) -> None:
        """Return when the bytes are in host memory and ``changed`` is known."""
        event, changed, ended = self._issued.result()
        if event is None:
            self.changed, self.secs = changed, ended - self._began
            return
        event.synchronize()
        self.secs = time.perf_counter() - self._began
        self._joined.wait()


class Copier:
    """Owns the copying thread and, with CUDA, its stream."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="moe_ckpt-copy")
        self._on_phase = on_phase
        self._stream: torch.cuda.Stream | None = None

    def start(self, placed: Sequence[Placed], memory: torch.Tensor) -> Copy:
        """Begin copying; returns at once. ``memory`` is a byte tensor that nobody else touches until done."""
        ready = None
        if torch.cuda.is_initialized() and any(s.is_cuda for _, s, _ in placed):  # type: ignore[no-untyped-call]
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream())
        watch = _Watch(placed)
        return Copy(self._pool.submit(self._run, placed, memory, ready, watch), watch)

    def _run(
        self, placed: Sequence[Placed], memory: torch.Tensor, ready: torch.cuda.Event | None, watch: _Watch
    ) -> _Issued:
        half = len(placed) // 2
        self._copy(placed[:half], memory, ready)
        if self._on_phase is not None:
            self._on_phase("copy")
        done = self._copy(placed[half:], memory, ready)
        return done, () if done is not None else watch.changed(), time.perf_counter()

    def _copy(
        self, placed: Sequence[Placed], memory: torch.Tensor, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if ready is None or self._stream is None:
            copy_on_cpu(placed, memory)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for entry, source, base in placed:
                _target(entry, base, memory).copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def later(self, work: Callable[[], None]) -> None:
        """Do ``work`` on the copying thread when the copies asked for so far are done; its errors are dropped.

        From the thread itself too, even while it is being closed: the work is then left undone.
        """
        with contextlib.suppress(RuntimeError):
            self._pool.submit(work)

    def close(self) -> None:
        """End the thread after the copy in hand. Never blocks for longer than that copy takes."""
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())


def copy_on_cpu(placed: Sequence[Placed], memory: torch.Tensor) -> None:
    """Copy, joining runs that are adjacent in source and target into one ``memmove``.

    Compute weights may have another type than their master; those are converted.
    """
    run_source, run_target, run_bytes = 0, 0, 0
    base_address = memory.data_ptr()
    for entry, source, base in placed:
        if not source.is_contiguous() or source.dtype is not TORCH_DTYPES[entry.dtype]:
            _target(entry, base, memory).copy_(source)
            continue
        address, target = source.data_ptr(), base_address + base + entry.begin
        if address == run_source + run_bytes and target == run_target + run_bytes:
            run_bytes += entry.nbytes
            continue
        if run_bytes:
            ctypes.memmove(run_target, run_source, run_bytes)
        run_source, run_target, run_bytes = address, target, entry.nbytes
    if run_bytes:
        ctypes.memmove(run_target, run_source, run_bytes)


def _target(entry: SliceEntry, base: int, memory: torch.Tensor) -> torch.Tensor:
    raw = memory[base + entry.begin : base + entry.end]
    return raw.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def place(pieces: Sequence[Piece], laid_out: Sequence[SliceEntry], base: int) -> list[Placed]:
    """Join laid-out entries with their sources, in file order."""
    sources = {piece.entry.name: piece.source for piece in pieces}
    return [(entry, sources[entry.name], base) for entry in laid_out]
