"""The session on a real directory: complete views, right run_ledger, bounded stalls and memory, honest failures."""

from __future__ import annotations

import re
import threading
import time
import weakref
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from moe_ckpt import Memory
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.errors import ConfigError, HostMemoryError, SaveFailedError, StoreInUseError
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.policies import Dense, Measured
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.slices.copying import Copier
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from moe_ckpt_sim.run.sync import SyncDense
from tests.unit.engine_parts import (
    ALL,
    ALWAYS,
    MODEL,
    PATIENCE_SECS,
    GatedStorage,
    Life,
    ThreadRanks,
    assert_view,
    failing,
    manifests,
    run_threads,
    sequential,
    steps_of_experts,
    versions_after,
)

# --- complete views ---


def test_every_partial_checkpoint_opens_as_a_complete_view(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(7, settle=True)
    found = manifests(tmp_path)
    assert [m.step for m in found] == list(range(1, 8))
    for number, manifest in enumerate(found):
        history = [(m.step, sequential(m.index)) for m in found[: number + 1]]
        assert_view(tmp_path, MODEL, manifest, versions_after(history))
    sizes = [record.nbytes for record in life.records]
    assert max(sizes[1:]) < 0.6 * sizes[0], "partial ones are smaller"
    assert [record.experts_saved for record in life.records] == [8] + [2] * 6


def test_the_plain_state_is_that_of_the_step_with_its_tensors(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(3, settle=True)
    reader = StoreReader(LocalStorage(tmp_path))
    for manifest in manifests(tmp_path):
        state = reader.state(manifest, 0)
        assert state["step"] == manifest.step
        assert torch.equal(state["buffer"], torch.full((3,), float(manifest.step)))
        assert state["empty"].shape == (0,)


def test_the_plain_state_is_copied_before_after_update_returns(tmp_path):
    """Unlike parameters, it may change in the next forward pass, while the copy thread is still at work."""
    copying = threading.Event()
    live = torch.zeros(3)
    with Life(LocalStorage(tmp_path), on_phase=lambda phase: copying.wait(PATIENCE_SECS)) as life:
        life.capture = lambda: {"live": live}
        life.go()
        live.fill_(7)
        copying.set()
    [manifest] = manifests(tmp_path)
    assert torch.equal(StoreReader(LocalStorage(tmp_path)).state(manifest, 0)["live"], torch.zeros(3))


def test_steps_that_nothing_waits_for_still_commit_in_order(tmp_path):
    """As fast as it goes: some checkpoints are skipped, all views are whole."""
    with Life(LocalStorage(tmp_path)) as life:
        life.go(60)
        life.finish()
    begun = [r.step for r in life.records if r.begun]
    found = manifests(tmp_path)
    assert [m.step for m in found[:-1]] == begun
    assert [m.index for m in found] == list(range(len(found)))
    for number in range(len(begun)):
        history = [(m.step, sequential(m.index)) for m in found[: number + 1]]
        assert_view(tmp_path, MODEL, found[number], versions_after(history))


def test_two_ranks_write_disjoint_shares_of_one_view(tmp_path):
    ranks = ThreadRanks(2)

    def body(comm):
        with Life(LocalStorage(tmp_path), comm=comm) as life:
            life.go(4, settle=True)
        return life

    first, second = run_threads(ranks, body)
    assert [replace(r, stall_secs=0, agree_secs=0, nbytes=0) for r in first.records] == [
        replace(r, stall_secs=0, agree_secs=0, nbytes=0) for r in second.records
    ]
    assert np.array_equal(first.session.run_ledger.tokens.applied, 4 * 2 * first.counts), "both ranks' tokens"
    order = [0, 2, 1, 3]  # interleaved over two owners
    found = manifests(tmp_path)
    assert [m.world_size for m in found] == [2] * 4
    history = []
    for manifest in found:
        history.append((manifest.step, {(layer, order[(manifest.index - 1 + layer) % 4]) for layer in range(2)}))
        assert_view(tmp_path, MODEL, manifest, versions_after(history))
        assert {f.rank for f in manifest.files} == {0, 1}


# --- books ---


def test_the_books_follow_commits(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        counts, book = life.counts, life.session.run_ledger.tokens
        life.go(1, settle=True)
        assert book.unsaved().sum() == counts.sum(), "nobody has agreed on the commit yet"
        assert life.records[0].committed_step is None
        assert life.records[0].at_risk_plt == 0
        for step in range(2, 8):
            record = life.go(settle=True)
            versions = versions_after([(s, sequential(s - 1)) for s in range(1, step)])
            stale = step - steps_of_experts(versions)
            assert np.array_equal(book.unsaved(), stale * counts)
            assert record.committed_step == step - 1
            # Coming back to step - 1 would lose what its experts lack of the tokens up to that step.
            assert record.at_risk_plt == pytest.approx(((stale - 1) * counts).sum() / (step * counts.sum()))
            assert (record.plt, record.lost_tokens) == (0, 0)
            assert record.routed_tokens == step * counts.sum()
    assert life.session.committed_directory == step_dir(6, 0)


def test_what_a_manifest_says_of_tokens_is_the_truth_of_its_view(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(6, settle=True)
    for manifest in manifests(tmp_path):
        saved = np.array(manifest.tokens["saved"]["storage"])
        applied = np.array(manifest.tokens["applied"])
        assert np.array_equal(applied, manifest.step * life.counts)
        for layer in range(2):
            for expert in range(4):
                version = manifest.operators[expert_id(layer, expert)].step
                assert saved[layer, expert] == version * life.counts[layer, expert]


def test_a_second_life_goes_on_and_books_the_loss(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(3, settle=True)
    counts = life.counts
    [*_, newest] = manifests(tmp_path)
    versions = versions_after([(s, sequential(s - 1)) for s in (1, 2, 3)])
    lacking = int(((3 - steps_of_experts(versions)) * counts).sum())
    with Life(LocalStorage(tmp_path)) as second:
        fault = second.session.resume_from(newest)
        second.step = 3
        assert (fault.restored_step, fault.lost_tokens, fault.stale_experts) == (3, lacking, 6)
        assert second.session.run_ledger.tokens.unsaved().sum() == 0
        assert second.session.committed_directory == step_dir(3, 0)
        record = second.go(settle=True)
        assert (record.committed_step, record.experts_saved) == (3, 2)
        assert (record.lost_tokens, record.plt) == (lacking, pytest.approx(lacking / (4 * counts.sum())))
        assert record.at_risk_plt == record.plt, "another fault would come back to step 3, which lacks no more"
        second.go(settle=True)
    found = manifests(tmp_path)
    assert [(m.step, m.generation, m.index) for m in found] == [(1, 0, 0), (2, 0, 1), (3, 0, 2), (4, 1, 3), (5, 1, 4)]
    history = [(s, sequential(s - 1)) for s in range(1, 6)]
    assert_view(tmp_path, MODEL, found[-1], versions_after(history))
    assert found[-1].parent == step_dir(3, 0)
    assert found[-1].tokens["faults"] == [[3, lacking, 6, 3 * counts.sum()]]


def test_adopting_from_another_store_writes_dense_first(tmp_path):
    with Life(LocalStorage(tmp_path / "old")) as life:
        life.go(3, settle=True)
    [*_, newest] = manifests(tmp_path / "old")
    with Life(LocalStorage(tmp_path / "new")) as second:
        fault = second.session.resume_from(newest, same_store=False)
        second.step = 3
        assert fault.lost_tokens > 0, "the history comes along"
        assert second.session.committed_directory is None
        second.go(2, settle=True)
    assert [r.experts_saved for r in second.records] == [8, 2]
    assert [r.lost_tokens for r in second.records] == [fault.lost_tokens] * 2
    first, last = manifests(tmp_path / "new")
    assert_view(tmp_path / "new", MODEL, first, dict.fromkeys(ALL, 4))
    assert_view(tmp_path / "new", MODEL, last, versions_after([(4, set()), (5, sequential(1))]))
    assert all(path.startswith("step_0000000") and path[:13] != step_dir(3, 0) for path in last.paths)


@dataclass(frozen=True)
class Heard:
    """A policy, and what it was told to be measured."""

    policy: Dense
    told: list[Measured] = field(default_factory=list)

    def plan(self, context):
        self.told.append(context.measured)
        return self.policy.plan(context)

    def check(self, catalog):
        self.policy.check(catalog)

    def describe(self):
        return self.policy.describe()


def test_a_second_life_knows_what_the_first_one_measured(tmp_path):
    """So that an interval or a window is right at once, not only after another checkpoint was timed."""
    with Life(LocalStorage(tmp_path), policy=Heard(Dense(2))) as life:
        life.go(8, settle=True)
        known = life.session._booking.meter.measurements
    [*_, newest] = manifests(tmp_path)
    without_peers_and_probes = vars(Measured()).keys() - {"send_bytes_per_sec", "copy_interference_secs"}
    assert newest.measured.keys() == known.keys() == without_peers_and_probes
    for ranks in (newest.world_size, newest.world_size + 1):
        second = Heard(Dense(2))
        with Life(LocalStorage(tmp_path), policy=second) as life:
            life.session.resume_from(replace(newest, world_size=ranks))
            life.step = 8
            life.go()
        if ranks == newest.world_size:
            assert second.told[0].persist_secs == pytest.approx(newest.measured["persist_secs"], abs=1e-6)
            assert second.told[0].persist_bytes_per_sec is not None
        else:
            assert second.told[0].persist_secs is second.told[0].persist_bytes_per_sec is None


# --- slow storage: skip or wait ---


def test_skipping_never_waits_for_storage(tmp_path):
    """The gate stays shut for 30 steps, so a single wait for storage would hang the test."""
    storage = GatedStorage(tmp_path)
    with Life(storage, max_in_flight=2) as life:
        storage.gate.clear()
        life.go(30)
        records = list(life.records)
        storage.gate.set()
        life.settle()
        life.go(1, settle=True)
        last = life.go(1, settle=True)
    assert [r.begun for r in records] == [True, True] + [False] * 28
    assert [r.skipped for r in records] == [False, False] + [True] * 28
    assert sorted(r.stall_secs for r in records)[15] < 0.05, "the median step is not held up"
    assert last.begun
    assert [m.step for m in manifests(tmp_path)] == [1, 2, 31, 32]
    assert last.committed_step == 31


def test_a_skipped_checkpoint_is_made_up_for_at_the_next_step(tmp_path):
    storage = GatedStorage(tmp_path)
    with Life(storage, policy=Dense(every_n_steps=5), max_in_flight=1) as life:
        life.go(4)
        storage.gate.clear()
        life.go(7)
        storage.gate.set()
        life.settle()
        life.go(3, settle=True)
    assert [r.step for r in life.records if r.skipped] == [10, 11]
    assert [r.step for r in life.records if r.begun] == [5, 12]


def test_waiting_stalls_and_skips_none(tmp_path):
    storage = GatedStorage(tmp_path)
    with Life(storage, when_busy="wait", max_in_flight=2) as life:
        storage.gate.clear()
        life.go(2)
        opener = threading.Timer(1.0, storage.gate.set)  # on a busy machine the step begins late
        opener.start()
        began = time.perf_counter()
        record = life.go()
        opener.join()
        assert record.begun
        assert time.perf_counter() - began > 0.25
        assert record.stall_secs > 0.25
        life.go(20)
        life.settle()
    assert not any(r.skipped for r in life.records)
    assert [m.step for m in manifests(tmp_path)] == list(range(1, 24))


def test_a_plan_that_asks_to_wait_is_committed_when_the_step_ends(tmp_path):
    with Life(LocalStorage(tmp_path), policy=SyncDense(every_n_steps=2), max_in_flight=1) as life:
        for _ in range(6):
            life.go()
            assert [m.step for m in manifests(tmp_path)] == list(range(2, life.step + 1, 2))


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_memory_held_never_exceeds_the_budget(tmp_path, when_busy):
    """Room for one dense snapshot and one partial one beside it, though three might be in flight."""
    with Life(LocalStorage(tmp_path / "probe")) as life:
        dense = life.go().nbytes
    storage = GatedStorage(tmp_path / "run")
    budget = int(1.6 * dense)
    with Life(storage, when_busy=when_busy, host_memory_bytes=budget, max_in_flight=3) as life:
        pool, held = life.session._snapshots.pipeline._pool, []
        for step in range(25):
            if when_busy == "skip":
                storage.gate.set() if step % 5 == 4 else storage.gate.clear()
            life.go()
            held.append(pool.lent_bytes)
        storage.gate.set()
        life.finish()
    assert dense <= max(held) <= budget
    found = manifests(tmp_path / "run")
    assert any(r.skipped for r in life.records) == (when_busy == "skip")
    assert len(found) == 1 + sum(r.begun for r in life.records)


def test_a_budget_below_one_snapshot_is_refused_with_both_numbers(tmp_path):
    with (
        Life(LocalStorage(tmp_path), host_memory_bytes=500) as life,
        pytest.raises(HostMemoryError, match="budget is 500 bytes") as refused,
    ):
        life.go()
    needed = refused.value.needed_bytes
    assert re.match(r"the checkpoint of step 1, which holds everything, needs .* on rank 0, ", str(refused.value))
    assert f"Set host_memory_bytes to {needed} or more; {3 * needed} is enough" in str(refused.value)
    assert "Every policy first saves everything" in str(refused.value)
    assert "fewer experts" not in str(refused.value)
    with Life(LocalStorage(tmp_path / "enough"), host_memory_bytes=needed) as life:
        assert life.go().begun


def test_a_budget_that_holds_no_partial_checkpoint_says_what_would_need_less(tmp_path):
    class Partial(Dense):
        def plan(self, context):
            return SnapshotPlan(context.run.step, tuple(sorted(ALWAYS)))

    said = r"holds a part of the model,.*saves fewer experts at once also needs less"
    with (
        Life(LocalStorage(tmp_path), policy=Partial(), host_memory_bytes=50) as life,
        pytest.raises(HostMemoryError, match=said),
    ):
        life.go()


def test_a_budget_that_nobody_gave_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "default_budget_bytes", lambda local_ranks, left_bytes=0: 500)
    with (
        Life(LocalStorage(tmp_path)) as life,
        pytest.raises(HostMemoryError, match=r"500 bytes\. That is half of what was free at the start.*Set host_"),
    ):
        life.go()


# --- the end ---


def test_finish_leaves_a_complete_checkpoint_in_its_own_generation(tmp_path):
    with Life(LocalStorage(tmp_path), when_busy="wait") as life:
        life.go(3)
        life.finish()
        assert life.session.committed_directory == step_dir(3, 1)
    found = manifests(tmp_path)
    assert (found[-1].step, found[-1].generation) == (3, 1)
    assert found[-2].directory == step_dir(3, 0)  # the partial one, whose name is taken
    assert_view(tmp_path, MODEL, found[-1], dict.fromkeys(ALL, 3))
    saved = np.array(found[-1].tokens["saved"]["storage"])
    assert np.array_equal(saved, 3 * life.counts)
    with Life(LocalStorage(tmp_path)) as second:
        assert second.session.generation == 2
        assert second.session.resume_from(found[-1]).lost_tokens == 0


def test_finish_writes_nothing_more_where_the_last_checkpoint_is_complete(tmp_path):
    with Life(LocalStorage(tmp_path), policy=Dense(), when_busy="wait") as life:
        life.go(3)
        life.finish()
        assert life.session.committed_directory == step_dir(3, 0)
    assert [m.directory for m in manifests(tmp_path)] == [step_dir(s, 0) for s in (1, 2, 3)]


def test_finish_without_a_last_checkpoint_waits_for_those_under_way(tmp_path):
    storage = GatedStorage(tmp_path)
    with Life(storage) as life:
        storage.gate.clear()
        life.go(2)
        opener = threading.Timer(0.2, storage.gate.set)
        opener.start()
        life.finish(save_last=False)
        opener.join()
        assert life.session.committed_directory == step_dir(2, 0)
    assert [m.directory for m in manifests(tmp_path)] == [step_dir(1, 0), step_dir(2, 0)]


def test_finish_says_when_the_last_checkpoint_failed(tmp_path):
    storage = failing(tmp_path, None)
    with Life(storage) as life:
        life.go(2, settle=True)
        storage.fail_at = len(storage.calls) + 1
        with pytest.raises(SaveFailedError, match=r"step 2 .*injected"):
            life.finish()
        assert life.session.committed_directory == step_dir(2, 0)
    assert [m.directory for m in manifests(tmp_path)] == [step_dir(1, 0), step_dir(2, 0)]


def test_finish_gives_up_on_storage_that_hangs(tmp_path):
    storage = GatedStorage(tmp_path)
    with Life(storage, timeout_secs=0.2) as life:
        storage.gate.clear()
        life.go(1)
        with pytest.raises(SaveFailedError, match=r"did not finish within 0\.2 s .*writing the checkpoint of step 1"):
            life.finish()
        storage.gate.set()


def test_close_may_be_called_twice_and_nothing_follows_it(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(1)
        life.session.close()
        life.session.close()
        with pytest.raises(ConfigError, match="nothing after finish"):
            life.go()
    with pytest.raises(ConfigError, match="call open"):
        Life(LocalStorage(tmp_path)).session.before_update()


def test_close_abandons_a_slow_write_and_keeps_the_store_from_others(tmp_path, caplog):
    """Its thread may write on, so till then nobody else here may have the store: not after a second close, either."""
    storage = GatedStorage(tmp_path)
    with Life(storage) as life:
        life.go(1, settle=True)
        storage.gate.clear()
        life.go(1)
        writer = life.session._snapshots.pipeline.persister._thread
        began = time.perf_counter()
        life.session.close(0.2)
        assert time.perf_counter() - began < PATIENCE_SECS / 2
        assert "still being written" in caplog.text
        life.session.close(0.2)
        with pytest.raises(StoreInUseError), Life(LocalStorage(tmp_path)):
            pass
        assert [m.step for m in manifests(tmp_path)] == [1]
    storage.gate.set()
    writer.join(PATIENCE_SECS)
    with Life(LocalStorage(tmp_path)):
        assert [m.step for m in manifests(tmp_path)] == [1, 2], "it wrote to the end, and then let go of the store"


def test_close_waits_for_a_quick_write(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(1)
        life.session.close()
        assert [m.step for m in manifests(tmp_path)] == [1]


def test_the_complete_checkpoint_of_a_step_joins_the_partial_one(tmp_path):
    """Both begin in one step; the copy of the first must not be forgotten, for its writing may wait for the join."""
    with Life(LocalStorage(tmp_path)) as life:
        life.go(2, settle=True)
        first = life.session._snapshots.pipeline._copy
        life.session.save_complete(life.step, life.capture)
        assert first._joined.is_set()
        life.finish()
    assert [m.directory for m in manifests(tmp_path)] == [step_dir(1, 0), step_dir(2, 0), step_dir(2, 1)]


def test_one_store_serves_one_life_at_a_time(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(1, settle=True)
        with pytest.raises(StoreInUseError), Life(LocalStorage(tmp_path)):
            pass
        life.go(1, settle=True)
    with Life(LocalStorage(tmp_path)) as second:
        second.go(1, settle=True)
    assert [(m.step, m.generation) for m in manifests(tmp_path)] == [(1, 0), (2, 0), (1, 1)]


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_snapshot_before_is_freed_before_the_next_is_copied(tmp_path, monkeypatch, in_memory):
    """Afterwards training would free it beside the thread that copies, and lose its core to that for milliseconds."""
    (tmp_path / "memory").mkdir()
    memory = Memory(directory=tmp_path / "memory") if in_memory else None
    began, alive = [], []
    start = Copier.start

    def started(copier, jobs, **options):
        alive.append(any(snapshot() is not None for snapshot in began))
        return start(copier, jobs, **options)

    monkeypatch.setattr(Copier, "start", started)
    with Life(LocalStorage(tmp_path / "store"), policy=Dense(), memory=memory) as life:
        for _ in range(4):
            life.go(1, settle=True)
            began.append(weakref.ref(life.session._snapshots.newest))
    assert alive == [False] * 4
