"""What this process's memory keeps of the newest committed checkpoint, also after training failed around it.

The buffer that a committed checkpoint was written from stays lent out, as the recovery buffer, until the
next commit (MoC, section 3.2, "triple buffering" and "two-level PEC"). It holds what went to storage and, where the
policy asked for it, further experts that storage has in older versions only. A fault that leaves the
process alive (an exception; a dead peer, after which the survivors form a new process group) loses
nothing of it: ``recovery.overlay`` then takes those experts from here. A process that dies takes its
buffer with it.

The buffers of all ranks are of one step: one becomes the recovery buffer when the commit is announced,
which every rank hears. A checkpoint whose announcement got lost with a peer may be committed all the
same; it is kept beside the last announced one, and storage decides which of them counts.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import xxhash

from moe_ckpt.engine.buffers import HostBuffer, HostBufferPool
from moe_ckpt.engine.snapshot import ShardPart, Snapshot
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.format.shard import ShardHeader, SliceEntry
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True, eq=False)
class HeldCheckpoint:
    """One rank's share of one checkpoint in host memory, which nobody writes to any more.

    parts: as laid out in ``buffer``; every entry carries the checksum that its bytes had when they were written
        to storage, or would have been.
    """

    run_id: str
    step: int
    generation: int
    parts: tuple[ShardPart, ...]
    buffer: HostBuffer

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.generation)

    def slices(self) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        """Each slice with its bytes (uint8, a view of the buffer). Not verified."""
        for part in self.parts:
            for entry in part.entries:
                yield entry, self.buffer.memory[part.base + entry.begin : part.base + entry.end]


def checksum(data: torch.Tensor) -> str:
    """XXH3-64 of a uint8 tensor in host memory, 16 hex digits, as in shard headers."""
    return xxhash.xxh3_64_hexdigest(data.contiguous().numpy().data)


def as_values(entry: SliceEntry, data: torch.Tensor) -> torch.Tensor:
    """The bytes of one slice as the tensor they are. A view, unless they lie where the dtype cannot."""
    dtype = TORCH_DTYPES[entry.dtype]
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(entry.shape)


def hold(snapshot: Snapshot, run_id: str, headers: tuple[ShardHeader, ...]) -> HeldCheckpoint:
    """What a written snapshot leaves in memory. headers: of its shards, in the order of ``snapshot.written``.

    Called on the persist thread, which has just taken the checksums in ``headers``; those of what is only
    held are taken here, so that nothing is ever read back from memory without one.
    """
    parts = [
        ShardPart(part.kind, header.slices, part.base)
        for part, header in zip(snapshot.written, headers, strict=True)
    ]
    for part in snapshot.parts:
        if not part.is_written:
            data = snapshot.buffer.memory[part.base : part.base + part.nbytes]
            entries = (replace(e, checksum=checksum(data[e.begin : e.end])) for e in part.entries)
            parts.append(ShardPart(part.kind, tuple(entries), part.base))
    return HeldCheckpoint(run_id, snapshot.step, snapshot.generation, tuple(parts), snapshot.buffer)


class HostTier:
    """Owns the recovery buffer of one rank. Made by ``claim``; outlives the session, unless that ended well.

    ``offer`` and ``settle`` are called on the persist thread, ``drop`` on the training thread while that
    runs, ``find`` between two lives.
    """

    def __init__(self, rank: int, pool: HostBufferPool, kept: tuple[HeldCheckpoint, ...] = ()) -> None:
        self.rank = rank
        self._pool = pool
        self._kept = kept
        self._offered: HeldCheckpoint | None = None
        self._lock = threading.Lock()
        for held in kept:
            pool.adopt(held.buffer)

    def retire(self) -> None:
        """The session ended: of all its buffers only those held here outlive it."""
        self._pool.retire()

    def surrender(self) -> tuple[HeldCheckpoint, ...]:
        """Hand over everything held. A thread of the old session that is still at work cannot touch it any more."""
        with self._lock:
            held, self._kept, self._offered = self._holds(), (), None
            return held

    def offer(self, held: HeldCheckpoint) -> None:
        """This rank's share is written and will be acknowledged next: from here on it may become committed."""
        with self._lock:
            self._offered = held

    def settle(self, buffer: HostBuffer, *, committed: bool) -> None:
        """The outcome was announced. ``buffer`` is that of the snapshot, offered or not.

        Committed and offered, it becomes the recovery buffer and the former one is free. Committed, but not
        offered (the checkpoint was complete), storage holds all there is, and memory nothing. Not
        committed, the former recovery buffer stays what it is.
        """
        with self._lock:
            offered, self._offered = self._offered, None
            free = [buffer]
            if committed:
                free = [held.buffer for held in self._kept] + ([] if offered else [buffer])
                self._kept = (offered,) if offered else ()
            for each in free:
                self._pool.give_back(each)

    def drop(self) -> bool:
        """Give the recovery buffer up early, because there is no other; True if there was one."""
        with self._lock:
            kept, self._kept = self._kept, ()
            for held in kept:
                self._pool.give_back(held.buffer)
            return bool(kept)

    def find(self, run_id: str, step: int, generation: int) -> HeldCheckpoint | None:
        """What is held of exactly this checkpoint."""
        with self._lock:
            wanted = (run_id, step, generation)
            found = (held for held in self._holds() if (held.run_id, held.step, held.generation) == wanted)
            return next(found, None)

    def _holds(self) -> tuple[HeldCheckpoint, ...]:
        return self._kept if self._offered is None else (*self._kept, self._offered)

    @property
    def droppable_bytes(self) -> int:
        """Host memory that ``drop`` would free."""
        with self._lock:
            return sum(held.buffer.nbytes for held in self._kept)

    @property
    def nbytes(self) -> int:
        """Host memory that survives a fault here."""
        with self._lock:
            return sum(held.buffer.nbytes for held in self._holds())


