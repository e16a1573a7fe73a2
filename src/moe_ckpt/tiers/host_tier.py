"""A rank's copy of the newest committed checkpoint in its own memory, which survives a failure of training.

The buffer that a committed checkpoint was written from stays lent out, as the recovery buffer, until the next commit
(MoC, section 3.2, "triple buffering" and "two-level PEC"). It holds what went to storage and, where the policy asked
for it, further experts that storage has in older versions only. A fault that leaves the process alive (an exception; a
dead peer, after which the survivors form a new process group) loses nothing of it: it is a slot without files, which
``reading.memory.memory_checkpoints`` reads as any other. A process that dies takes its buffer with it; memory that
outlives the process is kept by ``tiers.memory_tier`` instead.

What storage has, too, is worth time only. So the recovery buffer is given up wherever a snapshot finds no other room.

The buffers of all ranks are of one step: one becomes the recovery buffer when the commit is announced, which every rank
hears. A checkpoint whose announcement got lost with a peer may be committed all the same; it is kept beside the last
announced one, and storage decides which of them counts.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from moe_ckpt.format.manifest import ModelRecord, step_dir
from moe_ckpt.format.shard import TORCH_DTYPES, SliceEntry
from moe_ckpt.format.slot import SlotHeader
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.memory.directory import RankDirectory
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.memory.slot import HEADER_SUFFIX, PrivateSlot
from moe_ckpt.peers.replication import Replicator
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.compiling import HOST_ONLY
from moe_ckpt.slices.snapshot import Snapshot
from moe_ckpt.storage import open_storage
from moe_ckpt.tiers.buffers import BufferPool
from moe_ckpt.tiers.memory_tier import MemoryTier
from moe_ckpt.tiers.sealing import SlotHeaders

log = logging.getLogger("moe_ckpt")


def checksum(data: torch.Tensor) -> int:
    """Returns XXH3-64 of a uint8 tensor in host memory, as in the seals of shards."""
    return xxhash.xxh3_64_intdigest(data.contiguous().numpy().data)


def as_values(entry: SliceEntry, data: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a slice as a tensor of its type and shape: a view, or a copy if they are not aligned."""
    dtype = TORCH_DTYPES[entry.dtype]
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(entry.shape)


