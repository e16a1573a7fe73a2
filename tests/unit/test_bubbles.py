"""When chunks go: a pipeline's end, what is expected of the next iteration, and the arithmetic of holding back."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.bubbles.schedule import CAUTION, Bubble, Pace, clipped, tail_secs, typical


class Chunk(NamedTuple):
    begin: float
    nbytes: int
    in_bubble: bool


def timetable(pace: Pace, nbytes: int, most: int, bubbles) -> list[Chunk]:
    """When each chunk goes, if these are the bubbles that come: what the gate does on threads, as a function."""
    chunks: list[Chunk] = []
    now, remaining = 0.0, nbytes
    coming = list(reversed(bubbles))
    while remaining:
        size = min(most, remaining)
        while coming and coming[-1].end <= now:
            coming.pop()
        idle = coming[-1].begin if coming else inf
        begin = max(now, min(idle, pace.beside_from(remaining)))
        chunks.append(Chunk(begin, size, idle <= begin))
        now, remaining = begin + size / pace.bytes_per_sec, remaining - size
    return chunks


@st.composite
def windows(draw, end: float = 100.0, most: int = 6) -> tuple[Bubble, ...]:
    """Disjoint and in order."""
    edges = sorted(draw(st.lists(st.floats(0, end), min_size=2, max_size=2 * most, unique=True)))
    return tuple(Bubble(begin, stop) for begin, stop in zip(edges[::2], edges[1::2], strict=False) if stop > begin)


@st.composite
def copies(draw) -> tuple[Pace, int, int]:
    """A pace, and bytes in chunks that it can bring through in time."""
    deadline, rate = draw(st.floats(1, 100)), draw(st.floats(0.5, 50))
    nbytes = draw(st.integers(1, max(1, int(deadline * rate))))
    pace = Pace(clipped(draw(windows()), 0.0, deadline), deadline, rate)
    return pace, min(nbytes, int(deadline * rate)), draw(st.integers(1, 20))


@given(st.tuples(st.integers(1, 8), st.integers(1, 24)), st.floats(0.01, 100))
def test_a_stage_is_idle_at_the_end_until_those_before_it_are_through(pipeline, secs):
    stages, many = pipeline
    ends = [ended(stage, stages, many) for stage in range(stages)]
    for stage, end in enumerate(ends):
        assert tail_secs(stage, stages, many, secs) == pytest.approx(secs * (ends[0] - end) / end)


def ended(stage: int, stages: int, many: int) -> float:
    """When a stage's last backward pass ends: a pass of 2, of 1 forward, begins once its input is there."""
    done: dict[tuple[int, bool, int], float] = {}
    orders = []
    for at in range(stages):
        ahead = min(stages - 1 - at, many)
        order = [(True, number) for number in range(ahead)]
        for number in range(many - ahead):
            order += [(True, number + ahead), (False, number)]
        orders.append(order + [(False, number) for number in range(many - ahead, many)])
    nows, moved = [0.0] * stages, True
    while moved:
        moved = False
        for at, order in enumerate(orders):
            while order:
                forward, number = order[0]
                before = at - 1 if forward else at + 1
                if 0 <= before < stages and (before, forward, number) not in done:
                    break
                nows[at] = max(nows[at], done.get((before, forward, number), 0.0)) + (1.0 if forward else 2.0)
                done[at, forward, number] = nows[at]
                order.pop(0)
                moved = True
    return nows[stage]


def test_of_waits_the_medians_are_expected():
    seen = [[Bubble(1, 2), Bubble(5, 9)], [Bubble(2, 4), Bubble(6, 7)], [Bubble(9, 9)], [Bubble(3, 9), Bubble(4, 7)]]
    assert typical(seen) == ((2, 4), (5, 8))
    assert typical([*seen, [Bubble(9, 9)]]) == ((9, 9),)
    assert typical([]) == ()


@given(windows())
def test_expected_waits_do_not_overlap(found):
    assert all(one.end <= other.begin for one, other in pairwise(typical([found, found[::-1], found])))


@given(copies(), st.integers(0, 1000))
def test_the_rest_begins_at_the_first_moment_of_the_rule(copy, nbytes):
    pace, _, _ = copy
    needed = CAUTION * nbytes / pace.bytes_per_sec

    def missing(now: float) -> float:
        """``CAUTION r - 2 B - C``, by a sum over the windows."""
        bubbles = sum(each.secs for each in clipped(pace.windows, now, pace.deadline))
        return needed - bubbles - (pace.deadline - now)

    at = pace.beside_from(nbytes)
    assert missing(at) == pytest.approx(0, abs=1e-6)
    assert missing(at - 0.1) < 0


@given(copies(), windows())
def test_all_bytes_are_through_by_the_deadline_whatever_bubbles_come(copy, bubbles):
    pace, nbytes, most = copy
    found = timetable(pace, nbytes, most, bubbles)
    assert sum(each.nbytes for each in found) == nbytes
    ends = [each.begin + each.nbytes / pace.bytes_per_sec for each in found]
    assert all(end <= after.begin + 1e-9 for end, (_, after) in zip(ends, pairwise(found), strict=False))
    assert max(ends, default=0.0) <= pace.deadline + 1e-6


@given(copies(), windows())
def test_nothing_goes_beside_compute_as_long_as_bubbles_and_time_are_left(copy, bubbles):
    pace, nbytes, most = copy
    left = nbytes
    for chunk in timetable(pace, nbytes, most, bubbles):
        if chunk.in_bubble:
            assert any(each.begin <= chunk.begin < each.end for each in bubbles)
        else:
            assert chunk.begin >= pace.beside_from(left) - 1e-9
        left -= chunk.nbytes


@given(copies())
def test_expected_bubbles_that_come_are_used_first(copy):
    """As many bytes as the caution allows: half of them, at least, of what the expected bubbles have room for."""
    pace, nbytes, _ = copy
    found = timetable(pace, nbytes, 1, pace.windows)
    fitting = min(nbytes, sum(each.secs for each in pace.windows) * pace.bytes_per_sec)
    spent = sum(each.nbytes for each in found if each.in_bubble)
    slack = 1 + len(pace.windows) * 2
    room = pace.deadline - CAUTION * nbytes / pace.bytes_per_sec
    if room >= 0:
        assert spent >= fitting / CAUTION - slack


def test_what_fits_the_bubbles_waits_for_them_though_they_come_late():
    pace = Pace((Bubble(60, 80),), 80.0, 1.0)
    assert [chunk.begin for chunk in timetable(pace, 10, 5, pace.windows)] == [60, 65]
    assert all(chunk.in_bubble for chunk in timetable(pace, 10, 5, pace.windows))
    missed = timetable(pace, 10, 5, ())
    assert not any(chunk.in_bubble for chunk in missed)
    assert [chunk.begin for chunk in missed] == [70, 75]
