"""Ranks that need the same slices of storage divide the reading, and hand over what they have read.

Each slice is read, and verified, by one of the ranks that need it: first by itself, before training state is touched,
and then once more, when its bytes also go to the others. These compare its checksum before they use it. What does not
arrive as it was written they read from storage. Storage thus gives all ranks together what it would give to one.
They go in rounds, each in the same memory.
"""

from __future__ import annotations

import logging
import socket
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from moe_ckpt.memory.directory import boot_id
from moe_ckpt.ports import Communicator, StateTensor
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.reading_shares import (
    Chunk,
    Flags,
    Route,
    anything_shared,
    groups_of,
    readers_of,
    rounds_of,
    route_of,
)
from moe_ckpt.reading.restore import StoredByKey, Targets, copy_slices, targets_of, write_slice, write_targets
from moe_ckpt.reading.together import NotUsableError, raise_on_all_ranks, together
from moe_ckpt.tiers.host_tier import as_values, checksum

log = logging.getLogger("moe_ckpt")

RUN_NBYTES = 64 << 20
"""Handed over in one round, beside the largest slice."""
_ALIGNED = 64
"""Slices begin at multiples of it in what is handed over, so that every dtype can be viewed there."""
_NOT_READ = torch.frombuffer(bytearray(b"not read"), dtype=torch.uint8)
"""End of a chunk whose reader failed. Only this word says so: all else is judged by the checksums of the slices."""

Tensors = Callable[[], Sequence[StateTensor]]


def this_machine() -> str:
    """Names the machine, on which bytes go from memory to memory."""
    return boot_id() or socket.gethostname()


def divide(
    comm: Communicator,
    slices: Sequence[StoredSlice],
    needed: Callable[[], Collection[StoredSlice]],
    *,
    agrees: bool = True,
) -> SharedReading | None:
    """Agree on who reads what. A collective.

    Args:
        comm: The ranks.
        slices: Of the checkpoint on storage, in the same order on every rank.
        needed: Those that this rank will read, and maybe others. If it raises, all ranks read by themselves.
        agrees: As of ``SharedReading``.

    Returns:
        None, on every rank, if no two ranks need the same slice, or it is not known what some need.

    Raises:
        PeerLostError: A peer is gone.
    """
    if comm.world_size == 1:
        return None
    try:
        mine = frozenset(needed())
        flags = np.fromiter(
            (stored in mine and stored.nbytes > 0 for stored in slices), dtype=np.bool_, count=len(slices)
        )
        payload = _needs_payload(slices, flags)
    except Exception as error:  # the read that needs it raises on all ranks
        log.warning("rank %d cannot tell what it needs of storage: %s", comm.rank, error)
        payload = b""
    payloads = comm.everyone(payload)
    if not all(payloads) or len({raw[:8] for raw in payloads}) > 1 or not slices:
        return None
    rows: dict[bytes, Flags] = {raw[24:]: _flags(raw[24:], len(slices)) for raw in payloads}
    needs = [rows[raw[24:]] for raw in payloads]
    if not anything_shared(needs):
        return None
    nodes = [raw[8:24].hex() for raw in payloads]
    groups = []
    for ranks, numbers in groups_of(comm.rank, needs):
        chosen = [slices[number] for number in numbers]
        readers = readers_of([stored.nbytes for stored in chosen], ranks, RUN_NBYTES)
        groups.append(_Group(dict(zip(chosen, readers, strict=True)), ranks, nodes))
    return SharedReading(comm, groups, agrees=agrees)


def _needs_payload(slices: Sequence[StoredSlice], flags: Flags) -> bytes:
    """8 bytes that differ if ranks have other lists of slices, 16 of the machine, and what is needed."""
    listed = xxhash.xxh3_64()
    for stored in slices:
        listed.update(f"{stored.path} {stored.offset} {stored.entry.checksum}\n".encode())
    machine = xxhash.xxh3_128_digest(this_machine().encode())
    return listed.digest() + machine + zlib.compress(np.packbits(flags).tobytes(), 1)


def _flags(packed: bytes, count: int) -> Flags:
    return np.unpackbits(np.frombuffer(zlib.decompress(packed), dtype=np.uint8), count=count).astype(np.bool_)


