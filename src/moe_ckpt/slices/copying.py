"""Copy live tensors into a host buffer behind the next forward and backward pass.

One thread per rank. The caller may change the live tensors again only after ``Copy.join``. On the CPU the bytes move
outside the interpreter lock on one core, so that the training threads keep theirs; on a GPU they move on a side stream,
and the join makes the training stream wait, not the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.format import tensor_words
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.gathering import Numbers, Values, by_size, memory_at, pieces_of
from moe_ckpt.format.shard import SliceEntry, moved
from moe_ckpt.slices.cuts import (
    ADDRESS,
    BLOCK,
    IN_HOST_MEMORY,
    KIND,
    MEMORY,
    NBYTES,
    Shelf,
    Table,
)

_LARGE_NBYTES = 1 << 16
"""From here on a run of neighbours is moved by itself; smaller ones are gathered, many by one call."""
_AT_A_TIME_NBYTES = 1 << 18
"""Of small runs in host memory, so much by one call: they are still in the cache when they are written."""
_WORTH_JOINING = 8
"""From so many neighbours on a device on it is quicker to make one tensor of them than to gather them one by one."""
_GATHERED = (1 << 15) - 1
"""Elements that one call gathers: so few that torch does it on one core, and training keeps the others."""


class CopyProgram:
    """The copies of one part of a plan, worked out once: few calls, each of which runs without the interpreter lock.

    Neighbours in memory that are neighbours in the target too are one run. Large runs are moved one by one. Small ones
    in host memory are moved by their addresses, all of one size by one call, so that no tensor is looked at. Those on a
    GPU that follow one another are gathered there by one ``torch.cat``, and one transfer brings the result to the host.
    What is not contiguous, or must be converted (compute weights may have another type than their master), is copied by
    itself.

    Args:
        shelf: Has what is copied.
        numbers: Its slices there, in the order of the target.
        table: Of them, see ``slices.cuts``.
        begins: Where each goes.
        at_once: Keys of tensors that ``copy_at_once`` copies instead.

    Attributes:
        blocks: The tensors that are copied, in the order in which they lie in memory.
        is_cuda: Whether any of them is on a GPU.
    """

    def __init__(
        self, shelf: Shelf, numbers: Numbers, table: Table, begins: Numbers, at_once: Collection[str] = ()
    ) -> None:
        self._shelf = shelf
        self._at_once: list[tuple[SliceEntry, torch.Tensor]] = []
        if at_once:
            now = np.array([shelf.entries[number].key in at_once for number in numbers.tolist()], dtype=bool)
            early = zip(numbers[now].tolist(), begins[now].tolist(), strict=True)
            self._at_once = [(moved(shelf.entries[each], begin), shelf.source(each)) for each, begin in early]
            numbers, table, begins = numbers[~now], table[~now], begins[~now]
        self._numbers, self._table, self._begins = numbers, table, begins
        first = _starts(table[1:, BLOCK] == table[:-1, BLOCK], len(numbers))
        self._watched = numbers[first[np.argsort(table[first, BLOCK])]]
        self.blocks = tuple(map(shelf.blocks.__getitem__, self._watched.tolist()))
        self._counters = shelf.counters(self._watched)
        elsewhere = numbers[table[:, KIND] != IN_HOST_MEMORY].tolist()
        self.is_cuda = any(map(_IS_CUDA, map(shelf.blocks.__getitem__, elsewhere)))

    @property
    def keys(self) -> list[str]:
        """Of ``blocks``."""
        return [self._shelf.entries[number].key for number in self._watched.tolist()]

    def versions(self) -> Values:
        """How often each of ``blocks`` was written to."""
        if self._counters is not None:
            return tensor_words.counts(self._counters)
        return np.fromiter(map(tensor_words.VERSION, self.blocks), np.uint64, len(self.blocks))

    @cached_property
    def steps(self) -> tuple[HostMoves | CopyStep, ...]:
        """Made on the copying thread, when it first needs them."""
        there = self._table[:, KIND] == IN_HOST_MEMORY
        others = np.flatnonzero(~there)
        return (*self._host_steps(there), *(self._steps(others) if len(others) else ()))

    def _host_steps(self, there: npt.NDArray[np.bool_]) -> Iterator[HostMoves]:
        """there: of each piece, whether it lies contiguous in host memory."""
        there = there & (self._table[:, NBYTES] > 0)
        if not there.any():
            return
        nbytes, address = self._table[there][:, [NBYTES, ADDRESS]].T
        begins = self._begins[there]
        joined = (begins[:-1] + nbytes[:-1] == begins[1:]) & (address[:-1] + nbytes[:-1] == address[1:])
        first = _starts(joined, len(begins))
        sizes = np.add.reduceat(nbytes, first)
        for size, those in by_size(sizes):
            most = max(1, _AT_A_TIME_NBYTES // size)
            for at in range(0, len(those), most):
                these = first[those[at : at + most]]
                yield HostMoves(size, address[these], begins[these])

    def _steps(self, which: Numbers) -> Iterator[CopyStep]:
        """The runs of neighbours among the pieces at ``which`` places, small ones gathered."""
        tensors, numbers, target_begins = self._shelf.others, self._numbers[which], self._begins[which]
        nbytes, memory, address, kinds = self._table[which][:, [NBYTES, MEMORY, ADDRESS, KIND]].T
        ends = target_begins + nbytes
        touching = (ends[:-1] == target_begins[1:]) & (kinds[:-1] == kinds[1:]) & (kinds[1:] >= 0)
        following = (memory[:-1] == memory[1:]) & (address[:-1] + nbytes[:-1] == address[1:])
        first, lengths = _runs(touching & following, nbytes)
        begin, end, kind = target_begins[first], ends[first + lengths - 1], kinds[first]
        small = (kind >= 0) & (end - begin < _LARGE_NBYTES)
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
                most = begin[at] + _GATHERED * itemsize
                upto = max(at + 1, at + int(np.searchsorted(end[at:stop], most, side="right")))
                heads = [tensors[number] for number in numbers[first[at:upto]].tolist()]
                yield _gathered(heads, lengths[at:upto], begin[at:upto], end[at:upto])
                at = upto

    def copy_at_once(self, memory: torch.Tensor) -> bool:
        """Copy, on the calling thread, what others than the optimizer change. See ``copy_here``."""
        return copy_here(self._at_once, memory)


@dataclass(frozen=True, eq=False)
class HostMoves:
    """Bytes that lie contiguous in host memory, ``nbytes`` from each of ``addresses`` to each of ``begins``.

    Whoever runs it sees to it that the tensors there live.
    """

    nbytes: int
    addresses: Numbers
    begins: Numbers

    def run(self, memory: torch.Tensor) -> None:
        """Copy into ``memory``, which is host memory."""
        if self.nbytes >= _LARGE_NBYTES or len(self.begins) == 1:
            for begin, address in zip(self.begins.tolist(), self.addresses.tolist(), strict=True):
                ctypes.memmove(memory.data_ptr() + begin, address, self.nbytes)
            return
        low = int(self.addresses.min())
        source = memory_at(low, int(self.addresses.max()) + self.nbytes - low)
        found = pieces_of(source, self.nbytes)[self.addresses - low]
        pieces_of(memory.numpy(), self.nbytes)[self.begins] = found


@dataclass(frozen=True, eq=False)
class CopyStep:
    """Bytes ``[begin, end)`` of the target, from one call.

    Attributes:
        dtype: Of the target's elements.
        sources: Contiguous and flat on a device, one after the other; or one of any shape and anywhere, if ``shape``
            says which.
        shape: Of a source that is copied element by element.
    """

    begin: int
    end: int
    dtype: torch.dtype
    sources: tuple[torch.Tensor, ...]
    shape: tuple[int, ...] | None = None

    def run(self, memory: torch.Tensor) -> None:
        """Copy into ``memory``, which is host memory: from the CPU at once, from a device on the current stream."""
        into = memory[self.begin : self.end]
        first = self.sources[0]
        if self.shape is not None:
            into.view(self.dtype).view(self.shape).copy_(first, non_blocking=True)
        else:
            gathered = first if len(self.sources) == 1 else torch.cat(self.sources)
            into.view(self.dtype).copy_(gathered, non_blocking=True)


def _starts(joined: npt.NDArray[np.bool_], count: int) -> Numbers:
    """Where a stretch begins, of ``count`` of which each but the first is ``joined`` to the one before, or not."""
    return np.concatenate([np.zeros(min(count, 1), dtype=np.int64), np.flatnonzero(~joined) + 1])


def _runs(joined: npt.NDArray[np.bool_], nbytes: Numbers) -> tuple[Numbers, Numbers]:
    """The first piece of each run, and how many it has. Short runs of small pieces are not worth a tensor of their own.

    joined: of each piece but the first, whether it follows on the one before it.
    """
    first = _starts(joined, len(nbytes))
    lengths = np.diff(first, append=len(nbytes))
    few = (lengths < _WORTH_JOINING) & (np.add.reduceat(nbytes, first) < _LARGE_NBYTES)
    first = _starts(joined & ~np.repeat(few, lengths)[1:], len(nbytes))
    return first, np.diff(first, append=len(nbytes))


def _gathered(heads: list[torch.Tensor], lengths: Numbers, begins: Numbers, ends: Numbers) -> CopyStep:
    """Runs that follow one another: the first piece of each, how many it has, and where it goes."""
    counts = ((ends - begins) // heads[0].itemsize).tolist()
    for at in np.flatnonzero(lengths > 1).tolist():
        heads[at] = torch.as_strided(heads[at], (counts[at],), (1,))
    return CopyStep(int(begins[0]), int(ends[-1]), heads[0].dtype, tuple(heads))


def copy_here(sources: Sequence[tuple[SliceEntry, torch.Tensor]], memory: torch.Tensor) -> bool:
    """Copy from the CPU at once, from a device behind what it was asked for so far; nobody waits for it here.

    Returns:
        Whether anything is copied from a device: then the bytes are there when the next ``Copier.start`` is done.
    """
    for entry, source in sources:
        target(entry, memory).copy_(source, non_blocking=True)
    return any(source.is_cuda for _, source in sources)


def target(entry: SliceEntry, memory: torch.Tensor) -> torch.Tensor:
    """Where in a part's memory the slice goes, as a tensor of its type and shape."""
    return memory[entry.begin : entry.end].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


