"""Ranks with sealed memory slots and copies of them on one another, without training."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from moe_ckpt import Memory
from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.step import Contents, Facts, Step
from moe_ckpt.format.shard import Checksums, ShardHeader, SliceEntry, encode_header, lay_out_in_order
from moe_ckpt.format.slot import SlotHeader, SlotPart, encode_slot
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.peers.messages import SealedSlot
from moe_ckpt.peers.replication import open_replication
from moe_ckpt.ports import Communicator

RUN = "a-run"
SLICES = 5


def checksum(data: torch.Tensor) -> int:
    """XXH3-64 of a uint8 tensor in host memory, as in the seals of shards."""
    return xxhash.xxh3_64_intdigest(data.contiguous().numpy().data)


def with_checksums(entries: Sequence[SliceEntry], checksums: Checksums) -> tuple[SliceEntry, ...]:
    """The entries, each with its checksum."""
    pairs = zip(entries, checksums.tolist(), strict=True)
    return tuple(replace(entry, checksum=checksum) for entry, checksum in pairs)


class Rank:
    """One rank with a memory directory on its node and the copies that go with it.

    Args:
        root: Under which each node has a directory.
        ranks_per_node: Consecutive ranks of one node.
        replicas: Copies of each.
        timeout_secs: Of peers.
        generation: Of the run.
        comm: Made already, on another network than the copies take.
    """

    def __init__(
        self,
        root: str,
        ranks_per_node: int,
        replicas: int,
        timeout_secs: float,
        generation: int = 7,
        comm: Communicator | None = None,
    ) -> None:
        self.rank, self.world_size, self.generation = dist.get_rank(), dist.get_world_size(), generation
        node = Path(root, f"node_{self.rank // ranks_per_node}")
        node.mkdir(parents=True, exist_ok=True)
        self.comm = comm or make_communicator(120.0)
        self.comm.enter(generation)
        self.files = MemoryFiles(str(node), RUN, generation, "a-life", self.rank, "a-store")
        memory = Memory(directory=node, replicas=replicas)
        found = open_replication(self.comm, memory, RUN, generation, self.files.make, timeout_secs)
        assert found is not None
        self.replicator = found

    def seal(self, sequence: int, nbytes: int, slot: Slot | None = None, **facts: int) -> tuple[Slot, SealedSlot]:
        """A slot of this step's own bytes. facts: what its header says of them that is not so."""
        slot = slot or self.files.make(nbytes + 100)
        slot.memory[:nbytes] = bytes_of(self.rank, sequence, nbytes)
        header = header_of(slot, nbytes, **{"step": sequence, "generation": self.generation, "rank": self.rank} | facts)
        slot.seal(header)
        return slot, SealedSlot(sequence, slot.memory[:nbytes], header)

    def holds(self, source: int, sequence: int, nbytes: int) -> bool:
        """A copy lies here, equal to the last bit, and opens."""
        slot = self.replicator.store.held().get((source, sequence))
        if slot is None:
            return False
        opened, header = Slot.open(slot.path)
        assert (header.rank, header.step) == (source, sequence)
        return torch.equal(opened.memory[:nbytes], bytes_of(source, sequence, nbytes))

    def release_before(self, sequence: int) -> None:
        """Copies older than those of ``sequence`` are no longer needed."""
        store = self.replicator.store
        store.release_except({newer for _, newer in store.held() if newer >= sequence})

    def close(self, timeout_secs: float = 20.0) -> bool:
        ended = self.replicator.close(timeout_secs)
        self.files.close(keep=False)
        self.comm.close()
        return ended


def bytes_of(rank: int, sequence: int, nbytes: int) -> torch.Tensor:
    """Of a rank's snapshot: different for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * sequence + rank)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def header_of(slot: Slot, nbytes: int, *, step: int, generation: int, rank: int) -> bytes:
    """That of a slot whose first bytes are slices of two parts."""
    half = nbytes // 2
    parts = [
        _part(slot, kind, begin, end, (step, generation, rank))
        for kind, begin, end in (("expert", 0, half), ("non_expert", half, nbytes))
    ]
    return encode_slot(slot_header(RUN, step, generation, rank, 4, slot.memory.numel(), tuple(parts)))


def slot_header(
    run_id: str, step: int, generation: int, rank: int, ranks: int, nbytes: int, parts: tuple[SlotPart, ...]
) -> SlotHeader:
    """That of a slot of which only the slices matter."""
    contents, facts = Contents(("gate/0",)), Facts(index=step, base="", applied=np.array([[step]]))
    of_slot = {"contents": contents, "facts": facts, "state": b"{}", "parts": parts}
    return SlotHeader(Step(run_id, "a-life", generation, step, step), rank, ranks, nbytes, 0, **of_slot)


def _part(slot: Slot, kind: str, begin: int, end: int, facts: tuple[int, int, int]) -> SlotPart:
    step, generation, rank = facts
    cuts = [begin + (end - begin) * at // SLICES for at in range(SLICES + 1)]
    sizes = [to - fro for fro, to in pairwise(cuts)]
    entries = lay_out_in_order(
        SliceEntry(f"model/{kind}.{at}", "dense", "U8", (0,), (size,), (size,)) for at, size in enumerate(sizes)
    )
    digests = [checksum(slot.memory[begin + each.begin : begin + each.end]) for each in entries]
    slices = with_checksums(entries, np.array(digests, dtype=np.uint64))
    return SlotPart(kind, begin, encode_header(ShardHeader(RUN, step, generation, rank, slices)))


def resources() -> tuple[int, int]:
    """(open descriptors, threads) of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()
