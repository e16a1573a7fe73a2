"""Three buffers under slow and failing storage: none is written to while in use, and no step waits unless asked to."""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
import torch

from moe_ckpt.errors import NoCheckpointError
from moe_ckpt.format.manifest import parse_step_dir
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import MoC
from moe_ckpt.reading.reader import StoreReader, check_checkpoint, choose
from moe_ckpt.reading.slices import as_values
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import FaultyStorage
from moe_ckpt.tiers import host_memory
from moe_ckpt.tiers.buffers import BufferPool
from tests.support.store_builder import values_at
from tests.support.waiting import retry_until
from tests.unit.engine_parts import (
    MODEL,
    PATIENCE_SECS,
    GatedStorage,
    Life,
    ThreadRanks,
    assert_view,
    failing,
    manifests,
    run_threads,
)
from tests.unit.test_engine_host_tier import slices_of

POISON = 0xFF
"""Four of them are a NaN, which no test value is."""


@pytest.fixture(autouse=True)
def no_memory_left():
    yield
    host_memory.release_host_memory()


class SlowStorage(LocalStorage):
    """Every write takes a moment, of varying length."""

    def __init__(self, root, most_secs: float, seed: int = 1) -> None:
        super().__init__(root)
        self.most_secs = most_secs
        self.random = random.Random(seed)

    def write(self, path, chunks):
        time.sleep(self.random.uniform(0, self.most_secs))
        return super().write(path, chunks)


@pytest.fixture
def poisoned(monkeypatch):
    """Each buffer is filled with poison when it is given back; the list holds how often that was."""
    times = []
    give_back = BufferPool.give_back

    def poison(self, buffer):
        buffer.memory.fill_(POISON)
        times.append(buffer)
        give_back(self, buffer)

    monkeypatch.setattr(BufferPool, "give_back", poison)
    return times


def assert_recovery_buffer_is_of_one_step(life: Life) -> int:
    """Every slice has the values of the step it says; returns the step, 0 if nothing is held."""
    with life.session.tier._lock:  # or it may rightly become another one meanwhile
        committed = {number for number, entry in life.session.tier._entries.items() if entry.complete}
        [held] = [life.session.tier._entries[number].slot for number in committed] or [None]
        step = 0 if held is None else held.header.step
        for entry, data in () if held is None else slices_of(held):
            if entry.operator:
                whole = values_at(step, entry.key, entry.global_shape, torch.float32)
                block = tuple(slice(o, o + n) for o, n in zip(entry.offsets, entry.shape, strict=True))
                assert torch.equal(as_values(entry, data), whole[block]), f"{entry.name} is not of {step}"
    return step


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
@pytest.mark.parametrize("snapshot_k", [1, 3])
def test_no_buffer_is_written_to_while_it_is_in_use(tmp_path, poisoned, when_busy, snapshot_k):
    """Copies, writes, failures and commits overlap; what was given back too early would be found as poison."""
    inner = SlowStorage(tmp_path, 0.004)

    class Failing(FaultyStorage):
        def write(self, path, chunks):
            return super().write(path, chunks) if path.startswith("step_") else self.inner.write(path, chunks)

    storage = Failing(inner, None, verbs={"write"})
    seen = set()
    life = Life(
        storage,
        policy=MoC(k=1, snapshot_k=snapshot_k),
        when_busy=when_busy,
        on_phase=lambda phase: time.sleep(0.002) if phase == "copy" else None,
    )
    with life:
        begun = 0
        while begun < 40:
            if life.go().begun:
                begun += 1
                if begun % 9 == 8:
                    storage.fail_at = len(storage.calls) + 2
            seen.add(assert_recovery_buffer_is_of_one_step(life))
        life.settle()
        seen.add(assert_recovery_buffer_is_of_one_step(life))
        assert life.session._snapshots.pipeline._pool.lent_bytes < 4 * life.session.tier.nbytes
    found = manifests(tmp_path)
    assert storage.failures == 4
    assert len(found) == 40 - 4
    assert len(poisoned) >= 38, "buffers did go round"
    assert seen - {0} <= {m.step for m in found}
    assert len(seen) > 5
    for manifest in found:
        assert_view(tmp_path, MODEL, manifest, {op: record.step for op, record in manifest.operators.items()})


def test_two_ranks_keep_the_same_step(tmp_path, poisoned):
    """After every agreement that no snapshot is under way."""

    def body(comm):
        steps = []
        with Life(SlowStorage(tmp_path, 0.004, comm.rank), policy=MoC(k=1, snapshot_k=4), comm=comm) as life:
            for _ in range(15):
                life.go(settle=True)
                steps.append(assert_recovery_buffer_is_of_one_step(life))
        return steps

    first, second = run_threads(ThreadRanks(2), body)
    assert first == second == [*range(1, 16)]


