"""Rooms of an arena never overlap, whatever is taken, given back and adopted, and none is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.memory.arena import ALIGNMENT, FreeSpace, rounded_room


def rooms_of(space: FreeSpace) -> int:
    return sum(high - low for low, high in space.gaps())


@given(st.lists(st.tuples(st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.integers(0, 3)), max_size=40))
def test_rooms_never_overlap_and_all_come_back(asked):
    space, lent = FreeSpace(), []
    for sizes, give_back in asked:
        for begin, nbytes in lent[:give_back]:
            space.free(begin, nbytes)
        del lent[:give_back]
        if (begins := space.take(sizes)) is None:
            before = rooms_of(space)
            assert space.end_for(sizes) > space.end, "it says so where it would fit"
            assert rooms_of(space) == before, "none of several is taken"
            space.end = space.end_for(sizes)
            begins = space.take(sizes)
        lent += zip(begins, sizes, strict=True)
        spans = sorted((begin, begin + rounded_room(nbytes)) for begin, nbytes in lent)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= space.end
        assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
        assert rooms_of(space) + sum(end - begin for begin, end in spans) == space.end
    for begin, nbytes in lent:
        space.free(begin, nbytes)
    assert list(space.gaps()) == ([(0, space.end)] if space.end else [])


@given(st.integers(1, 1 << 44))
def test_a_room_takes_a_64th_more_at_most(nbytes):
    assert nbytes <= rounded_room(nbytes) <= nbytes + max(ALIGNMENT, nbytes // 64 + 1)
    assert rounded_room(rounded_room(nbytes)) == rounded_room(nbytes)


def test_sizes_that_differ_a_little_use_the_same_room_again():
    space = FreeSpace()
    space.end = space.end_for([1_000_000] * 2)
    kept, gone = space.take([1_000_000, 1_000_000])
    space.free(gone, 1_000_000)
    assert space.take([1_000_900]) == [gone]
    assert kept == 0


def test_what_an_earlier_process_has_filled_is_lent_to_nobody():
    space = FreeSpace()
    space.adopt(640, 1000)
    for begin, nbytes in ((640, 1000), (0, 700), (1600, 64), (641, 10), (-64, 10)):
        with pytest.raises(ValueError, match="overlaps"):
            space.adopt(begin, nbytes)
    space.end = 4096
    assert space.take([700]) == [640 + rounded_room(1000)]
    assert space.take([600]) == [0]
    space.free(640, 1000)
    assert space.take([1000]) == [640]


def test_a_room_that_nobody_has_is_not_given_back():
    space = FreeSpace()
    space.end = 4096
    [begin] = space.take([100])
    space.free(begin, 100)
    with pytest.raises(ValueError, match="not in list"):
        space.free(begin, 100)
