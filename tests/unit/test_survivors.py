"""Which share of which snapshot survivors sealed, and what a recovery makes of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt import Memory
from moe_ckpt.core.placement import lends
from moe_ckpt.core.step import Step
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.slot import STATE, TENSORS
from moe_ckpt.reading.memory.memory_checkpoints import checkpoint_in, say_kept
from moe_ckpt.reading.memory.memory_shares import (
    LeftBehind,
    MemoryCheckpoint,
    Share,
    beneath_of,
    checkpoints_of,
    is_agreed,
    newer_than,
    snapshots_of,
    teller_of,
)

DUE = Share(0, "a", 0, Step("run", "life", 3, 40, 7), 0, 2, None, "step_00000001_g3")
"""Of a partial checkpoint of step 40, as rank 0 of two sealed it."""


def due(rank: int, *, step: int = 40, sequence: int = 7, **other: object) -> Share:
    identity = replace(DUE.identity, step=step, number=sequence)
    return replace(DUE, holder=rank, number=rank, writer=rank, identity=identity, **other)


def own(rank: int, step: int = 40) -> Share:
    return replace(due(rank), identity=Step("run", "life", 3, step, step, parting=True), sealer=rank)


def lent(rank: int, by: int, step: int = 40) -> Share:
    return replace(own(rank, step), holder=by, number=9, sealer=by)


numbers = st.integers(0, 1 << 40)


@given(numbers, st.booleans(), numbers, st.booleans())
def test_survivors_share_a_snapshot_by_its_step_only(step, is_own, other, is_others):
    one = own(0, step) if is_own else lent(0, 1, step)
    two = own(1, other) if is_others else lent(1, 0, other)
    assert (one.snapshot == two.snapshot) == (step == other)
    assert (one.snapshot < two.snapshot) == (step < other)
    assert one.is_lent == (not is_own)


@given(numbers, numbers, numbers)
def test_what_survivors_seal_is_newer_than_all_that_was_due(step, sequence, of):
    shares = [due(0, sequence=sequence, step=of), due(1, sequence=sequence, step=of), own(0, step), own(1, step)]
    assert shares[0].snapshot < shares[2].snapshot
    assert not shares[0].is_lent
    found = checkpoints_of(shares)
    assert len(found) == 2, "also where the step is another one's sequence"
    assert [each.is_complete for each in found] == [True, True]
    if step >= of:
        assert [each.is_parting for each in found] == [True, False]


@given(st.sets(st.integers(0, 500), min_size=1, max_size=40).map(sorted))
def test_each_rank_of_a_group_is_sealed_by_one_other(group):
    lenders = {lends(rank, group): rank for rank in group}
    if len(group) == 1:
        assert lenders == {None: group[0]}
    else:
        assert sorted(lenders) == group
        assert all(of != rank for of, rank in lenders.items())
    assert lends(501, group) is None


def test_what_all_ranks_sealed_is_the_newest_checkpoint():
    newest, older = checkpoints_of([due(0), due(1), own(0), own(1), lent(1, 0), lent(0, 1)])
    assert newest.is_complete
    assert newest.is_whole
    assert not any(share.is_lent for share in newest.shares), "each rank's own has its plain state"
    assert older.shares == (due(0), due(1))


def test_a_lent_share_makes_nothing_complete():
    newest, older = checkpoints_of([due(0), due(1), own(0), lent(1, 0)])
    assert not newest.is_complete
    assert not newest.is_whole
    assert older.is_complete
    assert [len(snapshot) for snapshot in newest.snapshots] == [2]


def whole(rank: int, by: int, step: int = 40) -> Share:
    """All that a rank writes, but its plain state."""
    return replace(lent(rank, by, step), only=TENSORS)


def state(rank: int, step: int = 40) -> Share:
    return replace(own(rank, step), number=7, only=STATE)


def test_what_is_lent_whole_and_the_plain_state_of_its_writer_make_a_share():
    newest, older = checkpoints_of([state(1), due(0), due(1), whole(1, 0), own(0), state(0)])
    assert newest.is_complete
    assert newest.snapshots == ({0: (own(0),), 1: (whole(1, 0),)},)
    assert newest.states == {1: (state(1),)}, "the plain state of rank 0 is in its own share"
    assert older.shares == (due(0), due(1))


@pytest.mark.parametrize(
    "shares",
    [
        [own(0), whole(1, 0)],
        [own(0), whole(1, 0), state(1, 39)],
        [own(0), lent(1, 0), state(1)],
        [own(0), state(1)],
        [state(0), state(1)],
    ],
    ids=["no state", "state of another step", "experts only", "no tensors", "states only"],
)
def test_else_they_do_not(shares):
    assert not any(each.is_complete for each in checkpoints_of(shares))
    assert all(each.only != STATE for found in snapshots_of(shares) for each in found.shares)


def test_a_ranks_own_share_goes_before_what_was_lent():
    [newest] = checkpoints_of([own(0), own(1), whole(1, 0), whole(0, 1), state(0), state(1)])
    assert newest.shares == (own(0), own(1))


def test_experts_are_taken_of_the_very_same_step_only():
    shares = [due(0), due(1), own(0), lent(1, 0), own(0, 41), due(0, sequence=6, step=39), due(1, sequence=6, step=39)]
    checkpoint = next(each for each in checkpoints_of(shares) if each.step == 40 and each.is_complete)
    beneath = beneath_of(checkpoint, snapshots_of(shares))
    assert [(each.step, each.is_complete) for each in beneath] == [(39, True), (40, False)]


def test_ranks_that_stopped_at_different_steps_sealed_nothing_together():
    assert not any(each.is_complete for each in checkpoints_of([own(0, 40), own(1, 41)]))


@pytest.mark.parametrize("secs", [-1, True, "soon", float("nan"), None])
def test_a_time_that_cannot_be(secs):
    with pytest.raises(ConfigError, match=r"^Memory\(survivor_secs=.*\): must be 0 for never, or greater than 0 and"):
        Memory(survivor_secs=secs)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("replicas", -1), ("upstream_bytes", 0)),
        *(("storage_every", 0), ("storage_every", "never"), ("directory", "s3://x")),
    ],
)
def test_a_setting_that_cannot_be_is_called_in_one_form(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"Memory({name}={value!r}): must be ")):
        Memory(**{name: value})


def test_a_time_beyond_the_launchers_patience(monkeypatch):
    assert Memory(survivor_secs="1min").survivor_secs == 60
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(ConfigError, match="torchrun kills ranks 30 s after"):
        Memory(survivor_secs="1min")
    assert Memory(survivor_secs=0).survivor_secs == 0


def logged(rank: int, sequence: int, step: int) -> Share:
    return due(rank, sequence=sequence, step=step, since=5)


LOGGED = [logged(rank, sequence, 33 + sequence) for sequence in (5, 6, 7) for rank in (0, 1)]


def of_log(shares: list[Share]) -> MemoryCheckpoint:
    return next(each for each in checkpoints_of(shares) if each.is_log)


def test_a_newer_step_that_survivors_sealed_is_left_behind():
    shares = [*LOGGED, own(0)]
    assert newer_than(of_log(shares), shares) is None, "it is of the log's last step"
    shares = [due(0), due(1), own(0, 41)]
    [older] = [each for each in checkpoints_of(shares) if each.is_complete]
    assert newer_than(older, shares) == LeftBehind(41, (0,))


@given(st.lists(st.sets(st.integers(40, 44), max_size=4), min_size=2, max_size=5))
def test_ranks_at_different_steps_meet_at_the_newest_that_each_of_them_has(reached):
    """Some stopped before an update and some after it, some sealed a checkpoint that was due, and some nothing."""
    ranks = len(reached)
    sealed = [replace(own(rank, step), writers=ranks) for rank, steps in enumerate(reached) for step in sorted(steps)]
    found = [each for each in checkpoints_of(sealed) if each.is_complete]
    common = set.intersection(*reached)
    assert [each.step for each in found] == sorted(common, reverse=True)
    if found:
        newest = max(set.union(*reached))
        ahead = tuple(rank for rank, steps in enumerate(reached) if newest in steps)
        assert newer_than(found[0], sealed) == (None if newest in common else LeftBehind(newest, ahead))


def test_who_knows_the_tokens_of_all_tells_them():
    early, late = replace(own(0), unagreed=True), own(1)
    assert teller_of({0: (early,), 1: (late,)}) == 1
    assert teller_of({0: (early,), 1: (replace(late, unagreed=True),)}) == 0
    assert is_agreed({0: (early,), 1: (late,)})
    assert not is_agreed({0: (early,), 1: (replace(late, unagreed=True),)})


def test_ranks_that_sealed_a_newer_step_than_the_log_has():
    shares = [*LOGGED, own(0, 41), own(1, 40), lent(1, 0, 41)]
    assert newer_than(of_log(shares), shares) == LeftBehind(41, (0,))


@pytest.mark.parametrize("kept", [[own(0)], [own(0), own(1)]], ids=["one rank", "all ranks"])
def test_a_step_of_a_log_that_was_made_dense_is_not_asked_for_beside_what_survivors_sealed_of_it(kept):
    shares, directory = [*LOGGED, *kept], "step_00000040_g3"
    assert checkpoint_in(shares, directory, stored=[directory]).is_parting
    assert checkpoint_in(shares, directory).is_parting == (len(kept) == 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_said_of_a_newer_step_names_other_ranks_only_if_there_are_any(ranks, caplog):
    shares = [replace(due(rank), writers=ranks) for rank in range(ranks)] + [replace(own(0, 41), writers=ranks)]
    with caplog.at_level("INFO", "moe_ckpt"):
        say_kept(shares, "step_00000040_g3")
    assert "rank 0 kept step 41 when training stopped" in caplog.text
    assert ("ranks" in caplog.text) == (ranks > 1)
    assert "step 40" in caplog.text
