"""Which pipeline stages go back, which keep their state, and what logs the former need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.localized.segments import (
    LocalRecovery,
    LogGap,
    Segment,
    local_recoveries,
    local_recovery,
    log_gap,
    segments,
)

STAGES = [0, 0, 1, 1, 2, 2, 3, 3]
"""PP4 x DP2."""


def test_runs_of_stages():
    assert segments([3, 0, 1, 5, 4, 1]) == [(0, 1), (3, 5)]
    assert segments([]) == []


@given(st.sets(st.integers(0, 40)))
def test_segments_cover_the_stages_and_touch_nothing(stages):
    found = segments(stages)
    assert {stage for one in found for stage in range(one.first, one.last + 1)} == stages
    assert not any(one.touches(other) for one in found for other in found if one is not other)


@pytest.mark.parametrize(
    ("other", "touches"), [((0, 1), False), ((0, 2), True), ((5, 5), True), ((6, 9), True), ((7, 9), False)]
)
def test_neighbours_recover_together(other, touches):
    assert Segment(3, 5).touches(Segment(*other)) == touches
    assert Segment(*other).touches(Segment(3, 5)) == touches


def test_joined():
    assert Segment(3, 5).joined([Segment(6, 6), Segment(1, 2)]) == (1, 6)
    assert Segment(3, 5).joined([]) == (3, 5)


@pytest.mark.parametrize(
    ("lost", "found"),
    [
        ([3], LocalRecovery(9, (Segment(1, 1),), (2, 3))),
        ([2, 3], LocalRecovery(9, (Segment(1, 1),), (2, 3))),
        ([3, 4], LocalRecovery(9, (Segment(1, 2),), (2, 3, 4, 5))),
        ([0, 7], LocalRecovery(9, (Segment(0, 0), Segment(3, 3)), (0, 1, 6, 7))),
        ([0, 2, 4, 7], None),
        ([], None),
        (range(8), None),
    ],
)
def test_a_stage_goes_back_with_each_of_its_ranks(lost, found):
    kept = [None if rank in lost else 9 for rank in range(8)]
    assert local_recovery(STAGES, kept) == found


def test_a_stage_that_stopped_a_step_before_others_goes_back():
    assert local_recovery(STAGES, [9, 9, 9, 9, 9, 9, 8, 9]) == LocalRecovery(9, (Segment(3, 3),), (6, 7))
    assert local_recovery([0, 0], [9, 8]) is None, "one stage, which has no neighbours"


def test_a_rank_that_is_ahead_of_its_stage_does_not_keep_the_others_from_staying():
    assert local_recovery(STAGES, [9, 10, *[9] * 5, None]) == LocalRecovery(
        9, (Segment(0, 0), Segment(3, 3)), (0, 1, 6, 7)
    )
    assert local_recovery([0, 0, 1, 1], [9, 10, None, 9]) is None, "no stage is whole"


def test_an_older_step_that_a_stage_kept_comes_next():
    """Stage 3 is lost; stages 0 and 1 have ended the update that stage 2 had not."""
    found = local_recoveries(STAGES, [10, 10, 10, 10, 9, 9, None, 9])
    assert found == [
        LocalRecovery(10, (Segment(2, 3),), (4, 5, 6, 7)),
        LocalRecovery(9, (Segment(0, 1), Segment(3, 3)), (0, 1, 2, 3, 6, 7)),
    ]
    assert local_recoveries(STAGES, [9] * 7 + [None]) == [LocalRecovery(9, (Segment(3, 3),), (6, 7))]
    assert local_recoveries(STAGES, [9] * 8) == [], "nobody goes back"
    assert local_recoveries(STAGES, [10, 9] * 4) == [], "no stage is whole"


def test_what_the_logs_lack():
    recovery = local_recovery(STAGES, [9, 9, None, 9, 9, 9, 9, 9])
    logged = {rank: range(5, 10) for rank in range(8) if rank not in recovery.ranks}
    assert log_gap(recovery, 4, 8, logged) is None
    assert log_gap(recovery, 3, 8, logged) == LogGap(0, 4)
    assert log_gap(recovery, 4, 8, logged | {5: [5, 6, 8, 9]}) == LogGap(5, 7)
    del logged[7]
    assert log_gap(recovery, 4, 8, logged) == LogGap(7, 5)
    assert log_gap(recovery, 9, 8, {}) is None, "the checkpoint is of that very step"
