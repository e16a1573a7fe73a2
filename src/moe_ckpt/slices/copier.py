"""Copy live tensors into a host buffer behind the next forward and backward pass.

One thread per rank. The caller may change the live tensors again only after ``Copy.join``. On a GPU the bytes move on a
side stream, and the join makes the training stream wait, not the host. Through a gate they go chunk by chunk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.ports import GatedTransfer, TransferGate
from moe_ckpt.slices.copying import CopyProgram, CopyStep
from moe_ckpt.threads import ThreadName, named_pool

_TICK_SECS = 1e-6

Job = tuple[CopyProgram, torch.Tensor]
"""A program and the memory that it copies into."""
Move = tuple[CopyStep, torch.Tensor]
"""A step and the memory that its program copies into."""


class _CopiedVersions:
    """Notices tensors that were changed in place while they were being copied, by torch's version counters."""

    def __init__(self, programs: Sequence[CopyProgram]) -> None:
        self._programs = programs
        self._versions = self._now()

    def _now(self) -> list[npt.NDArray[np.uint32]]:
        return [program.versions() for program in self._programs]

    def changed(self) -> tuple[str, ...]:
        keys: list[str] = []
        for program, seen, now in zip(self._programs, self._versions, self._now(), strict=True):
            places = np.flatnonzero(now != seen)
            if len(places):
                keys += program.keys(places)
        return tuple(sorted(set(keys)))


_Issued = tuple[torch.cuda.Event | None, tuple[str, ...], float]
"""(event at the end of the copies on a device, what was seen to change, when the host was through)."""


class Copy:
    """A copy under way. ``join`` on the training thread; ``wait_on_host`` on the persist thread.

    changed: keys of tensors that something changed before the copy was done: the snapshot is torn. Known
    once ``join`` or ``wait_on_host`` has returned.
    secs: how long it took. Known once ``wait_on_host`` has returned.
    moving_secs: of those, less what a gate held it back. Known likewise.
    """

    def __init__(self, issued: Future[_Issued], watch: _CopiedVersions, transfer: GatedTransfer | None) -> None:
        self._issued = issued
        self._watch = watch
        self._transfer = transfer
        self._joined = threading.Event()
        self._began = time.perf_counter()
        self.changed: tuple[str, ...] = ()
        self.secs = 0.0

    @property
    def done(self) -> bool:
        return self._issued.done()

    @property
    def moving_secs(self) -> float:
        return self.secs if self._transfer is None else max(_TICK_SECS, self.secs - self._transfer.held_secs)

    def join(self) -> None:
        """Return when the live tensors may change. Raises what the copying thread raised."""
        event, self.changed, _ = self._issued.result()
        if event is not None:
            # The device may still be copying, but what the host has queued so far can be seen here.
            self.changed = self._watch.changed()
            torch.cuda.current_stream().wait_event(event)
        self._joined.set()

    def wait_on_host(self) -> None:
        """Return when the bytes are in host memory and ``changed`` is known."""
        event, changed, ended = self._issued.result()
        if event is None:
            self.changed, self.secs = changed, ended - self._began
        else:
            event.synchronize()
            self.secs = time.perf_counter() - self._began
        if self._transfer is not None:
            self._transfer.moved(self.moving_secs)
        if event is not None:
            self._joined.wait()


class Copier:
    """Owns the copying thread and, with CUDA, its stream.

    Args:
        on_phase: See ``driver.run.on_phase``.
        gate: Holds copies back; None: they go at once.
    """

    def __init__(self, on_phase: Callable[[str], None] | None = None, gate: TransferGate | None = None) -> None:
        self._pool = named_pool(ThreadName.COPY)
        self._on_phase = on_phase
        self._gate = gate
        self._stream: torch.cuda.Stream | None = None

    def start(self, jobs: Sequence[Job], *, on_device: bool = False) -> Copy:
        """Begin copying; returns at once. Nothing else may touch the jobs' memory until it is done.

        Args:
            jobs: What to copy.
            on_device: ``copy_here`` has asked a device for more, which belongs to this copy.
        """
        ready = None
        if on_device or any(program.is_cuda for program, _ in jobs):
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream())
        watch = _CopiedVersions([program for program, _ in jobs])
        transfer = None if self._gate is None else self._gate.copy(sum(program.nbytes for program, _ in jobs))
        return Copy(self._pool.submit(self._run, jobs, ready, watch, transfer), watch, transfer)

    def _run(
        self,
        jobs: Sequence[Job],
        ready: torch.cuda.Event | None,
        watch: _CopiedVersions,
        transfer: GatedTransfer | None,
    ) -> _Issued:
        moves = [(step, memory) for program, memory in jobs for step in program.steps]
        half = len(moves) // 2
        try:
            self._copy(moves[:half], ready, transfer)
            if self._on_phase is not None:
                self._on_phase("copy")
            done = self._copy(moves[half:], ready, transfer)
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()  # the snapshot fails, and its buffer is lent again
            raise
        return done, () if done is not None else watch.changed(), time.perf_counter()

    def _copy(
        self, moves: Sequence[Move], ready: torch.cuda.Event | None, transfer: GatedTransfer | None
    ) -> torch.cuda.Event | None:
        if ready is None or self._stream is None:
            self._carry_out(moves, transfer)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            self._carry_out(moves, transfer)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def _carry_out(self, moves: Sequence[Move], transfer: GatedTransfer | None) -> None:
        if transfer is None:
            carry_out(moves)
            return
        for step, memory in moves:
            for chunk in step.chunks(transfer.chunk_nbytes):
                idle_from = transfer.admit(chunk.size)
                if idle_from is not None and self._stream is not None:
                    self._stream.wait_event(idle_from)
                carry_out([(chunk, memory)])

    def close(self) -> None:
        """End the thread after the copy in hand. Never blocks for longer than that copy takes."""
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())


@torch.no_grad()
def carry_out(moves: Sequence[Move]) -> None:
    """Run steps one after the other, on the current stream where they read a device."""
    for step, memory in moves:
        step.run(memory)
