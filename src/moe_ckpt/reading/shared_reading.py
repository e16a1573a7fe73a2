"""Ranks that need the same slices of storage divide the reading, and hand over what they have read.

One of the ranks that need a slice reads it twice: first to verify it, before any rank changes training state, and then
once more, to hand its bytes to the others. These compare its checksum before they use it, and read it from storage if
it differs. So all ranks together read from storage what one rank would read. Slices are handed over in rounds, which
all use the same memory.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from operator import attrgetter

import numpy as np
import torch
import xxhash

from moe_ckpt.memory.directory import this_machine
from moe_ckpt.ports import Communicator, StateTensor
from moe_ckpt.reading.collective import NotUsableError, on_all_ranks, raise_on_all_ranks
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
from moe_ckpt.reading.restore import StoredByKey, Targets, needed_slices, targets_of, write_slice, write_targets
from moe_ckpt.reading.slices import as_values, in_file_order

log = logging.getLogger("moe_ckpt")

RUN_NBYTES = 64 << 20
"""Bytes of a round, unless one slice is larger."""
_ALIGNED = 64
"""Slices begin at multiples of it in what is handed over, so that every dtype can be viewed there."""
_NOT_READ = torch.frombuffer(bytearray(b"not read"), dtype=torch.uint8)
"""The last bytes of a part whose reader failed. Everything else is judged by the checksums of the slices."""

Tensors = Callable[[], Sequence[StateTensor]]


def divide_reading(
    comm: Communicator,
    slices: Sequence[StoredSlice],
    needed: Callable[[], Collection[StoredSlice]],
    *,
    agrees: bool = True,
) -> SharedReading | None:
    """Divides among the ranks the reading of slices that several of them need. A collective.

    Args:
        comm: The ranks.
        slices: What the checkpoint has on storage, in the same order on every rank.
        needed: Gives those that this rank will read, and maybe others. If it raises, all ranks read by themselves.
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


def exchange_bytes(comm: Communicator, routed: Sequence[tuple[Route, torch.Tensor]]) -> None:
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


class TensorLoader:
    """Loads tensors of a checkpoint into live ones. Ranks that need the same slices of storage may read them together.

    Args:
        reader: Of the store.
        kinds: Slices by tensor key. The first are loaded; others are verified too.
        parameters: Returns the parameters of the model that this rank reads; None if it reads everything.

    Attributes:
        shared: What this rank and others read together; None before ``share``, and if there is nothing.
    """

    def __init__(self, reader: StoreReader, kinds: Sequence[StoredByKey], parameters: Tensors | None = None) -> None:
        self.kinds = kinds
        self.shared: SharedReading | None = None
        self._reader, self._parameters = reader, parameters

    def share(
        self, comm: Communicator, is_stored: Callable[[str], bool] = lambda path: True, *, agrees: bool = True
    ) -> None:
        """Divides among the ranks the reading of what several of them need. A collective, before ``verify``.

        Args:
            comm: The ranks.
            is_stored: Whether the file at a path is on storage; the same on every rank.
            agrees: As of ``SharedReading``.
        """
        groups = (group for kind in self.kinds for group in kind.values())
        slices = in_file_order(stored for group in groups for stored in group if is_stored(stored.path))
        self.shared = divide_reading(comm, slices, lambda: set(self._needed()), agrees=agrees)

    def _needed(self) -> Iterator[StoredSlice]:
        parameters = None if self._parameters is None else self._parameters()
        for kind in self.kinds:
            yield from chain.from_iterable(kind.values()) if parameters is None else needed_slices(kind, parameters)

    def verify(self) -> None:
        """Raises ``DamagedError`` if a slice that this rank will read is damaged."""
        self._reader.verify(filter(self.shared.is_read_here, self._needed()) if self.shared else self._needed())

    def write(self, tensors: Tensors, stored_of: StoredByKey | None = None) -> None:
        """Writes this rank's part into the live tensors. A collective if reading is shared.

        Args:
            tensors: Gives the live tensors; may create optimizer state first.
            stored_of: What is loaded; None for the first of ``kinds``.

        Raises:
            DamagedError: Bytes were damaged since ``verify``; and what ``SharedReading.load`` raises.
        """
        stored_of = self.kinds[0] if stored_of is None else stored_of
        if self.shared is None:
            write_targets(self._reader, targets_of(stored_of, tensors()))
        else:
            self.shared.load(self._reader, stored_of, tensors)

    def agreed(self, directory: str, action: Callable[[], None]) -> None:
        """Calls ``action``, as ``SharedReading.agreed`` if reading is shared."""
        if self.shared is None:
            action()
        else:
            self.shared.agreed(directory, action)


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

    def rounds(self, chosen: Collection[StoredSlice]) -> list[list[_Part]]:
        """Returns the parts that the chosen slices are handed over in, round by round."""
        slices = [stored for stored in self.readers if stored in chosen]
        sizes, readers = [tensor.nbytes for tensor in slices], [self.readers[tensor] for tensor in slices]

        def part_of(chunk: Chunk) -> _Part:
            reader, numbers = chunk
            # The ranks of another node take turns in receiving from the reader.
            route = route_of(reader, self.ranks, self.nodes, lambda members: members[numbers[0] % len(members)])
            return _Part(reader, [slices[number] for number in numbers], route)

        return [list(map(part_of, chunks)) for chunks in rounds_of(sizes, readers, RUN_NBYTES)]