@dataclass(eq=False)
class _Registered:
    root: str
    run_id: str
    tier: HostTier
    in_use: bool = True
    passed_over: bool = False


_registry: list[_Registered] = []
_registry_lock = threading.Lock()


def claim(root: str, run_id: str, rank: int, pool: HostBufferPool) -> HostTier:
    """The tier for a new session on the store at ``root``: what an earlier one left in this process, or an empty one.

    What is left of another run that once used the same directory can never be used again, and is freed. What is
    left of other stores is passed over: see ``leave``.
    """
    with _registry_lock:
        _registry[:] = [r for r in _registry if r.in_use or r.root != root or r.run_id == run_id]
        for other in _registry:
            other.passed_over = other.passed_over or (not other.in_use and other.root != root)
        left = [r for r in _registry if not r.in_use and (r.root, r.run_id) == (root, run_id)]
        kept: tuple[HeldCheckpoint, ...] = ()
        if left:
            found = min(left, key=lambda r: r.tier.rank != rank)  # of several, where ranks are threads
            _registry.remove(found)
            kept = found.tier.surrender()
        tier = HostTier(rank, pool, kept)
        _registry.append(_Registered(root, run_id, tier))
        return tier


def leave(tier: HostTier, *, keep: bool) -> None:
    """The session that claimed ``tier`` ends. keep: it failed, so that what is held may be needed again.

    A process that fails in one store after the other, as in a search over hyperparameters, keeps the memory of the
    last one: what was left before this session began, by a run that was not started again, is freed.
    """
    tier.retire()
    with _registry_lock:
        if keep and tier.nbytes:
            _registry[:] = [r for r in _registry if r.in_use or not r.passed_over]
        for registered in [r for r in _registry if r.tier is tier]:
            registered.in_use = False
            if keep and tier.nbytes:
                log.info(
                    "%.1f MB of host memory are kept for a restart of training in this process; "
                    "moe_ckpt.release_host_memory() frees them",
                    tier.nbytes / 1e6,
                )
            else:
                _registry.remove(registered)


def release_host_memory(dirpath: str | os.PathLike[str] | None = None) -> int:
    """Frees the snapshots that failed runs left in this process's memory for a restart.

    For processes that live on without starting the run again, such as notebooks. Buffers of a running fit stay.

    Args:
        dirpath: Store of the run, as given to ``MoECheckpoint`` or ``megatron.attach``; None for all stores.

    Returns:
        How many bytes were freed.
    """
    root = None if dirpath is None else open_storage(dirpath).root
    with _registry_lock:
        freed = [r for r in _registry if not r.in_use and root in (None, r.root)]
        _registry[:] = [r for r in _registry if r not in freed]
        return sum(r.tier.nbytes for r in freed)
