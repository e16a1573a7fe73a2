"""Somebody deletes what a run has in memory while it trains, or memory has no room for a while: both come back."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest

from moe_ckpt import Memory
from moe_ckpt.errors import MemoryGoneError
from moe_ckpt.format.slot import decode_slot
from moe_ckpt.memory import mapping
from moe_ckpt.memory.files import MemoryFiles, newest_generation
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers.buffers import BufferPool
from tests.support.deleting import delete_tree
from tests.support.slots import create_slot
from tests.support.spoiled import files_of_slots
from tests.unit.engine_parts import Life, ThreadRanks, run_threads
from tests.unit.test_engine_host_tier import come_back

BEFORE, AFTER = 6, 9
POLICIES = [Dense(), MoC(k=1), MoEvement(window=2)]
GONE = {
    "slots": lambda node: [path.unlink() for path in node.rglob("slot_*")],
    "bytes": lambda node: [path.unlink() for path in files_of_slots(node)],
    "directory": lambda node: [delete_tree(path) for path in node.rglob("rank_*")],
    "all of this user": lambda node: [delete_tree(path) for path in node.iterdir()],
    "all": delete_tree,
}
"""What is deleted -> how. systemd-logind deletes all of a user's."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for node in ("A", "B"):
        (tmp_path / node).mkdir()
    return tmp_path


def life(root: Path, node: str = "A", policy=None, replicas: int = 0, **given) -> Life:
    memory = Memory(directory=root / node, storage_every=1000, replicas=replicas)
    return Life(LocalStorage(root / "store"), policy=policy or Dense(), memory=memory, **given)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("what", GONE)
def test_memory_that_somebody_deletes_is_made_again(root, what, policy, caplog):
    with life(root, policy=policy) as one:
        one.go(BEFORE, settle=True)
        GONE[what](root / "A")
        (root / "A").mkdir(exist_ok=True)
        one.go(AFTER, settle=True)
        assert one.records[-1].memory_step >= BEFORE + AFTER - 3
    said = [record.getMessage() for record in caplog.records if "is gone" in record.getMessage()]
    assert 1 <= len(said) <= 3
    assert "RemoveIPC=no" in said[0]
    if not isinstance(policy, MoEvement):  # whose windows this state cannot replay
        with life(root, policy=policy) as two:
            assert come_back(two)[0].manifest.step == BEFORE + AFTER
    headers = [decode_slot(path.read_bytes(), str(path)) for path in (root / "A").rglob("*.head")]
    steps = {header.step for header in headers}
    assert BEFORE + AFTER in steps
    assert not isinstance(policy, MoEvement) or {one.records[-1].memory_step - 1, one.records[-1].memory_step} <= steps


def test_what_is_gone_is_not_counted_on(root):
    """Until a newer checkpoint is complete."""
    with life(root, policy=MoEvement(window=4)) as one:
        one.go(10, settle=True)
        assert one.records[-1].memory_step == 9
        GONE["directory"](root / "A")
        one.go(2, settle=True)
        assert one.records[-1].memory_step is None
        one.go(12, settle=True)
        assert one.records[-1].memory_step == 21


def test_a_start_that_used_other_names_says_so_again(root):
    """Generations that a life has used must not be used by the next."""
    begun = MemoryFiles(str(root / "A"), "run", 3, "life", 0, "store")
    begun.note_generation(7)
    GONE["all of this user"](root / "A")
    begun.make(100)
    assert newest_generation(begun.path.parent.parent) == 7
    begun.close(keep=False)


def test_peers_take_copies_again(root):
    """The holder's directory goes, and then the node whose copies lay there."""
    done = []

    def train(comm):
        with life(root, "AB"[comm.rank], replicas=1, comm=comm, local_ranks=1) as one:
            one.go(BEFORE, settle=True)
            comm.everyone(b"")
            if comm.rank == 1:
                GONE["all of this user"](root / "B")
            comm.everyone(b"")
            one.go(AFTER, settle=True)
            done.append(one.records[-1].memory_step)

    run_threads(ThreadRanks(2), train)
    assert min(done) >= BEFORE + AFTER - 3
    delete_tree(root / "A")
    (root / "A").mkdir()
    found = []

    def again(comm):
        with life(root, "AB"[comm.rank], replicas=1, comm=comm, local_ranks=1) as one:
            found.append(come_back(one)[0].manifest.step)

    run_threads(ThreadRanks(2), again)
    assert min(found) >= BEFORE + AFTER - 3


def test_a_slot_without_its_bytes_is_not_sealed(root):
    slot = create_slot(root / "slot_000", 100)
    (root / "copies").unlink()
    with pytest.raises(MemoryGoneError, match="slot_000@0 is gone"):
        slot.seal(b"header")
    create_slot(root / "slot_000", 100)
    with pytest.raises(MemoryGoneError, match="slot_000@0 is gone"):
        slot.seal(b"header")
    assert not slot.is_sealed


# --- no room for a while ---


def test_slots_are_taken_again_when_there_is_room_again(root, monkeypatch, caplog):
    """As after a DataLoader's workers have ended."""
    free = [0]
    monkeypatch.setattr("moe_ckpt.memory.arena.free_bytes", lambda place: free[0])
    monkeypatch.setattr("moe_ckpt.memory.files.free_bytes", lambda place: free[0])
    with caplog.at_level(logging.INFO, "moe_ckpt"), life(root) as one:
        one.go(BEFORE, settle=True)
        assert one.records[-1].memory_step is None
        free[0] = 1 << 30
        one.go(AFTER, settle=True)
        assert one.records[-1].memory_step >= BEFORE + AFTER - 2
    assert caplog.text.count("kept in private memory") == 1
    assert caplog.text.count("there is room again") == 1


def test_private_memory_serves_on_as_long_as_there_is_none(root, monkeypatch):
    files, free = MemoryFiles(str(root), "a" * 32, 0, "life", 0, "/a/store"), [0]
    monkeypatch.setattr("moe_ckpt.memory.arena.free_bytes", lambda place: 0)
    monkeypatch.setattr("moe_ckpt.memory.files.free_bytes", lambda place: free[0])
    files.open_arena(1 << 20)
    pool = BufferPool(1 << 20, files=files)
    [first] = pool.acquire([5000])
    pool.give_back(first)
    assert [buffer.begin for buffer in pool.take([5000])] == [first.begin], "warm"
    free[0] = 1 << 20  # somebody else takes it meanwhile
    assert pool.take([5000]) is None
    [second] = pool.acquire([5000])
    assert second.slot is None
    files.close(keep=False)


def test_files_that_were_deleted_are_not_mapped_for_life(root):
    """systemd-logind may delete them at each logout."""
    mapped = []
    with life(root, host_memory_bytes=8 << 20) as one:
        for _ in range(4):
            one.go(5, settle=True)
            gc.collect()
            mapped.append(len(mapping._mapped))
            for path in (root / "A").iterdir():
                delete_tree(path)
    assert mapped[1:] == [mapped[1]] * 3
