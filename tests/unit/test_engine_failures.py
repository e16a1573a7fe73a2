"""The session when something fails: nothing half-done is committed, the cause is named, training ends in time."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import numpy as np
import pytest

from moe_ckpt import Memory
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.step import Tier
from moe_ckpt.errors import SaveFailedError, UnencodableStateError
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.storage import LocalStorage, listings
from moe_ckpt.threads import ThreadName
from moe_ckpt_sim.run.sync import SyncDense
from tests.unit.builders import experts_in
from tests.unit.engine_parts import (
    ALL,
    MODEL,
    GatedStorage,
    Life,
    ThreadRanks,
    assert_view,
    failing,
    manifests,
    run_threads,
    sequential,
    versions_after,
)


def test_a_failed_first_checkpoint_leaves_all_experts_missing(tmp_path):
    with Life(failing(tmp_path, 1)) as life:
        life.go(3, settle=True)
    assert [r.experts_saved for r in life.records] == [8, 8, 2], "nothing to fall back on, so dense again"
    assert [r.failed_checkpoints for r in life.records] == [0, 1, 1]
    assert [r.committed_step for r in life.records] == [None, None, 2]
    assert [m.step for m in manifests(tmp_path)] == [2, 3]


@pytest.mark.parametrize("write", [6, 7, 8, 9, 10])
def test_a_failed_partial_checkpoint_leaves_its_experts_unsaved(tmp_path, write):
    """The second checkpoint fails, at each of its files in turn."""
    with Life(failing(tmp_path, write)) as life:
        life.go(3, settle=True)
        saved = life.session.run_ledger.tokens.saved[Tier.STORAGE]
        assert np.array_equal(saved, life.counts), "only step 1 is in the books"
        life.go(2, settle=True)
    found = manifests(tmp_path)
    assert [m.step for m in found] == [1, 3, 4, 5]
    history = [(1, set()), (3, sequential(1)), (4, sequential(2)), (5, sequential(3))]
    assert_view(tmp_path, MODEL, found[-1], versions_after(history))
    assert experts_in(tuple(op for op, r in found[-1].operators.items() if r.step == 1)), "some were never saved again"


def test_no_row_of_failures_ends_training(tmp_path, caplog):
    storage = failing(tmp_path, 6, persistent=True)
    with Life(storage) as life:
        life.go(21, settle=True)
        assert life.records[-1].failed_checkpoints == 19, "and that of the newest step is not booked yet"
        storage.fail_at = None
        life.go(2, settle=True)
    assert life.records[-1].failed_checkpoints == 20
    assert [m.step for m in manifests(tmp_path)] == [1, 22, 23]
    assert "step 2 was not committed; training continues. rank 0" in caplog.text
    assert "step 17 was not committed either, for the same reason (16 in a row)" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_whose_checkpoint_failed_is_saved_again_if_asked(tmp_path, ranks):
    """The user makes room and asks once more. Not at the end, when a framework may have changed the state since."""

    def body(comm):
        comm.agrees_late = ranks > 1
        storage = failing(tmp_path, 1, persistent=True)
        with Life(storage, policy=Dense(), comm=comm) as life:
            life.go(2, settle=True)
            life.session.save_complete(life.step, life.capture)
            assert not life.session.drain(life.step)[-1].committed
            storage.fail_at = None
            life.session.save_complete(life.step, life.capture)
            assert life.session.drain(life.step)[-1].committed
            life.session.save_complete(life.step, life.capture)
            life.go(settle=True)
            storage.fail_at = len(storage.calls) + 1
            life.go(settle=True)
            storage.fail_at = None
            with pytest.raises(SaveFailedError, match="step 4 "):
                life.finish()

    run_threads(ThreadRanks(ranks), body)
    assert [(m.step, m.generation) for m in manifests(tmp_path)] == [(2, 2), (3, 2)]


def test_state_that_only_pickle_could_hold_is_named_at_the_start(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.capture = lambda: {"callbacks": {"mine": {"lock": threading.Lock()}}}
        with pytest.raises(UnencodableStateError, match=r"callbacks.*mine.*lock"):
            life.go()
    assert manifests(tmp_path) == []


def test_state_that_cannot_be_encoded_later_costs_a_checkpoint_on_every_rank(tmp_path, caplog):
    def body(comm):
        with Life(LocalStorage(tmp_path), policy=Dense(), comm=comm) as life:
            life.go(2, settle=True)
            capture = life.capture
            if comm.rank == 1:
                life.capture = lambda: {"callbacks": {"mine": {"lock": threading.Lock()}}}
            life.go(1, settle=True)
            life.capture = capture
            life.go(2, settle=True)
        return life.records[-1].failed_checkpoints

    assert run_threads(ThreadRanks(2), body) == [1, 1]
    assert [m.step for m in manifests(tmp_path)] == [1, 2, 4, 5]
    assert re.search(r"step 3 was not committed.*rank 1: UnencodableStateError.*callbacks.*mine.*lock", caplog.text)


class Deaf(SoloCommunicator):
    """A peer that is gone, as the persist thread sees it from the second checkpoint on."""

    def __init__(self) -> None:
        self.left = 1

    def combine(self, columns):
        if not self.left:
            raise RuntimeError("connection closed by peer")
        self.left -= 1
        return super().combine(columns)


def test_the_death_of_the_persist_thread_surfaces_once(tmp_path):
    with Life(LocalStorage(tmp_path), comm=Deaf()) as life:
        life.go(1, settle=True)
        life.go()
        with pytest.raises(RuntimeError, match="closed by peer"):
            life.settle()
        life.session._snapshots.pipeline.raise_fatal()
        life.session.close()
    assert [m.step for m in manifests(tmp_path)] == [1]


def test_the_death_of_the_persist_thread_surfaces_at_the_next_step(tmp_path):
    with Life(LocalStorage(tmp_path), comm=Deaf()) as life:
        life.go(1, settle=True)
        life.go()
        life.session._snapshots.pipeline.persister._thread.join(120)
        with pytest.raises(RuntimeError, match="closed by peer"):
            life.go()


@pytest.mark.parametrize("memory", [False, True])
def test_a_broken_copy_costs_its_checkpoint_and_nothing_else(memory, tmp_path, caplog):
    copies = []

    def on_phase(phase):
        copies.append(phase)
        if len(copies) == 2:
            raise MemoryError("the copy broke")

    (tmp_path / "memory").mkdir()
    settings = {"memory": Memory(directory=tmp_path / "memory")} if memory else {}
    with Life(LocalStorage(tmp_path / "store"), policy=Dense(), on_phase=on_phase, **settings) as life:
        life.go(4, settle=True)
    assert life.records[-1].failed_checkpoints == 1
    assert [m.step for m in manifests(tmp_path / "store")] == [1, 3, 4]
    assert "MemoryError: the copy broke" in caplog.text


@pytest.mark.parametrize("policy", [Dense(), SyncDense()])
def test_storage_that_hangs_ends_no_training_that_waits_for_it(policy, tmp_path, caplog):
    storage = GatedStorage(tmp_path)
    with Life(storage, policy=policy, when_busy="wait", timeout_secs=0.3, host_memory_bytes=1 << 20) as life:
        life.go(1, settle=True)
        storage.gate.clear()
        life.go(5)
        storage.gate.set()
        life.settle()
        life.go(2, settle=True)
    assert life.records[-1].failed_checkpoints > 0
    assert manifests(tmp_path)[-1].step == life.step
    assert ("did not finish within 0.3 s (timeout_secs)" in caplog.text) == isinstance(policy, SyncDense)


def test_close_ends_everything_even_if_the_copy_in_hand_broke(tmp_path):
    def on_phase(phase):
        raise MemoryError("the copy broke")

    life = Life(LocalStorage(tmp_path), on_phase=on_phase)
    life.session.open()
    life.go()
    life.session.close()
    with Life(LocalStorage(tmp_path)) as second:
        second.go(1, settle=True)
    life.session.close()


# --- the proof of coverage at commit ---

STACK = "model/layers.1.moe.w"


def stack_changed(**what):
    """``StateTensor`` of one stack of experts with other fields, all others as they are."""

    def change(tensors):
        return [replace(t, **{k: f(t) for k, f in what.items()}) if t.key == STACK else t for t in tensors]

    return change


LACKS = r"1\.moe\.w at \[%d, 0, 0\]: 12 of 12 elements are missing"
BROKEN = {
    "missing": (stack_changed(local=lambda t: t.local[:-1]), LACKS % 3),
    "absent": (lambda ts: [t for t in ts if t.key != STACK], LACKS % 2),
    "doubled": (stack_changed(replicated=lambda t: False), r"1\.moe\.w is written twice, at \[0, 0, 0\]"),
    "unknown": (
        lambda ts: [*ts, *(replace(t, key="model/new") for t in ts if t.key == STACK)],
        "model/new at .* no operator of this plan",
    ),
    "misplaced": (stack_changed(offsets=lambda t: (-1, 0, 0)), LACKS % 3),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_one_rank_misses_or_doubles_is_never_committed(tmp_path, how, caplog):
    """Rank 1 of 2 goes wrong at step 3, in what it writes; rank 0's claim is right."""
    change, said = BROKEN[how]

    def body(comm):
        with Life(LocalStorage(tmp_path), policy=Dense(), comm=comm) as life:
            life.go(2, settle=True)
            if comm.rank == 1:
                life.state.change = change
            life.go(1, settle=True)
            life.state.change = lambda tensors: tensors
            life.go(2, settle=True)
        return life.records[-1].failed_checkpoints

    assert run_threads(ThreadRanks(2), body) == [1, 1]
    found = manifests(tmp_path)
    assert [m.step for m in found] == [1, 2, 4, 5]
    assert_view(tmp_path, MODEL, found[-1], dict.fromkeys(ALL, 5))
    [message] = [r.getMessage() for r in caplog.records if "not committed" in r.getMessage()]
    assert "step 3" in message
    assert "CoverageError" in message
    assert re.search(said, message), message


def test_after_a_refused_commit_the_earlier_checkpoint_is_the_newest(tmp_path):
    with Life(LocalStorage(tmp_path)) as life:
        life.go(2, settle=True)
        life.state.change = stack_changed(local=lambda t: t.local[:0])
        life.go(1, settle=True)
    found = manifests(tmp_path)
    assert [m.step for m in found] == [1, 2]
    assert_view(tmp_path, MODEL, found[-1], versions_after([(1, set()), (2, sequential(1))]))


def test_a_commit_for_which_no_thread_can_be_started_fails_by_itself(tmp_path, monkeypatch):
    """Directories of an object store are listed by several threads."""
    start, refuses = threading.Thread.start, []

    def refused(thread):
        if refuses and thread.name.startswith(ThreadName.LIST.value):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(listings, "Stamped", type("Never", (), {}))
    with Life(LocalStorage(tmp_path), policy=MoC(k=1)) as life:
        life.go(4, settle=True)
        refuses.append(True)
        life.go(1, settle=True)
        refuses.clear()
        life.go(3, settle=True)
    assert life.records[-1].failed_checkpoints == 1
    assert life.records[-1].committed_step >= 7
