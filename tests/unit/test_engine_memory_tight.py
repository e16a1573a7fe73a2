"""A budget of just two checkpoints, on several ranks: memory gets on, and the last step gets to storage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt import Memory
from moe_ckpt.commit.room import Room
from moe_ckpt.core.step import Contents, SnapshotPlan, Step
from moe_ckpt.policies import AnyOf, Dense, MoC, MoEvement, Needs
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.support.waiting import retry_until
from tests.unit.engine_parts import GatedStorage, Life, ThreadCommunicator, ThreadRanks, failing, manifests, run_threads

STEPS = 22
POLICIES = {"dense": Dense(), "moc": MoC(k=1, snapshot_k=2), "windows": MoEvement(window=4)}
BEHIND = {"dense": 3, "moc": 3, "windows": 9}
"""Steps at most, where each snapshot waits for its room."""


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


def trained(root: Path, name: str, steps: int, replicas: int = 0, **settings: Any) -> list[Life]:
    """The lives of two ranks, each a node, whose agreements arrive a step later. They end well.

    Where checkpoints may be left out nothing is under way when the next step begins, so that it is the budget that
    leaves them out, and not a busy machine; nor a peer that has not answered yet.
    """

    def body(comm: ThreadCommunicator) -> Life:
        comm.agrees_late = True
        node = root / f"node_{comm.rank}"
        node.mkdir(parents=True)
        memory = Memory(directory=node, storage_every=1000, replicas=replicas)
        with Life(LocalStorage(root / "store"), policy=POLICIES[name], memory=memory, comm=comm, **settings) as each:
            settle = settings.get("when_busy") == "skip"
            replicator = each.session._snapshots.pipeline.memory.replicator
            for _ in range(steps):
                each.go(settle=settle)
                assert not settle or replicator is None or retry_until(lambda: not replicator.in_flight)
            each.finish()
        return each

    return run_threads(ThreadRanks(2), body)


def least_nbytes(root: Path, name: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of two of the largest checkpoints that a rank makes without a limit; and one snapshot more beside windows."""
    found, find = list[tuple[int, int]](), Room.find

    def finding(room: Room, identity: Step, contents: Contents, needs: Any, *more: Any, **how: Any) -> Any:
        found.append((contents.window.size if contents.window else 1, sum(needs)))
        return find(room, identity, contents, needs, *more, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Room, "find", finding)
        trained(root, name, STEPS, replicas)
    return max((2 * size + (size > 1)) * nbytes for size, nbytes in found)


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize("name", POLICIES)
def test_the_last_step_gets_to_storage_and_memory_gets_on_before(name, when_busy, replicas, tmp_path, monkeypatch):
    nbytes = least_nbytes(tmp_path / "free", name, replicas, monkeypatch)
    ranks = trained(tmp_path / "run", name, STEPS, replicas, host_memory_bytes=nbytes, when_busy=when_busy)
    assert manifests(tmp_path / "run" / "store")[-1].step == STEPS
    for each in ranks:
        newest = [record.memory_step for record in each.records]
        if when_busy == "wait":
            assert newest[-1] >= STEPS - BEHIND[name], newest
        else:
            assert newest[-1] > 1, newest


class Small:
    """After a dense checkpoint it saves no experts, so that memory has room for three snapshots, but not for both."""

    needs = Needs(partial=True)

    def plan(self, context):
        catalog = context.model.catalog
        small = tuple(op.id for op in catalog.always_saved)
        return SnapshotPlan(context.run.step, small if context.run.last_step else catalog.everything)

    def check(self, catalog):
        pass

    def describe(self):
        return {"name": "small"}


def test_what_neither_storage_nor_memory_takes_is_counted_once_and_said(tmp_path, caplog):
    storage, memory = GatedStorage(tmp_path / "store"), Memory(directory=tmp_path, storage_every=1000)
    with Life(storage, policy=Small(), memory=memory, host_memory_bytes=1600) as life:
        life.go(2, settle=True)
        storage.gate.clear()
        with caplog.at_level(logging.WARNING, "moe_ckpt"):
            for _ in range(5):
                life.go()
                assert life.session._snapshots.pipeline.first.wait(0, 60)
        storage.gate.set()
    *_, before, last = life.records
    assert last.skipped
    assert last.skips == before.skips + 1
    assert "this one is left out: memory has no room for two" in caplog.text
    assert "stays in memory only" not in caplog.text


@pytest.mark.parametrize(("ranks", "nbytes", "outlives"), [(1, 1600, False), (1, 1600, True), (2, 900, False)])
def test_training_does_not_wait_for_storage_if_a_dense_checkpoint_has_no_room_beside_a_partial_one(
    tmp_path, ranks, nbytes, outlives
):
    """Storage hangs with the partial one of step 3, and the budget has room for the dense one of step 4 only alone."""
    policy = AnyOf([MoC(k=1), Dense(every_n_steps=4)])

    def body(comm):
        storage, memory = GatedStorage(tmp_path / "store"), Memory(directory=tmp_path) if outlives else None
        settings = {"memory": memory, "host_memory_bytes": nbytes, "timeout_secs": 3.0}
        with Life(storage, policy=policy, comm=comm, **settings) as life:
            life.go(2, settle=True)
            storage.gate.clear()
            life.go(3)
            storage.gate.set()
        return life.records[-2:]

    for steps in run_threads(ThreadRanks(ranks), body):
        assert [step.skipped for step in steps] == [True, True]
        assert steps[-1].failed_checkpoints == 0


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
@pytest.mark.parametrize(("name", "nbytes"), [("dense", 2000), ("moc", 1400), ("windows", 2000)])
def test_a_checkpoint_that_storage_did_not_take_makes_room_for_the_next(tmp_path, name, nbytes, when_busy):
    """Else no checkpoint would follow one failed write: memory alone has that checkpoint, and no room for another."""
    storage = failing(tmp_path / "store", None)
    memory = Memory(directory=tmp_path, storage_every=1000)
    settings = {"memory": memory, "host_memory_bytes": nbytes, "when_busy": when_busy, "timeout_secs": 10.0}
    with Life(storage, policy=POLICIES[name], **settings) as life:
        life.go(8, settle=True)
        storage.fail_at = len(storage.calls) + 1
        life.go(3, settle=True)
        storage.fail_at = None
        life.go(12, settle=True)
        assert life.records[-1].failed_checkpoints == 1
        assert life.records[-1].committed_step > 15
        life.finish()
    assert manifests(tmp_path / "store")[-1].step == 23
