"""Begins and ends the host memory of a session: the pool that snapshots are copied into, and the tier that keeps them.

A session that fails leaves its tier to the next one on the same store in this process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from moe_ckpt.comm.communicator import largest
from moe_ckpt.errors import LARGER_FILE_SYSTEM, ConfigError, MoECheckpointError, StoreError, StoreUnwritableError
from moe_ckpt.memory.directory import RankDirectory, node_of, run_directory
from moe_ckpt.memory.files import MemoryFiles, left_bytes, newest_generation, sweep
from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.memory.limits import (
    CGROUP,
    MACHINE,
    RoomNeeded,
    available_bytes,
    cgroup_bytes,
    default_budget_bytes,
    requires_room,
    say_file_system,
    say_room,
)
from moe_ckpt.memory.options import Memory
from moe_ckpt.memory.slot import HEADER_SUFFIX
from moe_ckpt.peers.replication import CANNOT_OPEN, Replicator, open_replication
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.local_state import ExpectedShare
from moe_ckpt.storage import open_storage
from moe_ckpt.storage.local import free_bytes
from moe_ckpt.tiers.buffers import BufferPool, arena_limit
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

_NUMBER_BITS = 62
"""Of what ranks agree on as a whole number."""

T = TypeVar("T")


def open_memory(run: RunContext, run_id: str, generation: int) -> MemoryTier:
    """Returns this rank's tier. A collective.

    Args:
        run: The session's.
        run_id: Of the store.
        generation: Life of the run, as storage knows it: a life may have left something in memory only.

    Raises:
        ConfigError: Memory is on at some ranks only, ranks have other settings, or its directory cannot be used.
        StoreUnwritableError: Its directory cannot be written.
        StoreError: That of another rank cannot be used.
    """
    settings, memory, rank = run.settings, run.settings.memory, run.comm.rank
    life, newest, directory = _agree(run, memory, run_id)
    if memory is None or directory is None:
        return _open_private(run, run_id, generation, life)
    generation = max(generation, newest + 1)
    with contextlib.ExitStack() as opened:

        def take_over() -> tuple[MemoryFiles, LeftSlots]:
            """Makes this life's directory, and takes over what this rank left; a thread verifies that from here on."""
            files = MemoryFiles(memory.root, run_id, generation, life, rank, run.storage.root)
            opened.callback(files.close, keep=True)
            leftovers = files.take_left(same_rank=True)
            files.open_arena(arena_limit(directory.budget), locks=settings.pinned)
            leftovers = files.adopt(leftovers)
            own_shares = [leftover for leftover in leftovers if leftover.header.rank == rank]
            slots = LeftSlots(leftovers, files.remove, own_shares)
            opened.callback(slots.checker.close)
            return files, slots

        taken, trouble = _attempt(memory, take_over)
        [failed] = largest(run.comm, [0 if trouble is None else rank + 1])
        files, slots = _on_all_ranks(taken, trouble, failed)
        # Each rank has taken over its own slots; now those that no rank has. ``open_replication`` shares the error.
        located, trouble = _attempt(memory, lambda: (node_of(memory.root), files.take_left(same_rank=False)))
        node, others = located or ("", [])
        slots.add(others)
        pool = BufferPool(directory.budget, pinned=settings.pinned, files=files)
        groups = [group for group in (run.placement.expert_peers, run.placement.peers) if group]
        require = requires_room(files.path, settings.local_ranks, lambda: pool.unmade_bytes)
        limits = partial(files.make, require=require), settings.timeout_secs
        replicator = open_replication(
            run.comm, memory, run_id, generation, *limits, groups=groups, gate=run.gate, problem=trouble
        )
        if replicator is not None:
            opened.callback(replicator.close)
        _say_room(run, memory, directory, replicator)
        tier = MemoryTier(
            run, run_id, generation, life, pool, files=files, node=node, left_slots=slots, replicator=replicator
        )
        pool.give_up = tier.give_up
        opened.pop_all()  # from here on they are the tier's
    with _registry_lock:  # it finds in files what earlier sessions left
        earlier = [one for one in _left_by(run.storage.root, run_id) if one.tier.rank == rank]
        _registry[:] = [one for one in _registry if one not in earlier]
    return tier


