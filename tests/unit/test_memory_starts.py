"""Starts that fail, or find something odd: what they leave in memory, count there, and say."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt import Memory
from moe_ckpt.errors import ConfigError, NoCheckpointError
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.storage import LocalStorage
from tests.support.deleting import delete_tree
from tests.support.mapped import deleted_slots
from tests.support.spoiled import blank
from tests.unit.engine_parts import MODEL, Life, ThreadRanks, failing, run_threads
from tests.unit.test_engine_host_tier import come_back

STEPS = 6


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for node in ("A", "B"):
        (tmp_path / node).mkdir()
    return tmp_path


def life(root, node="A", policy=None, storage=None, **given) -> Life:
    memory = Memory(directory=root / node, storage_every=1000)
    return Life(storage or LocalStorage(root / "store"), policy=policy or Dense(), memory=memory, **given)


def of_four(root, comm, nodes) -> Life:
    """Two ranks to a node."""
    return life(root, nodes[comm.rank // 2], comm=comm, local_ranks=2)


def test_a_start_that_fails_before_its_first_step_costs_no_other_rank_its_memory(root):
    """Nodes are numbered the other way round then, so that one rank of each node has what two ranks left."""

    def first(comm):
        with of_four(root, comm, "AB") as one:
            one.go(STEPS, settle=True)

    run_threads(ThreadRanks(4), first)
    turn = [threading.Event() for _ in range(5)]
    turn[0].set()

    def second(comm):
        one = of_four(root, comm, "BA")
        one.session.open()
        come_back(one)
        comm.everyone(b"")
        assert turn[comm.rank].wait(60)
        one.session.close(5.0)
        turn[comm.rank + 1].set()

    run_threads(ThreadRanks(4), second)
    assert len(list(root.rglob("*.head"))) == 4, "those of the step that was resumed from"
    found = []

    def third(comm):
        with of_four(root, comm, "AB") as one:
            found.append(come_back(one)[0].manifest.step)

    run_threads(ThreadRanks(4), third)
    assert found == [STEPS] * 4


def test_what_was_written_to_storage_is_held_no_longer(root):
    """The first checkpoint is whole, and those after it are not: its slot fits none of them, and is removed."""
    larger = {name: (*shape[:-1], 2000 * shape[-1]) for name, shape in MODEL.parameters.items() if name.endswith(".w")}
    with life(root, policy=MoC(k=1), model=replace(MODEL, parameters={**MODEL.parameters, **larger})) as one:
        one.go(30, settle=True)
        gc.collect()
        assert not deleted_slots(root)


HOLDS = """
import fcntl, sys, time
with open(sys.argv[1], "r+") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_a_directory_that_is_held_for_a_moment_is_waited_for(root):
    """By a process that is dying, or a command of ours."""
    with life(root) as one:
        one.go(STEPS, settle=True)
    [lock] = (root / "A").rglob("rank_00000/lock")
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(lock), "1.5"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with life(root) as two:
            assert come_back(two)[0].manifest.step == STEPS


def test_one_that_is_held_for_longer_costs_its_steps_and_that_is_said(root, monkeypatch, caplog):
    monkeypatch.setattr("moe_ckpt.memory.files._PATIENCE_SECS", 0.2)
    with life(root) as one:
        one.go(STEPS, settle=True)
    [lock] = (root / "A").rglob("rank_00000/lock")
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(lock), "20"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with life(root) as two:
            assert come_back(two)[0].manifest.step == 1, "of storage"
        assert f"process {holder.pid} holds it" in " ".join(
            r.message for r in caplog.records if r.levelname == "WARNING"
        )
        holder.kill()


def test_a_start_that_refuses_the_script_counts_for_nothing(root):
    """Another precision is no fault of the checkpoint, which three starts would else pass for."""
    with life(root) as one:
        one.go(STEPS, settle=True)
    for _ in range(3):
        with life(root) as wrong:
            wrong.state.change = lambda tensors: [replace(each, local=each.local.double()) for each in tensors]
            with pytest.raises(ConfigError, match="float64"):
                come_back(wrong)
    with life(root) as right:
        assert come_back(right)[0].manifest.step == STEPS


def test_starts_that_find_no_checkpoint_count_for_nothing(root):
    """The store is mended after three of them: the checkpoint in memory, which is laid over it, had no fault."""
    with life(root, policy=MoC(k=1)) as one:
        one.go(3, settle=True)
    manifest = root / "store" / "step_00000001" / "MANIFEST.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good[:-9])
    for _ in range(3):
        with life(root, policy=MoC(k=1)) as again, pytest.raises(NoCheckpointError, match="checksum mismatch"):
            come_back(again)
    manifest.write_bytes(good)
    with life(root, policy=MoC(k=1)) as mended:
        assert come_back(mended)[0].manifest.step == 3


@pytest.mark.parametrize("lost", ["damaged", "one node"])
def test_memory_that_was_all_there_was_is_not_lost_in_silence(root, lost, caplog):
    """Storage never took a checkpoint."""

    def first(comm):
        with life(root, "AB"[comm.rank], storage=failing(root / "store", 1, persistent=True), comm=comm) as one:
            one.go(STEPS, settle=True)

    run_threads(ThreadRanks(2), first)
    if lost == "damaged":
        for path in (root / "B").rglob("*.head"):
            blank(path)
    else:
        delete_tree(root / "B")
        (root / "B").mkdir()

    def second(comm):
        with life(root, "AB"[comm.rank], comm=comm) as two:
            found = resume_newest(two.storage, two.session.comm, two.state, two.session.tier)
            assert found is None

    run_threads(ThreadRanks(2), second)
    assert f"memory held steps of an earlier start, up to {STEPS}, but no whole checkpoint" in caplog.text


def two_copies(root) -> tuple[LocalStorage, LocalStorage]:
    with Life(LocalStorage(root / "a"), policy=Dense()) as first:
        first.go(1, settle=True)
    shutil.copytree(root / "a", root / "b")
    return LocalStorage(root / "a"), LocalStorage(root / "b")


def test_a_copy_of_the_store_that_starts_at_the_same_moment_is_another_life(root):
    one, other = two_copies(root)
    with life(root, storage=one) as first, life(root, storage=other) as second:
        assert first.session.generation == second.session.generation
        second.go(1, settle=True)
        first.go(1, settle=True)
        assert first.session.tier.files.path != second.session.tier.files.path
