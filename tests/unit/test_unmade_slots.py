"""Training makes no memory, and waits for none that takes long to make: what has none is left out, on every rank."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from moe_ckpt import Memory
from moe_ckpt.commit import room
from moe_ckpt.memory import mapping
from moe_ckpt.memory.arena import Arena
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.run.events import StepRecord
from moe_ckpt.storage import LocalStorage
from tests.support.acted_gpu import ActedGPU
from tests.unit.engine_parts import Life, ThreadRanks, manifests, run_threads
from tests.unit.test_engine_memory import no_memory_of_other_tests, where  # noqa: F401 - fixtures

MAKING_SECS = 2.0
"""For a complete checkpoint."""
POLICIES = {"dense": Dense(), "moc": MoC(k=1), "windows": MoEvement(window=2)}


@pytest.fixture(autouse=True)
def _all_sizes_take_long(monkeypatch):
    """As if each snapshot were one of gigabytes."""
    monkeypatch.setattr(room, "_QUICK_NBYTES", 0, raising=False)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(mapping, "LOCK_NBYTES", mapping.PAGE_NBYTES)
    gc.collect()  # what tests before have locked is not unlocked in the middle of this one
    with ActedGPU() as acted:
        yield acted


def stepped(each: Life) -> list[float]:
    """How long each step took, until six snapshots have begun one after the other."""
    found, until = [], time.monotonic() + 30.0
    while time.monotonic() < until and not all(record.begun for record in each.records[-6:] or [StepRecord(0)]):
        began = time.monotonic()
        each.go()
        found.append(time.monotonic() - began)
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "private"])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.quick("dense-memory", "moc-memory", "windows-memory", "windows-private")
def test_no_step_waits_for_page_locking(name, in_memory, where, gpu, caplog):  # noqa: F811
    gpu.locking_secs_per_byte = MAKING_SECS / mapping.PAGE_NBYTES
    memory = Memory(directory=where[1]) if in_memory else None
    with Life(LocalStorage(where[0]), policy=POLICIES[name], memory=memory, pinned=True) as each:
        each.session.training_begins()
        secs = stepped(each)
        made, freed = {name for name, _ in gpu.lockers}, set(gpu.unlockers)
        skips = sum(record.skipped for record in each.records)
        last, counted = each.records[-1], each.session._snapshots.backlog.skips
        each.finish()
    assert gpu.lockers
    assert threading.current_thread().name not in made | freed
    assert max(secs) < 0.8 * MAKING_SECS, sorted(secs)[-5:]
    assert each.records[0].skipped
    assert skips < len(each.records)
    assert skips <= counted == last.skips, "what is left out is counted, also by storage alone"
    assert last.begun
    assert last.failed_checkpoints == 0
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize("name", POLICIES)
def test_no_rank_leaves_a_step_out_alone(name, tmp_path, monkeypatch):
    grow = Arena.grow

    def slowly(arena, end, **how):
        if "node_1" in str(arena.path) and end > arena.ready:
            time.sleep(MAKING_SECS)
        return grow(arena, end, **how)

    monkeypatch.setattr(Arena, "grow", slowly)

    def body(comm) -> Life:
        comm.agrees_late = True
        node = tmp_path / f"node_{comm.rank}"
        node.mkdir()
        memory = Memory(directory=node)
        with Life(LocalStorage(tmp_path / "store"), policy=POLICIES[name], memory=memory, comm=comm) as each:
            each.session.training_begins()
            while each.step < 200 and not (each.step > 20 and each.records[-1].memory_step):
                each.go()
                time.sleep(0.02)
            each.finish()
        return each

    one, other = run_threads(ThreadRanks(2), body)
    assert [record.begun for record in one.records] == [record.begun for record in other.records]
    assert [record.skipped for record in one.records] == [record.skipped for record in other.records]
    assert one.records[0].skipped
    assert one.records[-1].memory_step
    assert one.records[-1].failed_checkpoints == 0
    assert manifests(tmp_path / "store")[-1].step == one.step


def test_whoever_asked_to_wait_waits_and_makes_nothing_on_the_training_thread(where, gpu):  # noqa: F811
    gpu.locking_secs_per_byte = MAKING_SECS / mapping.PAGE_NBYTES
    settings = {"memory": Memory(directory=where[1]), "pinned": True, "when_busy": "wait"}
    with Life(LocalStorage(where[0]), policy=Dense(), **settings) as each:
        each.session.training_begins()
        each.go(3)
        assert [record.begun for record in each.records] == [True] * 3
        assert threading.current_thread().name not in {name for name, _ in gpu.lockers}
