"""Copies live tensors into a host buffer during the next forward and backward pass, with few calls, which are planned
once per part of a plan.

One thread per rank. The caller may change the live tensors again only after ``Copy.join``. On a GPU the copy runs on a
side stream, and the join makes the training stream wait, not the host. A gate admits the copy chunk by chunk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.format.shard import TORCH_DTYPES, SliceEntry, with_byte_range
from moe_ckpt.memory.mapping import LOCK_NBYTES
from moe_ckpt.ports import GatedTransfer, TransferGate
from moe_ckpt.slices.cuts import (
    ADDRESS,
    BLOCK,
    KIND,
    MEMORY,
    NBYTES,
    Numbers,
    Shelf,
    Table,
    ascending,
    on_cuda,
)
from moe_ckpt.threads import ThreadName, named_pool

log = logging.getLogger("moe_ckpt")

_VERSION = attrgetter("_version")
_LARGE_NBYTES = 1 << 16
"""From this size on a run of neighbours is copied by itself; smaller runs are gathered, many by one call."""
_WORTH_JOINING = 8
"""From this many neighbours on, one tensor for all is quicker than gathering them one by one."""
_GATHERED = (1 << 15) - 1
"""Elements that one call gathers: so few that torch uses one core, and leaves the others to training."""
_LARGE_ON_DEVICE, _GATHERED_ON_DEVICE = 1 << 20, 1 << 20
"""The same for a device: to begin a transfer over the bus takes as long as to transfer some hundred KB."""


class CopyProgram:
    """The copies of one part of a plan: few calls, each of which runs without the interpreter lock.

    Slices that are neighbours in memory and in the target are one run. Large runs are copied one by one. Small runs
    that follow one another are gathered by one ``torch.cat``: into the target, or on a GPU, from where one transfer
    brings the result to the host. A slice that is not contiguous, or must be converted (compute weights may have
    another type than their masters), is copied by itself.

    Args:
        shelf: Of the slices.
        numbers: Of the slices on the shelf, in the order of the target.
        table: Rows of the slices, see ``slices.cuts``.
        begins: First byte of each in the target.
        at_once: Keys of tensors that something other than the optimizer changes.

    Attributes:
        at_once: Slices of these tensors, which ``copy_here`` copies instead.
        is_cuda: True if any of the tensors is on a GPU.
    """

    def __init__(
        self, shelf: Shelf, numbers: Numbers, table: Table, begins: Numbers, at_once: Collection[str] = ()
    ) -> None:
        self._shelf = shelf
        self.at_once: list[tuple[SliceEntry, torch.Tensor]] = []
        if at_once:
            now = np.array([shelf.entries[number].key in at_once for number in numbers.tolist()], dtype=bool)
            early = zip(numbers[now].tolist(), begins[now].tolist(), strict=True)
            self.at_once = [
                (with_byte_range(shelf.entries[number], begin), shelf.source(number)) for number, begin in early
            ]
            numbers, table, begins = numbers[~now], table[~now], begins[~now]
        self._numbers, self._table, self._begins = numbers, table, begins
        self._watched = ascending(table[:, BLOCK], len(shelf.blocks))
        self.is_cuda = on_cuda(table, shelf)

    def release(self) -> None:
        """Drops all references to live tensors: nothing more is copied from them."""
        for name in ("steps", "_blocks"):
            self.__dict__.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that ``steps`` copy."""
        return int(self._table[:, NBYTES].sum())

    def versions(self) -> Numbers:
        """Returns how often each tensor that is copied was written to."""
        return write_counts(self._blocks)

    @cached_property
    def _blocks(self) -> list[torch.Tensor]:
        """The tensors that are copied from."""
        return [self._shelf.blocks[at] for at in self._watched.tolist()]

    def changed_since(self, before: Numbers) -> Iterator[str]:
        """Yields the keys of tensors to copy that were written to since ``before`` (of ``write_counts``)."""
        places = np.flatnonzero(self.versions() != before)
        if len(places):
            is_copied = np.isin(self._table[:, BLOCK], self._watched[places])
            yield from (self._shelf.entries[number].key for number in self._numbers[is_copied].tolist())

    @cached_property
    def steps(self) -> tuple[CopyStep, ...]:
        """The calls, which the copying thread plans when it first needs them."""
        steps = self._steps() if len(self._numbers) else ()
        return tuple(chunk for step in steps for chunk in step.chunks(_PIECE_NBYTES))

    def _steps(self) -> Iterator[CopyStep]:
        tensors, numbers, target_begins = self._shelf.sources, self._numbers, self._begins
        large, gathered = (_LARGE_ON_DEVICE, _GATHERED_ON_DEVICE) if self.is_cuda else (_LARGE_NBYTES, _GATHERED)
        nbytes, memory, address, kinds = self._table[:, [NBYTES, MEMORY, ADDRESS, KIND]].T
        ends = target_begins + nbytes
        touching = (ends[:-1] == target_begins[1:]) & (kinds[:-1] == kinds[1:]) & (kinds[1:] >= 0)
        following = (memory[:-1] == memory[1:]) & (address[:-1] + nbytes[:-1] == address[1:])
        first, lengths = _runs(touching & following, nbytes)
        begin, end, kind = target_begins[first], ends[first + lengths - 1], kinds[first]
        small = (kind >= 0) & (end - begin < large)
        fitting = small[:-1] & small[1:] & (end[:-1] == begin[1:]) & (kind[:-1] == kind[1:])
        stretches = _starts(fitting, len(first)).tolist()
        for at, stop in zip(stretches, [*stretches[1:], len(first)], strict=True):
            if kind[at] < 0:
                number = int(numbers[first[at]])
                entry = self._shelf.entries[number]
                yield CopyStep(int(begin[at]), int(end[at]), TORCH_DTYPES[entry.dtype], (tensors[number],), entry.shape)
                continue
            itemsize = tensors[int(numbers[first[at]])].itemsize
            while at < stop:
                most = begin[at] + gathered * itemsize
                upto = max(at + 1, at + int(np.searchsorted(end[at:stop], most, side="right")))
                heads = [tensors[number] for number in numbers[first[at:upto]].tolist()]
                yield _gathered(heads, lengths[at:upto], begin[at:upto], end[at:upto])
                at = upto


