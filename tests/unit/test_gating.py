"""The gate between a pipeline's schedule and the threads that copy and send: who is held back, and until when."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from moe_ckpt.bubbles.gate import CHUNK_NBYTES, BubbleGate
from moe_ckpt.slices.copying import Copier, CopyStep
from tests.support.acted_gpu import ActedGPU
from tests.unit.test_engine_copying import piece, program_of

RATE = 1e6
SPAN = 0.2
SHORT, LONG = 0.02, 5.0


def iterate(gate: BubbleGate, waits: int = 2, span: float = SPAN) -> None:
    """One iteration with so many waits, of a rank that receives as many micro-batches."""
    gate.step_begins()
    for _ in range(waits):
        with gate.waiting(previous=True, following=True):
            time.sleep(span / 8)
        time.sleep(span / 8)
    time.sleep(max(0.0, span - waits * span / 4))
    gate.update_begins()


class Waiting:
    """A thread that asks for one chunk after the other."""

    def __init__(self, transfer, sizes):
        self.transfer, self.went = transfer, []
        self.thread = threading.Thread(target=self._run, args=(sizes,), daemon=True)
        self.thread.start()

    def _run(self, sizes):
        for size in sizes:
            self.transfer.admit(size)
            self.went.append(time.perf_counter())

    def ended(self, secs: float) -> bool:
        self.thread.join(secs)
        return not self.thread.is_alive()


def begun(secs: float) -> BubbleGate:
    """In an iteration that has begun, after some of so many seconds."""
    made = BubbleGate(0, 2)
    made.forecast.span_secs = made.forecast.period_secs = secs
    made._last_began = time.perf_counter()
    made.step_begins()
    made.forecast.period_secs = secs
    made.rates.append(RATE)
    return made


@pytest.fixture
def gate() -> BubbleGate:
    """Whose iterations are so long that nothing is due within a test."""
    return begun(60.0)


def test_what_was_measured_is_expected_and_then_the_pipelines_end():
    gate = BubbleGate(1, 3)
    for _ in range(2):
        iterate(gate, waits=4, span=0.04)
        assert not gate.forecast.windows[:-1], "the first one is no measure"
    for _ in range(3):
        iterate(gate, waits=4, span=0.04)
    *seen, tail = gate.forecast.windows
    assert len(seen) == 4, "as many as waits, and what only the schedule knows"
    assert all(each.secs >= 0.04 / 8 for each in seen)
    assert tail.begin >= seen[-1].end
    assert gate.forecast.tail_secs == pytest.approx(tail.secs)


def test_no_end_is_expected_of_interleaved_chunks():
    gate = BubbleGate(1, 2, 2)
    iterate(gate, span=0.02)
    assert gate.forecast.windows == ()
    assert gate.forecast.tail_secs == 0.0


def test_a_copy_is_held_back_until_this_rank_waits(gate):
    asking = Waiting(gate.copy(1000), [500, 500])
    assert not asking.ended(SHORT)
    with gate.waiting():
        assert asking.ended(LONG)
    assert gate.copied.in_bubbles == gate.copied.nbytes == 1000
    assert asking.transfer.held_secs >= SHORT


def test_a_chunk_more_than_a_wait_is_held_back_again(gate):
    transfer = gate.copy(1000)
    with gate.waiting():
        transfer.admit(500)
    asking = Waiting(transfer, [500])
    assert not asking.ended(SHORT)
    gate.update_begins()
    assert asking.ended(LONG)
    assert gate.copied.nbytes == 1000


@pytest.mark.parametrize("end", ["update_begins", "release"])
def test_nothing_is_held_back_when_training_waits(gate, end):
    asking = Waiting(gate.copy(1000), [1000])
    assert not asking.ended(SHORT)
    getattr(gate, end)()
    assert asking.ended(LONG)
    gate.copy(1000).admit(1000)


def test_what_bubbles_do_not_bring_through_goes_by_the_deadline():
    gate = begun(SPAN)
    began = gate._began
    transfer = gate.copy(1000)
    transfer.admit(1000)
    assert 0.3 * SPAN < time.perf_counter() - began < LONG
    assert gate.copied.in_bubbles == 0


@pytest.mark.parametrize("rate", [None, 20.0])
def test_a_copy_that_takes_the_whole_iteration_or_of_unknown_rate_is_not_held_back(gate, rate):
    gate.rates.clear()
    gate.rates.extend([rate] if rate else [])
    transfer = gate.copy(1000)
    transfer.admit(1000)
    assert transfer.held_secs == 0.0


def test_a_send_goes_by_its_own_deadline_and_no_peer_waits_long_for_it(gate):
    began = time.perf_counter()
    begun(SPAN).send(1000, RATE, LONG).admit(1000)
    assert 0.3 * SPAN < time.perf_counter() - began < LONG
    gate.send(1000, RATE, 0.01).admit(1000)
    assert time.perf_counter() - began < LONG


def test_large_runs_are_divided_and_come_out_whole():
    source = torch.arange(1000, dtype=torch.int16)
    into = torch.zeros(2000, dtype=torch.uint8)
    steps = list(CopyStep(0, 2000, torch.int16, (source,)).chunks(301))
    assert [step.size for step in steps] == [300] * 6 + [200]
    for step in steps:
        step.run(into)
    assert torch.equal(into.view(torch.int16), source)


def test_a_join_brings_a_copy_through_that_is_held_back(gate):
    gate.rates.clear()
    source, copier = torch.arange(1 << 16), Copier(gate=gate)
    into = torch.zeros(source.nbytes, dtype=torch.uint8)
    try:
        for held in (False, True):
            gate.update_begins()
            gate.step_begins()
            gate.forecast.period_secs = 60.0
            copy = copier.start([(program_of([piece("w", source)]), into)])
            time.sleep(SHORT)
            assert copy.issued.done() != held
            gate.update_begins()
            copy.join()
            copy.wait_on_host()
            assert torch.equal(into.view(torch.int64), source)
            assert (copy.moving_secs < copy.secs) == held
            into.zero_()
    finally:
        copier.close()


def test_on_a_device_chunks_go_behind_the_moment_at_which_it_waits():
    """As many as the wait is expected to have room for: what a device was asked for cannot be taken back."""
    gate, number = BubbleGate(0, 2, on_device=True), CHUNK_NBYTES * 3
    source = torch.zeros(number, dtype=torch.uint8)
    with ActedGPU() as gpu:
        for _ in range(5):
            iterate(gate, waits=1, span=0.08)
        gpu.take(source)
        pieces, copier = [piece("w", source)], Copier(gate=gate)
        memory = torch.empty(number, dtype=torch.uint8, pin_memory=True)
        program = program_of(pieces)
        try:
            for value, held in ((1, False), (2, True)):
                source.fill_(value)
                gate.step_begins()
                gate.rates.clear()
                gate.rates.extend([2.5 * CHUNK_NBYTES / gate.forecast.wait_secs(0)] * held)
                before = gate.copied.in_bubbles
                copy = copier.start([(program, memory)])
                with gate.waiting():
                    time.sleep(0.02)
                gate.update_begins()
                copy.join()
                copy.wait_on_host()
                assert (memory == value).all()
                assert not held or gate.copied.in_bubbles - before == 2 * CHUNK_NBYTES
        finally:
            copier.close()
