"""Keeps the copies of other ranks' snapshots on this rank, the holder. Copies are verified before they are sealed."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from moe_ckpt.errors import DamagedError, MemoryFullError
from moe_ckpt.format.shard import Checksums, split_header
from moe_ckpt.format.slot import GRADIENTS, SlotHeader, SlotPart, decode_slot
from moe_ckpt.ledger.coverage import joined_ranges
from moe_ckpt.memory.slot import Slot
from moe_ckpt.slices.checksums import digests_of
from moe_ckpt.slices.cuts import Numbers
from moe_ckpt.slices.snapshot import SnapshotPart

_CACHED_NBYTES = 64 << 20
"""Most bytes of cached heads per source. A policy saves other slices at every step, but later the first ones again."""


@dataclass(frozen=True, eq=False)
class Extents:
    """The slices of a slot, in the order of their bytes.

    Attributes:
        begins: First byte of each slice in the slot.
        ends: End of each slice in the slot.
        checksums: XXH3-64 of each slice.
        names: ``[n]`` digest of each slice's name.
    """

    begins: list[int]
    ends: list[int]
    checksums: list[int]
    names: Numbers

    @property
    def nbytes(self) -> int:
        """Bytes up to the end of the last slice."""
        return max(self.ends, default=0)


_Layout = tuple[Numbers, Numbers, Numbers]
"""The slices of a part: ``[n]`` first byte of each in the part, ``[n]`` its end, ``[n]`` digest of its name."""
_EMPTY = np.zeros(0, dtype=np.int64)


class HeaderReader:
    """Reads the headers of one source, on one thread.

    Attributes:
        decoded: Number of heads that were not cached.
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
"""Rank whose copy it is, sequence of the snapshot, and index of a slot of its gradients, or ``MAIN_SLOT``."""
MAIN_SLOT = -1
Run = tuple[int, int]
"""First byte, and the byte behind the last."""
_MOST_MIRRORS = 8
"""Number of the newest snapshots whose copies may still come."""


class Incoming:
    """A copy that is being received. For one thread.

    Args:
        slot: Slot for the copy.
        header: Header of the slot, as its source sealed it.
        extents: The slices that the header names.
        index: Index of a slot of gradients; ``MAIN_SLOT`` for the snapshot's main slot.

    Attributes:
        requested: Bytes that the source must send, in order. All bytes, unless ``fill`` took some from this rank.
    """

    def __init__(self, slot: Slot, header: bytes, extents: Extents, index: int = MAIN_SLOT) -> None:
        self.slot, self.index = slot, index
        self.header = header
        self.memory = slot.memory.numpy().data[: extents.nbytes]
        self.requested: list[Run] = [(0, extents.nbytes)] if extents.nbytes else []
        self._extents = extents
        self._left = list(range(len(extents.ends)))
        self._next = 0

    def fill(self, mirror: SnapshotPart) -> int:
        """Fills the copy from ``mirror`` as far as possible; only the rest is requested.

        Returns:
            The number of slices that have the same name and size here as at their source, but other bytes.
        """
        extents, ends = self._extents, mirror.compiled.ends
        begins, sizes = ends - np.diff(ends, prepend=0), np.diff(ends, prepend=0)
        order = np.argsort(mirror.compiled.names, kind="stable")
        if not len(order):
            return 0
        at = np.searchsorted(mirror.compiled.names[order], extents.names).clip(max=len(order) - 1)
        candidates = order[at]
        wanted_sizes = np.asarray(extents.ends) - np.asarray(extents.begins)
        is_present = (mirror.compiled.names[candidates] == extents.names) & (sizes[candidates] == wanted_sizes)
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
        self.requested = joined_ranges((extents.begins[number], extents.ends[number]) for number in self._left)
        return differ

    def verify(self, arrived: int) -> int | None:
        """Compares the checksums of slices that have arrived, while they are still in the processor's cache.

        Args:
            arrived: End of the bytes that have arrived, in the slot.

        Returns:
            First byte of the first damaged slice; None if there is none.
        """
        begins, ends, checksums = self._extents.begins, self._extents.ends, self._extents.checksums
        remaining, memory = self._left, self.memory
        while self._next < len(remaining) and ends[remaining[self._next]] <= arrived:
            at = remaining[self._next]
            if xxhash.xxh3_64_intdigest(memory[begins[at] : ends[at]]) != checksums[at]:
                return begins[at]
            self._next += 1
        return None


