"""What a start says of the room that slots will need, before training."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_ckpt import Memory
from moe_ckpt.core.placement import everywhere
from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory import limits
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.limits import CGROUP, MACHINE, RoomNeeded, requires_room, say_room
from moe_ckpt.policies import Dense
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.local_state import ExpectedShare
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from moe_ckpt.tiers.buffers import BufferPool
from tests.unit.engine_parts import Life, ThreadRanks, catalog, run_threads


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(limits, "_said", set())
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


@pytest.mark.parametrize(
    ("needed", "nbytes"),
    [
        (RoomNeeded(share_bytes=100, snapshots=3, budget_bytes=10**9, copies=0, ranks=1), 300),
        (RoomNeeded(share_bytes=100, snapshots=3, budget_bytes=10**9, copies=0, ranks=8), 2400),
        (RoomNeeded(share_bytes=100, snapshots=3, budget_bytes=10**9, copies=16, ranks=8), 7200),
        (RoomNeeded(share_bytes=100, snapshots=3, budget_bytes=250, copies=2, ranks=2), 1000),
        (RoomNeeded(share_bytes=100, snapshots=3, budget_bytes=10**9, copies=4, ranks=1), 1500),
    ],
)
def test_what_the_slots_of_a_node_come_to(needed, nbytes):
    """Three shares, or the budget if that is less; with copies of others'; for each rank of the node."""
    assert needed.nbytes == nbytes


NEEDED = RoomNeeded(share_bytes=100, snapshots=3, budget_bytes=10**9, copies=2, ranks=2)


@pytest.mark.parametrize(
    ("free", "limit", "kind", "said"),
    [
        (1200, None, "tmpfs", None),
        (1200, 1200, "tmpfs", None),
        (1199, None, "tmpfs", "has 1,199 bytes free, and .* about 1,200: .*--shm-size.*emptyDir of medium Memory"),
        (1199, 1200, "tmpfs", "has 1,199 bytes free, and .*--shm-size"),
        (5000, 1199, "tmpfs", "has 5,000 bytes free, but the memory limit .* leaves 1,199, .*resources.limits.memory"),
        (5000, 1199, "ext4", None),
        (1199, 1000, "ext4", "has 1,199 bytes free, and .* about 1,200: "),
    ],
)
def test_what_is_short_is_said_with_both_numbers_and_what_to_raise(caplog, monkeypatch, free, limit, kind, said):
    """Pages of a tmpfs count against a cgroup's limit, those of a disk do not."""
    monkeypatch.setattr(limits, "file_system", lambda path: kind)
    for _ in range(2):
        say_room("/memory", NEEDED, free, {CGROUP: limit, MACHINE: None})
    assert len(caplog.messages) == (said is not None), "once"
    if said is not None:
        [found] = caplog.messages
        assert found.startswith("Memory(directory='/memory') has ")
        assert "3 snapshots of 100 bytes on each rank" in found
        assert "as many of each rank whose copies lie on this node (2)" in found
        caplog.clear()
        limits._said.clear()
        assert re.search(said, found), found


def test_a_tmpfs_as_large_as_the_memory_of_the_machine_promises_more_than_there_is(caplog, monkeypatch):
    monkeypatch.setattr(limits, "file_system", lambda path: "tmpfs")
    say_room("/memory", NEEDED, 5000, {CGROUP: 1500, MACHINE: 1199})
    [found] = caplog.messages
    assert "has 5,000 bytes free, but the memory of this machine leaves 1,199" in found
    assert "Use more nodes, or set host_memory_bytes to 299" in found


@pytest.mark.parametrize(("free", "advised"), [(1199, "set host_memory_bytes to 299"), (399, None)])
def test_a_smaller_budget_is_advised_where_a_snapshot_fits_in_it(caplog, free, advised):
    say_room("/memory", NEEDED, free, {})
    assert ("host_memory_bytes" in caplog.text) == (advised is not None)
    assert advised is None or advised in caplog.text


def start(place: Path, free: int, monkeypatch, ranks: int = 2) -> list[int]:
    """Opens the sessions of a node's ranks where the file system has so much free. Returns bytes of their snapshots."""
    (place / "memory").mkdir(parents=True)
    monkeypatch.setattr(os, "statvfs", lambda root: SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=1))
    monkeypatch.setattr(limits, "cgroup_bytes", lambda **_: None)
    nbytes = [0] * ranks

    def begin(comm):
        chosen = Memory(directory=place / "memory")
        given = {"memory": chosen, "host_memory_bytes": 10**9, "comm": comm, "local_ranks": ranks}
        life = Life(LocalStorage(place / "store"), catalog(30, 4), policy=Dense(), **given)
        with life as each:
            nbytes[comm.rank] = each.go(1, settle=True).nbytes

    run_threads(ThreadRanks(ranks), begin)
    return nbytes