class HostTier:
    """Owns the recovery buffer of one rank. Made by ``claim``; outlives the session, unless that ended well.

    ``offer`` and ``ended`` are called on the persist thread, ``drop`` on the training thread at the same time.

    Args:
        rank: This process's.
        run_id: Of the store.
        model: The model that is trained.
        pool: Lends the buffers.
        describe: Makes the header of a snapshot's share.
        inherited: Checkpoints of an earlier session in this process.

    Attributes:
        node: Name of this process: no other one reaches its memory.
        left_slots: ``inherited``, until this session has a checkpoint.
        complete_step: Step of the checkpoint that this session resumed from, if it was here.
    """

    outlives_process = False
    replicator: Replicator | None = None
    retained_count = 0
    paths: Sequence[Path] = ()

    def __init__(
        self,
        rank: int,
        run_id: str,
        model: ModelRecord,
        pool: BufferPool,
        describe: Callable[[Snapshot], SlotHeader],
        *,
        inherited: Sequence[FoundSlot] = (),
    ) -> None:
        self.rank, self.model, self.run_id = rank, model, run_id
        self.root, self.node = "", f"process {os.getpid()} {secrets.token_hex(8)}"
        self.complete_step: int | None = None
        self.left_slots = LeftSlots(inherited, self._free)
        self._pool, self._describe = pool, describe
        self._kept: FoundSlot | None = None
        self._offered: FoundSlot | None = None
        self._lock = threading.RLock()
        for checkpoint in inherited:
            pool.adopt(_room(checkpoint))

    def retire(self, *, keep: bool) -> None:
        """Ends with the session: its pool lends nothing any more, and only the buffers of this tier stay."""
        with self._lock:
            self._pool.retire()

    def surrender(self) -> tuple[FoundSlot, ...]:
        """Returns all checkpoints, and owns them no more: a thread of the old session that still runs cannot touch
        them."""
        with self._lock:
            every, self._kept, self._offered = self.holds(), None, None
            self.left_slots.forget()
            return every

    def offer(self, snapshot: Snapshot) -> None:
        """Notes that this rank's share is written, so that the snapshot may be committed from now on."""
        if snapshot.contents.window is None:  # one step of a window is no checkpoint
            header = self._describe(snapshot)
            name = f"{step_dir(header.step, header.identity.generation)} in memory of process {os.getpid()}"
            with self._lock:
                self._offered = FoundSlot(PrivateSlot(name, snapshot.buffer), header)

    def ended(self, snapshot: Snapshot, *, committed: bool) -> None:
        """Notes the outcome of a snapshot.

        If it is committed, its buffer becomes the recovery buffer, and the former one is given back; of a step of a
        sparse window, which was not offered, no buffer stays. If it failed, the recovery buffer stays the same.
        """
        with self._lock:
            offered, self._offered = self._offered, None
            if committed:
                self.drop()
                self._kept = offered
            if not committed or offered is None:
                self._pool.give_back(snapshot.buffer)

    def drop(self, *, chain: bool = True, last: bool = False) -> bool:
        """Gives up the recovery buffer, because another snapshot needs the room; False if there was none.

        Args:
            chain, last: Not used here; see ``MemoryTier.drop``.
        """
        with self._lock:
            newest, self._kept = self._kept, None
            if newest is not None:
                self._pool.give_back(_room(newest))
            return bool(self.left_slots.slots and self.left_slots.remove()) or newest is not None

    def _free(self, checkpoints: list[FoundSlot]) -> None:
        for checkpoint in checkpoints:
            self._pool.give_back(_room(checkpoint))
        checkpoints.clear()

    @property
    def has_more(self) -> bool:
        """True if a checkpoint here has experts of which storage has only older versions: a fault without it would cost
        tokens."""
        return any(part.kind == HOST_ONLY for checkpoint in self.holds() for part in checkpoint.header.parts)

    def holds(self) -> tuple[FoundSlot, ...]:
        """Returns all checkpoints here, the oldest first."""
        with self._lock:
            return (*self.left_slots.slots, *filter(None, (self._kept, self._offered)))

    @property
    def droppable_bytes(self) -> int:
        """Bytes that ``drop`` would free."""
        with self._lock:
            return self.left_slots.nbytes + (0 if self._kept is None else self._kept.slot.memory.numel())

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoints here."""
        return sum(checkpoint.slot.memory.numel() for checkpoint in self.holds())


def _room(checkpoint: FoundSlot) -> Buffer:
    if not isinstance(checkpoint.slot, PrivateSlot):
        raise TypeError(f"{checkpoint.slot.path} is a slot of memory that outlives the process")
    return checkpoint.slot.room


BufferTier = HostTier | MemoryTier
"""Owner of the buffers of one rank that are kept for a recovery.

