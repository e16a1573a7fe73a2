"""What there is time to save on one rank, and how many experts that buys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.cadence import Division, bytes_in_time, largest_k, least_capacity, owned_total
from moe_ckpt.policies.base import Measured

OWNED = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(OWNED, st.integers(0, 60))
def test_the_least_capacity_is_the_first_that_is_enough(owned, total):
    enough = next(n for n in range(11) if owned_total(n, owned) >= min(total, sum(owned)))
    assert least_capacity(total, owned) == enough


@given(OWNED, st.integers(-1, 60))
def test_the_largest_k_is_the_last_that_is_not_too_much(sizes, total):
    fits = [k for k in range(max(sizes) + 1) if sum(min(k, size) for size in sizes) <= total]
    assert largest_k(sizes, total) == max(fits, default=0)


def _heaviest(division: Division, total: int, shared_bytes: int, expert_bytes: int) -> float:
    """Bytes on the rank with most, if ``total`` experts are saved and owners save as evenly as they can."""
    most = least_capacity(total, division.owned)
    if division.divided is not None:
        return -(-shared_bytes // division.ranks) + most * expert_bytes / division.divided
    even = (shared_bytes + total * expert_bytes) / division.ranks
    return max(even, most * expert_bytes) if division.by_owner else even


@given(
    st.builds(
        Division,
        ranks=st.integers(1, 4),
        owned=OWNED.map(tuple),
        by_owner=st.booleans(),
        divided=st.sampled_from([None, 1, 2]),
    ),
    st.integers(0, 800),
    st.integers(0, 200),
    st.integers(1, 40),
)
def test_what_is_affordable_fits_and_one_expert_more_does_not(division, limit, shared_bytes, expert_bytes):
    sizes = shared_bytes, expert_bytes
    total, capacity = division.affordable(limit, *sizes)
    assert 0 <= total <= sum(division.owned)
    if total:
        assert _heaviest(division, total, *sizes) <= limit
        assert capacity is None or least_capacity(total, division.owned) <= capacity
    if total < sum(division.owned):
        assert _heaviest(division, total + 1, *sizes) > limit
    assert division.affordable(limit + 1, *sizes)[0] >= total


@pytest.mark.parametrize(("secs", "rate"), [(None, 5.0), (2.0, None), (0.0, 5.0), (2.0, 0.0)])
def test_what_is_not_measured_buys_nothing_known(secs, rate):
    assert bytes_in_time(secs, rate) is None


def test_copies_have_the_time_between_two_updates_and_storage_that_between_two_checkpoints():
    measured = Measured(recent_iteration_secs=2.0, update_secs=0.5, copy_bytes_per_sec=90.0, persist_bytes_per_sec=30.0)
    assert (measured.overlap_secs, measured.copy_bytes(), measured.persist_bytes(3)) == (1.5, 135, 180)
    assert (measured.copy_bytes(0.5), measured.persist_bytes(3, 0.5)) == (67, 90)
    assert Measured(recent_iteration_secs=2.0).overlap_secs == 2.0
    assert Measured(recent_iteration_secs=2.0, update_secs=3.0).overlap_secs == 0.0
    assert Measured(update_secs=3.0).overlap_secs is None


def test_time_that_saving_itself_takes_is_no_time_to_save_more_in():
    secs = {"iteration_secs": 2.0, "recent_iteration_secs": 2.5, "update_secs": 0.5}
    measured = Measured(**secs, copy_bytes_per_sec=100.0, send_bytes_per_sec=10.0)
    assert measured.interference_secs == 0.5
    assert (measured.overlap_secs, measured.copy_bytes()) == (1.5, 150)
    assert (measured.send_bytes(1), measured.send_bytes(3, 0.5)) == (20, 30)
    assert Measured(recent_iteration_secs=2.0).send_bytes(1) is None
    faster = Measured(iteration_secs=3.0, recent_iteration_secs=2.0, update_secs=0.5)
    assert (faster.interference_secs, faster.overlap_secs) == (0.0, 1.5), "the newest iterations are what there is"
