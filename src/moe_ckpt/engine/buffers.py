"""Host memory for snapshots: reused buffers under a budget in bytes.

Buffers are reused because fresh memory costs more than the copy itself (page faults made a clone 3.5
times as slow as a warm copy where it was measured), and bounded because a growing queue of snapshots
would take the host down.

Steady state is three buffers of one size (MoC, "triple buffering"): one is copied into, one is written
from, and one, the recovery buffer, holds the newest committed checkpoint (``engine.host_tier``). The pool
knows only which are lent out; the roles are the pipeline's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import torch

from moe_ckpt.engine.cgroups import available_bytes
from moe_ckpt.engine.cgroups import free_bytes as _cgroup_free_bytes
from moe_ckpt.engine.early_buffers import EarlyBuffers
from moe_ckpt.engine.host_buffer import MIRRORED, PIECES, WHOLE, HostBuffer, let_go, serves
from moe_ckpt.errors import HostMemoryError
from moe_ckpt.memory.slot import Slot

log = logging.getLogger("moe_ckpt")

_SHARE_OF_FREE_MEMORY = 0.5
_PAGE_NBYTES = 4096
_FEW = 8
"""Of a budget that holds no more buffers than this, none may be larger than it must."""


class HostBufferPool(EarlyBuffers):
    """Lends byte buffers; never makes more than ``budget_bytes`` of them. Safe to use from several threads.

    Args:
        budget_bytes: Of all buffers together.
        pinned: Page-locked, for copies from a GPU.
        make_slot: Makes memory that outlives the process; None for private memory. Where it cannot (no room, no
            descriptor left, a directory that is gone), private memory serves.
        make_early: As ``make_slot``, for memory made ahead of time, which takes no room from anything else.
        fits: Whether a slot of so many bytes could be made now. If so, private memory that was used for lack of room is
            given up for a slot. None: it is kept.

    Attributes:
        dispose: Frees a buffer's memory, which may take long; on another thread where the calling one must not wait.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        pinned: bool = False,
        make_slot: Callable[[int], Slot] | None = None,
        make_early: Callable[[int], Slot] | None = None,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(budget_bytes, pinned=pinned)
        self._make_slot, self._make_slot_early, self._fits = make_slot, make_early or make_slot, fits
        self.dispose: Callable[[HostBuffer], None] = let_go
        self._said_private = False
        self._sizes: dict[str, tuple[int, ...]] = {}

    def take(self, needs: Sequence[tuple[str, int]]) -> list[HostBuffer] | None:
        """Buffers of at least these (kind, bytes) that need nothing but to be lent; None if there are not all of them.

        For the training thread: no memory is made, touched, page-locked or freed.
        """
        found: list[HostBuffer] = []
        with self._lock:
            self._note_sizes(needs)
            for kind, nbytes in needs:
                best = self._fitting(kind, max(1, nbytes), found)
                if best is None or not self._is_ready(best, max(1, nbytes)) or not _unseal(best):
                    return None
                found.append(best)
            for each in found:
                each.foreseen = False
                self._free.remove(each)
                self._lent.add(each)
        return found

    def has_ready(self, nbytes: int) -> bool:
        """True if ``take`` finds a buffer for a whole snapshot of so many bytes."""
        with self._lock:
            best = self._fitting(WHOLE, nbytes)
            return best is not None and self._is_ready(best, nbytes)

    def _is_ready(self, buffer: HostBuffer, nbytes: int) -> bool:
        if self._replaces(buffer) or buffer.is_cold:
            return False
        return not self._is_to_be_cut(buffer, nbytes)

    def _replaces(self, buffer: HostBuffer) -> bool:
        """It is private memory, and there is room again for what outlives the process."""
        return buffer.slot is None and self._fits is not None and self._fits(buffer.nbytes)

    def acquire_all(
        self, needs: Sequence[tuple[str, int]], require: Callable[[int], None] | None = None
    ) -> list[HostBuffer] | None:
        """Buffers of at least these (kind, bytes), or None if the budget has no room for all of them. Slow where they
        must be made: not for the training thread.

        A buffer of another kind than ``WHOLE`` is kept when it is given back, if it fits one of these sizes.

        Args:
            needs: See above.
            require: As of ``acquire``.

        Raises:
            HostMemoryError: They can never fit into the budget.
            OSError: As ``acquire``; then none is lent.
        """
        self._note_sizes(needs)
        if not self.fits(sum(nbytes for _, nbytes in needs)):
            return None
        found: list[HostBuffer] = []
        try:
            for kind, nbytes in needs:
                buffer = self.acquire(max(1, nbytes), kind, require)
                if buffer is None:
                    break
                found.append(buffer)
        finally:
            if len(found) < len(needs):
                for each in found:
                    self.give_back(each)
        return found if len(found) == len(needs) else None

    def _note_sizes(self, needs: Sequence[tuple[str, int]]) -> None:
        for kind in (PIECES, MIRRORED):
            if sizes := tuple(nbytes for each, nbytes in needs if each == kind):
                self._sizes[kind] = sizes

    def acquire(
        self, nbytes: int, kind: str = WHOLE, require: Callable[[int], None] | None = None
    ) -> HostBuffer | None:
        """A buffer of at least ``nbytes``, or None if the budget is used up by buffers still lent out.

        Args:
            nbytes: See above.
            kind: What it is for.
            require: Called before memory for so many bytes is made, which outlives the process or is of no use.

        Raises:
            HostMemoryError: ``nbytes`` can never fit into the budget.
            OSError: ``require`` raised it, or memory of that kind cannot be made.
        """
        if nbytes > self.budget_bytes:
            raise HostMemoryError(nbytes, self.budget_bytes)
        with self._lock:
            best = self._fitting(kind, nbytes)
            if best is not None:
                self._free.remove(best)
                self._lent.add(best)
        if best is not None:
            if not self._replaces(best) and _unseal(best) and self._trim(best, nbytes) and self._warm(best):
                return best
            self.discard(best)
        with self._lock:
            # What was foreseen is something else, and free buffers of the wrong size go before the budget is called
            # exhausted.
            gone = [b for b in self._free if b.foreseen and kind == WHOLE]
            self._free = [b for b in self._free if b not in gone]
            while self._free and self._held() + nbytes > self.budget_bytes:
                gone.append(self._free.pop(0))
            left = self.budget_bytes - self._held()
            size = 0 if nbytes > left else min(self._size(nbytes), left)
            self._making_bytes += size
        for each in gone:
            self.dispose(each)
        if not size:
            return None
        buffer = self._make(size, require)
        buffer.kind = kind
        with self._lock:
            self._making_bytes -= size
            self._lent.add(buffer)
        return buffer

    def _fitting(self, kind: str, nbytes: int, but: Sequence[HostBuffer] = ()) -> HostBuffer | None:
        """The free buffer that serves best. The caller has locked the pool."""
        # Where snapshots differ in size, as with ranks that own an expert of only some, all use the largest's.
        usual, free = self._least_bytes if kind == WHOLE else 0, [b for b in self._free if b.kind == kind]
        free = [b for b in free if b not in but]
        fitting = [b for b in free if b.nbytes >= nbytes and serves(b, max(nbytes, usual))]
        fitting = fitting or [b for b in free if serves(b, nbytes)]
        fitting = fitting or [b for b in free if b.foreseen and nbytes <= b.nbytes]
        return min(fitting, key=lambda b: b.nbytes, default=None)

    def _is_to_be_cut(self, buffer: HostBuffer, nbytes: int) -> bool:
        """It is larger than what ``nbytes`` need, and was made ahead of time, or the budget holds few of them. Where
        CUDA has page-locked it, it would have to do so again: there a little more is no reason."""
        if buffer.slot is None or buffer.nbytes <= max(self._size(nbytes), self._usual_bytes if buffer.foreseen else 0):
            return False
        is_tight = self.budget_bytes < _FEW * buffer.nbytes
        return is_tight or (buffer.foreseen and not (buffer.registered and serves(buffer, nbytes)))

    def _trim(self, buffer: HostBuffer, nbytes: int) -> bool:
        """Shrinks a buffer to the size that ``nbytes`` need, where it should be; False if that fails."""
        size = max(self._size(nbytes), self._usual_bytes if buffer.foreseen else 0)
        is_to_be_cut = self._is_to_be_cut(buffer, nbytes)
        buffer.foreseen = False
        if buffer.slot is None or not is_to_be_cut:
            return True
        try:
            buffer.is_cold = buffer.registered
            buffer.memory = buffer.memory[:0]
            buffer.slot.shrink(size)
            buffer.memory = buffer.slot.memory
        except (OSError, RuntimeError) as error:
            log.warning("a memory slot cannot be made smaller: %s", error)
            return False
        return True

    def _warm(self, buffer: HostBuffer) -> bool:
        """Touches the pages of a slot of an earlier life, and page-locks them for CUDA; False if that fails."""
        cold, buffer.is_cold = buffer.is_cold, False
        try:
            if cold and self._pinned and buffer.slot is not None:
                buffer.slot.pages.lock(buffer.nbytes)
            elif cold:
                buffer.memory[::_PAGE_NBYTES].max()  # to read a page of a file on a tmpfs maps it, and its neighbours
        except RuntimeError as error:
            log.warning("a memory slot of an earlier start cannot be used again: %s", error)
            return False
        return True

    def _make(self, size: int, require: Callable[[int], None] | None = None) -> HostBuffer:
        """New memory for bytes that are already counted as being made; the caller counts the buffer instead."""
        return self._made(size, self._make_slot, require, or_private=require is None)

    def _make_early(self, size: int) -> HostBuffer:
        return self._made(size, self._make_slot_early, None, or_private=False)

    def _made(
        self,
        size: int,
        make: Callable[[int], Slot] | None,
        require: Callable[[int], None] | None,
        *,
        or_private: bool,
    ) -> HostBuffer:
        try:
            if require is not None:
                require(size)
            slot = None if make is None else self._slot(size, make, or_none=or_private)
            if slot is not None:
                return HostBuffer(slot.memory, slot)
            return HostBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
        except (OSError, RuntimeError):
            with self._lock:
                self._making_bytes -= size
            raise

    def _slot(self, size: int, make: Callable[[int], Slot], *, or_none: bool) -> Slot | None:
        """Returns None if private memory must be used: training continues whatever is wrong with the file system."""
        slot = None
        try:
            slot = make(size)
            if self._pinned:
                slot.pages.lock(size)
            if self._said_private:
                log.info("there is room again for snapshots in memory that outlives this process")
                self._said_private = False
            return slot
        except (OSError, RuntimeError) as error:
            if slot is not None:
                slot.remove()
            if not or_none:
                raise
            if not self._said_private and not self._retired:
                log.warning("a snapshot is kept in private memory, which does not outlive this process: %s", error)
                self._said_private = True
            return None

    def adopt(self, buffer: HostBuffer) -> None:
        """Count a buffer as lent out by this pool although another one made it, even beyond the budget."""
        with self._lock:
            self._lent.add(buffer)

    def add(self, slot: Slot, kind: str) -> None:
        """Makes a free buffer of a slot of an earlier life, whose bytes are no longer needed."""
        with self._lock:
            if not self._retired:
                self._free.append(HostBuffer(slot.memory, slot, kind=kind, is_cold=True))

    def lend_nothing(self) -> HostBuffer:
        """Returns an empty buffer, which needs no room, for an empty snapshot."""
        buffer = HostBuffer(torch.empty(0, dtype=torch.uint8))
        self.adopt(buffer)
        return buffer

    def give_back(self, buffer: HostBuffer) -> None:
        """The lender no longer reads or writes ``buffer``. One of an unusual size, or beyond the budget, is not kept.

        Raises:
            ValueError: it is not lent out. Lending it on would give two snapshots the same memory.
        """
        with self._lock:
            if self._retired:
                return
            if buffer not in self._lent:
                raise ValueError("a host buffer was returned twice, or to a pool that it does not belong to")
            self._lent.remove(buffer)
            usual = self._is_usual(buffer)
            usual = usual and (buffer.slot is None or buffer.registered or not self._pinned)
            if buffer.nbytes and usual and self._held() + buffer.nbytes <= self.budget_bytes:
                self._free.append(buffer)
                return
        self.dispose(buffer)

    def _is_usual(self, buffer: HostBuffer) -> bool:
        if buffer.kind == WHOLE:
            return not self._least_bytes or serves(buffer, self._least_bytes)
        return any(serves(buffer, nbytes) for nbytes in self._sizes.get(buffer.kind, ()))

    def discard(self, buffer: HostBuffer) -> None:
        """The lender no longer reads or writes ``buffer``, whose room is needed for something else."""
        with self._lock:
            is_lent = buffer in self._lent
            self._lent.discard(buffer)
        if is_lent:
            self.dispose(buffer)

    def retire(self) -> None:
        """Lends and keeps no more buffers. A lent buffer lives as long as its user."""
        with self._lock:
            self._retired, self.budget_bytes = True, 0
            free, self._free = self._free, []
            self._lent.clear()
        for buffer in free:
            let_go(buffer)

    def expect(self, nbytes: int) -> bool:
        """Sets the usual size of a snapshot to ``nbytes``; True if others are to be made for it.

        Free buffers that cannot serve such a snapshot (that of the dense first one) are freed.
        """
        with self._lock:
            if nbytes <= self._least_bytes:
                return False
            self._least_bytes, more = nbytes, nbytes > self._usual_bytes
            self._usual_bytes = self._size(nbytes) if more else self._usual_bytes
            wrong = [b for b in self._free if b.kind == WHOLE and not serves(b, nbytes)]
            self._free = [b for b in self._free if b not in wrong]
        for buffer in wrong:
            self.dispose(buffer)
        return more or bool(wrong)

    def clear(self) -> bool:
        """Frees the free buffers, whose room a snapshot needs; False if there are none, or if the room is for another
        buffer that is made ahead of time."""
        with self._lock:
            if self._ahead:
                return False
            found, self._free = self._free, []
        for buffer in found:
            self.dispose(buffer)
        return bool(found)

    def fits(self, nbytes: int, spare: int = 0) -> bool:
        """True if a buffer of ``nbytes`` could be lent out now, or as soon as what is made ahead of time is there, once
        ``spare`` bytes lent out are returned."""
        with self._lock:
            lent = self._held() - sum(buffer.nbytes for buffer in self._free) - sum(self._ahead)
            return lent - spare + nbytes <= self.budget_bytes


def _unseal(buffer: HostBuffer) -> bool:
    """Marks a slot as not sealed, so that no later process uses the old snapshot in it; False if that fails."""
    try:
        if buffer.slot is not None:
            buffer.slot.unseal()
            return buffer.slot.is_there
    except OSError as error:
        log.warning("a memory slot cannot be used again: %s", error)
        return False
    return True


def default_budget_bytes(local_ranks: int, left_bytes: int = 0) -> int:
    """Half of the memory that can be had now, within the cgroup's limit, shared by the ranks of this host.

    Page cache makes room when memory is needed, so it counts as free: a data set that was read must not shrink it.

    Args:
        local_ranks: How many they are.
        left_bytes: What snapshots of earlier lives take on this host, which their buffers replace.
    """
    free = available_bytes()
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_free_bytes(left_bytes=left_bytes)
    usable = free + left_bytes if limit is None else min(free + left_bytes, limit)
    return int(usable * _SHARE_OF_FREE_MEMORY) // max(1, local_ranks)