def test_a_reader_always_finds_a_whole_checkpoint(tmp_path, caplog):
    """Another thread opens and verifies the newest good step all the time, while slow storage is written to."""
    found: list[int] = []
    problems: list[BaseException | str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                reader = StoreReader(LocalStorage(tmp_path))
                chosen, _ = choose(reader, functools.partial(check_checkpoint, reader))
                if not chosen:
                    problems.append("nothing is there")
                    return
                [manifest] = chosen
                versions = {op: record.step for op, record in manifest.operators.items()}
                assert_view(tmp_path, MODEL, manifest, versions)
                found.append(manifest.step)
            except (NoCheckpointError, AssertionError, OSError) as error:
                problems.append(error)
                return

    storage = SlowStorage(tmp_path, 0.03)
    keep = RetentionPolicy(keep_last=4)
    with Life(storage, policy=MoC(k=1, snapshot_k=2), when_busy="wait", retention=keep) as life:
        life.go(1, settle=True)
        thread = threading.Thread(target=read)
        thread.start()
        life.go(40)
        life.settle()
        until = time.monotonic() + PATIENCE_SECS
        while not problems and found[-1:] != [41] and time.monotonic() < until:
            time.sleep(0.01)
        stop.set()
        thread.join(PATIENCE_SECS)
    assert not problems, problems[:3]
    assert "is skipped" not in caplog.text
    assert found == sorted(found)
    assert found[-1] == 41
    assert len(set(found)) > 3, "it looked while checkpoints came and went"


def test_when_skipping_no_step_waits_though_storage_stands_still(tmp_path):
    """Nothing opens the gate before all steps are through, so a single wait would hang (and then fail) the test."""
    storage = GatedStorage(tmp_path)
    with Life(storage, policy=MoC(k=1, snapshot_k=4), when_busy="skip") as life:
        life.go(3, settle=True)
        storage.gate.clear()
        life.go(50)
        assert not storage.gate.is_set()
        during = life.records[3:]
        storage.gate.set()
        life.settle()
    assert [r.begun for r in during] == [True, True] + [False] * 48, "one is being written, one waits for that"
    assert not any(r.waited for r in life.records)
    assert life.records[-1].waits == 0
    assert life.records[-1].skips == sum(r.skipped for r in life.records) == 48


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_when_waiting_it_is_counted_and_nothing_is_skipped(tmp_path, buffers):
    """With room for one buffer, two, or three."""
    with Life(LocalStorage(tmp_path / "probe"), policy=MoC(k=4)) as life:
        size = life.go().nbytes + 4096

    class Behind(SlowStorage):
        """Writes a step when the next one has begun: training is ahead of it, however busy the machine is."""

        def write(self, path, chunks):
            if path.startswith("step_"):
                assert retry_until(lambda: life.step > min(parse_step_dir(path[:13])[0], 11), PATIENCE_SECS)
            return super().write(path, chunks)

    storage = Behind(tmp_path / "run", 0.02)
    with Life(storage, policy=MoC(k=4), when_busy="wait", host_memory_bytes=buffers * size) as life:
        life.go(12)
        life.settle()
    assert [m.step for m in manifests(tmp_path / "run")] == list(range(1, 13))
    assert life.records[-1].skips == 0
    assert life.records[-1].waits == sum(r.waited for r in life.records) >= 8
    assert not life.records[0].waited


def test_a_step_that_found_a_buffer_did_not_wait(tmp_path):
    with Life(LocalStorage(tmp_path), policy=MoC(k=1, snapshot_k=2), when_busy="wait") as life:
        life.go(10, settle=True)
    assert not any(r.waited for r in life.records)


def test_room_for_two_skips_no_more_than_room_for_three(tmp_path):
    """The recovery buffer is the first to go: it must not cost checkpoints."""
    policy = MoC(k=1, snapshot_k=4)
    with Life(LocalStorage(tmp_path / "probe"), policy=policy) as life:
        life.go(2, settle=True)
        size = life.session.tier.nbytes
    counts = []
    for room in (3.3, 2.3):
        storage = GatedStorage(tmp_path / str(room))
        with Life(storage, policy=policy, when_busy="skip", host_memory_bytes=int(room * size)) as life:
            life.go(3, settle=True)
            storage.gate.clear()
            life.go(4)
            storage.gate.set()
            life.settle()
            counts.append([r.begun for r in life.records])
    assert counts[0] == counts[1] == [True] * 5 + [False] * 2


def test_failing_storage_and_memory_never_disagree(tmp_path):
    """What memory keeps is always the newest step that storage has committed."""
    storage = failing(tmp_path, None)
    with Life(storage, policy=MoC(k=1, snapshot_k=4)) as life:
        for step in range(2, 25):
            if step % 5 == 0:
                storage.fail_at = len(storage.calls) + 1 + step % 4
            life.go(1, settle=True)
            newest = manifests(tmp_path)[-1]
            assert assert_recovery_buffer_is_of_one_step(life) == newest.step
    assert storage.failures == 4
