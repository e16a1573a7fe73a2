"""The beginning of copies on peers: who is on which node, who holds whose copies, and how to reach them."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from moe_ckpt.core.quantities import name_ranks
from moe_ckpt.errors import ConfigError, StoreError
from moe_ckpt.memory.directory import node_of
from moe_ckpt.memory.options import Memory
from moe_ckpt.memory.slot import Slot
from moe_ckpt.notices import announce
from moe_ckpt.peers.replica_placement import ReplicaPlacement, place_replicas
from moe_ckpt.peers.replication import Replicator, Roster
from moe_ckpt.peers.wire import SECRET_NBYTES, Listener
from moe_ckpt.ports import Communicator, TransferGate

CANNOT_OPEN = "rank {} could not open its memory directory; see its log"


def open_replication(
    comm: Communicator,
    memory: Memory,
    run_id: str,
    generation: int,
    make: Callable[[int], Slot],
    timeout_secs: float,
    *,
    groups: Sequence[Sequence[int]] = (),
    gate: TransferGate | None = None,
    problem: Exception | None = None,
) -> Replicator | None:
    """Returns this rank's replicator; None without replicas. A collective of the training thread.

    The last one of a start's: what went wrong on a rank before is told here, and needs no message of its own.

    Args:
        comm: The ranks, all of which have memory on.
        memory: What this rank's user chose.
        run_id: Of the store.
        generation: Life of the run, which ``comm`` has entered.
        make: Makes a slot in this rank's memory directory. Raises ``MemoryFullError``.
        timeout_secs: Longest time in which a peer takes or gives no byte.
        groups: Kinds of data parallelism, from the one whose ranks share most state: the ranks of this rank's group.
        gate: Holds sends back; None: they go at once.
        problem: Why this rank cannot use its memory directory; it raises that, once the others know.

    Raises:
        ConfigError: On every rank alike: settings differ, or there are no nodes for so many copies.
        StoreError: A rank cannot listen, and says why; or cannot use its memory directory.
        PeerLostError: A peer did not come.
    """
    listener, trouble = None, "" if problem is None else CANNOT_OPEN.format(comm.rank)
    announced: dict[str, Any] = {"replicas": memory.replicas, "domain": memory.failure_domain}
    announced["groups"] = [min(group) for group in groups]  # whose members all say so
    announced["secret"] = secrets.token_hex(SECRET_NBYTES)  # rank 0's counts
    try:
        announced["node"] = node_of(memory.root)
        if memory.replicas and comm.world_size > 1 and problem is None:
            listener = Listener(timeout_secs)
            announced["address"] = list(listener.address)
    except OSError as error:
        trouble = trouble or f"rank {comm.rank} cannot take copies of peers: {error}"
    try:
        ranks = [json.loads(raw) for raw in comm.everyone(json.dumps({**announced, "trouble": trouble}).encode())]
        if problem is not None:
            raise problem
        placement = _placement(ranks)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    if listener is None:
        return None
    if comm.rank == 0 and placement.short:
        _say_short(placement, memory.replicas)
    addresses = tuple((str(answer["address"][0]), int(answer["address"][1])) for answer in ranks)
    secret = bytes.fromhex(ranks[0]["secret"])
    roster = Roster(comm.rank, run_id, generation, placement, addresses, secret)
    return Replicator(roster, listener, make, timeout_secs, gate)


def _placement(ranks: list[dict[str, Any]]) -> ReplicaPlacement:
    """The same on every rank, or the same error."""
    trouble = next((answer["trouble"] for answer in ranks if answer["trouble"]), "")
    if trouble:
        raise StoreError(trouble)
    for rank, answer in enumerate(ranks):
        if answer["replicas"] != ranks[0]["replicas"]:
            raise ConfigError(
                f"Memory(replicas=...): rank 0 has {ranks[0]['replicas']}, and rank {rank} has {answer['replicas']}"
            )
        if (answer["domain"] is None) != (ranks[0]["domain"] is None):
            raise ConfigError(
                f"Memory(failure_domain=...): rank 0 has {ranks[0]['domain']!r}, and rank {rank} has "
                f"{answer['domain']!r}; set it on all ranks, or on none"
            )
    named = [(answer["node"],) if answer["domain"] is None else (answer["node"], answer["domain"]) for answer in ranks]
    kinds = [list(kind) for kind in zip(*(answer["groups"] for answer in ranks), strict=True)]
    return place_replicas(named, ranks[0]["replicas"], [_groups(kind) for kind in kinds])


def _groups(first: Sequence[int]) -> list[tuple[int, ...]]:
    """Per rank the ranks of its group. first: per rank the lowest of them."""
    members: dict[int, list[int]] = {}
    for rank, lowest in enumerate(first):
        members.setdefault(lowest, []).append(rank)
    return [tuple(members[lowest]) for lowest in first]


def _say_short(placement: ReplicaPlacement, replicas: int) -> None:
    fewest = min(len(placement.peers_of[rank]) for rank in placement.short)
    announce(
        "Memory(replicas=%d): %d of %d ranks (%s) have fewer copies, at least %d: there are no more nodes outside "
        "their failure domain",
        *(replicas, len(placement.short), len(placement.peers_of), name_ranks(placement.short), fewest),
        level=logging.WARNING,
    )