def test_a_node_whose_file_system_is_too_small_is_told_of_once_before_training(tmp_path, caplog, monkeypatch):
    """Less than three times what snapshots of both ranks really take."""
    snapshots = start(tmp_path / "large", 10**9, monkeypatch)
    assert "will need" not in caplog.text
    free = int(3.8 * sum(snapshots))
    start(tmp_path / "small", free, monkeypatch)
    [said] = [text for text in caplog.messages if "will need" in text]
    assert f"has {free:,} bytes free, and the slots of this node's ranks (2) will need about " in said
    caplog.clear()
    limits._said.clear()
    start(tmp_path / "enough", int(4.2 * sum(snapshots)), monkeypatch)
    assert "will need" not in caplog.text


def test_a_node_that_holds_copies_of_more_ranks_than_others_needs_room_for_each(tmp_path, caplog, monkeypatch):
    """A rack of three nodes, and one of a single node that holds copies of all three."""
    nbytes = start(tmp_path / "alone", 10**9, monkeypatch, ranks=4)[0]
    monkeypatch.setattr(os, "statvfs", lambda root: SimpleNamespace(f_bavail=9 * nbytes, f_frsize=1, f_blocks=1))

    def begin(comm):
        here = tmp_path / f"memory{comm.rank}"
        here.mkdir()
        rack = "one" if comm.rank == 3 else "other"
        chosen = Memory(replicas=1, directory=here, failure_domain=rack)
        given = {"memory": chosen, "host_memory_bytes": 10**9, "comm": comm, "local_ranks": 1}
        with Life(LocalStorage(tmp_path / "store"), catalog(30, 4), policy=Dense(), **given):
            pass

    run_threads(ThreadRanks(4), begin)
    [said] = [text for text in caplog.messages if "will need" in text]
    assert said.startswith(f"Memory(directory={str(tmp_path / 'memory3')!r})")
    assert "as many of each rank whose copies lie on this node (3)" in said


def tensor(key: str, parameter: str, *, replicated: bool = True, updated: bool = True) -> StateTensor:
    return StateTensor(key, parameter, torch.zeros(6, 5), (0, 0), (6, 5), replicated=replicated, updated_here=updated)


def spec(key: str, parameter: str, dtype: str = "F32", gradient: str | None = None) -> TensorSpec:
    return TensorSpec(key, parameter, dtype, (6, 5), gradient=gradient)


def test_two_moments_per_weight_are_counted_until_the_optimizer_has_state():
    weights = [tensor("model/w", "w"), tensor("model/frozen", "frozen")]
    specs = [spec("model/w", "w", gradient="F32"), spec("model/frozen", "frozen")]
    before = ExpectedShare(weights, specs)
    assert (before.is_estimated, before.most_nbytes) == (True, 2 * 120 + 2 * 120), "what is frozen gets none"
    moments = [tensor(f"optim/0/w/{name}", "w") for name in ("exp_avg", "exp_avg_sq")]
    after = ExpectedShare(weights + moments, [*specs, *(spec(each.key, "w") for each in moments)])
    assert (after.is_estimated, after.most_nbytes) == (False, before.most_nbytes)


def test_master_weights_are_no_moments_and_moments_are_as_wide_as_those():
    weight = replace(tensor("model/w", "w"), local=torch.zeros(6, 5, dtype=torch.bfloat16))
    master = tensor("optim/0/w/fp32_param", "w")
    specs = [spec("model/w", "w", "BF16", gradient="F32"), spec(master.key, "w")]
    expected = ExpectedShare([weight, master], specs)
    assert (expected.is_estimated, expected.most_nbytes) == (True, 60 + 120 + 2 * 120)


def test_peers_divide_what_they_hold_alike_and_keep_what_is_their_own():
    model = catalog(0, 0)
    [name, *_] = model.parameters
    shape = model.parameters[name]
    weight = StateTensor(f"model/{name}", name, torch.zeros(shape), (0,) * len(shape), shape)
    specs = [TensorSpec(weight.key, name, "F32", shape, gradient="F32")]
    nbytes, placement = weight.local.nbytes, everywhere(model.layers, 2)
    shares = [ExpectedShare([weight], specs).nbytes(model, placement, rank) for rank in (0, 1)]
    assert sum(shares) == 3 * nbytes
    own = ExpectedShare([replace(weight, replicated=False)], specs)
    assert own.nbytes(model, placement, 0) == 3 * nbytes, "FSDP2"
    other = replace(weight, updated_here=False)
    divided = ExpectedShare([weight, other], specs)
    assert divided.nbytes(model, placement, 1) == 2 * nbytes, "a distributed optimizer: moments are its own"
    mirrored = [ExpectedShare([weight], specs, sources=[1 - rank]).nbytes(model, placement, rank) for rank in (0, 1)]
    assert mirrored == [3 * nbytes] * 2, "each keeps its part, and the other's, which it need not be sent"


