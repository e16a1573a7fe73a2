"""The holder's side of copies on peers: slots for other ranks' snapshots, verified before they are sealed."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from moe_ckpt.errors import DamagedError, MemoryFullError
from moe_ckpt.format.shard import Checksums, split_header
from moe_ckpt.format.slot import GRADIENTS, SlotHeader, SlotPart, decode_slot
from moe_ckpt.memory.slot import Slot
from moe_ckpt.slices.cuts import Numbers
from moe_ckpt.slices.mirroring import Mirror, digests_of

_CACHED_NBYTES = 64 << 20
"""Of heads, for each source. A policy saves other slices at every step, but comes back to the first ones."""


@dataclass(frozen=True, eq=False)
class Extents:
    """The slices of a slot, in the order of their bytes.

    Attributes:
        begins, ends: In the slot.
        checksums: XXH3-64.
        names: ``[n]`` digests of their names.
    """

    begins: list[int]
    ends: list[int]
    checksums: list[int]
    names: Numbers

    @property
    def nbytes(self) -> int:
        """Up to the end of the last slice."""
        return max(self.ends, default=0)


_Layout = tuple[Numbers, Numbers, Numbers]
"""Of the slices that a head names: ``[n]`` first byte in the part, ``[n]`` end, ``[n]`` digest of the name."""
_EMPTY = np.zeros(0, dtype=np.int64)


class HeaderReader:
    """Reads the headers of one source, on one thread.

    Attributes:
        decoded: How many heads were no copy of one before.
    """

    def __init__(self) -> None:
        self._layouts: OrderedDict[bytes, _Layout] = OrderedDict()
        self.decoded = 0

    def extents(self, header: SlotHeader, path: str) -> Extents:
        """Returns all slices of a slot.

        Args:
            header: Of the slot.
            path: For messages.

        Raises:
            DamagedError: The header does not hold together.
        """
        columns = [(_EMPTY, _EMPTY, _EMPTY.astype(np.uint64), _EMPTY)]
        for part in header.parts:
            (begins, ends, names), checksums = self._layout(header, part, path)
            if part.begin + int(ends.max(initial=0)) > header.nbytes:
                raise DamagedError(path, "a part ends beyond the slot", step=header.step, rank=header.rank)
            columns.append((begins + part.begin, ends + part.begin, checksums, names))
        begins, ends, checksums, names = map(np.concatenate, zip(*columns, strict=True))
        order = np.argsort(begins, kind="stable")
        return Extents(begins[order].tolist(), ends[order].tolist(), checksums[order].tolist(), names[order])

    def _layout(self, header: SlotHeader, part: SlotPart, path: str) -> tuple[_Layout, Checksums]:
        head, step, generation, checksums = split_header(part.raw, path)
        layout = self._layouts.get(head)
        is_of_slot = (step, generation) == (header.step, header.identity.generation)  # its run and rank are in the head
        if layout is not None and is_of_slot and len(checksums) == len(layout[1]):
            self._layouts.move_to_end(head)
            return layout, checksums
        self.decoded += 1
        entries = header.slices(part, path)
        rows = np.array([(entry.begin, entry.end) for entry in entries], dtype=np.int64).reshape(-1, 2)
        layout = self._layouts[head] = rows[:, 0], rows[:, 1], digests_of([entry.name for entry in entries])
        while len(self._layouts) > 1 and sum(map(len, self._layouts)) > _CACHED_NBYTES:
            self._layouts.popitem(last=False)
        return layout, checksums


log = logging.getLogger("moe_ckpt")

Key = tuple[int, int, int]
"""Rank whose copy it is, sequence of the snapshot, and ``OWN`` or the index of a slot of gradients beside that."""
OWN = -1
Run = tuple[int, int]
"""First byte and end."""
_MOST_MIRRORS = 8
"""Snapshots whose copies may still come."""


class Incoming:
    """A copy that is being received. For one thread.

    Args:
        slot: To receive it into.
        header: Of the slot, as its source sealed it.
        extents: What it says of the bytes that come.
        index: Of a slot of gradients beside the snapshot's own, which is ``OWN``.

    Attributes:
        requested: Bytes that the source must send, in order: all, unless some are here already (``fill``).
    """

    def __init__(self, slot: Slot, header: bytes, extents: Extents, index: int = OWN) -> None:
        self.slot, self.index = slot, index
        self.header = header
        self.memory = slot.memory.numpy().data[: extents.nbytes]
        self.requested: list[Run] = [(0, extents.nbytes)] if extents.nbytes else []
        self._extents = extents
        self._left = list(range(len(extents.ends)))
        self._next = 0

    def fill(self, mirror: Mirror) -> int:
        """Fills the copy from ``mirror`` as far as possible; only the rest is requested.

        Returns:
            How many slices of the same name and size have other bytes here than at their source.
        """
        extents, ends = self._extents, mirror.part.ends
        begins, sizes = ends - np.diff(ends, prepend=0), np.diff(ends, prepend=0)
        order = np.argsort(mirror.part.names, kind="stable")
        if not len(order):
            return 0
        at = np.searchsorted(mirror.part.names[order], extents.names).clip(max=len(order) - 1)
        candidates = order[at]
        wanted_sizes = np.asarray(extents.ends) - np.asarray(extents.begins)
        is_present = (mirror.part.names[candidates] == extents.names) & (sizes[candidates] == wanted_sizes)
        memory, differ, taken = mirror.memory.numpy().data, 0, set[int]()
        for number in np.flatnonzero(is_present).tolist():
            begin = int(begins[candidates[number]])
            data = memory[begin : begin + int(sizes[candidates[number]])]
            if xxhash.xxh3_64_intdigest(data) == extents.checksums[number]:
                self.memory[extents.begins[number] : extents.ends[number]] = data
                taken.add(number)
            else:
                differ += 1
        self._left = [number for number in self._left if number not in taken]
        self.requested = _joined([(extents.begins[number], extents.ends[number]) for number in self._left])
        return differ

    def verify(self, arrived: int) -> int | None:
        """Compare what was sent, is complete and not compared yet, while it is still in the processor's cache.

        Args:
            arrived: Bytes from the beginning on, of those that are wanted.

        Returns:
            Where the first damaged slice begins; None if there is none.
        """
        begins, ends, checksums = self._extents.begins, self._extents.ends, self._extents.checksums
        remaining, memory = self._left, self.memory
        while self._next < len(remaining) and ends[remaining[self._next]] <= arrived:
            at = remaining[self._next]
            if xxhash.xxh3_64_intdigest(memory[begins[at] : ends[at]]) != checksums[at]:
                return begins[at]
            self._next += 1
        return None


def _joined(runs: list[Run]) -> list[Run]:
    """The same bytes, in order, in as few runs as there are gaps."""
    joined: list[Run] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


class ReplicaStore:
    """Slots in this rank's memory directory that hold copies of others. Safe to use from several threads.

    Args:
        make: Makes a slot. Raises ``MemoryFullError``.

    Attributes:
        expects_mirrors: ``mirrored`` will be called for every snapshot of which copies come.
    """

    def __init__(self, make: Callable[[int], Slot]) -> None:
        self.expects_mirrors = False
        self._make = make
        self._kept: dict[Key, Slot] = {}
        self._lock = threading.Lock()
        self._spare: frozenset[int] = frozenset()
        self._mirrors: dict[int, dict[int, Mirror]] = {}
        self._mirrored = threading.Condition(self._lock)
        self._is_closed = False

    def mirrored(self, sequence: int, mirrors: Mapping[int, Mirror]) -> None:
        """This rank's own snapshot ``sequence`` is in memory, with its duplicates of others' shares, by source.

        Empty where it could not be made: all is asked of the sources then.
        """
        with self._mirrored:
            if self._is_closed:
                return
            self._mirrors[sequence] = dict(mirrors)
            for old in sorted(self._mirrors)[:-_MOST_MIRRORS]:
                del self._mirrors[old]
            self._mirrored.notify_all()

    def mirror_of(self, source: int, sequence: int, timeout_secs: float, *, again: bool = False) -> Mirror | None:
        """This rank's duplicate of a snapshot of ``source``; None if there is none in time.

        Args:
            source: Whose.
            sequence: Of the snapshot.
            timeout_secs: Longest wait for it.
            again: It will be asked for once more; else it is handed out for the last time.
        """

        def is_known() -> bool:
            return self._is_closed or not self.expects_mirrors or max(self._mirrors, default=-1) >= sequence

        with self._mirrored:
            self._mirrored.wait_for(is_known, timeout_secs)
            mirrors = self._mirrors.get(sequence, {})
            return mirrors.get(source) if again else mirrors.pop(source, None)

    def reserve(self, header: SlotHeader, raw: bytes, extents: Extents, nbytes: int) -> Incoming:
        """Make ready to receive a copy.

        Args:
            header: Of the slot at its source.
            raw: The same, encoded.
            extents: Its slices.
            nbytes: That the source will send.

        Raises:
            DamagedError: The header speaks of other bytes than ``nbytes``.
            MemoryFullError: There is no room.
            OSError: The slot cannot be made.
        """
        if extents.nbytes != nbytes or header.nbytes < nbytes:
            raise DamagedError(
                f"the copy of rank {header.rank}",
                f"{nbytes:,} bytes were announced, but its header says {extents.nbytes:,}",
            )
        index = header.place if header.only == GRADIENTS else OWN
        return Incoming(self._slot(header.nbytes), raw, extents, index)

    def _slot(self, nbytes: int) -> Slot:
        while True:
            try:
                return self._make(nbytes)
            except MemoryFullError:
                if not self._let_go_of_spare():
                    raise

    def _let_go_of_spare(self) -> bool:
        """Copies that only hold older versions go before the newest is refused, the oldest first; False without any."""
        with self._lock:
            spare = sorted((key for key in self._kept if key[1] in self._spare), key=lambda key: key[1])
            oldest = [key for key in spare if key[:2] == spare[0][:2]]  # with its gradients
            gone = [self._kept.pop(key) for key in oldest]
        for slot in gone:
            slot.remove()
        return bool(gone)

    def keep(self, source: int, sequence: int, incoming: Incoming) -> None:
        """Seals a copy that arrived complete and was verified: later processes may read it.

        Raises:
            OSError: The header cannot be written; the copy does not count.
        """
        with self._lock:
            if self._is_closed:  # a later life may own the directory by now
                raise ConnectionAbortedError("this start of the run has ended")
            incoming.slot.seal(incoming.header)
            self._kept[source, sequence, incoming.index] = incoming.slot

    def discard(self, incoming: Incoming) -> None:
        """Discards a copy that did not arrive complete."""
        incoming.memory.release()
        self._give_back([incoming.slot])

    def release_except(
        self, sequences: Collection[int], spare: Collection[int] = (), over: Collection[tuple[int, int]] = ()
    ) -> None:
        """Let go of all copies but those of these sequences; of ``spare`` ones once there is no other room.

        Args:
            sequences: Of snapshots.
            spare: Likewise.
            over: (sequence, index) of slots of gradients that are not needed, though the sequence is.
        """
        with self._lock:
            self._spare = frozenset(spare)
            gone = [key for key in self._kept if key[1] not in sequences or key[1:] in over]
            slots = [self._kept.pop(key) for key in gone]
        self._give_back(slots)

    def _give_back(self, slots: Iterable[Slot]) -> None:
        if not self._is_closed:
            for slot in slots:
                slot.remove()

    def held(self) -> dict[tuple[int, int], Slot]:
        """Returns (source, sequence) -> slot of the copies here, whole and verified, without gradients beside it."""
        with self._lock:
            return {(source, sequence): slot for (source, sequence, index), slot in self._kept.items() if index == OWN}

    @property
    def nbytes(self) -> int:
        """Memory that copies take here."""
        with self._lock:
            return sum(slot.memory.numel() for slot in self._kept.values())

    def close(self) -> None:
        """Touch no file any more. What is sealed stays, and belongs to the owner of the directory."""
        with self._lock:
            self._is_closed = True
            self._mirrors.clear()
            self._mirrored.notify_all()
            self._kept.clear()


def decoded(raw: bytes, run_id: str, generation: int, source: int, step: int) -> SlotHeader:
    """A header that a source sent.

    Raises:
        DamagedError: It is not as it was written, or not of this run, this rank and this step, or of an older life. A
            complete checkpoint beside a partial one of the same step counts as of a later one.
    """
    header = decode_slot(raw, f"the copy of rank {source}")
    identity = header.identity
    if (identity.run, header.rank, identity.step) != (run_id, source, step) or identity.generation < generation:
        raise DamagedError(
            f"the copy of rank {source}",
            f"it is of run {identity.run}, generation {identity.generation}, rank {header.rank}, step {identity.step}; "
            f"expected: run {run_id}, generation {generation} or later, rank {source}, step {step}",
        )
    return header
