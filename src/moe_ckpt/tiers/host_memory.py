"""Opens the host memory of a session: the pool that snapshots are copied into, and the tier that keeps them."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from moe_ckpt.comm.communicator import largest
from moe_ckpt.errors import LARGER_FILE_SYSTEM, ConfigError, MoECheckpointError, StoreError, StoreUnwritableError
from moe_ckpt.memory.cgroups import cgroup_bytes
from moe_ckpt.memory.directory import node_of, run_directory
from moe_ckpt.memory.files import MemoryFiles, left_bytes, newest_generation, sweep
from moe_ckpt.memory.left_slots import LeftSlots, newest_of
from moe_ckpt.memory.options import Memory
from moe_ckpt.peers.replication import CANNOT_OPEN, Replicator, open_replication
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.local_state import ExpectedShare
from moe_ckpt.storage.local import free_bytes
from moe_ckpt.tiers import host_tier
from moe_ckpt.tiers.buffers import BufferPool, arena_limit
from moe_ckpt.tiers.host_tier import HostTier
from moe_ckpt.tiers.limits import (
    CGROUP,
    MACHINE,
    LimitedSlots,
    RoomNeeded,
    available_bytes,
    default_budget_bytes,
    say_file_system,
    say_room,
)
from moe_ckpt.tiers.memory_tier import MemoryTier

_NUMBER_BITS = 62
"""Of what ranks agree on as a whole number."""

T = TypeVar("T")
_Free = tuple[int, Mapping[str, int | None]]


class HostMemory(NamedTuple):
    """This rank's pool and tier, and the life of the run that they are of: newer than all that memory holds.

    Attributes:
        life: A token that no other life has, equal on every rank.
    """

    pool: BufferPool
    tier: HostTier | MemoryTier
    generation: int
    life: str


def open_memory(run: RunContext, run_id: str, generation: int) -> HostMemory:
    """Returns this rank's pool and tier. A collective.

    Args:
        run: The session's.
        run_id: Of the store.
        generation: Life of the run, as storage knows it: a life may have left something in memory only.

    Raises:
        ConfigError: Memory is on at some ranks only, ranks have other settings, or its directory cannot be used.
        StoreUnwritableError: Its directory cannot be written.
        StoreError: That of another rank cannot be used.
    """
    settings, memory = run.settings, run.settings.memory
    agreed = _agree(run, memory, run_id)
    if memory is None:
        ranks = settings.local_ranks

        def make(taken_nbytes: int) -> BufferPool:
            budget = settings.host_memory_bytes or default_budget_bytes(
                ranks, taken_nbytes * ranks
            )  # each has left as much
            pool = BufferPool(budget, pinned=settings.pinned)
            pool.map_private()
            return pool

        return HostMemory(*host_tier.claim(run, run_id, make), generation, agreed.life)
    generation = max(generation, agreed.newest + 1)
    files, slots = _take_over_on_all_ranks(run, memory, run_id, generation, agreed)
    replicator = None
    try:
        # Each rank has taken over its own slots; now those that no rank has. ``open_replication`` shares the error.
        taken, trouble = _attempt(memory, lambda: (node_of(memory.root), files.take_left(same_rank=False)))
        node, others = taken or ("", [])
        slots.add(others)
        pool = BufferPool(agreed.budget, pinned=settings.pinned, files=files)
        groups = [group for group in (run.placement.expert_peers, run.placement.peers) if group]
        limits = LimitedSlots(files, pool, settings.local_ranks).make, settings.timeout_secs
        replicator = open_replication(
            run.comm, memory, run_id, generation, *limits, groups=groups, gate=run.gate, problem=trouble
        )
        _say_room(run, memory, agreed, replicator)
        tier = MemoryTier(run, node, pool, files, slots, replicator=replicator)
        pool.give_up = tier.give_up
    except BaseException:
        if replicator is not None:
            replicator.close()
        _release((files, slots))
        raise
    host_tier.begin_in_slots(run.storage.root, run_id, tier.rank)
    return HostMemory(pool, tier, generation, files.life)


def _inspect(run: RunContext, memory: Memory, run_id: str) -> tuple[int, int, _Free]:
    """Looks at the memory directory, before any rank takes over slots there, so that a node's ranks find the same.

    Returns:
        Newest life of which memory has something, -1 for none; budget of this rank's buffers in bytes; what is free.
    """
    if os.path.isdir(memory.root):  # else an error tells that, and it lies nowhere
        say_file_system(memory.root)
    directory = run_directory(memory.root, run_id, run.storage.root)
    newest = newest_generation(directory)
    sweep(directory)
    leftover_nbytes = left_bytes(directory)
    budget = run.settings.host_memory_bytes or default_budget_bytes(run.settings.local_ranks, leftover_nbytes)
    available = available_bytes()
    machine = None if available is None else available + leftover_nbytes
    limits = {CGROUP: cgroup_bytes(left_bytes=leftover_nbytes), MACHINE: machine}
    return newest, budget, (free_bytes(memory.root) + leftover_nbytes, limits)


def _say_room(run: RunContext, memory: Memory, agreed: _Agreed, replicator: Replicator | None) -> None:
    """Warns before training if slots will find no room. One rank of the node knows of all whose copies lie there."""
    settings, rank, (free, limits) = run.settings, run.comm.rank, agreed.free
    if rank % settings.local_ranks:
        return
    held = () if replicator is None else replicator.roster.placement.sources_of[rank : rank + settings.local_ranks]
    share = ExpectedShare(run.state.tensors(), run.state.specs())
    of_node = settings.max_in_flight + 2, agreed.budget, sum(map(len, held)), settings.local_ranks, share.is_estimated
    needed = RoomNeeded(share.most_nbytes, *of_node)
    known_limits = (limit for limit in limits.values() if limit is not None)
    if needed.nbytes > min(free, *known_limits):  # else there is no need to weigh what peers share
        exact = share.nbytes(run.catalog, run.placement, run.comm.rank)
        say_room(memory.root, replace(needed, share_bytes=exact), free, limits)


class _Agreed(NamedTuple):
    """What the ranks agree on first.

    Attributes:
        life: A token that names this life of the run, equal on every rank.
        newest: Life of which any rank's memory has something; -1 for none.
        budget: Of this rank's buffers, in bytes.
        free: Bytes of the memory directory, and what ``CGROUP`` and ``MACHINE`` leave (None where nothing says), for
            this life's slots: with what earlier lives left there.
    """

    life: str
    newest: int
    budget: int
    free: _Free


def _agree(run: RunContext, memory: Memory | None, run_id: str) -> _Agreed:
    """Looks at the ranks' memory directories, if memory is on. One agreement, of a few numbers.

    Raises:
        ConfigError: Memory is on at some ranks only.
    """
    rank, is_on = run.comm.rank, memory is not None
    life = secrets.randbits(_NUMBER_BITS) if rank == 0 else 0
    inspected: tuple[int, int, _Free] | None = None
    trouble: Exception | None = None
    if memory is not None:
        inspected, trouble = _attempt(memory, lambda: _inspect(run, memory, run_id))
    newest, budget, free = inspected or (-1, 0, (0, {}))
    failed = 0 if trouble is None else rank + 1
    mine = [(rank + 1) * is_on, (rank + 1) * (not is_on), life, failed, newest]
    on, off, life, failed, newest = largest(run.comm, mine)
    if on and off:
        other = f"rank {off - 1} has it off" if is_on else f"rank {on - 1} has it on"
        raise ConfigError(f"memory={memory!r} on rank {rank}, but {other}. Set it on all ranks, or on none")
    _raise_on_all_ranks(trouble, failed)
    return _Agreed(f"{life:016x}", newest, budget, free)


def _take_over(
    run: RunContext, memory: Memory, run_id: str, generation: int, agreed: _Agreed
) -> tuple[MemoryFiles, LeftSlots]:
    """Makes this life's directory, and takes over what this rank left; a thread verifies that from here on."""
    files = MemoryFiles(memory.root, run_id, generation, agreed.life, run.comm.rank, run.storage.root)
    try:
        leftovers = files.take_left(same_rank=True)
        files.open_arena(arena_limit(agreed.budget), locks=run.settings.pinned)
        leftovers = files.adopt(leftovers)
        return files, LeftSlots(leftovers, files.remove, newest_of(leftovers, run.comm.rank))
    except BaseException:
        files.close(keep=True)
        raise