@dataclass(frozen=True, eq=False)
class CopyStep:
    """One call, which fills the bytes ``[begin, end)`` of the target.

    Attributes:
        dtype: Of the target's elements.
        sources: Contiguous and flat tensors, one after the other; or a single one of any shape.
        shape: Of a single source that is copied element by element; else None.
    """

    begin: int
    end: int
    dtype: torch.dtype
    sources: tuple[torch.Tensor, ...]
    shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Bytes that the call copies."""
        return self.end - self.begin

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        """The bytes of a single source in host memory."""
        source: npt.NDArray[np.uint8] = self.sources[0].view(torch.uint8).numpy()
        return source

    def chunks(self, most: int) -> Iterator[CopyStep]:
        """Yields the same copy in pieces of at most ``most`` bytes, if it is a single run."""
        if self.size <= most or len(self.sources) > 1 or self.shape is not None:
            yield self
            return
        whole, width = self.sources[0], self.sources[0].itemsize
        elements = most // width
        for first in range(0, len(whole), elements):
            begin, run = self.begin + first * width, whole[first : first + elements]
            yield CopyStep(begin, begin + len(run) * width, self.dtype, (run,))

    def run(self, memory: torch.Tensor) -> None:
        """Copies into host memory: from the CPU at once, from a device on its current stream."""
        into = memory[self.begin : self.end]
        first = self.sources[0]
        if self.shape is not None or not first.is_cpu:
            sources, begin = self.sources, 0
            if len(sources) > 1:
                try:
                    sources = (torch.cat(sources),)
                except torch.OutOfMemoryError:
                    warn_device_is_full()
            for source in sources:
                end = begin + source.numel() * self.dtype.itemsize
                transfer(source, into[begin:end], self.dtype, self.shape or (-1,))
                begin = end
        elif len(self.sources) == 1:
            np.copyto(into.numpy(), self._bytes)  # copy_ would take all cores
        else:
            torch.cat(self.sources, out=into.view(self.dtype))


@cache
def warn_device_is_full() -> None:
    """Warns, once, that a device has no memory for copies to begin or to end in."""
    log.warning(
        "the GPU has no memory left, not even a few MB to gather small tensors in: they are copied one by one, and "
        "what does not lie in one piece by way of the host, which takes longer. Does another process use this GPU?"
    )


def write_counts(tensors: Sequence[torch.Tensor]) -> Numbers:
    """Returns how often each tensor was written to, as far as torch counts that."""
    with torch._C.DisableTorchFunction():  # a default device would run Python for each
        return np.fromiter(map(_VERSION, tensors), np.int64, len(tensors))


def _starts(joined: npt.NDArray[np.bool_], count: int) -> Numbers:
    """Returns the first element of each stretch of ``count`` elements.

    Args:
        joined: For each element but the first, whether it is in the same stretch as the one before.
        count: Elements.
    """
    return np.concatenate([np.zeros(min(count, 1), dtype=np.int64), np.flatnonzero(~joined) + 1])


def _runs(joined: npt.NDArray[np.bool_], nbytes: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the first slice of each run, and the number of its slices. A short run of small slices is divided again,
    since a tensor of its own is not worth it.

    Args:
        joined: For each slice but the first, whether it follows the one before in memory and in the target.
        nbytes: Of each slice.
    """
    first = _starts(joined, len(nbytes))
    lengths = np.diff(first, append=len(nbytes))
    few = (lengths < _WORTH_JOINING) & (np.add.reduceat(nbytes, first) < _LARGE_NBYTES)
    first = _starts(joined & ~np.repeat(few, lengths)[1:], len(nbytes))
    return first, np.diff(first, append=len(nbytes))