@dataclass(frozen=True)
class _Part:
    """Slices that one rank reads and hands to the others that need them.

    Attributes:
        reader: The rank that reads them.
        slices: In the order of the files.
        route: The way of their bytes to the other ranks.
    """

    reader: int
    slices: Sequence[StoredSlice]
    route: Route

    @property
    def nbytes(self) -> int:
        """Bytes that are handed over: the slices, aligned, and ``_NOT_READ`` or zeros."""
        return sum(map(_padded, self.slices)) + _ALIGNED

    def blocks(self, data: torch.Tensor) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
        """Yields each slice with its bytes in ``data``, the ``nbytes`` of this part."""
        begins = accumulate(map(_padded, self.slices), initial=0)
        for stored, begin in zip(self.slices, begins, strict=False):
            yield stored, data[begin : begin + stored.nbytes]


def _padded(stored: StoredSlice) -> int:
    return -(-stored.nbytes // _ALIGNED) * _ALIGNED


class SharedReading:
    """The slices that this rank and others need, each with the rank that reads it.

    Args:
        comm: The ranks.
        groups: The groups that this rank is in, in the same order on all ranks.
        agrees: All ranks load each time, so that they can tell each other of errors. False where some go back alone.
    """

    def __init__(self, comm: Communicator, groups: Sequence[_Group], *, agrees: bool = True) -> None:
        self._comm, self._groups, self._agrees = comm, groups, agrees
        self._reader_of = {stored: reader for group in groups for stored, reader in group.readers.items()}

    def is_read_here(self, stored: StoredSlice) -> bool:
        """Returns whether it is this rank that reads and verifies a slice that it needs."""
        return self._reader_of.get(stored, self._comm.rank) == self._comm.rank

    def agreed(self, directory: str, action: Callable[[], None]) -> None:
        """Calls ``action``, which may load slices, on every rank; if it fails on one, all ranks raise. A collective.

        If only some ranks load (not ``agrees``), each raises its own error alone.

        Args:
            directory: Of the checkpoint, for messages.
            action: What every rank does.
        """
        if not self._agrees:
            action()
            return
        try:
            on_all_ranks(self._comm, action)
        except NotUsableError as error:
            raise_on_all_ranks(self._comm, error, directory)

    def load(self, reader: StoreReader, stored_of: StoredByKey, tensors: Tensors) -> None:
        """Writes this rank's part of the slices into the live tensors. A collective, which each rank completes even if
        something fails on it.

        Args:
            reader: Of the store.
            stored_of: All slices that ranks load now, those that other ranks need included.
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
        for parts in rounds:
            handing.hand_over(parts)
        if handing.problem is not None:
            raise handing.problem
        write_targets(reader, {one: blocks for one, blocks in handing.targets.items() if one not in handing.done})


class _Handing:
    """Reads, hands over and writes slices on this rank, in one load.

    Attributes:
        targets: Where each slice goes that this rank needs.
        problem: The first error. The parts that this rank was to read after it are marked as not read.
        done: Slices that were written, and need not be read by this rank.
    """

    def __init__(self, comm: Communicator, reader: StoreReader) -> None:
        self.targets: Targets = {}
        self.problem: Exception | None = None
        self.done: set[StoredSlice] = set()
        self._comm, self._reader = comm, reader

    def attempt(self, action: Callable[[], object]) -> bool:
        """Calls ``action`` unless an earlier one failed; returns whether none has failed so far.

        An error is kept as ``problem``, since the other ranks still wait for this one.
        """
        try:
            if self.problem is None:
                action()
        except Exception as error:  # raised when nobody waits any more
            self.problem = error
        return self.problem is None

    def reserve(self, rounds: Sequence[Sequence[_Part]]) -> None:
        """Allocates the memory that any round needs. Raises ``RuntimeError`` if there is none."""
        nbytes = max((sum(part.nbytes for part in parts) for parts in rounds), default=0)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def hand_over(self, parts: Sequence[_Part]) -> None:
        """Reads this rank's parts of a round, gets those of the others, and writes them."""
        ends = [0, *accumulate(part.nbytes for part in parts)]
        memory = [self._memory[begin:end] for begin, end in pairwise(ends)]
        for part, data in zip(parts, memory, strict=True):
            if part.reader == self._comm.rank:
                is_read = self.attempt(partial(self._read, part, data))
                data[-len(_NOT_READ) :] = torch.zeros_like(_NOT_READ) if is_read else _NOT_READ
        exchange_bytes(self._comm, [(part.route, data) for part, data in zip(parts, memory, strict=True)])
        for part, data in zip(parts, memory, strict=True):
            self._write(part, data)

    def _read(self, part: _Part, data: torch.Tensor) -> None:
        blocks = dict(part.blocks(data))
        for stored, values in self._reader.read_many(part.slices):
            blocks[stored].copy_(values.reshape(-1).view(torch.uint8))

    def _write(self, part: _Part, data: torch.Tensor) -> None:
        """Writes the slices that arrived undamaged. The rest is read from storage."""
        if torch.equal(data[-len(_NOT_READ) :], _NOT_READ):
            self.problem = self.problem or part.slices[0].damaged(f"rank {part.reader} could not read it")
            return
        for stored, received in part.blocks(data):
            comes = part.reader != self._comm.rank
            if comes and xxhash.xxh3_64_intdigest(received.numpy().data) != stored.entry.checksum:
                log.warning(
                    "slice %s of %s did not arrive from rank %d as it was written; it is read from storage",
                    *(stored.entry.name, stored.path, part.reader),
                )
                continue
            values = as_values(stored.entry, received)
            self.attempt(partial(write_slice, stored, values, self.targets.get(stored, ())))
            self.done.add(stored)
