"""Opens the host memory of a session: the pool that snapshots are copied into, and the tier that keeps them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.cadence import StorageCadence
from moe_ckpt.engine import host_tier
from moe_ckpt.engine.buffers import HostBufferPool, default_budget_bytes
from moe_ckpt.engine.context import RunContext
from moe_ckpt.engine.host_tier import HostTier
from moe_ckpt.engine.left_slots import LeftSlots
from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.errors import ConfigError, MoECheckpointError, StoreError, StoreUnwritableError
from moe_ckpt.memory.checking import newest_of
from moe_ckpt.memory.directory import node_of
from moe_ckpt.memory.files import MemoryFiles, left_bytes, newest_generation, sweep
from moe_ckpt.memory.options import Memory
from moe_ckpt.memory.preflight import say_file_system
from moe_ckpt.replicas.opening import open_replication

T = TypeVar("T")


class HostMemory(NamedTuple):
    """This rank's pool and tier, and the life of the run that they are of: newer than all that memory holds."""

    pool: HostBufferPool
    tier: HostTier | MemoryTier
    generation: int


def open_memory(run: RunContext, run_id: str, generation: int) -> HostMemory:
    """Returns this rank's pool and tier. A collective.

    Args:
        run: The session's.
        run_id: Of the store.
        generation: Life of the run, as storage knows it: a life may have left something in memory only.

    Raises:
        ConfigError: Memory is on at some ranks only, or its directory cannot be used.
        StoreUnwritableError: Its directory cannot be written.
        StoreError: That of another rank cannot be used.
    """
    settings, memory = run.settings, run.settings.memory
    _require_on_all(run, memory)
    if memory is None:
        left_here = host_tier.claimable_bytes(run.storage.root, run_id, run.comm.rank)
        ranks = settings.local_ranks
        budget = settings.host_memory_bytes or default_budget_bytes(ranks, left_here * ranks)  # each has left as much
        pool = HostBufferPool(budget, pinned=settings.pinned)
        return HostMemory(pool, host_tier.claim(run.storage.root, run_id, run.comm.rank, pool), generation)
    life = _agreed_life(run, memory)
    prepared = lambda: _prepared(run, memory, run_id)  # noqa: E731
    (_, budget), newest = _together_with_most(run, memory, prepared, lambda found: found[0])
    generation = max(generation, newest + 1)
    files = _together(
        run, memory, lambda: MemoryFiles(memory.root, run_id, generation, life, run.comm.rank, run.storage.root)
    )
    slots: LeftSlots | None = None
    try:
        # First what each rank left itself, then, once all have theirs, what nobody has taken.
        _together(run, memory, lambda: files.take_left(own=True))
        left = _together(run, memory, lambda: files.take_left(own=False))
        slots = LeftSlots(left, files.remove, newest_of(left, run.comm.rank))
        pool = HostBufferPool(budget, pinned=settings.pinned, make_slot=lambda nbytes: tier.make(nbytes))
        groups = [group for group in (run.placement.expert_peers, run.placement.peers) if group]
        limits = files.make, settings.timeout_secs
        replicator = open_replication(run.comm, memory, run_id, generation, *limits, groups, run.gate)
        tier = MemoryTier(run.comm.rank, node_of(memory.root), run.model, pool, files, slots, replicator)
    except BaseException:
        if slots is not None:
            slots.checker.close()
        files.close(keep=True)
        raise
    host_tier.register(run.storage.root, run_id, tier)
    return HostMemory(pool, tier, generation)


def _prepared(run: RunContext, memory: Memory, run_id: str) -> tuple[int, int]:
    """(newest life of which memory has something, -1 for none; budget of this rank's buffers in bytes).

    Before any rank takes anything over: the ranks of a node find the same there.
    """
    say_file_system(memory.root)
    newest = newest_generation(memory.root, run_id)
    sweep(memory.root, run_id)
    budget = memory.budget_bytes or run.settings.host_memory_bytes
    if budget is None:
        left = left_bytes(memory.root, run_id, run.storage.root)
        budget = default_budget_bytes(run.settings.local_ranks, left)
    return newest, int(budget)


def _require_on_all(run: RunContext, memory: Memory | None) -> None:
    rank, is_on = run.comm.rank, memory is not None
    on, off = largest(run.comm, [(rank + 1) * is_on, (rank + 1) * (not is_on)])
    if on and off:
        other = f"rank {off - 1} has it off" if is_on else f"rank {on - 1} has it on"
        raise ConfigError(f"memory={memory!r} on rank {rank}, but {other}. All ranks have it, or none")


def _agreed_life(run: RunContext, memory: Memory) -> str:
    """A token that names this life of the run, alike on every rank.

    Raises:
        ConfigError: Ranks have other settings. Each decides alone which snapshots go to storage: they would wait for
            each other.
    """
    mine = memory.cadence
    told = run.comm.everyone(json.dumps([secrets.token_hex(8), mine.every_n_steps, mine.every_secs]).encode())
    lives, *_ = zip(*(json.loads(raw) for raw in told), strict=True)
    for rank, raw in enumerate(told):
        other = StorageCadence(*json.loads(raw)[1:])
        if other != mine:
            raise ConfigError(
                f"ranks disagree on which checkpoints go to storage: {_said_cadence(mine)} on rank {run.comm.rank}, "
                f"{_said_cadence(other)} on rank {rank}. Give all ranks the same"
            )
    return str(lives[0])


def _said_cadence(cadence: StorageCadence) -> str:
    return f"storage_every_n_steps={cadence.every_n_steps!r}, storage_every_secs={cadence.every_secs!r}"


def _together(run: RunContext, memory: Memory, action: Callable[[], T]) -> T:
    """What ``action`` gives; raises on every rank, if on one. A collective."""
    return _together_with_most(run, memory, action, lambda found: 0)[0]


def _together_with_most(
    run: RunContext, memory: Memory, action: Callable[[], T], number: Callable[[T], int]
) -> tuple[T, int]:
    """The same, and the largest ``number`` of what it gives on any rank."""
    trouble: Exception | None = None
    told = 0
    try:
        found = action()
        told = number(found)
    except MoECheckpointError as error:
        trouble = error
    except OSError as error:
        trouble = StoreUnwritableError(f"Memory(directory={memory.root!r}) cannot be used: {error}")
    failed, most = largest(run.comm, [0 if trouble is None else run.comm.rank + 1, told])
    if trouble is not None:
        raise trouble
    if failed:
        raise StoreError(f"rank {failed - 1} could not open its memory directory; its log says why")
    return found, most
