"""A committed snapshot that holds everything stays in memory, too: who comes back in this process reads no storage."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from moe_ckpt.core.operators import expert_id
from moe_ckpt.errors import HostMemoryError
from moe_ckpt.memory import mapping
from moe_ckpt.memory.arena import Arena
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.policies import Dense, MoC, MoEtion, MoEvement
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.support.tensor_reads import tensor_bytes_read
from tests.unit.engine_parts import (
    ALL,
    GatedStorage,
    Life,
    ThreadRanks,
    manifests,
    run_threads,
    steps_of_experts,
)
from tests.unit.test_engine_host_tier import (
    LAYOUTS,
    assert_state,
    come_back,
    damage_expert,
    held_steps,
    slices_of,
    train_and_fail,
)

FULL = {
    "dense": Dense(),
    "moc-all": MoC(k=4),
    "moc-two-level": MoC(k=1, snapshot_k=4),
    "moetion-all": MoEtion(experts=4),
}


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


SIDE_NBYTES = 12
"""Of ``Life.capture``."""


def nbytes_of(root, operators, suffix="") -> int:
    """What storage has of these operators, in the newest checkpoint; of tensors whose keys end so."""
    reader = StoreReader(LocalStorage(root))
    live = reader.index(reader.manifest(reader.directories()[0])).live
    return sum(s.nbytes for s in live if s.entry.operator in operators and s.entry.key.endswith(suffix))


def recovery_plan(caplog) -> str:
    return next(r.getMessage() for r in caplog.records if r.getMessage().startswith("recovery plan"))


@pytest.mark.parametrize("policy", FULL.values(), ids=FULL)
def test_after_a_fault_in_this_process_no_tensor_is_read_from_storage(tmp_path, policy, caplog):
    train_and_fail(tmp_path, policy=policy)
    with Life(LocalStorage(tmp_path), policy=policy) as life, caplog.at_level(logging.INFO, "moe_ckpt"):
        with tensor_bytes_read() as read:
            restored, fault = come_back(life)
        assert read == []
        assert restored.manifest.step == 6
        assert fault.lost_tokens == 0
        assert_state(life, dict.fromkeys(ALL, 6))
        assert torch.equal(restored.plain["buffer"], torch.full((3,), 6.0))
        assert recovery_plan(caplog).endswith("from memory: this job's processes"), recovery_plan(caplog)
        life.go(2, settle=True)
    assert manifests(tmp_path)[-1].step == 8


def test_without_that_memory_storage_is_read(tmp_path, caplog):
    """The count can fail."""
    train_and_fail(tmp_path, policy=Dense())
    host_memory.release_host_memory()
    with Life(LocalStorage(tmp_path), policy=Dense()) as life, caplog.at_level(logging.INFO, "moe_ckpt"):
        with tensor_bytes_read() as read:
            come_back(life)
        assert sum(nbytes for _, nbytes in read) >= nbytes_of(tmp_path, ALL)
        assert "from step_00000006" in recovery_plan(caplog)


@pytest.mark.parametrize("policy", [MoC(k=1), MoC(k=2, selector="load_aware"), MoEtion(experts=2)])
def test_of_a_partial_one_only_what_it_lacks_is_read(tmp_path, policy, caplog):
    train_and_fail(tmp_path, policy=policy)
    stored = {op: record.step for op, record in manifests(tmp_path)[-1].operators.items()}
    stale = {op for op in stored if stored[op] < 6}
    assert stale
    with Life(LocalStorage(tmp_path), policy=policy) as life, caplog.at_level(logging.INFO, "moe_ckpt"):
        with tensor_bytes_read() as read:
            restored, fault = come_back(life)
        assert sum(nbytes for _, nbytes in read) == 2 * nbytes_of(tmp_path, stale), "verified, and then read"
        assert not [path for path, _ in read if path.startswith("step_00000006")]
        assert restored.tokens_from_host is None
        assert_state(life, stored)
        assert fault.lost_tokens == ((6 - steps_of_experts(stored)) * life.counts).sum()
        text = recovery_plan(caplog)
        assert "memory: this job's processes" in text
        assert "storage: step_00000006" in text


@pytest.mark.parametrize("operator", ["expert/1/2", "gate/0", ""])
def test_where_a_slice_in_memory_is_damaged_storage_is_read(tmp_path, caplog, operator):
    """Of an expert, of a gate, of what is no operator's."""
    train_and_fail(tmp_path, policy=Dense())
    with Life(LocalStorage(tmp_path), policy=Dense()) as life:
        [kept] = life.session.tier.holds()
        next(data for entry, data in slices_of(kept) if entry.operator == operator and entry.nbytes)[0] ^= 1
        with tensor_bytes_read() as read:
            restored, _ = come_back(life)
        assert sum(nbytes for _, nbytes in read) >= 2 * nbytes_of(tmp_path, ALL), "verified, then loaded"
        assert restored.manifest.step == 6
        assert_state(life, dict.fromkeys(ALL, 6))
        assert torch.equal(restored.plain["buffer"], torch.full((3,), 6.0))
    assert "is damaged: it is set aside, and not used" in caplog.text