def hand_on(comm: Communicator, routed: Sequence[tuple[Route, torch.Tensor]]) -> None:
    """Sends and receives bytes along their routes. Every rank that a route names calls this, in the same order.

    Args:
        comm: The ranks.
        routed: Routes, each with the memory that has the bytes on this rank, or gets them.
    """
    for hops_of in (attrgetter("from_source"), attrgetter("onward")):
        outgoing, expected = defaultdict[int, list[torch.Tensor]](list), defaultdict[int, list[torch.Tensor]](list)
        for route, data in routed:
            for sender, receiver in hops_of(route):
                if sender == comm.rank:
                    outgoing[receiver].append(data)
                elif receiver == comm.rank:
                    expected[sender].append(data)
        if outgoing or expected:
            comm.swap(outgoing, expected)


def load_slices(
    reader: StoreReader, stored_of: StoredByKey, tensors: Tensors, shared: SharedReading | None = None
) -> None:
    """Loads slices by ``SharedReading.load``, or by ``copy_slices`` without it."""
    if shared is None:
        copy_slices(reader, stored_of, tensors())
    else:
        shared.load(reader, stored_of, tensors)


@dataclass(frozen=True)
class _Group:
    """Slices that the same ranks need.

    Attributes:
        readers: Of each slice, in order.
        ranks: That need them.
        nodes: Per rank of the run its node.
    """

    readers: Mapping[StoredSlice, int]
    ranks: tuple[int, ...]
    nodes: Sequence[str]

    def route(self, chunk: Chunk) -> Route:
        """Returns the route of a chunk from its reader; the ranks of another node take turns in receiving from it."""
        return route_of(chunk.reader, self.ranks, self.nodes, lambda members: members[chunk.first % len(members)])

    def rounds(self, chosen: Collection[StoredSlice]) -> list[_Round]:
        """What is handed over of the chosen slices, round by round."""
        slices = [stored for stored in self.readers if stored in chosen]
        sizes, readers = [tensor.nbytes for tensor in slices], [self.readers[tensor] for tensor in slices]
        return [
            _Round(self, [(chunk, slices[chunk.first : chunk.end]) for chunk in chunks])
            for chunks in rounds_of(sizes, readers, RUN_NBYTES)
        ]


class _Round(NamedTuple):
    """What is handed over at once: chunks of a group, with their slices."""

    group: _Group
    chunks: Sequence[tuple[Chunk, Sequence[StoredSlice]]]


class SharedReading:
    """Slices that this rank and others need, each with its reader.

    Args:
        comm: The ranks.
        groups: That this rank is in, in the same order on all ranks.
        agrees: All ranks load each time, so that they can tell each other of errors. False where some go back alone.
    """

    def __init__(self, comm: Communicator, groups: Sequence[_Group], *, agrees: bool = True) -> None:
        self._comm, self._groups, self._agrees = comm, groups, agrees
        self._reader_of = {stored: reader for group in groups for stored, reader in group.readers.items()}

    def is_read_here(self, stored: StoredSlice) -> bool:
        """Returns whether it is this rank that reads and verifies a slice that it needs."""
        return self._reader_of.get(stored, self._comm.rank) == self._comm.rank

    def agreed(self, directory: str, action: Callable[[], None]) -> None:
        """Does what every rank does, which may load; if it fails on one, all raise. A collective.

        If only some ranks load, each raises its own error, also where another could not read what it needs.

        Args:
            directory: Of the checkpoint, for messages.
            action: What.
        """
        if not self._agrees:
            action()
            return
        try:
            together(self._comm, action)
        except NotUsableError as error:
            raise_on_all_ranks(self._comm, error, directory)

    def load(self, reader: StoreReader, stored_of: StoredByKey, tensors: Tensors) -> None:
        """Write this rank's part of the slices into the live tensors. A collective, which is completed in any case.

        Args:
            reader: Of the store.
            stored_of: Of the slices that all ranks load now, those of every rank.
            tensors: Gives the live tensors; may create optimizer state first.

        Raises:
            DamagedError: A slice is damaged; or the rank that was to read it, which raises why, could not.
            StoreError: Another rank has no memory for what is handed over, with its message.
            Exception: Whatever else failed on this rank.
            PeerLostError: A peer is gone.
        """
        handing = _Handing(self._comm, reader)
        handing.attempt(lambda: handing.targets.update(targets_of(stored_of, tensors())))
        chosen = frozenset(stored for group in stored_of.values() for stored in group)
        rounds = [reading_round for group in self._groups for reading_round in group.rounds(chosen)]
        # Before any rank waits for the bytes of one that has no memory for them.
        self.agreed(reader.storage.root, lambda: handing.reserve(rounds))
        handing.hand_over(rounds)
        if handing.problem is not None:
            raise handing.problem
        write_targets(reader, {one: blocks for one, blocks in handing.targets.items() if one not in handing.done})


