"""Checkpoints that only memory has: storage gets every n-th, and a life comes back to the newest of either."""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt import Memory
from moe_ckpt.cli.main import main
from moe_ckpt.comm.communicator import SoloCommunicator, largest
from moe_ckpt.commit.room import Room
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.step import WindowPlace
from moe_ckpt.errors import RecoveryLoopError, SaveFailedError
from moe_ckpt.format.manifest import age_of
from moe_ckpt.format.slot import decode_slot, encode_slot
from moe_ckpt.ledger.retention import needed_steps
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.run.events import SnapshotBegan, StepRecord
from moe_ckpt.storage import LocalStorage, Storage
from moe_ckpt.survivors.newest_step import Survivor
from moe_ckpt.tiers import host_memory
from tests.support.bad_disks import SmallDisk
from tests.support.deleting import delete_tree
from tests.support.spoiled import blank, flip
from tests.unit.builders import memory_step
from tests.unit.engine_parts import (
    ALL,
    PATIENCE_SECS,
    GatedStorage,
    Life,
    ThreadCommunicator,
    ThreadRanks,
    failing,
    manifests,
    run_threads,
)
from tests.unit.test_engine_host_tier import assert_state, come_back

RARELY = 100


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


@pytest.fixture
def where(tmp_path):
    """(store, memory directory)"""
    (tmp_path / "memory").mkdir()
    return tmp_path / "store", tmp_path / "memory"


def life(where, policy=None, every: Any = RARELY, storage: Storage | None = None, **settings) -> Life:
    store, memory = where
    chosen = Memory(directory=memory, storage_every=every)
    return Life(storage or LocalStorage(store), policy=policy or Dense(), memory=chosen, **settings)


def train_and_fail(where, steps=6, policy=None, **more) -> Life:
    with life(where, policy, **more) as first:
        first.go(steps, settle=True)
    return first


def committed(store: Path) -> list[str]:
    return sorted(path.parent.name for path in store.glob("step_*/MANIFEST.json"))


def at(step: int) -> dict[str, int]:
    return dict.fromkeys(ALL, step)


def test_a_life_comes_back_to_a_step_that_storage_never_had(where):
    train_and_fail(where)
    assert committed(where[0]) == ["step_00000001"], "the first one always goes"
    with life(where) as second:
        restored, fault = come_back(second)
        assert (restored.manifest.step, restored.plain["step"]) == (6, 6)
        assert_state(second, at(6))
        assert fault.lost_tokens == 0
        assert restored.origin == "memory"
        assert set(restored.plan.from_source(restored.plan.sources[0])) == set(ALL), "from this node"
        assert second.session.completed(StepRecord(6)).memory_step == 6, "a failure now would come back to it again"
        assert second.session.run_ledger.ledger.at_risk.tokens == 0, "all of the checkpoint on storage is of one step"
        second.go(3, settle=True)
    with life(where) as third:
        come_back(third)
        assert_state(third, at(9))


def test_every_nth_goes_to_storage(where):
    train_and_fail(where, 10, every=4)
    assert committed(where[0]) == ["step_00000001", "step_00000004", "step_00000008"]