def test_what_storage_lost_meanwhile_memory_still_gives(tmp_path):
    """As with stale experts: what memory gives is not read, so its damage on storage is no reason to go back."""
    train_and_fail(tmp_path, policy=Dense())
    damage_expert(tmp_path, "expert/1/2")
    with Life(LocalStorage(tmp_path), policy=Dense()) as life:
        restored, _ = come_back(life)
        assert restored.manifest.step == 6
        assert_state(life, dict.fromkeys(ALL, 6))


def test_the_steps_of_a_window_are_not_kept(tmp_path):
    """One of them is no state, and private memory has no rule for several."""
    with Life(LocalStorage(tmp_path), policy=MoEvement(window=3)) as life:
        seen = set()
        for _ in range(8):
            life.go(1, settle=True)
            seen |= set(held_steps(life))
    assert [m.step for m in manifests(tmp_path) if m.window], "there were some"
    assert seen == {m.step for m in manifests(tmp_path) if not m.window}, "the dense one at the beginning"


# --- what it costs ---


def size_of(root, policy) -> int:
    with Life(LocalStorage(root), policy=policy) as life:
        life.go(1, settle=True)
        return life.session.tier.nbytes


@pytest.mark.parametrize("policy", [Dense(), MoC(k=4)], ids=["dense", "moc-all"])
@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_it_costs_no_checkpoint_and_no_wait(tmp_path, policy, room, when_busy, caplog):
    """With room for one, two or three: what begins and what waits is what would without a recovery buffer."""
    size = size_of(tmp_path / "probe", policy)
    host_memory.release_host_memory()
    seen = {}
    for kept in (True, False):
        storage = GatedStorage(tmp_path / str(kept))
        budget = room * size + size // 2
        with Life(storage, policy=policy, when_busy=when_busy, host_memory_bytes=budget) as life:
            if not kept:
                life.session.tier.offer = lambda snapshot, share: None
            life.go(3, settle=True)
            storage.gate.clear()
            opener = threading.Timer(0.3, storage.gate.set)
            if when_busy == "wait":  # or the training thread would wait for ever
                opener.start()
            life.go(4)
            storage.gate.set()
            life.settle()
            assert life.session._snapshots.pipeline._pool.lent_bytes <= budget
            life.go(1, settle=True)
            seen[kept] = [(r.begun, r.waited and when_busy == "skip") for r in life.records]
            assert held_steps(life) == ([life.step] if kept else [])
    assert seen[True] == seen[False]
    assert "is not kept in memory" not in caplog.text, "no token is at stake"


def test_it_goes_first_when_the_machine_has_less_memory_than_the_budget(tmp_path, monkeypatch):
    """A data loader has taken it meanwhile: page-locked memory, for instance, cannot be had then."""
    grow, made = Arena.grow, []

    def once_only(self, end, **how):
        if made:
            raise OSError("cannot allocate memory")
        made.append(end)
        return grow(self, end, **how)

    monkeypatch.setattr(mapping, "PAGE_NBYTES", 64)
    monkeypatch.setattr(Arena, "grow", once_only)
    with Life(LocalStorage(tmp_path), policy=Dense(), when_busy="wait") as life:
        life.go(3, settle=True)
        assert held_steps(life) == [3]
    assert [m.step for m in manifests(tmp_path)] == [1, 2, 3]


def test_without_anything_to_give_up_that_is_an_error(tmp_path, monkeypatch):
    def none(self, end, **how):
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(Arena, "grow", none)
    with Life(LocalStorage(tmp_path), policy=Dense()) as life, pytest.raises(RuntimeError, match="cannot allocate"):
        life.go(1)


