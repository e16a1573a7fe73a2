"""The holder's side of copies on peers: slots for other ranks' snapshots, verified before they are sealed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import xxhash

from moe_ckpt.engine.replica_headers import Extents
from moe_ckpt.errors import DamagedError, MemoryFullError
from moe_ckpt.format.slot import SlotHeader, decode_slot
from moe_ckpt.memory.slot import Slot

_OVERSIZE = 2
_SMALL_BYTES = 1 << 20
"""As of ``engine.buffers``: which slot serves which size."""


class Incoming:
    """A copy that is being received. For one thread.

    Args:
        slot: To receive it into.
        header: Of the slot, as its source sealed it.
        extents: What it says of the bytes that come.
    """

    def __init__(self, slot: Slot, header: bytes, extents: Extents) -> None:
        self.slot = slot
        self.header = header
        self.memory = slot.memory.numpy().data[: extents.nbytes]
        self._extents = extents
        self._next = 0

    def verify(self, arrived: int) -> int | None:
        """Compare what is complete and not compared yet, while it is still in the processor's cache.

        Args:
            arrived: Bytes from the beginning on.

        Returns:
            Where the first damaged slice begins; None if there is none.
        """
        begins, ends, checksums = self._extents.begins, self._extents.ends, self._extents.checksums
        at, memory = self._next, self.memory
        while at < len(ends) and ends[at] <= arrived:
            if xxhash.xxh3_64_intdigest(memory[begins[at] : ends[at]]) != checksums[at]:
                return begins[at]
            at += 1
        self._next = at
        return None


class ReplicaStore:
    """Slots in this rank's memory directory that hold copies of others. Safe to use from several threads.

    A slot that is let go of serves again, because a warm one is several times as fast as a new one.

    Args:
        make: Makes a slot. Raises ``MemoryFullError``.
        sources: How many ranks' copies lie here.
    """

    def __init__(self, make: Callable[[int], Slot], sources: int) -> None:
        self._make = make
        self._most_free = sources + 1
        self._kept: dict[tuple[int, int], Slot] = {}
        self._free: list[Slot] = []
        self._lock = threading.Lock()
        self._is_closed = False

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
                f"{nbytes:,} bytes were announced, and its header speaks of {extents.nbytes:,}",
            )
        return Incoming(self._slot(header.nbytes), raw, extents)

    def _slot(self, nbytes: int) -> Slot:
        with self._lock:
            fitting = [each for each in self._free if _serves(each, nbytes)]
            if fitting:
                best = min(fitting, key=lambda each: each.memory.numel())
                self._free.remove(best)
                return best
        try:
            return self._make(nbytes)
        except MemoryFullError:
            if not self._let_go_of_free():
                raise
        return self._make(nbytes)

    def _let_go_of_free(self) -> int:
        """Free slots of the wrong size go before the memory is called full."""
        with self._lock:
            free, self._free = self._free, []
        for slot in free:
            slot.remove()
        return len(free)

    def keep(self, source: int, sequence: int, incoming: Incoming) -> None:
        """Everything arrived and was verified: from here on whoever comes next may read it.

        Raises:
            OSError: The header cannot be written; the copy does not count.
        """
        with self._lock:
            if self._is_closed:  # a later life may own the directory by now
                raise ConnectionAbortedError("this life of the run is over")
            incoming.slot.seal(incoming.header)
            self._kept[source, sequence] = incoming.slot

    def discard(self, incoming: Incoming) -> None:
        """It did not arrive whole."""
        incoming.memory.release()
        self._give_back([incoming.slot])

    def release_except(self, sequences: Collection[int]) -> None:
        """Let go of all copies but those of these sequences."""
        with self._lock:
            over = [key for key in self._kept if key[1] not in sequences]
            slots = [self._kept.pop(key) for key in over]
        self._give_back(slots)

    def release(self, sequence: int) -> None:
        """Let go of all copies that are older than those of ``sequence``."""
        with self._lock:
            stays = {each for _, each in self._kept if each >= sequence}
        self.release_except(stays)

    def _give_back(self, slots: list[Slot]) -> None:
        with self._lock:
            if self._is_closed:
                return
            for slot in slots:
                slot.unseal()
            self._free += slots
            surplus = self._free[: -self._most_free]
            del self._free[: -self._most_free]
        for slot in surplus:
            slot.remove()

    def held(self) -> dict[tuple[int, int], Slot]:
        """(source, sequence) -> slot of the copies that lie here, whole and verified."""
        with self._lock:
            return dict(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory that copies take here, and what is kept free for the next ones."""
        with self._lock:
            return sum(slot.memory.numel() for slot in (*self._kept.values(), *self._free))

    def close(self) -> None:
        """Touch no file any more. What is sealed stays, and belongs to whoever owns the directory."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()
            self._free.clear()


def decoded(raw: bytes, run_id: str, generation: int, source: int, step: int) -> SlotHeader:
    """A header that a source sent.

    Raises:
        DamagedError: It is not as it was written, or not of this run, this life, this rank and this step.
    """
    header = decode_slot(raw, f"the copy of rank {source}")
    found = header.run_id, header.generation, header.rank, header.step
    if found != (run_id, generation, source, step):
        raise DamagedError(
            f"the copy of rank {source}",
            f"it is of run {header.run_id}, generation {header.generation}, rank {header.rank}, step {header.step}; "
            f"expected were run {run_id}, generation {generation}, rank {source}, step {step}",
        )
    return header


def _serves(slot: Slot, nbytes: int) -> bool:
    return nbytes <= slot.memory.numel() <= max(_OVERSIZE * nbytes, _SMALL_BYTES)