def _take_over_on_all_ranks(
    run: RunContext, memory: Memory, run_id: str, generation: int, agreed: _Agreed
) -> tuple[MemoryFiles, LeftSlots]:
    """``_take_over`` on every rank; if it fails on one rank, all raise. A collective."""
    taken, trouble = _attempt(memory, partial(_take_over, run, memory, run_id, generation, agreed))
    try:
        [failed] = largest(run.comm, [0 if trouble is None else run.comm.rank + 1])
        if taken is None or failed:
            raise trouble or StoreError(CANNOT_OPEN.format(failed - 1))
    except BaseException:
        if taken is not None:
            _release(taken)
        raise
    return taken


def _release(taken_over: tuple[MemoryFiles, LeftSlots]) -> None:
    files, slots = taken_over
    slots.checker.close()
    files.close(keep=True)


def _attempt(memory: Memory, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns (result of ``action``, None), or (None, its error)."""
    try:
        return action(), None
    except MoECheckpointError as error:
        return None, error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = f". {_clearing(memory.root)} {LARGER_FILE_SYSTEM}" if full else ""
        return None, StoreUnwritableError(f"Memory(directory={memory.root!r}) cannot be used: {error}{mend}")


def _clearing(root: str) -> str:
    where = f"--directory {shlex.quote(root)}"
    return (
        f"`moe-ckpt memory {where}` lists what your runs left there, and `moe-ckpt memory clear --run ID {where}` "
        "frees what one of them would go on from at its next start."
    )


def _raise_on_all_ranks(trouble: Exception | None, failed: int) -> None:
    """Raises on every rank if one has failed. failed: the highest such rank plus one; 0 for none."""
    if trouble is not None:
        raise trouble
    if failed:
        raise StoreError(CANNOT_OPEN.format(failed - 1))
