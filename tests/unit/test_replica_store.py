"""Copies of others on this rank: what goes first where there is no room, and whose own bytes save sending."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_ckpt.errors import MemoryFullError
from moe_ckpt.peers.store import Extents, Incoming, ReplicaStore
from moe_ckpt.slices.checksums import digests_of
from moe_ckpt.slices.snapshot import SnapshotPart
from tests.support.replicas import checksum, slot_header

SIZES = {"a": 5, "b": 40, "c": 8, "d": 100}


class Place:
    """A slot that is memory only."""

    is_there = True

    def __init__(self, nbytes: int, made: list[Place]) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.made = made
        made.append(self)

    def seal(self, header: bytes) -> None:
        pass

    def unseal(self) -> None:
        pass

    def remove(self) -> None:
        self.made.remove(self)


def store_of(room: int) -> tuple[ReplicaStore, list[Place]]:
    """A directory with room for so many slots."""
    made: list[Place] = []

    def make(nbytes: int) -> Place:
        if len(made) >= room:
            raise MemoryFullError("a directory", nbytes, 0)
        return Place(nbytes, made)

    return ReplicaStore(make), made


def extents_of(memory: torch.Tensor) -> Extents:
    """Of slices of ``SIZES``, in order."""
    ends = np.cumsum(list(SIZES.values())).tolist()
    begins = [0, *ends[:-1]]
    sums = [checksum(memory[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    return Extents(begins, ends, sums, digests_of(list(SIZES)))


def filled(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (sum(SIZES.values()),), dtype=torch.uint8, generator=generator)


def take(store: ReplicaStore, sequence: int, place: int | None = None) -> None:
    memory = filled(sequence)
    extents = extents_of(memory)
    header = slot_header("run", sequence, 0, 1, 2, extents.nbytes, ())
    if place is not None:
        header = replace(header, only="gradients", gradient_slot=place)
    incoming = store.reserve(header, b"", extents, extents.nbytes)
    assert incoming.requested == [(0, extents.nbytes)]
    store.keep(1, sequence, incoming)


def test_copies_of_older_experts_go_before_the_newest_is_refused():
    store, made = store_of(room=3)
    for sequence in range(3):
        take(store, sequence)
    store.release_except({0, 1, 2}, spare={0, 1})
    take(store, 3)
    assert {sequence for _, sequence in store.held()} == {1, 2, 3}
    take(store, 4)
    assert {sequence for _, sequence in store.held()} == {2, 3, 4}
    with pytest.raises(MemoryFullError):
        take(store, 5)
    assert len(made) == 3


def test_gradients_go_by_themselves():
    store, made = store_of(room=100)
    for sequence in range(20):
        for place in (0, 1, None):
            take(store, sequence, place)
        store.release_except({sequence, sequence - 1}, over={(sequence - 1, 0)})
    assert sorted(key[1:] for key in store._kept) == [(18, -1), (18, 1), (19, -1), (19, 0), (19, 1)]
    assert store.held().keys() == {(1, 18), (1, 19)}
    assert len(made) == 5, "what is over is given back"
    store.release_except(())
    assert store.held() == {}
    assert made == []


def mirror_of(memory: torch.Tensor, names: list[str]) -> SnapshotPart:
    """Of these slices, one after the other."""
    ends = dict(zip(SIZES, np.cumsum(list(SIZES.values())).tolist(), strict=True))
    pieces = [memory[ends[name] - SIZES[name] : ends[name]] for name in names]
    part = SimpleNamespace(names=digests_of(names), ends=np.cumsum([SIZES[name] for name in names]))
    memory = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.uint8)
    return SnapshotPart(0, 0, part, memory)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["a", "b", "c", "d"], []),
        (["d", "b"], [(0, 5), (45, 53)]),
        (["c", "a"], [(5, 45), (53, 153)]),
        ([], [(0, 153)]),
    ],
)
def test_only_what_is_not_here_is_asked_for(names: list[str], wanted: list[tuple[int, int]]):
    memory = filled()
    incoming = Incoming(Place(200, []), b"", extents_of(memory))
    assert incoming.fill(mirror_of(memory, names)) == 0
    assert incoming.requested == wanted
    for begin, end in wanted:
        incoming.memory[begin:end] = memory.numpy().data[begin:end]
        assert incoming.verify(end) is None
    assert bytes(incoming.memory) == memory.numpy().tobytes()


def test_other_bytes_are_asked_for_and_counted():
    memory = filled()
    other = memory.clone()
    other[50] ^= 1  # in c
    incoming = Incoming(Place(200, []), b"", extents_of(memory))
    assert incoming.fill(mirror_of(other, ["a", "c", "d"])) == 1
    assert incoming.requested == [(5, 53)], "b, which is not here, and c"
    incoming.memory[5:53] = other.numpy().data[5:53]
    assert incoming.verify(45) is None
    assert incoming.verify(53) == 45, "what was sent is compared, too"


def test_a_copy_waits_for_this_ranks_own_snapshot_and_no_longer_than_told():
    store, _ = store_of(room=1)
    assert store.mirror_of(1, 5, 60.0) == (), "nobody said that there would be any"
    store.expects_mirrors = True
    assert store.mirror_of(1, 5, 0.01) == ()
    mirrors = [mirror_of(filled(), ["a"])]
    found: list[Sequence[SnapshotPart]] = []
    waiting = threading.Thread(target=lambda: found.append(store.mirror_of(1, 5, 60.0)))
    waiting.start()
    store.mirrored(5, {1: mirrors})
    waiting.join(60.0)
    assert found == [mirrors]
    assert store.mirror_of(1, 5, 60.0) == (), "it is given once"
    store.mirrored(7, {})
    assert store.mirror_of(1, 6, 60.0) == (), "of a snapshot that was left out nothing will come"