def _open_private(run: RunContext, run_id: str, generation: int, life: str) -> MemoryTier:
    """Returns the tier of a session without slots, with the checkpoints that an earlier one left in this process.

    Memory of another run that has used the same directory is freed, since nobody can use it again. Memory of runs on
    other stores is freed, too, if their storage has the same: to them it would only save time, and they may never be
    started again. The rest stays: see ``keep_for_next_session``.
    """
    settings, root, rank = run.settings, run.storage.root, run.comm.rank
    with _registry_lock:
        _forget(lambda one: one.root != root and not one.tier.has_more)
        private = [one for one in _left_by(root, run_id) if not one.tier.outlives_process]
        # Where ranks are threads of one process, there are several.
        earlier = min(private, key=lambda one: one.tier.rank != rank, default=None)
        # Each rank of the host takes over as many bytes.
        taken_nbytes = 0 if earlier is None else earlier.tier.nbytes * settings.local_ranks
        budget = settings.host_memory_bytes or default_budget_bytes(settings.local_ranks, taken_nbytes)
        pool = BufferPool(budget, pinned=settings.pinned)
        pool.map_private()
        tier = MemoryTier(run, run_id, generation, life, pool)
        if earlier is not None:
            tier.take_over(earlier.tier.surrender())
            _registry.remove(earlier)
    return tier


class _Directory(NamedTuple):
    """This rank's memory directory, before any rank takes over slots there, so that a node's ranks see the same.

    Attributes:
        newest: Newest life of which it has something; -1 for none.
        budget: Of this rank's buffers, in bytes.
        free: Bytes of the file system for this life's slots: with what earlier lives left there.
        limits: Likewise what ``CGROUP`` and ``MACHINE`` leave; None where nothing says.
    """

    newest: int
    budget: int
    free: int
    limits: Mapping[str, int | None]


def _inspect(run: RunContext, memory: Memory, run_id: str) -> _Directory:
    """Returns the facts of the memory directory, after removing the directories of runs that are over."""
    if os.path.isdir(memory.root):  # else an error tells that, and it lies nowhere
        say_file_system(memory.root)
    path = run_directory(memory.root, run_id, run.storage.root)
    newest = newest_generation(path)
    sweep(path)
    left_nbytes = left_bytes(path)
    budget = run.settings.host_memory_bytes or default_budget_bytes(run.settings.local_ranks, left_nbytes)
    available = available_bytes()
    machine = None if available is None else available + left_nbytes
    limits = {CGROUP: cgroup_bytes(left_bytes=left_nbytes), MACHINE: machine}
    return _Directory(newest, budget, free_bytes(memory.root) + left_nbytes, limits)


def _say_room(run: RunContext, memory: Memory, directory: _Directory, replicator: Replicator | None) -> None:
    """Warns before training if there is not enough memory for slots. One rank of each node does that."""
    settings, rank = run.settings, run.comm.rank
    if rank % settings.local_ranks:
        return
    held = () if replicator is None else replicator.roster.placement.sources_of[rank : rank + settings.local_ranks]
    share = ExpectedShare(run.state.tensors(), run.state.specs())
    of_node = settings.max_in_flight + 2, directory.budget, sum(map(len, held)), settings.local_ranks
    needed = RoomNeeded(share.most_nbytes, *of_node, share.is_estimated)
    limits = (limit for limit in directory.limits.values() if limit is not None)
    if needed.nbytes > min(directory.free, *limits):  # else there is no need to weigh what peers share
        exact = share.nbytes(run.catalog, run.placement, rank)
        say_room(memory.root, replace(needed, share_bytes=exact), directory.free, directory.limits)