def test_seconds_count_as_well(where, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, memory = where
    chosen = Memory(directory=memory, storage_every=30.0)
    with Life(LocalStorage(store), policy=Dense(), memory=chosen) as only:
        for _ in range(7):
            now[0] += 10
            only.go(1, settle=True)
        only.finish(save_last=False)
    assert committed(store) == ["step_00000001", "step_00000004", "step_00000007"]


def test_seconds_count_from_the_start_of_a_life_that_goes_on(where, monkeypatch):
    """Whatever the clock shows there: it is another machine's, or was set anew by a reboot."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, memory = where
    chosen = Memory(directory=memory, storage_every=30.0)
    with Life(LocalStorage(store), policy=Dense(), memory=chosen) as first:
        for _ in range(2):
            now[0] += 10
            first.go(1, settle=True)
    now[0] = 5000.0
    with Life(LocalStorage(store), policy=Dense(), memory=chosen) as second:
        come_back(second)
        for _ in range(5):
            now[0] += 10
            second.go(1, settle=True)
    assert committed(store) == ["step_00000001", "step_00000006_g1"]


def test_seconds_count_from_the_first_step_that_ranks_have_agreed_on(where, monkeypatch):
    """Where they agree a step late, nobody knows rank 0's clock in the first step."""
    now = [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, memory = where
    chosen = Memory(directory=memory, storage_every=30.0)
    with Life(LocalStorage(store), policy=Dense(), memory=chosen, comm=SoloCommunicator(late=True)) as only:
        for _ in range(9):
            now[0] += 10
            only.go(1, settle=True)
    assert committed(store) == ["step_00000001", "step_00000005", "step_00000008"]


def test_the_run_goes_on_on_storage_where_that_stood(where):
    """The next checkpoint on storage builds upon what storage has, not on what memory had."""
    policy = MoC(k=1)
    train_and_fail(where, policy=policy)
    with life(where, policy) as second:
        come_back(second)
        second.go(2, settle=True)
        second.finish()
    delete_tree(where[1])
    where[1].mkdir()
    with life(where, policy) as third:
        restored, _ = come_back(third)
        assert restored.manifest.step == 8
        assert_state(third, at(8))


def test_partial_steps_are_laid_over_older_ones_and_their_loss_is_counted(where):
    """Of each layer memory has another expert as of each step: they take turns there, however old storage is."""
    policy = MoC(k=1)
    first = train_and_fail(where, policy=policy)
    with life(where, policy) as second:
        restored, fault = come_back(second)
        versions = {op: record.step for op, record in restored.manifest.operators.items()}
        assert_state(second, versions)
        assert restored.manifest.step == 6
        experts = np.array([[versions[expert_id(layer, expert)] for expert in range(4)] for layer in range(2)])
        assert np.sort(experts).tolist() == [[3, 4, 5, 6]] * 2, "k=1 of each layer"
        assert fault.lost_tokens == ((6 - experts) * first.counts).sum()
        assert {step for op, step in versions.items() if not op.startswith("expert")} == {6}


def test_partial_steps_are_laid_over_storage(where):
    """Two steps have brought one expert each of a layer's four; the others are as storage has them, since step 1."""
    policy = MoC(k=1)
    train_and_fail(where, 3, policy=policy)
    with life(where, policy) as second:
        restored, _ = come_back(second)
        versions = {op: record.step for op, record in restored.manifest.operators.items()}
        assert_state(second, versions)
        experts = np.array([[versions[expert_id(layer, expert)] for expert in range(4)] for layer in range(2)])
        assert np.sort(experts).tolist() == [[1, 1, 2, 3]] * 2


def test_what_goes_to_storage_now_and_then_takes_turns_there_too(where):
    """Whatever turns memory takes in between. The first checkpoint, of step 1, is dense; then every third goes."""
    policy = MoC(k=1)
    train_and_fail(where, 12, policy=policy, every=3)
    newest = manifests(where[0])[-1]
    assert newest.step == 12
    stored = [[newest.operators[expert_id(layer, expert)].step for expert in range(4)] for layer in range(2)]
    assert np.sort(stored).tolist() == [[3, 6, 9, 12]] * 2


def test_moc_holds_more_in_memory(where):
    policy = MoC(k=1, snapshot_k=4)
    train_and_fail(where, policy=policy)
    with life(where, policy) as second:
        _, fault = come_back(second)
        assert_state(second, at(6))
        assert fault.lost_tokens == 0


def test_what_memory_had_and_storage_has_not_is_unsaved_still(where):
    """A second failure, of the node, costs what the first one did not."""
    policy = MoC(k=1, snapshot_k=4)
    first = train_and_fail(where, policy=policy)
    with life(where, policy) as second:
        come_back(second)
        unsaved = second.session.run_ledger.tokens.unsaved()
        assert (unsaved == 5 * first.counts).all(), "all since step 1"


def test_a_damaged_slot_costs_the_steps_that_storage_does_not_have(where, caplog):
    train_and_fail(where, every=4)
    for path in where[1].rglob("*.head"):
        flip(path)
    with life(where) as second:
        come_back(second)
        assert_state(second, at(4))
    assert "is damaged: it is set aside, and not used\n" in caplog.text
    assert len(list(where[1].rglob("*.damaged"))) <= 2


def test_the_newest_of_two_good_steps_is_taken_when_the_newer_one_is_damaged(where):
    """What is released stays readable until its slot is used again."""
    train_and_fail(where)
    newest = max(where[1].rglob("*.head"), key=lambda path: path.stat().st_mtime_ns)
    blank(newest)
    with life(where) as second:
        restored, _ = come_back(second)
        assert restored.manifest.step == 5
        assert_state(second, at(5))


def test_a_stuck_storage_holds_up_neither_training_nor_memory(where, caplog):
    storage = GatedStorage(where[0])
    with life(where, every=1, storage=storage) as only:
        only.go(1, settle=True)
        storage.gate.clear()
        for _ in range(12):
            only.go()
            assert only.session._snapshots.pipeline.first.wait(0, 60)
        only.go(2)
        assert only.records[-1].memory_step >= 12
        stayed = [record.step for record in only.records if record.begun and not record.to_storage]
        assert only.records[-1].skips == len(stayed) > 10, "each of them is counted, and not only warned of"
        assert committed(where[0]) == ["step_00000001"]
        storage.gate.set()
        only.settle()
        only.go(3, settle=True)
        assert committed(where[0])[-1] == "step_00000018"
    assert caplog.text.count("stays in memory only") == 1


def test_a_full_disk_ends_no_training(where, caplog):
    storage = failing(where[0], 6, persistent=True)
    with life(where, every=1, storage=storage) as only:
        only.go(10, settle=True)
    with life(where, every=1) as second:
        come_back(second)
        assert_state(second, at(10))


@pytest.mark.parametrize("slots_before", [0, 1, 3])
def test_a_full_disk_ends_no_sparse_window_that_memory_goes_on_with(slots_before, where):
    """And none of what memory then has of windows stays on storage in part."""
    disk = SmallDisk(where[0], float("inf"))
    with life(where, MoEvement(window=4), every=1, storage=disk) as only:
        only.go(9 + slots_before, settle=True)
        disk.capacity_bytes = 0
        only.go(16 - slots_before, settle=True)
        assert [record.slot for record in only.records[1:]] == [0, 1, 2, 3] * 6, "after the first one, which is dense"
        assert [record.memory_step for record in only.records[-5:]] == [17, 21, 21, 21, 21]
        assert only.records[-1].failed_checkpoints == 4, "each window once"
        assert [record.to_storage for record in only.records[13:17]] == [True, False, False, False], "the rest is not"
        disk.capacity_bytes = float("inf")
        only.go(8, settle=True)
        assert only.records[-1].committed_step == 29
    assert len(list(where[0].glob("step_*"))) == 1 + 4 * 4, "the dense one, two windows from before, and two from after"


def test_a_window_that_neither_memory_nor_a_full_disk_has_begins_anew(where, monkeypatch):
    disk = SmallDisk(where[0], float("inf"))
    with life(where, MoEvement(window=4), every=1, storage=disk) as only:
        only.go(9, settle=True)
        disk.capacity_bytes = 0
        monkeypatch.setattr(Slot, "seal", raising_once(OSError("no page is free"), Slot.seal))
        only.go(8, settle=True)
        assert [record.slot for record in only.records[9:]] == [0, 0, 1, 2, 3, 0, 1, 2]


def raising_once(error, real):
    calls = itertools.count()

    def call(*args):
        if not next(calls):
            raise error
        return real(*args)

    return call


def test_generations_go_on_where_only_memory_knows_of_a_life(where):
    """The second life writes nothing to storage; the third must not take its name."""
    train_and_fail(where)
    with life(where) as second:
        come_back(second)
        second.go(2, settle=True)
        generation = second.session.generation
        assert second.records[-1].memory_step is not None
    with life(where) as third:
        restored, _ = come_back(third)
        assert third.session.generation == generation + 1
        assert restored.manifest.generation == generation
        assert_state(third, at(8))


def test_an_abandoned_branch_is_not_returned_to(where):
    """A life that came from storage is newer than slots that turn up again afterwards."""
    train_and_fail(where)
    shutil.move(where[1], where[1].with_name("away"))
    where[1].mkdir()
    with life(where) as second:
        come_back(second)
        assert_state(second, at(1))
        second.go(2, settle=True)
    shutil.copytree(where[1].with_name("away"), where[1], dirs_exist_ok=True)
    with life(where) as third:
        restored, _ = come_back(third)
        assert restored.manifest.step == 3


def test_an_abandoned_branch_of_which_storage_has_nothing_is_not_returned_to(where):
    """It had come further than the run has since, which went on from storage on another node."""
    train_and_fail(where)
    with life(where) as second:
        come_back(second)
        second.go(6, settle=True)
    shutil.move(where[1], where[1].with_name("away"))
    where[1].mkdir()
    with life(where, every=1) as third:
        come_back(third)
        third.go(2, settle=True)
        assert third.session.generation == 2
    delete_tree(where[1])
    shutil.move(where[1].with_name("away"), where[1])
    with life(where) as fourth:
        restored, _ = come_back(fourth)
        assert restored.manifest.directory == "step_00000003_g2"
        assert [path.name for path in where[0].glob(".generation*")] == [".generation_3"]


def test_slots_of_two_lives_are_never_mixed(where, tmp_path):
    """Two ranks, two nodes; one node's memory is of another life than the other's: neither is a checkpoint."""
    nodes = [tmp_path / "a", tmp_path / "b"]

    def one(steps):
        def body(comm):
            place = (where[0], nodes[comm.rank])
            with life(place, comm=comm) as each:
                if steps[0]:
                    come_back(each)
                each.go(steps[1], settle=True)
                found[comm.rank] = each.step

        return body

    found: dict[int, int] = {}
    for node in nodes:
        node.mkdir()
    run_threads(ThreadRanks(2), one((0, 4)))
    shutil.copytree(nodes[0], tmp_path / "old")
    run_threads(ThreadRanks(2), one((4, 3)))
    delete_tree(nodes[0])
    shutil.copytree(tmp_path / "old", nodes[0])
    run_threads(ThreadRanks(2), one((1, 1)))
    assert found == {0: 2, 1: 2}, "back to step 1 on storage"


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_other_nodes_hold_is_fetched(where, tmp_path, ranks):
    """Each rank a node of its own. All restart with their memory, renumbered."""
    nodes = [tmp_path / f"node_{rank}" for rank in range(ranks)]
    for node in nodes:
        node.mkdir()

    def train(comm):
        with life((where[0], nodes[comm.rank]), comm=comm) as each:
            each.go(6, settle=True)

    def again(comm):
        with life((where[0], nodes[(comm.rank + 1) % ranks]), comm=comm) as each:
            restored, fault = come_back(each)
            assert_state(each, at(6))
            assert fault.lost_tokens == 0
            found[comm.rank] = restored.manifest.step

    found: dict[int, int] = {}
    run_threads(ThreadRanks(ranks), train)
    run_threads(ThreadRanks(ranks), again)
    assert found == dict.fromkeys(range(ranks), 6)


def test_another_world_size_takes_what_memory_has(where):
    def train(comm):
        with life(where, comm=comm, local_ranks=2) as each:
            each.go(6, settle=True)

    run_threads(ThreadRanks(2), train)
    with life(where) as alone:
        come_back(alone)
        assert_state(alone, at(6))


def test_memory_without_room_for_two_sends_each_to_storage(where, caplog):
    with life(where, host_memory_bytes=2000) as only:
        only.go(6, settle=True)
    begun = [record.step for record in only.records if record.begun]
    assert begun == [1, 3, 5], "the ranks learn at the next step that the one before is complete, and may go"
    assert committed(where[0]) == [f"step_{step:08d}" for step in begun]
    assert caplog.text.count("memory has no room for two checkpoints, so each goes to storage too") == 1
    with life(where) as second:
        come_back(second)
        assert_state(second, at(5))


POLICIES = {
    "dense": Dense(),
    "moc": MoC(k=1, snapshot_k=2),
    "computed": MoEvement(),
    "window": MoEvement(window=6),
}


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
@pytest.mark.parametrize("name", POLICIES)
def test_no_budget_that_holds_a_checkpoint_ends_training(name, when_busy, where):
    """From just one checkpoint to six: the newest that a life can come back to is never far behind."""
    dense = train_and_fail(where, policy=Dense()).records[-1].nbytes
    for tenths in (10, 11, 13, 15, 18, 20, 22, 26, 30, 40, 60):
        place = tuple(path / f"of_{tenths}" for path in where)
        place[1].mkdir()
        budget = dense * tenths // 10
        with life(place, policy=POLICIES[name], when_busy=when_busy, host_memory_bytes=budget) as each:
            each.session.begin_run(each.capture)
            each.session.training_begins()
            each.go(24, settle=True)
            newest = max(each.records[-1].memory_step or 0, each.records[-1].committed_step or 0)
            assert newest >= 24 - 14, (tenths, [record.begun for record in each.records])
            assert each.session._snapshots.pipeline._pool.lent_bytes <= budget
            each.finish()


def test_what_outgrows_the_budget_in_training_is_left_out_and_said_once(where, caplog):
    with life(where, host_memory_bytes=1000, policy=Dense(every_n_steps=4)) as each:
        each.go(11, settle=True)
    assert not any(record.begun for record in each.records)
    assert [record.skipped for record in each.records].count(True) == 8
    assert each.records[-1].skips == 8
    assert (
        caplog.text.count("step 4: no checkpoint, and training continues: the checkpoint of step 4, which holds") == 1
    )
    assert caplog.text.count("training continues") == 1


def test_slots_that_could_not_be_used_again_for_some_steps_cost_no_checkpoint_later(where, monkeypatch, caplog):
    with life(where, host_memory_bytes=4000, every=4) as each:
        each.go(8, settle=True)
        with monkeypatch.context() as patched:
            patched.setattr(Slot, "unseal", lambda slot: (_ for _ in ()).throw(OSError("no memory for a name")))
            each.go(4, settle=True)
        each.go(4, settle=True)
        assert [record.begun for record in each.records[-2:]] == [True, True]
    assert caplog.text.count("a memory slot cannot be used again: no memory for a name") == 1
    assert committed(where[0])[-1] == "step_00000016"


def test_a_last_step_that_finds_no_room_beside_what_memory_keeps_does_not_say_that_it_waited(where, monkeypatch):
    with life(where) as only:
        only.go(3, settle=True)
        monkeypatch.setattr(Room, "find", lambda *_, **__: (None, False))
        with pytest.raises(SaveFailedError, match="checkpoints that memory must keep; raise host_memory_bytes"):
            only.finish()


def test_a_clean_end_leaves_the_last_step_on_storage(where):
    with life(where) as only:
        only.go(5, settle=True)
        only.finish()
    assert committed(where[0])[-1] == "step_00000005"
    assert not [path for path in where[1].rglob("*") if path.is_file()]


def test_the_plan_is_said(where, caplog):
    policy = MoC(k=1)
    train_and_fail(where, 3, policy=policy)
    with caplog.at_level(logging.INFO, "moe_ckpt"), life(where, policy) as second:
        come_back(second)
    assert "memory: this node" in caplog.text
    assert "storage: step_00000001" in caplog.text


@pytest.mark.parametrize(
    ("what", "on_purpose"),
    [("step_00000008", True), ("step_00000008", False), ("step_00000008/MANIFEST.json", False), ("step_*", False)],
)
def test_who_goes_back_by_removing_checkpoints_clears_memory_as_well(where, what, on_purpose, caplog):
    """Storage may have lost them, and memory is whole. Else it is of the future that the user wants to undo."""
    train_and_fail(where, 10, every=4)
    for path in where[0].glob(what):
        delete_tree(path) if path.is_dir() else path.unlink()
    if on_purpose:
        assert main(["memory", "clear", "--directory", str(where[1])]) == 0
    with life(where) as second:
        restored, _ = come_back(second)
        assert restored.manifest.step == (4 if on_purpose else 10)
        second.go(2, settle=True)
    said = "step_00000008 is gone from storage, or its MANIFEST.json is, and memory has steps up to 10"
    assert (said in caplog.text) is not on_purpose
    if not on_purpose:
        assert committed(where[0])[-1] == "step_00000011_g1", "storage has it at the next step"


@pytest.mark.parametrize("policy", [Dense(), Dense(4), MoC(k=1)], ids=["dense", "dense rarely", "moc"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.quick("1-dense rarely", "2-dense", "2-moc")
def test_a_manifest_that_is_lost_while_the_run_lives_is_noticed_at_the_next_step(where, policy, ranks, caplog):
    """Else a lost node costs all that memory had, and no checkpoint is due for a hundred steps."""

    def train(comm):
        with life(where, policy, comm=comm, local_ranks=ranks) as each:
            each.go(5, settle=True)
            if comm.rank == 0:
                for path in where[0].glob("step_*/MANIFEST.json"):
                    path.unlink()
            for _ in range(10):
                time.sleep(0.3)  # a short step
                each.go(settle=True)

    run_threads(ThreadRanks(ranks), train)
    assert caplog.text.count("something deleted it during training") == 1
    [newest] = committed(where[0])
    assert age_of(newest)[1] <= 14, "the thread that looks may be late on a busy machine"
    delete_tree(where[1])
    where[1].mkdir()
    with life(where) as alone:
        assert come_back(alone)[1].lost_tokens == 0
        assert_state(alone, at(age_of(newest)[1]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_token_counts_of_another_model_are_damage(where, ranks):
    """They were sealed by a rank with a mistake: the checksum is right."""

    def train(comm):
        with life(where, comm=comm, local_ranks=ranks) as each:
            each.go(6, settle=True)

    run_threads(ThreadRanks(ranks), train)
    for head in where[1].rglob("*.head"):
        header = decode_slot(head.read_bytes(), str(head))
        applied = np.vstack([header.facts.applied, header.facts.applied[:1]])
        head.write_bytes(encode_slot(replace(header, facts=replace(header.facts, applied=applied))))
    with life(where) as alone:
        restored, _ = come_back(alone)
        assert (restored.manifest.step, restored.origin) == (1, "step_00000001")
        assert_state(alone, at(1))


def test_a_new_beginning_leaves_nothing_to_come_back_to(where):
    """resume="never": what an earlier life left goes before the first step."""
    train_and_fail(where)
    with life(where) as second:
        second.session.training_begins()
    assert not list(where[1].rglob("*.head"))


def starts_that_end_no_step(where, count):
    for _ in range(count):
        with life(where) as each:
            come_back(each)
            assert_state(each, at(6))


def test_starts_that_end_no_step_do_not_go_on_for_ever(where, capsys):
    train_and_fail(where)
    starts_that_end_no_step(where, 3)
    for _ in range(2):
        with life(where) as fourth, pytest.raises(RecoveryLoopError, match="step_00000006 in memory") as caught:
            come_back(fourth)
        assert caught.value.starts == 3
        [slot] = caught.value.slots
        assert str(where[1]) in slot
        assert "rank 0's, on rank 0" in slot
    run_id = caught.value.run_id
    assert f"moe-ckpt memory retry --run {run_id} --directory {where[1]};" in str(caught.value)
    assert main(["memory", "retry", "--run", run_id, "--directory", str(where[1])]) == 0
    assert "resumes from memory" in capsys.readouterr().out
    starts_that_end_no_step(where, 3)
    assert main(["memory", "clear", "--run", run_id, "--directory", str(where[1])]) == 0
    with life(where) as last:
        come_back(last)
        assert_state(last, at(1))


def test_a_start_that_ends_a_step_counts_for_nothing(where):
    """Though storage and memory get nothing newer: the step is not one that is saved."""
    train_and_fail(where, policy=Dense(every_n_steps=6))
    for _ in range(5):
        with life(where, Dense(every_n_steps=6)) as each:
            restored, _ = come_back(each)
            assert restored.manifest.step == 6
            each.go(2, settle=True)


def test_all_ranks_end_a_row_of_starts_though_one_alone_has_counted(where, tmp_path):
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    for _ in range(3):
        replicated(where, nodes, again=True, steps=0)
    for path in nodes[1].rglob("*.starts"):
        path.unlink()
    raised = {}

    def body(comm):
        with life((where[0], nodes[comm.rank]), comm=comm) as each:
            try:
                come_back(each)
            except RecoveryLoopError as error:
                raised[comm.rank] = error.starts

    run_threads(ThreadRanks(2), body)
    assert raised == {0: 3, 1: 3}


# --- copies on peers ---


def replicated(where, nodes, replicas=1, policy=None, **more):
    """One life of ranks on ``nodes``, a directory for each. Returns a function for ``run_threads``."""
    steps = more.pop("steps", 6)
    found: dict[int, Any] = {}

    def body(comm):
        chosen = Memory(directory=nodes[comm.rank], storage_every=RARELY, replicas=replicas)
        with Life(LocalStorage(where[0]), policy=policy or Dense(), memory=chosen, comm=comm) as each:
            if more.get("again"):
                restored, fault = come_back(each)
                found[comm.rank] = (restored.manifest.step, restored.origin, fault.lost_tokens)
                assert_state(each, at(restored.manifest.step))
            for _ in range(steps):
                each.go(1, settle=True)
                wait_for_copies(each)
                largest(comm, [0])  # nobody ends while somebody sends

    run_threads(ThreadRanks(len(nodes)), body)
    return found


def wait_for_copies(each: Life) -> None:
    until = time.monotonic() + 60
    while each.session.tier.replicator.lag_steps:
        assert time.monotonic() < until
        time.sleep(0.001)


def make_nodes(root: Path, count: int) -> list[Path]:
    nodes = [root / f"node_{number}" for number in range(count)]
    for node in nodes:
        node.mkdir(exist_ok=True)
    return nodes


def lose(node: Path) -> None:
    delete_tree(node)
    node.mkdir()


def test_peers_take_copies_of_a_complete_checkpoint_beside_a_partial_one_and_of_all_after_it(where, tmp_path):
    """Its directory has another name, which headers say; the life is the same."""
    nodes = make_nodes(tmp_path, 2)

    def body(comm):
        chosen = Memory(directory=nodes[comm.rank], replicas=1)
        with Life(LocalStorage(where[0]), policy=MoC(k=1), memory=chosen, comm=comm) as each:
            each.go(3, settle=True)
            each.session.save_complete(each.step, each.capture)
            assert each.session.generation == 1
            for _ in range(2):
                each.settle()
                wait_for_copies(each)
                largest(comm, [0])
                each.go(1, settle=True)
            wait_for_copies(each)
            largest(comm, [0])

    run_threads(ThreadRanks(2), body)


def test_no_later_life_has_a_generation_that_only_slots_know(where):
    """Of the complete checkpoint beside a partial one nothing got to storage."""
    with life(where, policy=MoC(k=1), every=1) as each:
        each.go(3, settle=True)
        each.session.save_complete(each.step, each.capture)
        each.settle()
    for path in where[0].glob("step_00000003*"):
        if age_of(path.name)[0] == 1:
            delete_tree(path)
    with life(where, policy=MoC(k=1), every=1) as each:
        assert each.session.generation == 2
        each.go(1, settle=True)
        each.finish()
    assert not [path for path in where[1].rglob("*") if path.is_file()]


def test_a_survivor_lends_after_a_complete_checkpoint_beside_a_partial_one(where, caplog):
    """The dead rank's plain state has the name of the checkpoint that it is a part of."""

    def train(comm):
        with life(where, MoC(k=1, every_n_steps=3), every=1, comm=comm, local_ranks=2) as each:
            survivor = each.session.follow(Survivor)
            each.go(6, settle=True)
            each.session.save_complete(each.step, each.capture)
            each.settle()
            assert each.session.generation == 1
            each.go(2, settle=True)
            survivor.close(PATIENCE_SECS)
            if comm.rank == 0:
                assert not survivor.seal(PATIENCE_SECS).problem

    def again(comm):
        with life(where, MoC(k=1, every_n_steps=3), every=1, comm=comm, local_ranks=2) as each:
            return come_back(each)[0].manifest.step

    run_threads(ThreadRanks(2), train)
    assert run_threads(ThreadRanks(2), again) == [8, 8]
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_plain_state_that_finds_no_memory_to_be_kept_in_ends_no_training(where, monkeypatch, error, caplog):
    """On a GPU that others have filled it goes to the host. Whatever else fails costs what survivors would seal."""

    def fails(tensor, **_):
        raise error("no memory")

    with life(where, Dense(every_n_steps=100)) as each:
        survivor = each.session.follow(Survivor)
        monkeypatch.setattr(torch.Tensor, "clone", fails)
        each.go(3)
        monkeypatch.undo()
        sealed = survivor.seal(5.0)
    assert (sealed is None) == ("the plain state of step 3 is not kept" in caplog.text) == (error is RuntimeError)
    if sealed is not None:
        with life(where, Dense()) as second:
            assert come_back(second)[0].plain["buffer"].tolist() == [3.0] * 3


def test_training_that_is_interrupted_right_after_a_snapshot_began_leaves_its_newest_step(where):
    """Before the ranks began to agree on the step, so that the snapshot waits for tokens that nobody will count."""

    def interrupt(event):
        if isinstance(event, SnapshotBegan) and each.step == 4:
            raise KeyboardInterrupt

    with life(where, MoC(k=1), comm=SoloCommunicator(late=True), observers=[interrupt]) as each:
        survivor = each.session.follow(Survivor)
        each.go(3, settle=True)
        with pytest.raises(KeyboardInterrupt):
            each.go()
        assert not survivor.seal(5.0).problem
    with life(where, MoC(k=1)) as second:
        come_back(second)
        assert_state(second, at(4))
        assert second.session.run_ledger.tokens.applied.tolist() == (4 * each.counts).tolist()


@pytest.mark.parametrize(("count", "replicas", "lost"), [(2, 1, [0]), (2, 1, [1]), (4, 1, [2]), (3, 2, [0, 2])])
def test_as_many_nodes_as_there_are_copies_may_be_lost(where, tmp_path, count, replicas, lost):
    nodes = make_nodes(tmp_path, count)
    replicated(where, nodes, replicas)
    for number in lost:
        lose(nodes[number])
    again = replicated(where, nodes, replicas, again=True, steps=2)
    assert again == dict.fromkeys(range(count), (6, "memory", 0))
    for number in lost:
        lose(nodes[number])
    assert replicated(where, nodes, replicas, again=True, steps=1)[0][0] == 8, "copies were made anew"


def test_the_ranks_of_a_node_fetch_what_they_all_need_once(where, tmp_path):
    """Four ranks that hold the same, on two nodes: a lost node gets each byte over the network once, not twice."""
    nodes = [node for node in make_nodes(tmp_path, 2) for _ in range(2)]
    replicated(where, nodes)
    lose(nodes[3])
    with counted_swaps() as swaps:
        again = replicated(where, nodes, again=True, steps=1)
    assert again == dict.fromkeys(range(4), (6, "memory", 0))
    between = sum(nbytes for source, target, nbytes in swaps if nodes[source] != nodes[target])
    within = sum(nbytes for source, target, nbytes in swaps if nodes[source] == nodes[target])
    both_want = sum(tensor.local.nbytes for tensor in Life(LocalStorage(where[0])).state.held.values())
    assert both_want <= within < both_want + 100, "tensors; the plain state is each rank's own"
    assert both_want <= between < 1.6 * both_want


@contextmanager
def counted_swaps():
    """(source, target, bytes) of what ranks give each other."""
    found: list[tuple[int, int, int]] = []
    plain = ThreadCommunicator.swap

    def counted(self, given, expected):
        found.extend((self.rank, to, tensor.numel()) for to, tensors in given.items() for tensor in tensors)
        plain(self, given, expected)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadCommunicator, "swap", counted)
        yield found


def test_one_more_lost_node_costs_what_storage_does_not_have(where, tmp_path):
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    for node in nodes:
        lose(node)
    again = replicated(where, nodes, again=True, steps=1)
    assert again == dict.fromkeys(range(2), (1, "step_00000001", 0))


def test_a_damaged_slot_is_replaced_by_its_copy(where, tmp_path, caplog):
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    for path in nodes[0].rglob("rank_00000/*.head"):
        if decode_slot(path.read_bytes(), "").rank == 0:
            flip(path)
    again = replicated(where, nodes, again=True, steps=1)
    assert again == dict.fromkeys(range(2), (6, "memory", 0))
    assert "is damaged: it is set aside, and not used\n" in caplog.text


def test_copies_do_not_pile_up(where, tmp_path):
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes, steps=20)
    assert len(list(nodes[0].rglob("*.head"))) <= 8


# --- what stays ---


def dense(sequence, complete=True):
    return memory_step(sequence, complete=complete)


def slot(sequence, window, place, size=3, complete=True, copied=True):
    return memory_step(sequence, window=WindowPlace(window, size, place), complete=complete, copied=copied)


def alone(sequence, complete=True):
    """Without copies on peers."""
    return memory_step(sequence, complete=complete, copied=False)


@pytest.mark.parametrize(
    ("held", "kept"),
    [
        ([], set()),
        ([dense(0, None)], {0}),
        ([dense(0), dense(1, None)], {0, 1}),
        ([dense(0), dense(1), dense(2, None)], {1, 2}),
        ([dense(0), dense(1, False), dense(2, None)], {0, 2}),
        ([dense(0), slot(1, 5, 0), slot(2, 5, 1)], {0, 1, 2}),
        ([dense(0), slot(1, 5, 0), slot(2, 5, 1), slot(3, 5, 2)], {1, 2, 3}),
        ([dense(0), slot(1, 5, 0), slot(2, 5, 1, complete=False), slot(3, 5, 2)], {0, 1, 3}),
        ([*(slot(n, 5, n) for n in range(3)), slot(3, 8, 0), slot(4, 8, 1, complete=None)], {0, 1, 2, 3, 4}),
        ([*(slot(n, 5, n) for n in range(3)), slot(3, 8, 0), slot(4, 9, 0)], {0, 1, 2, 4}),
        ([*(slot(n, 5, n) for n in range(3)), dense(3)], {3}),
        # The last step of a window is not known to be complete yet, and the next one has begun.
        ([dense(0), *(slot(n, 5, n - 1, complete=n < 3 or None) for n in range(1, 4)), slot(4, 8, 0)], {0, 1, 2, 3, 4}),
        # Peers are slow: what they have stays until they have something newer, and what they get until they have it.
        ([dense(0), alone(1), alone(2)], {0, 2}),
        ([dense(0), dense(1, None), alone(2), alone(3), alone(4, None)], {0, 1, 3, 4}),
        ([dense(0), dense(1), alone(2), dense(3, None)], {1, 2, 3}),
        ([alone(0), alone(1)], {1}),
        ([*(slot(n, 5, n) for n in range(3)), *(slot(n, 8, n - 3, copied=False) for n in range(3, 6))], {*range(6)}),
        ([dense(0), *(slot(n, 8, n - 1, copied=n != 2) for n in range(1, 4)), slot(4, 9, 0)], {0, 1, 2, 3, 4}),
    ],
)
def test_what_memory_must_keep(held, kept):
    assert needed_steps(held) == kept


def test_a_checkpoint_that_waits_for_storage_keeps_its_own_checksums(where):
    """What is sealed meanwhile, of the same plan, does not change those that wait."""
    storage = GatedStorage(where[0])
    with life(where, every=1, storage=storage) as only:
        only.go(3, settle=True)
        storage.gate.clear()
        only.go(1)
        for _ in range(2):  # memory alone holds these
            assert only.session._snapshots.pipeline.first.wait(0, PATIENCE_SECS)
            only.go(1)
        storage.gate.set()
        only.settle()
    found = {manifest.step for manifest in manifests(where[0])}
    assert {3, 4} <= found, "each of them proven whole and undamaged"