For each snapshot that goes to storage the persist thread calls ``offer`` and then ``ended``. The training thread calls
``drop`` if no buffer is free, and ``retire`` at the end.
"""


@dataclass(eq=False)
class _Kept:
    """A tier whose session failed in this process.

    Attributes:
        root: Of the session's store.
        tier: The tier.
        nbytes: Bytes of memory that it left.
        paths: Directories of its slots, if its buffers are slots.
        passed_over: A session on another store has begun since.
    """

    root: str
    tier: BufferTier
    nbytes: int
    paths: tuple[Path, ...]
    passed_over: bool = False


_registry: list[_Kept] = []
_registry_lock = threading.Lock()


def claim(run: RunContext, run_id: str, make: Callable[[int], BufferPool]) -> tuple[BufferPool, HostTier]:
    """Returns the pool and the tier of a new session on a store, with the checkpoints that an earlier one left.

    Memory of another run that has used the same directory is freed, since nobody can use it again. Memory of runs on
    other stores is freed, too, if their storage has the same: to them it would only save time, and they may never be
    started again. The rest stays: see ``leave``.

    Args:
        run: The session's.
        run_id: Of the store.
        make: Makes the pool, given the bytes of the checkpoints that are taken over.
    """
    root, rank = run.storage.root, run.comm.rank
    with _registry_lock:
        _forget(lambda one: one.root != root and not one.tier.has_more)
        tiers = [one.tier for one in _left_by(root, run_id) if isinstance(one.tier, HostTier)]
        # Where ranks are threads of one process, there are several.
        earlier = min(tiers, key=lambda tier: tier.rank != rank, default=None)
        pool = make(0 if earlier is None else earlier.nbytes)
        inherited = () if earlier is None else earlier.surrender()
        _registry[:] = [one for one in _registry if one.tier is not earlier]
    return pool, HostTier(rank, run_id, run.model, pool, SlotHeaders(run).of_share, inherited=inherited)


def begin_in_slots(root: str, run_id: str, rank: int) -> None:
    """Forgets earlier sessions on the store when one with slots begins, which finds their slots in files."""
    with _registry_lock:
        earlier = [one for one in _left_by(root, run_id) if one.tier.rank == rank]
        _registry[:] = [one for one in _registry if one not in earlier]


def _left_by(root: str, run_id: str) -> list[_Kept]:
    """Returns the tiers that earlier sessions on a store left, when another one begins. The caller has locked the
    registry."""
    _forget(lambda one: one.root == root and one.tier.run_id != run_id)
    for other in _registry:
        other.passed_over = other.passed_over or other.root != root
    return [one for one in _registry if one.root == root]


def _forget(is_over: Callable[[_Kept], bool]) -> int:
    """Frees the memory of tiers that no session will take over; returns its bytes. The caller has locked the
    registry."""
    freed = [one for one in _registry if is_over(one)]
    _registry[:] = [one for one in _registry if one not in freed]
    for path in [path for one in freed for path in one.paths]:
        directory = RankDirectory.take(path)
        if directory is not None:
            directory.remove()
    return sum(one.nbytes for one in freed)


def leave(tier: BufferTier, root: str, *, keep: bool) -> None:
    """Ends a tier with its session, and registers it for the next one on the store.

    A process that fails on one store after the other, as in a search over hyperparameters, keeps the memory of the last
    run only: memory of runs that were not started again before this session began is freed.

    Args:
        tier: Of the session.
        root: Of the store.
        keep: The session failed, so that its memory may be needed again.
    """
    nbytes, paths = tier.nbytes, tuple(tier.paths)
    holds = nbytes > 0 or any(any(path.glob(f"*{HEADER_SUFFIX}")) for path in paths)  # of plain state alone, too
    tier.retire(keep=keep)  # a rank that holds nothing must not remove what other ranks of the node hold
    if keep and holds:
        with _registry_lock:
            _forget(lambda one: one.passed_over)
            _registry.append(_Kept(root, tier, nbytes, paths))
        log.info(
            "%.1f MB of host memory are kept for a restart of training%s; moe_ckpt.release_host_memory() frees them",
            nbytes / 1e6,
            " on this node" if paths else " in this process",
        )


def release_host_memory(dirpath: str | os.PathLike[str] | None = None) -> int:
    """Frees the snapshots that failed runs of this process left in memory for a restart.

    For processes that live on without starting the run again, such as notebooks. Buffers of a running fit stay.

    Args:
        dirpath: Store of the run, as given to ``MoECheckpoint`` or ``megatron.attach``; None for all stores.

    Returns:
        How many bytes were freed.
    """
    root = None if dirpath is None else open_storage(dirpath).root
    with _registry_lock:
        return _forget(lambda one: root in (None, one.root))