def _agree(run: RunContext, memory: Memory | None, run_id: str) -> tuple[str, int, _Directory | None]:
    """Looks at the ranks' memory directories, if memory is on. One agreement, of a few numbers.

    Returns:
        A token that names this life of the run, equal on every rank; newest life of which any rank's memory has
        something, -1 for none; this rank's directory, if memory is on.

    Raises:
        ConfigError: Memory is on at some ranks only.
    """
    rank, is_on = run.comm.rank, memory is not None
    life = secrets.randbits(_NUMBER_BITS) if rank == 0 else 0
    directory, trouble = (None, None) if memory is None else _attempt(memory, lambda: _inspect(run, memory, run_id))
    failed = 0 if trouble is None else rank + 1
    mine = [(rank + 1) * is_on, (rank + 1) * (not is_on), life, failed, -1 if directory is None else directory.newest]
    on, off, life, failed, newest = largest(run.comm, mine)
    if on and off:
        other = f"rank {off - 1} has it off" if is_on else f"rank {on - 1} has it on"
        raise ConfigError(f"memory={memory!r} on rank {rank}, but {other}. Set it on all ranks, or on none")
    if is_on:
        _on_all_ranks(directory, trouble, failed)
    return f"{life:016x}", newest, directory


def _attempt(memory: Memory, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns (result of ``action``, None), or (None, its error)."""
    try:
        return action(), None
    except MoECheckpointError as error:
        return None, error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = f"--directory {shlex.quote(memory.root)}"
        mend = (
            f". `moe-ckpt memory {where}` lists what your runs left there, and `moe-ckpt memory clear --run ID "
            f"{where}` frees what one of them would go on from at its next start. {LARGER_FILE_SYSTEM}"
        )
        why = f"{error}{mend if full else ''}"
        return None, StoreUnwritableError(f"Memory(directory={memory.root!r}) cannot be used: {why}")


def _on_all_ranks(result: T | None, trouble: Exception | None, failed: int) -> T:
    """Returns what ``_attempt`` gave, if no rank has failed; else raises on every rank.

    Args:
        result, trouble: This rank's.
        failed: The highest rank that has failed, plus one; 0 for none.
    """
    if result is None or failed:
        raise trouble or StoreError(CANNOT_OPEN.format(failed - 1))
    return result


@dataclass(eq=False)
class _LeftTier:
    """A tier whose session failed in this process.

    Attributes:
        root: Of the session's store.
        tier: The tier.
        nbytes: Bytes of memory that it left.
        paths: Directories of its slots, if its buffers are slots.
        passed_over: A session on another store has begun since.
    """

    root: str
    tier: MemoryTier
    nbytes: int
    paths: tuple[Path, ...]
    passed_over: bool = False


_registry: list[_LeftTier] = []
_registry_lock = threading.Lock()


def _left_by(root: str, run_id: str) -> list[_LeftTier]:
    """Returns the tiers that earlier sessions on a store left, when another one begins. The caller has locked the
    registry."""
    _forget(lambda one: one.root == root and one.tier.run_id != run_id)
    for other in _registry:
        other.passed_over = other.passed_over or other.root != root
    return [one for one in _registry if one.root == root]


def _forget(is_over: Callable[[_LeftTier], bool]) -> int:
    """Frees the memory of tiers that no session will take over; returns its bytes. The caller has locked the
    registry."""
    freed = [one for one in _registry if is_over(one)]
    _registry[:] = [one for one in _registry if one not in freed]
    for path in [path for one in freed for path in one.paths]:
        directory = RankDirectory.take(path)
        if directory is not None:
            directory.remove()
    return sum(one.nbytes for one in freed)


def keep_for_next_session(tier: MemoryTier, root: str, *, keep: bool) -> None:
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
            _registry.append(_LeftTier(root, tier, nbytes, paths))
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