class _Handing:
    """One load of this rank.

    Attributes:
        targets: Where each slice goes that this rank needs.
        problem: The first thing that went wrong. What this rank was to read after that is said to be unread.
        done: Slices that were written, and need not be read by this rank.
    """

    def __init__(self, comm: Communicator, reader: StoreReader) -> None:
        self.targets: Targets = {}
        self.problem: Exception | None = None
        self.done: set[StoredSlice] = set()
        self._comm, self._reader = comm, reader

    def attempt(self, action: Callable[[], object]) -> bool:
        """Whether an action succeeds. None is tried after one that failed: the other ranks still wait for this one."""
        try:
            if self.problem is None:
                action()
        except Exception as error:  # raised when nobody waits any more
            self.problem = error
        return self.problem is None

    def reserve(self, rounds: Sequence[_Round]) -> None:
        """Memory for any round. Raises ``RuntimeError``: there is none."""
        nbytes = max((sum(_Part.nbytes(slices) for _, slices in chunks) for _, chunks in rounds), default=0)
        self._memory = torch.empty(nbytes, dtype=torch.uint8)

    def hand_over(self, rounds: Sequence[_Round]) -> None:
        """Read this rank's part of every round, and get the others' parts."""
        for group, chunks in rounds:
            ends = [0, *accumulate(_Part.nbytes(slices) for _, slices in chunks)]
            spans = (self._memory[begin:end] for begin, end in pairwise(ends))
            parts = [_Part(*chunk, data) for chunk, data in zip(chunks, spans, strict=True)]
            for part in parts:
                if part.chunk.reader == self._comm.rank:
                    is_read = self.attempt(partial(self._read, part))
                    part.end.copy_(torch.zeros_like(_NOT_READ) if is_read else _NOT_READ)
            hand_on(self._comm, [(group.route(part.chunk), part.data) for part in parts])
            for part in parts:
                self._take(part)

    def _read(self, part: _Part) -> None:
        for stored, values in self._reader.read_many(part.slices):
            part.bytes_of(stored).copy_(values.reshape(-1).view(torch.uint8))

    def _take(self, part: _Part) -> None:
        """Write the slices that arrived undamaged. The rest is read from storage."""
        if torch.equal(part.end, _NOT_READ):
            self.problem = self.problem or part.slices[0].damaged(f"rank {part.chunk.reader} could not read it")
            return
        for stored in part.slices:
            data = part.bytes_of(stored)
            if part.chunk.reader != self._comm.rank and checksum(data) != stored.entry.checksum:
                log.warning(
                    "slice %s of %s did not arrive from rank %d as it was written; it is read from storage",
                    *(stored.entry.name, stored.path, part.chunk.reader),
                )
                continue
            self.attempt(partial(self._write, stored, data))
            self.done.add(stored)

    def _write(self, stored: StoredSlice, data: torch.Tensor) -> None:
        write_slice(stored, as_values(stored.entry, data), self.targets.get(stored, ()))


class _Part:
    """The bytes of a chunk.

    Args:
        chunk: Which.
        slices: Of it.
        data: Its ``nbytes(slices)`` bytes.
    """

    def __init__(self, chunk: Chunk, slices: Sequence[StoredSlice], data: torch.Tensor) -> None:
        self.chunk, self.slices, self.data = chunk, slices, data
        self.end = data[-len(_NOT_READ) :]
        self._begins = dict(zip(slices, accumulate(map(_padded, slices), initial=0), strict=False))

    @staticmethod
    def nbytes(slices: Sequence[StoredSlice]) -> int:
        """Bytes of a chunk of these slices."""
        return sum(map(_padded, slices)) + _ALIGNED

    def bytes_of(self, stored: StoredSlice) -> torch.Tensor:
        """Where a slice lies in it."""
        begin = self._begins[stored]
        return self.data[begin : begin + stored.nbytes]


def _padded(stored: StoredSlice) -> int:
    return -(-stored.nbytes // _ALIGNED) * _ALIGNED