class ReplicaStore:
    """The slots in this rank's memory directory that hold copies of other ranks. Safe to use from several threads.

    Args:
        make: Makes a slot of so many bytes. Raises ``MemoryFullError``.

    Attributes:
        expects_mirrors: True if ``mirrored`` will be called for every snapshot of which copies come.
    """

    def __init__(self, make: Callable[[int], Slot]) -> None:
        self.expects_mirrors = False
        self._make = make
        self._kept: dict[Key, Slot] = {}
        self._lock = threading.Lock()
        self._spare: frozenset[int] = frozenset()
        self._mirrors: dict[int, dict[int, Sequence[SnapshotPart]]] = {}
        self._mirrored = threading.Condition(self._lock)
        self._is_closed = False

    def mirrored(self, sequence: int, mirrors: Mapping[int, Sequence[SnapshotPart]]) -> None:
        """Notes that this rank's own snapshot is in memory, so that copies can be filled from it.

        Args:
            sequence: Of the snapshot.
            mirrors: Source -> the parts of its share that this rank's own state duplicates; empty if the snapshot could
                not be made: then all bytes are requested from the sources.
        """
        with self._mirrored:
            if self._is_closed:
                return
            self._mirrors[sequence] = dict(mirrors)
            for old in sorted(self._mirrors)[:-_MOST_MIRRORS]:
                del self._mirrors[old]
            self._mirrored.notify_all()

    def mirror_of(
        self, source: int, sequence: int, timeout_secs: float, *, again: bool = False
    ) -> Sequence[SnapshotPart]:
        """Returns this rank's duplicate of a source's snapshot; nothing if there is none in time.

        Args:
            source: Rank whose snapshot it is.
            sequence: Of the snapshot.
            timeout_secs: Longest wait for the duplicate.
            again: True if it will be requested once more; otherwise it is released.
        """

        def is_known() -> bool:
            return self._is_closed or not self.expects_mirrors or max(self._mirrors, default=-1) >= sequence

        with self._mirrored:
            self._mirrored.wait_for(is_known, timeout_secs)
            mirrors = self._mirrors.get(sequence, {})
            return mirrors.get(source, ()) if again else mirrors.pop(source, ())

    def reserve(self, header: SlotHeader, raw: bytes, extents: Extents, nbytes: int) -> Incoming:
        """Prepares to receive a copy.

        Args:
            header: Header of the slot at its source.
            raw: The header, encoded.
            extents: Slices of the slot.
            nbytes: Bytes of the copy, as the source announced.

        Raises:
            DamagedError: The header and ``nbytes`` contradict each other.
            MemoryFullError: There is no room.
            OSError: The slot cannot be made.
        """
        if extents.nbytes != nbytes or header.nbytes < nbytes:
            raise DamagedError(
                f"the copy of rank {header.rank}",
                f"{nbytes:,} bytes were announced, but its header says {extents.nbytes:,}",
            )
        index = header.gradient_slot if header.only == GRADIENTS else MAIN_SLOT
        return Incoming(self._slot(header.nbytes), raw, extents, index)

    def _slot(self, nbytes: int) -> Slot:
        while True:
            try:
                return self._make(nbytes)
            except MemoryFullError:
                if not self._let_go_of_spare():
                    raise

    def _let_go_of_spare(self) -> bool:
        """Deletes the oldest snapshot's copies among those that only have older versions. False if there are none."""
        with self._lock:
            spare = sorted((key for key in self._kept if key[1] in self._spare), key=lambda key: key[1])
            oldest = [key for key in spare if key[:2] == spare[0][:2]]  # all slots of one snapshot
            gone = [self._kept.pop(key) for key in oldest]
        for slot in gone:
            slot.remove()
        return bool(gone)

    def keep(self, source: int, sequence: int, incoming: Incoming) -> None:
        """Seals a copy that arrived complete and was verified: from now on later processes may read it.

        Raises:
            OSError: The header cannot be written, and the copy is not valid.
        """
        with self._lock:
            if self._is_closed:  # a later life may own the directory by now
                raise ConnectionAbortedError("this start of the run has ended")
            incoming.slot.seal(incoming.header)
            self._kept[source, sequence, incoming.index] = incoming.slot

    def discard(self, incoming: Incoming) -> None:
        """Deletes a copy that did not arrive complete."""
        incoming.memory.release()
        self._give_back([incoming.slot])

    def release_except(
        self, sequences: Collection[int], spare: Collection[int] = (), over: Collection[tuple[int, int]] = ()
    ) -> None:
        """Deletes all copies except those of some snapshots.

        Args:
            sequences: Snapshots whose copies are kept.
            spare: Those of them that may be deleted as well if a newer copy finds no room.
            over: (sequence, index) of slots of gradients that are not needed, although their snapshot is.
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
        """Returns (source, sequence) -> main slot of each verified copy on this rank."""
        with self._lock:
            return {
                (source, sequence): slot for (source, sequence, index), slot in self._kept.items() if index == MAIN_SLOT
            }

    @property
    def nbytes(self) -> int:
        """Bytes of memory that copies take on this rank."""
        with self._lock:
            return sum(slot.memory.numel() for slot in self._kept.values())

    def close(self) -> None:
        """Stops all access to files. Sealed copies stay, and belong to the owner of the directory."""
        with self._lock:
            self._is_closed = True
            self._mirrors.clear()
            self._mirrored.notify_all()
            self._kept.clear()


def decode_sent_header(raw: bytes, run_id: str, generation: int, source: int, step: int) -> SlotHeader:
    """Decodes a header that a source sent.

    Args:
        raw: The encoded header.
        run_id: Run that it must be of.
        generation: Oldest life that it may be of. A complete checkpoint beside a partial one of the same step counts as
            one of a later life.
        source: Rank that it must be of.
        step: Step that it must be of.

    Raises:
        DamagedError: The header is damaged, or of another run, rank, step or an older life.
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