@pytest.mark.parametrize(
    ("kind", "limit", "fits"),
    [
        # Two ranks may take 200 and 50 bytes more each, and both keep two copies of 1,000 bytes.
        ("tmpfs", 4500, True),
        ("tmpfs", 4499, False),
        ("ext4", 4499, True),
        ("tmpfs", None, True),
    ],
)
@pytest.mark.parametrize("whose", ["cgroup", "machine"])
def test_copies_take_what_memory_leaves_beside_budgets(tmp_path, caplog, monkeypatch, kind, limit, fits, whose):
    monkeypatch.setattr(limits, "file_system", lambda path: kind)
    monkeypatch.setattr(limits, "cgroup_bytes", lambda any_cache: limit if whose == "cgroup" else 10**9)
    monkeypatch.setattr(limits, "available_bytes", lambda: limit if whose == "machine" else 10**9)
    monkeypatch.setattr(limits, "_once_more_bytes", lambda: 50)
    files = MemoryFiles(str(tmp_path), "a" * 32, 0, "life", 0, "/a/store")
    pool = BufferPool(300)
    pool.acquire([100])
    monkeypatch.setattr(BufferPool, "held_bytes", 100)
    require = requires_room(files.path, 2, lambda: pool.unmade_bytes)
    try:
        if fits:
            assert files.make(1000, require).memory.numel() == 1000
            return
        for _ in range(2):
            with pytest.raises(MemoryFullError) as refused:
                files.make(1000, require)
            assert (refused.value.needed_bytes, refused.value.free_bytes) == (1000, 999)
        [said] = [record.getMessage() for record in caplog.records]
        assert f"{whose} leaves 4,499 bytes, and each rank of this node (2) may still take 200 bytes of its " in said
        assert "budget for its own snapshots" in said
        assert "and 50 bytes as at its largest" in said
        assert (files.path / "copies").stat().st_size == 0
    finally:
        files.close(keep=False)


def test_what_the_machine_has_left(tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       24684204 kB\nMemFree:          170000 kB\nMemAvailable:      26624 kB\n")
    assert limits.available_bytes(str(told)) == 26624 * 1024
    assert limits.available_bytes(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("kind", "limit", "fits"),
    [("tmpfs", 2098 + (16 << 20), True), ("tmpfs", 2097 + (16 << 20), False), ("ext4", 0, True), ("tmpfs", None, True)],
)
def test_what_survivors_seal_takes_what_a_memory_limit_leaves(tmp_path, monkeypatch, kind, limit, fits):
    """Two ranks make 1,024 bytes each, and the other one may take 50 as at its largest. Private memory is of no use."""
    monkeypatch.setattr(limits, "file_system", lambda path: kind)
    monkeypatch.setattr(limits, "cgroup_bytes", lambda any_cache: limit)
    monkeypatch.setattr(limits, "available_bytes", lambda: 10**9)
    monkeypatch.setattr(limits, "_once_more_bytes", lambda: 50)
    files = MemoryFiles(str(tmp_path), "a" * 32, 0, "life", 0, "/a/store")
    files.open_arena(4000)
    pool = BufferPool(4000, files=files)
    require = requires_room(files.path, 2)
    try:
        if fits:
            [buffer] = pool.acquire([1000], require=require)
            pool.give_back(buffer)
            monkeypatch.setattr(limits, "cgroup_bytes", lambda any_cache: 0)
            assert pool.acquire([1000], require=require)[0].begin == buffer.begin, "which is there already"
            return
        with pytest.raises(MemoryFullError, match="memory limit of this job's cgroup leaves beside 1 other"):
            pool.acquire([1000], require=require)
        assert pool.held_bytes == 0
        assert (files.path / "arena").stat().st_size == 0
    finally:
        files.close(keep=False)


def test_survivors_get_no_private_memory_where_their_file_system_is_full(tmp_path, monkeypatch):
    files = MemoryFiles(str(tmp_path), "a" * 32, 0, "life", 0, "/a/store")
    monkeypatch.setattr("moe_ckpt.memory.arena.free_bytes", lambda place: 0)
    files.open_arena(4000)
    pool = BufferPool(4000, files=files)
    with pytest.raises(MemoryFullError):
        pool.acquire([1000], require=lambda nbytes: None)
    assert pool.held_bytes == 0
    [buffer] = pool.acquire([1000])
    assert buffer.slot is None, "as any other snapshot does"
    files.close(keep=False)


def test_what_a_process_once_took_more_than_now_is_known():
    large = torch.ones(64 << 20, dtype=torch.uint8)
    del large
    assert limits._once_more_bytes() >= 32 << 20