def _gathered(heads: list[torch.Tensor], lengths: Numbers, begins: Numbers, ends: Numbers) -> CopyStep:
    """Returns the call that gathers runs which follow one another.

    Args:
        heads: First slice of each run.
        lengths: Number of its slices.
        begins, ends: Bytes of each run in the target.
    """
    counts = ((ends - begins) // heads[0].itemsize).tolist()
    for at in np.flatnonzero(lengths > 1).tolist():
        heads[at] = torch.as_strided(heads[at], (counts[at],), (1,))
    return CopyStep(int(begins[0]), int(ends[-1]), heads[0].dtype, tuple(heads))


def copy_here(sources: Sequence[tuple[SliceEntry, torch.Tensor]], memory: torch.Tensor) -> bool:
    """Copies from the CPU at once, and from a device on its current stream, without waiting for that.

    Returns:
        True if a source is on a device: its bytes are there when the copy of the next ``Copier.start`` is done.
    """
    for entry, source in sources:
        transfer(source, memory[entry.begin : entry.end], TORCH_DTYPES[entry.dtype], entry.shape)
    return any(source.is_cuda for _, source in sources)


def transfer(source: torch.Tensor, memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Copies a tensor into host memory: from the CPU at once, from a device on its current stream. If the device has no
    memory to convert it or to make it contiguous, the copy is made at once.

    Args:
        source: The tensor.
        memory: ``[nbytes]`` uint8, all of which is written.
        dtype: Of the elements in ``memory``.
        shape: Of ``source``; (-1,) for a flat one.
    """
    ends = _lock_ends(memory) if source.is_cuda else []
    try:
        if not ends:
            memory.view(dtype).view(tuple(shape)).copy_(source, non_blocking=True)
            return
        flat, width = source.to(dtype).contiguous().view(-1), dtype.itemsize  # CUDA refuses a copy across such an end
        for begin, end in zip([0, *ends], [*ends, memory.numel()], strict=True):
            memory[begin:end].view(dtype).copy_(flat[begin // width : end // width], non_blocking=True)
    except torch.OutOfMemoryError:
        warn_device_is_full()
        memory.view(dtype).view(tuple(shape)).copy_(_on_host(source))


def _on_host(source: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a device's tensor on the host, which needs no memory of the device: the memory between its
    elements is copied as well."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    whole = torch.empty(extent, dtype=source.dtype, device="cpu").copy_(source.as_strided((extent,), (1,)))
    return whole.as_strided(source.shape, source.stride())


def _lock_ends(memory: torch.Tensor) -> list[int]:
    """Returns the bytes in ``memory`` at which a piece that CUDA has locked ends (``memory.mapping``)."""
    before = -memory.data_ptr() % LOCK_NBYTES or LOCK_NBYTES
    return list(range(before, memory.numel(), LOCK_NBYTES))


def slice_view(entry: SliceEntry, memory: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a slice in a part's memory, as a tensor of its type and shape."""
    return memory[entry.begin : entry.end].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


_TICK_SECS = 1e-6

Job = tuple[CopyProgram, torch.Tensor]
"""A program and the memory that it copies into."""
Move = tuple[CopyStep, torch.Tensor]
"""A step and the memory that its program copies into."""
_Position = tuple[int, int]
"""(number of a job, byte of its memory): what lies before it in the order of the copies."""
_PIECE_NBYTES = 64 << 20
"""After so many bytes a copy notes its progress: checksums are taken of them while the rest is copied."""


class Copy:
    """A copy under way. ``join`` is for the training thread, ``wait_on_host`` and ``wait_for`` for others.

    Attributes:
        ready: The device has done by then what was queued before the copy; None for tensors on the CPU.
        transfer: Holds the copy back; None if nothing does.
        changed: Keys of tensors that were changed in place before the copy was done, which tears the snapshot. Known
            once ``join`` or ``wait_on_host`` has returned.
        secs: Duration. Known once ``wait_on_host`` has returned.
    """

    issued: Future[torch.cuda.Event | None]
    """Done when the host is through with the copy: the event of the device at its end, if there is one."""

    def __init__(
        self, programs: Sequence[CopyProgram], ready: torch.cuda.Event | None, transfer: GatedTransfer | None
    ) -> None:
        self.ready, self.transfer = ready, transfer
        self.changed: tuple[str, ...] = ()
        self.secs = self._ran_secs = 0.0
        self._versions = [(program, program.versions()) for program in programs]
        self._joined = threading.Event()
        self._progress = threading.Condition()
        self._pieces: list[tuple[_Position, torch.cuda.Event | None]] = []
        self._has_ended = False
        self._began = time.perf_counter()

    @property
    def moving_secs(self) -> float:
        """``secs`` without the time for which a gate held the copy back; on a device by its own clock, from ``ready``
        on."""
        held_secs = 0.0 if self.transfer is None else self.transfer.held_secs
        return max(_TICK_SECS, self._ran_secs - held_secs)

    def _changes(self) -> tuple[str, ...]:
        """Returns the keys of tensors that were written to since the copy began, by torch's version counters."""
        return tuple(sorted({key for program, versions in self._versions for key in program.changed_since(versions)}))

    # --- on the copying thread ---

    def note(self, position: _Position, event: torch.cuda.Event | None) -> None:
        """Everything before a position is copied, on a device by the time of ``event``."""
        with self._progress:
            self._pieces.append((position, event))
            self._progress.notify_all()

    def end(self, *, on_device: bool) -> None:
        """Nothing more comes, since all is copied or something failed."""
        with self._progress:
            self._has_ended = True
            self._progress.notify_all()
        if not on_device:
            self.changed = self._changes()
            self.secs = self._ran_secs = time.perf_counter() - self._began

    # --- on others ---

    def join(self) -> None:
        """Return when the live tensors may change. Raises what the copying thread raised."""
        event = self.issued.result()
        if event is not None:
            # The device may still be copying, but what the host has queued so far can be seen here.
            self.changed = self._changes()
            torch.cuda.current_stream().wait_event(event)
        self._joined.set()

    def wait_for(self, job: int, end: int) -> None:
        """Return when the first bytes of a job's memory, up to ``end``, are there. Raises what the copying thread
        raised."""
        position = job, end
        with self._progress:
            self._progress.wait_for(lambda: self._has_ended or (self._pieces and self._pieces[-1][0] >= position))
            events = [event for reached, event in self._pieces if reached >= position][:1]
        if not events:
            self.issued.result()
        for event in events:
            if event is not None:
                event.synchronize()

    def wait_on_host(self) -> None:
        """Return when the bytes are in host memory and ``changed`` is known. Raises what the copying thread raised."""
        event = self.issued.result()
        if event is not None:
            event.synchronize()
            self.secs = time.perf_counter() - self._began
            self._ran_secs = self.secs if self.ready is None else self.ready.elapsed_time(event) / 1e3
        if self.transfer is not None:
            self.transfer.moved(self.moving_secs)
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
        """Begins to copy, and returns at once. Nothing else may use the jobs' memory until the copy is done.

        Args:
            jobs: Programs, each with its memory.
            on_device: ``copy_here`` has begun copies from a device, which belong to this copy.
        """
        ready = None
        programs = [program for program, _ in jobs]
        if on_device or any(program.is_cuda for program in programs):
            # Training's kernels go first: 0 is the lowest priority that CUDA has.
            self._stream = self._stream or torch.cuda.Stream(priority=0)  # type: ignore[no-untyped-call]
            ready = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream())
        transfer = None if self._gate is None else self._gate.copy(sum(program.nbytes for program in programs))
        copy = Copy(programs, ready, transfer)
        copy.issued = self._pool.submit(self._run, jobs, copy)
        return copy

    def _run(self, jobs: Sequence[Job], copy: Copy) -> torch.cuda.Event | None:
        done: torch.cuda.Event | None = None
        try:
            pieces = list(_pieces(jobs))
            for at, (moves, position) in enumerate(pieces):
                if at == len(pieces) // 2 and self._on_phase is not None:
                    self._on_phase("copy")
                done = self._copy(moves, copy)
                copy.note(position, done)
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()  # the snapshot fails, and its buffer is lent again
            raise
        finally:
            copy.end(on_device=done is not None)
        return done

    def _copy(self, moves: Sequence[Move], copy: Copy) -> torch.cuda.Event | None:
        admitted = moves if copy.transfer is None else self._admitted(moves, copy.transfer)
        if copy.ready is None or self._stream is None:
            run_copy_steps(admitted)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copy.ready)
            run_copy_steps(admitted)
            done = torch.cuda.Event(blocking=True, enable_timing=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def _admitted(self, moves: Sequence[Move], transfer: GatedTransfer) -> Iterator[Move]:
        """Yields chunks, each when the gate lets it go."""
        for step, memory in moves:
            for chunk in step.chunks(transfer.chunk_nbytes):
                idle_from = transfer.admit(chunk.size)
                if idle_from is not None and self._stream is not None:
                    self._stream.wait_event(idle_from)
                yield chunk, memory

    def close(self) -> None:
        """Ends the thread after the copy under way. Never blocks for longer than that copy takes."""
        self._pool.shutdown(wait=threading.current_thread() is threading.main_thread())


def _pieces(jobs: Sequence[Job]) -> Iterator[tuple[list[Move], _Position]]:
    """Yields all moves, in order and in two pieces or more, each with the position at its end."""
    most = min(_PIECE_NBYTES, max(1, sum(program.nbytes for program, _ in jobs) // 2))
    piece, nbytes = list[Move](), 0
    for number, (program, memory) in enumerate(jobs):
        for step in program.steps:
            piece.append((step, memory))
            nbytes += step.size
            if nbytes >= most:
                yield piece, (number, step.end)
                piece, nbytes = [], 0
    yield piece, (len(jobs), 0)


@torch.no_grad()
def run_copy_steps(moves: Iterable[Move]) -> None:
    """Runs steps one after the other; from a device on its current stream."""
    for step, memory in moves:
        step.run(memory)