def test_the_next_life_has_as_much_room_as_the_one_before(tmp_path, monkeypatch):
    """Half of what is free, to which what the life before left here counts: a run that fitted fits again."""
    size = size_of(tmp_path, Dense())
    host_memory.release_host_memory()
    free = 2 * size + 64
    asked = []

    def half(local_ranks, left_bytes=0):
        asked.append(left_bytes)
        kept = sum(r.tier.nbytes for r in host_memory._registry)
        return (free - kept + left_bytes) // 2 // local_ranks

    monkeypatch.setattr(host_memory, "default_budget_bytes", half)
    for _ in range(3):
        with Life(LocalStorage(tmp_path), policy=Dense()) as life:
            if manifests(tmp_path):
                come_back(life)
            life.go(2, settle=True)
    assert asked == [0, size, size]
    monkeypatch.setattr(host_memory, "default_budget_bytes", lambda ranks, left_bytes=0: (free - size) // 2)
    with Life(LocalStorage(tmp_path), policy=Dense()) as life, pytest.raises(HostMemoryError):  # noqa: PT012
        come_back(life)
        life.go(1)


def test_a_run_on_another_store_gets_the_memory_of_what_its_storage_has_too(tmp_path):
    train_and_fail(tmp_path / "dense", policy=Dense())
    train_and_fail(tmp_path / "moc", policy=MoC(k=1, snapshot_k=4))
    assert [r.root for r in host_memory._registry] == [str(tmp_path / "moc")]
    with Life(LocalStorage(tmp_path / "third"), policy=Dense()):
        assert [r.root for r in host_memory._registry] == [str(tmp_path / "moc")], "it has what is lost"


# --- several ranks ---


@contextmanager
def swapped(noted):
    """Notes how many bytes each receives."""
    swap = type(ThreadRanks(1).comm(0)).swap

    def noting(self, given, expected):
        noted.append(sum(data.numel() for group in expected.values() for data in group))
        swap(self, given, expected)

    type(ThreadRanks(1).comm(0)).swap = noting
    try:
        yield
    finally:
        type(ThreadRanks(1).comm(0)).swap = swap


def return_of(root, before, after, ranks, survivors, policy):
    """Trains, and comes back. Returns (bytes of tensors read from storage, bytes sent, what each rank restored)."""
    run_threads(
        ThreadRanks(ranks[0]),
        lambda comm: train_and_fail(root, policy=policy, comm=comm, change=LAYOUTS[before](comm.rank, ranks[0])),
    )
    host_memory._registry[:] = [r for r in host_memory._registry if r.tier.rank in survivors]

    def return_(comm):
        with Life(LocalStorage(root), policy=policy, comm=comm) as life:
            if (change := LAYOUTS[after](comm.rank, ranks[1])) is not None:
                life.state.change = change
            restored, fault = come_back(life)
            assert (restored.manifest.step, fault.lost_tokens) == (6, 0)
            assert_state(life, dict.fromkeys(ALL, 6))
            return restored.plan

    sent: list[int] = []
    with tensor_bytes_read() as read, swapped(sent):
        plans = run_threads(ThreadRanks(ranks[1]), return_)
    tables = {tuple((row.source.tier, row.operators, row.nbytes) for row in plan.rows()) for plan in plans}
    assert len(tables) == 1, "all ranks decide alike"
    return sum(nbytes for _, nbytes in read), sum(sent), plans[0]


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1, snapshot_k=4)], ids=["dense", "moc"])
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("ranks", [(2, 2), (2, 3)])
def test_of_ranks_that_all_live_none_reads_storage(tmp_path, before, after, ranks, policy):
    read, sent, plan = return_of(tmp_path, before, after, ranks, range(ranks[0]), policy)
    assert ranks[1] > ranks[0] or read == 0
    assert read <= ranks[1] * SIDE_NBYTES, "each thread may have taken over the share of another"
    assert len(list(plan.rows())) == 1, "all from memory"
    if before == after != "replicated" and ranks[0] == ranks[1]:
        assert sent == nbytes_of(tmp_path, ALL, "/step"), "scalars, which one rank writes for all"


def test_a_rank_gets_no_more_than_it_needs(tmp_path):
    """Plain data parallelism: each lacks what the other wrote, once."""
    _, sent, _ = return_of(tmp_path, "replicated", "replicated", (2, 2), (0, 1), Dense())
    assert sent == nbytes_of(tmp_path, ALL)


@pytest.mark.parametrize("survivor", [0, 1])
def test_what_a_dead_rank_had_is_read_from_storage(tmp_path, survivor):
    read, _, plan = return_of(tmp_path, "replicated", "replicated", (2, 2), (survivor,), Dense())
    rows = list(plan.rows())
    assert len(rows) == 2
    owned = {expert_id(layer, e) for layer in range(2) for e in range(4) if e // 2 == survivor}
    memory, storage = (set(plan.from_source(row.source)) for row in rows)
    assert owned <= memory
    assert owned.isdisjoint(storage)
    assert read > 0
    assert nbytes_of(tmp_path, storage) + nbytes_of(tmp_path, memory) == nbytes_of(tmp_path, ALL)


def test_what_arrives_damaged_is_read_from_storage_by_all(tmp_path, monkeypatch, caplog):
    swap = type(ThreadRanks(1).comm(0)).swap

    def flipping(self, given, expected):
        swap(self, given, expected)
        received = [tensor for group in expected.values() for tensor in group]
        if self.rank == 1 and received:
            received[0][0] ^= 1

    monkeypatch.setattr(type(ThreadRanks(1).comm(0)), "swap", flipping)
    read, _, _ = return_of(tmp_path, "replicated", "replicated", (2, 2), (0, 1), Dense())
    assert read > 0
    assert "in memory cannot be used" in caplog.text


def test_a_share_of_another_life_is_not_taken_for_this_ones(tmp_path, caplog):
    train_and_fail(tmp_path, policy=Dense())
    with Life(LocalStorage(tmp_path), policy=Dense()) as life:
        [kept] = life.session.tier.holds()
        state = kept.header.state.replace(b'"step":6', b'"step":7')
        life.session.tier.left_slots._slots = [FoundSlot(kept.slot, replace(kept.header, state=state))]
        with tensor_bytes_read() as read:
            come_back(life)
        assert read
    assert "storage has another dense checkpoint of the step" in caplog.text