Job = tuple[CopyProgram, torch.Tensor]
"""A program and the memory that it copies into."""
Move = tuple[HostMoves | CopyStep, torch.Tensor]
"""A step and the memory that its program copies into."""


class _Watch:
    """Notices tensors that were changed in place while they were being copied, by torch's version counters."""

    def __init__(self, programs: Sequence[CopyProgram]) -> None:
        self._programs = programs
        self._versions = self._now()

    def _now(self) -> list[Values]:
        return [program.versions() for program in self._programs]

    def changed(self) -> tuple[str, ...]:
        keys: list[str] = []
        for program, seen, now in zip(self._programs, self._versions, self._now(), strict=True):
            places = np.flatnonzero(now != seen)
            if len(places):
                known = program.keys
                keys += [known[at] for at in places.tolist()]
        return tuple(sorted(set(keys)))


_IS_CUDA = attrgetter("is_cuda")


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

    def start(self, jobs: Sequence[Job], *, on_device: bool = False) -> Copy:
        """Begin copying; returns at once. Nobody else touches the jobs' memory until it is done.

        Args:
            jobs: What to copy.
            on_device: ``copy_here`` has asked a device for more, which belongs to this copy.
        """
        ready = None
        if on_device or any(program.is_cuda for program, _ in jobs):
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream())
        watch = _Watch([program for program, _ in jobs])
        return Copy(self._pool.submit(self._run, jobs, ready, watch), watch)

    def _run(self, jobs: Sequence[Job], ready: torch.cuda.Event | None, watch: _Watch) -> _Issued:
        moves = [(step, memory) for program, memory in jobs for step in program.steps]
        half = len(moves) // 2
        self._copy(moves[:half], ready)
        if self._on_phase is not None:
            self._on_phase("copy")
        done = self._copy(moves[half:], ready)
        return done, () if done is not None else watch.changed(), time.perf_counter()

    def _copy(self, moves: Sequence[Move], ready: torch.cuda.Event | None) -> torch.cuda.Event | None:
        if ready is None or self._stream is None:
            carry_out(moves)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            carry_out(moves)
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


@torch.no_grad()
def carry_out(moves: Sequence[Move]) -> None:
    """Run steps one after the other, on the current stream where they read a device."""
    for step, memory in moves:
        step.run(memory)
