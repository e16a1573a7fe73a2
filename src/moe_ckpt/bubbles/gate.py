"""Holds copies and sends back until a pipeline's schedule leaves this rank idle, or until they must go.

The arithmetic is ``schedule``; here are the clock and the threads. The adapter says when this rank begins and ends to
wait for its neighbours, the engine when an iteration begins and when its update does, and every thread that copies or
sends asks before each chunk. Between the update and the next iteration nothing is held back, and neither is anything
while training waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from statistics import median

import torch

from moe_ckpt.bubbles.schedule import MARGIN, Bubble, Pace, clipped, tail_secs, typical

CHUNK_NBYTES = 1 << 20
"""So little at a time: a copy that began in a bubble ends soon after it."""
_RECENT = 5
_TICK_SECS = 1e-6


class HostStamps:
    """Moments of a rank that computes on the CPU: the time at which its thread gets there."""

    waits_for = None
    """Nothing: a chunk goes when it is requested."""

    def now(self) -> float:
        return time.perf_counter()

    @staticmethod
    def secs(begin: float, end: float) -> float | None:
        return end - begin


class CudaStamps:
    """Moments of a rank that computes on a GPU: the time at which the device gets there, which the host runs ahead of.

    Attributes:
        waits_for: The newest moment. A chunk that goes in this bubble is copied behind it, on its own stream.
    """

    def __init__(self) -> None:
        self.waits_for: torch.cuda.Event | None = None

    def now(self) -> torch.cuda.Event:
        moment = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        moment.record(torch.cuda.current_stream())
        self.waits_for = moment
        return moment

    @staticmethod
    def secs(begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """Returns the seconds between two moments; None if the device has not reached them yet."""
        return begin.elapsed_time(end) / 1e3 if begin.query() and end.query() else None  # type: ignore[no-untyped-call]


@dataclass
class Tally:
    """Bytes of one kind that went through a gate.

    Attributes:
        in_bubbles: Of ``nbytes``, while this rank was idle.
    """

    nbytes: int = 0
    in_bubbles: int = 0


class Forecast:
    """The forecast of an iteration's bubbles, by those of the newest iterations.

    Changed by the training thread alone; any thread may read the attributes.

    Args:
        stage: This rank's place in the pipeline.
        stages: Their number.
        chunks: Parts of the model on each rank; with several (interleaved 1F1B) no idle end is expected.
        stamps: What moments are.

    Attributes:
        windows: Expected, in seconds from an iteration's beginning; the last may lie behind its end.
        span_secs: The shortest of the recent times from an iteration's beginning to its update; None until there was
            one.
        period_secs: The same, to the beginning of the next one.
        tail_secs: How long this rank is idle after its own last backward pass, until the pipeline is through.
    """

    def __init__(self, stage: int, stages: int, chunks: int, stamps: HostStamps | CudaStamps) -> None:
        self.windows: tuple[Bubble, ...] = ()
        self.tail_secs = 0.0
        self.span_secs: float | None = None
        self.period_secs: float | None = None
        self._pipeline = stage, stages
        self._estimates = chunks == 1
        self._secs = stamps.secs
        self._spans: deque[float] = deque(maxlen=_RECENT)
        self._periods: deque[float] = deque(maxlen=_RECENT)
        self._seen: deque[tuple[Bubble, ...]] = deque(maxlen=_RECENT)
        self._iterations = 0
        self._last: tuple[object, list[tuple[object, object]]] | None = None

    def period(self, secs: float) -> None:
        """Takes in the seconds from the beginning of one iteration to that of the next."""
        self._periods.append(secs)
        self.period_secs = min(self._periods)

    def iteration(self, began: object, waits: list[tuple[object, object]], span_secs: float, microbatches: int) -> None:
        """One iteration was computed.

        Args:
            waits: Of this rank for its neighbours, as moments.
            microbatches: 0 if not known.

        On a device that may still be computing it: it is taken into account when the next one is.
        """
        last, self._last = self._last, (began, waits)
        self._spans.append(span_secs)
        self.span_secs = min(self._spans)
        self._iterations += 1
        if last is not None:
            self._measure(*last)
        # What the pipeline's end leaves idle is spent in the update, behind the last wait that can be seen.
        estimates = microbatches > 0 and self._estimates
        self.tail_secs = tail_secs(*self._pipeline, microbatches, span_secs) if estimates else 0.0
        seen = typical(self._seen)
        end = max([span_secs, *(window.end for window in seen[-1:])])
        self.windows = (*seen, Bubble(end, end + self.tail_secs)) if self.tail_secs else seen

    def _measure(self, began: object, waits: list[tuple[object, object]]) -> None:
        windows, at = list[Bubble](), 0.0
        for begin, end in waits:
            first, then = self._secs(began, begin), self._secs(began, end)  # type: ignore[arg-type]
            if first is None or then is None:
                return
            at = max(at, first)
            windows.append(Bubble(at, at := max(at, then)))
        if self._iterations > 2:  # the first is no measure: connections, allocators and kernels come into being
            self._seen.append(tuple(windows))

    def wait_secs(self, number: int) -> float:
        """Returns how long the wait of this number is expected to be; 0 until any was measured."""
        return self.windows[number].secs if self._seen and number < len(self.windows) else 0.0


class BubbleGate:
    """The gate of one rank. ``Transfer`` is for threads that copy or send; everything else for the training thread.

    Args:
        stage: This rank's place in the pipeline.
        stages: Their number, above 1.
        chunks: See ``Forecast``.
        on_device: This rank computes on a GPU.

    Attributes:
        copied: Bytes that were copied from live tensors.
        sent: Bytes that were sent to peers.
        rates: Bytes per second of the newest copies.
        holds: False: nothing is held back, but counted all the same.
    """

    def __init__(self, stage: int, stages: int, chunks: int = 1, *, on_device: bool = False) -> None:
        self.copied, self.sent = Tally(), Tally()
        self.rates: deque[float] = deque(maxlen=_RECENT)
        self.holds = True
        self.changed = threading.Condition()
        self._stamps = CudaStamps() if on_device else HostStamps()
        self.forecast = Forecast(stage, stages, chunks, self._stamps)
        self._began: float | None = None
        self._began_stamp: object = None
        self._last_began: float | None = None
        self._waits: list[tuple[object, object]] = []
        self._received = [0, 0]
        self._entered: object = None
        self._visit_secs = 0.0
        self._tail_until = -inf
        self._on_device = on_device

    @property
    def bubble_nbytes(self) -> int:
        return self.copied.in_bubbles + self.sent.in_bubbles

    @property
    def beside_nbytes(self) -> int:
        return self.copied.nbytes + self.sent.nbytes - self.bubble_nbytes

    # --- what the engine says ---

    def step_begins(self) -> None:
        if self._began is not None:
            return
        now = time.perf_counter()
        if self._last_began is not None:
            self.forecast.period(now - self._last_began)
        self._waits, self._received = [], [0, 0]
        self._began_stamp = self._stamps.now()
        self._last_began = now
        with self.changed:
            self._began = now

    def update_begins(self) -> None:
        began = self._began
        if began is None:
            return
        now = time.perf_counter()
        if self._waits:  # else nothing was computed
            self.forecast.iteration(self._began_stamp, self._waits, now - began, max(self._received))
        with self.changed:
            self._began, self._tail_until = None, now + self.forecast.tail_secs
            self.changed.notify_all()

    def release(self) -> None:
        with self.changed:
            self._began, self._last_began = None, None
            self.changed.notify_all()

    # --- what the adapter says ---

    @contextmanager
    def waiting(self, *, previous: bool = False, following: bool = False) -> Iterator[None]:
        """This rank waits for its neighbours inside.

        Args:
            previous, following: It receives from that stage.
        """
        begin = self._stamps.now()
        with self.changed:
            # What was queued on a device cannot be taken back when the bubble ends.
            self._visit_secs = self.forecast.wait_secs(len(self._waits)) if self._on_device else inf
            self._entered = begin
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._entered = None
            end = self._stamps.now()
            if self._began is not None:
                self._waits.append((begin, end))
                self._received[0] += previous
                self._received[1] += following

    # --- what threads that copy or send ask, with ``changed`` ---

    @property
    def is_open(self) -> bool:
        """True while no iteration is being computed."""
        return self._began is None

    @property
    def is_tail(self) -> bool:
        """The pipeline is not through, but for this rank: what comes next is an update."""
        return self._began is None and time.perf_counter() < self._tail_until

    def enter(self, secs: float) -> tuple[bool, torch.cuda.Event | None]:
        """Returns whether this rank is idle, for so long at least; and what a device must wait for until it is."""
        if self._entered is None or self._visit_secs < secs:
            return False, None
        self._visit_secs -= secs
        return True, self._stamps.waits_for

    def copy(self, nbytes: int) -> Transfer:
        began, span, rates = self._began, self.forecast.span_secs, tuple(self.rates)
        if began is None or span is None or not rates:
            return Transfer(self, self.copied, nbytes)
        deadline = MARGIN * span
        pace = Pace(clipped(self.forecast.windows, 0.0, deadline), deadline, median(rates))
        return Transfer(self, self.copied, nbytes, pace, began)

    def send(self, nbytes: int, bytes_per_sec: float | None, most_secs: float) -> Transfer:
        with self.changed:
            now = time.perf_counter()
            began, period, windows = self._last_began, self.forecast.period_secs, self.forecast.windows
        if began is None or period is None or not bytes_per_sec:
            return Transfer(self, self.sent, nbytes)
        deadline = now - began + min(MARGIN * period, most_secs)
        coming = (
            *clipped(windows, 0.0, period),
            *(Bubble(window.begin + period, window.end + period) for window in windows),
        )
        pace = Pace(clipped(coming, now - began, deadline), deadline, bytes_per_sec)
        return Transfer(self, self.sent, nbytes, pace, began)


@dataclass(eq=False)
class Transfer:
    """One copy, or one send, through a gate.

    Attributes:
        gate: That it goes through.
        tally: It is counted there.
        nbytes: In all.
        pace: When it must go beside compute; None: it is not held back.
        began: What the pace's times count from, on ``time.perf_counter``.
    """

    chunk_nbytes = CHUNK_NBYTES

    gate: BubbleGate
    tally: Tally
    nbytes: int
    pace: Pace | None = None
    began: float = 0.0
    held_secs: float = 0.0

    def __post_init__(self) -> None:
        self._rest = self.nbytes

    def moved(self, secs: float) -> None:
        if self.nbytes:
            self.gate.rates.append(self.nbytes / secs)

    def admit(self, nbytes: int) -> torch.cuda.Event | None:
        gate, pace = self.gate, self.pace
        secs = 0.0 if pace is None else nbytes / pace.bytes_per_sec
        with gate.changed:
            idle, event = gate.enter(secs)
            while not (idle or pace is None or not gate.holds or gate.is_open):
                asked = time.perf_counter()
                due = self.began + pace.beside_from(self._rest)
                if asked >= due:
                    break
                gate.changed.wait(max(due - asked, _TICK_SECS))
                self.held_secs += time.perf_counter() - asked
                idle, event = gate.enter(secs)
            self._rest -= nbytes
            self.tally.nbytes += nbytes
            self.tally.in_bubbles += nbytes if idle or gate.is_tail else 0
        return event
