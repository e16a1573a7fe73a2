"""What host memory costs a process that lives on: no more than the recovery buffer outlives a session."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.step import SnapshotPlan, Tier
from moe_ckpt.errors import StoreInUseError
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.memory.arena import Arena, Buffer
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt.reading.slices import as_values
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.support.store_builder import values_at
from tests.unit.engine_parts import PATIENCE_SECS, GatedStorage, Life, manifests, steps_of_experts, told


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


@pytest.fixture
def buffers(monkeypatch):
    """All buffers lent during the test that still exist."""
    alive: weakref.WeakSet[Buffer] = weakref.WeakSet()
    take = Arena.take

    def taken(self, sizes):
        lent = take(self, sizes)
        alive.update(lent or ())
        return lent

    monkeypatch.setattr(Arena, "take", taken)
    return alive


def nbytes_of(buffers) -> int:
    gc.collect()
    return sum(buffer.nbytes for buffer in buffers)


def fail(root, policy=None, **settings) -> None:
    """One life that ends by a fault which leaves the process alive, and of which the caller keeps nothing."""
    with Life(LocalStorage(root), policy=policy or MoC(k=1, snapshot_k=4), **settings) as life:
        life.go(5, settle=True)


def resume(life: Life):
    restored = resume_newest(life.storage, life.session.comm, life.state, life.session.tier)
    life.step = restored.manifest.step
    return life.session.resume_from(restored.manifest, **restored.going_on)


def test_after_a_fault_only_the_recovery_buffer_is_left(tmp_path, buffers):
    fail(tmp_path)
    kept = host_memory._registry[0].tier.nbytes
    assert nbytes_of(buffers) == kept > 0, "of three buffers one"
    assert host_memory.release_host_memory() == kept
    assert nbytes_of(buffers) == 0


def test_a_snapshot_under_way_when_the_fault_came_leaves_nothing_once_its_thread_ended(tmp_path, buffers):
    storage = GatedStorage(tmp_path)
    with Life(storage, policy=MoC(k=1, snapshot_k=4)) as life:
        life.go(3, settle=True)
        storage.gate.clear()
        life.go(2)
        writer = life.session._snapshots.pipeline.persister._thread
        life.session.close(0.2)
    del life
    storage.gate.set()
    writer.join(PATIENCE_SECS)
    assert [held.header.step for held in host_memory._registry[0].tier.holds()] == [5], "what was committed after all"
    assert nbytes_of(buffers) == host_memory._registry[0].tier.nbytes > 0


@pytest.mark.parametrize("policy", [MoC(k=1, snapshot_k=4), Dense()], ids=["moc", "dense"])
def test_many_runs_that_end_well_leave_nothing(tmp_path, buffers, policy):
    for number in range(4):
        with Life(LocalStorage(tmp_path / str(number)), policy=policy) as life:
            life.go(3)
            life.finish()
        del life
    assert host_memory._registry == []
    assert nbytes_of(buffers) == 0


def test_many_runs_that_fail_in_stores_of_their_own_leave_the_memory_of_the_last(tmp_path, buffers):
    """As in a search over hyperparameters, whose trials are ended by an exception."""
    for number in range(4):
        fail(tmp_path / str(number))
        assert [r.root for r in host_memory._registry] == [LocalStorage(tmp_path / str(number)).root]
    assert nbytes_of(buffers) == host_memory._registry[0].tier.nbytes


def test_another_run_in_between_costs_a_run_its_memory_only_if_it_fails_too(tmp_path):
    fail(tmp_path / "a")
    with Life(LocalStorage(tmp_path / "b"), policy=MoC(k=1, snapshot_k=4)) as other:
        other.go(3)
        other.finish()
    with Life(LocalStorage(tmp_path / "a"), policy=MoC(k=1, snapshot_k=4)) as life:
        assert resume(life).lost_tokens == 0


def test_two_runs_at_a_time_both_keep_theirs(tmp_path):
    """Neither began after the other had failed."""
    with (
        Life(LocalStorage(tmp_path / "a"), policy=MoC(k=1, snapshot_k=4)) as one,
        Life(LocalStorage(tmp_path / "b"), policy=MoC(k=1, snapshot_k=4)) as two,
    ):
        one.go(4, settle=True)
        two.go(4, settle=True)
        one.session.close()
    with (
        Life(LocalStorage(tmp_path / "a"), policy=MoC(k=1, snapshot_k=4)) as one,
        Life(LocalStorage(tmp_path / "b"), policy=MoC(k=1, snapshot_k=4)) as two,
    ):
        assert resume(one).lost_tokens == resume(two).lost_tokens == 0


def test_a_buffer_of_an_earlier_life_with_a_larger_budget_is_not_used_again(tmp_path):
    fail(tmp_path)
    size = host_memory._registry[0].tier.nbytes
    settings = {"host_memory_bytes": int(size * 0.7), "when_busy": "wait"}
    with Life(LocalStorage(tmp_path), policy=MoC(k=1), **settings) as life:
        resume(life)
        pool = life.session._snapshots.pipeline._pool
        for _ in range(3):
            life.go(1, settle=True)
            assert pool.lent_bytes <= pool.budget_bytes


def test_a_session_that_failed_in_the_middle_of_a_write_leaves_the_store_to_the_next_once_that_is_through(tmp_path):
    """A fault that the process survives must not lock it out of its own run."""
    storage = GatedStorage(tmp_path)
    with Life(storage, policy=MoC(k=1, snapshot_k=4)) as life:
        life.go(3, settle=True)
        storage.gate.clear()
        life.go(1)
        writer = life.session._snapshots.pipeline.persister._thread
        life.session.close(0.2)
        with pytest.raises(StoreInUseError), Life(LocalStorage(tmp_path)):
            pass
    storage.gate.set()
    writer.join(PATIENCE_SECS)
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as second:
        assert resume(second).lost_tokens == 0
        assert second.step == 4
        with pytest.raises(StoreInUseError), Life(LocalStorage(tmp_path)):
            pass
        second.go(1, settle=True)
    assert [m.step for m in manifests(tmp_path)] == [1, 2, 3, 4, 5]


def test_what_only_memory_had_is_at_risk_until_storage_has_it(tmp_path):
    fail(tmp_path)
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as life:
        assert resume(life).lost_tokens == 0
        stored = {op: record.step for op, record in manifests(tmp_path)[-1].operators.items()}
        lacking = int(((5 - steps_of_experts(stored)) * life.counts).sum())
        assert life.session.run_ledger.ledger.at_risk.tokens == lacking > 0
    host_memory.release_host_memory()
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as life:
        assert resume(life).lost_tokens == lacking, "and that is what it would have cost"
        assert life.session.run_ledger.ledger.at_risk.tokens == 0


def test_a_copy_that_breaks_while_an_earlier_checkpoint_is_being_written_leaves_the_lock_to_the_writer(tmp_path):
    def break_copy(phase):
        if phase == "copy" and breaking:
            raise RuntimeError("injected")

    breaking: list[bool] = []
    storage = GatedStorage(tmp_path)
    life = Life(storage, policy=MoC(k=1, snapshot_k=4), on_phase=break_copy)
    life.session.open()
    life.go(3, settle=True)
    storage.gate.clear()
    life.go(1)
    life.session.before_update()
    breaking.append(True)
    life.session.save_complete(life.step, life.capture)
    writer = life.session._snapshots.pipeline.persister._thread
    life.session.close(0.2)
    with pytest.raises(StoreInUseError), Life(LocalStorage(tmp_path)):
        pass
    storage.gate.set()
    writer.join(PATIENCE_SECS)
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as second:
        assert resume(second).lost_tokens == 0
        assert second.step == 4


class LosesTheNext(SoloCommunicator):
    """The peer dies before the commit of step ``at`` (so that it is none), or before its announcement."""

    def __init__(self, at: int, call: str) -> None:
        self.left, self.call = at, call

    def combine(self, columns: list[bytes]) -> list[bytes] | None:
        self._may_break("combine")
        return super().combine(columns)

    def announce(self, payload: bytes) -> bytes:
        self._may_break("announce")
        return payload

    def _may_break(self, call: str) -> None:
        self.left -= call == self.call
        if not self.left:
            raise RuntimeError("connection closed by peer")


def test_of_two_lives_that_offered_the_same_step_the_committed_one_counts(tmp_path):
    """Both offered step 6 and heard of no commit; storage has that of the second, whose state is another one."""
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4), comm=LosesTheNext(6, "combine")) as life:
        life.go(5, settle=True)
        life.go(1)
        with pytest.raises(RuntimeError, match="closed by peer"):
            life.settle()
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4), comm=LosesTheNext(1, "announce")) as life:
        assert resume(life).restored_step == 5
        life.session.before_update()
        life.state.advance(100)
        life.step = 6
        life.session.after_update(6, told(life.counts), life.capture)
        with pytest.raises(RuntimeError, match="closed by peer"):
            life.settle()
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as life:
        held = [(h.header.step, h.header.identity.generation) for h in life.session.tier.holds()]
        assert held == [(5, 0), (6, 1)], "the second life did not go on from the first's (6, 0)"
        fault = resume(life)
        assert (fault.restored_step, fault.lost_tokens) == (6, 0)
        for tensor in life.state.tensors():
            assert torch.equal(tensor.local, values_at(100, tensor.key, tensor.global_shape, torch.float32))
        life.step = 6
        life.go(1, settle=True)
        assert [h.header.step for h in life.session.tier.holds()] == [7], "all others are free"


def test_a_former_session_no_longer_has_what_the_next_one_took_over(tmp_path):
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as life:
        life.go(3, settle=True)
        former = life.session.tier
    assert former.nbytes > 0
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as second:
        assert former.nbytes == 0
        assert second.session.tier.nbytes > 0


def test_giving_up_the_recovery_buffer_leaves_what_may_be_committed_next(tmp_path):
    storage = GatedStorage(tmp_path)
    with Life(storage, policy=MoC(k=1, snapshot_k=4)) as life:
        life.go(4, settle=True)
        tier = life.session.tier
        [entry] = tier._entries.values()
        entry.complete, entry.on_storage, entry.readers = None, False, 1  # as before it was committed
        assert not tier.drop()
        assert tier.nbytes == entry.buffers[-1].nbytes, "storage may have it by now"
        tier.ended(SimpleNamespace(identity=entry.identity, contents=entry.contents), committed=True)
        assert tier.drop()
        assert tier.nbytes == 0


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_values_are_read_from_any_place(offset):
    """Received slices lie one behind the other, of whatever dtypes."""
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    memory = torch.zeros(64, dtype=torch.uint8)
    memory[offset : offset + 24] = values.flatten().view(torch.uint8)
    entry = SliceEntry("model/w", "expert/0/0", "F32", (0, 0), (2, 3), (2, 3))
    assert torch.equal(as_values(entry, memory[offset : offset + 24]), values)


def test_the_books_know_what_memory_holds(tmp_path):
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=4)) as life:
        life.go(5, settle=True)
        life.go(1)
        tokens = life.session.run_ledger.tokens
        assert (tokens.unsaved(Tier.HOST) == life.counts).all(), "all experts as of step 5, and this is step 6"
        assert (tokens.unsaved(Tier.STORAGE) > life.counts).any()


@dataclass(frozen=True)
class Uneven:
    """Everything but the experts at each step; three experts of each layer at every third step, else one."""

    def check(self, catalog) -> None:
        pass

    def describe(self):
        return {"name": "uneven"}

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        if context.run.missing:
            return SnapshotPlan(context.run.step, tuple(op.id for op in context.model.catalog.operators))
        number = 3 if context.run.step % 3 == 1 else 1
        chosen = {expert_id(layer, e) for layer in range(2) for e in range(number)}
        chosen |= {op.id for op in context.model.catalog.always_saved}
        return SnapshotPlan(context.run.step, tuple(op.id for op in context.model.catalog.operators if op.id in chosen))


def test_a_small_snapshot_leaves_room_for_a_large_one(tmp_path):
    """It takes no more than it needs of what the budget has."""
    with Life(LocalStorage(tmp_path / "probe"), policy=Uneven()) as life:
        large = life.go(4, settle=True).nbytes
    storage = GatedStorage(tmp_path / "run")
    with Life(storage, policy=Uneven(), host_memory_bytes=int(large * 1.9)) as life:
        life.go(5, settle=True)
        storage.gate.clear()
        records = [life.go(1), life.go(1)]  # with nobody to open the gate, waiting would end in an error
        storage.gate.set()
        life.settle()
        life.go(1, settle=True)
    assert [(r.begun, r.waited) for r in records] == [(True, False), (True, False)]
    assert not any(r.waited for r in life.records)
