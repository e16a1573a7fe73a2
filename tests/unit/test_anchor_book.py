"""Which snapshots a step of a gradient log needs: for its writer, for memory that keeps them, and for a reader."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.anchor_book import AnchorBook
from moe_ckpt.core.freshness import STALE
from moe_ckpt.core.gradient_chain import LoggedStep, chains
from moe_ckpt.core.memory_retention import MemoryStep, needed, newest_checkpoint
from moe_ckpt.core.memory_shares import Share, beneath_of, checkpoints_of, snapshots_of

ALL = ("a", "b", "c")


def test_without_anchors_nothing_can_be_logged():
    book = AnchorBook(ALL)
    assert book.since(0, ()) is None
    assert book.since(0, ("a", "b")) is None
    assert book.since(0, ALL) == 0


def test_a_step_needs_all_back_to_its_oldest_anchor():
    book = AnchorBook(ALL)
    book.begun(4, 9, ALL)
    assert book.since(5, ("a",)) == 4
    book.begun(5, 10, ("a",))
    book.begun(6, 12, ("b",))
    assert book.steps().tolist() == [10, 12, 9]
    assert book.since(7, ()) == 4
    assert book.since(7, ("c",)) == 5


def test_a_lost_snapshot_takes_all_anchors_before_it():
    book = AnchorBook(ALL)
    for sequence, anchored in enumerate((ALL, ("a",), ("b",), ("c",))):
        book.begun(sequence, sequence, anchored)
    book.broken(1)
    assert book.since(4, ()) is None, "a was anchored in what is lost"
    assert book.since(4, ("a",)) == 2
    assert book.steps().tolist() == [-1, 2, 3]
    book.broken()
    assert book.since(4, ("a", "b")) is None


def test_the_oldest_anchor_is_that_of_a_recount():
    rng = random.Random(1)
    book, history = AnchorBook(ALL), []
    for sequence in range(300):
        if rng.random() < 0.1:
            lost = rng.choice([None, *range(max(0, sequence - 4), sequence)])
            book.broken(lost)
            history = [] if lost is None else [(at, anchored) for at, anchored in history if at > lost]
        anchored = tuple(op for op in ALL if rng.random() < 0.4)
        newest = {op: at for at, those in history for op in those} | dict.fromkeys(anchored, sequence)
        expected = min((*newest.values(), sequence)) if len(newest) == len(ALL) else None
        assert book.since(sequence, anchored) == expected
        if expected is not None or anchored == ALL:
            book.begun(sequence, sequence, anchored)
            history.append((sequence, anchored))


def held(sequence, since=None, **more):
    return MemoryStep(sequence, since=since, **{"complete": True, **more})


def test_what_the_newest_complete_step_needs_stays():
    steps = [held(0), held(1, 0), held(2, 0), held(3, 1), held(4, 2, complete=None)]
    assert [each.sequence for each in newest_checkpoint(steps)] == [1, 2, 3]
    assert needed(steps) == {1, 2, 3, 4}


def test_a_step_that_lost_one_of_its_own_is_no_checkpoint():
    steps = [held(0), held(1, 0, complete=False), held(2, 0)]
    assert [each.sequence for each in newest_checkpoint(steps)] == [0]
    assert [each.sequence for each in newest_checkpoint(steps[1:])] == []


def test_what_peers_have_of_a_log_stays_beside_the_newest():
    steps = [held(0), held(1, 0), held(2, 0), held(3, 2, copied=False), held(4, 3)]
    assert needed(steps) == {0, 1, 2, 3, 4}, "4 is not whole at the peers, which lack 3"
    assert needed([*steps, held(5, 4)]) == {4, 5}


@st.composite
def rounds(draw):
    """Of each snapshot what it anchors, None where it is lost, and how many after it begin before it is complete."""
    anchored = st.one_of(st.none(), st.sampled_from(ALL).map(lambda one: (one,)), st.just(ALL), st.just(()))
    return draw(st.lists(st.tuples(anchored, st.integers(0, 2)), min_size=1, max_size=14))


def used(log, step):
    """Snapshots of which the newest one, or any operator's way to it, needs something."""
    ways = chains(log, ALL, step).values()
    return {step, *(at for way in ways for at in (way.anchor, *way.gradients))}


@given(rounds())
def test_what_stays_is_what_ways_to_the_newest_step_and_later_ones_need(given_rounds):
    """Against chains of operators: nothing that a step needs goes, and no whole snapshot stays that none needs."""
    book, steps, log, ends, lost = AnchorBook(ALL), {}, {}, {}, set()
    for sequence, (anchored, late) in enumerate(given_rounds):
        ends[sequence] = sequence + late, anchored is not None
        since = book.since(sequence, anchored or ())
        anchored = ALL if since is None else anchored or ()
        book.begun(sequence, sequence, anchored)
        of = None if anchored == ALL else since
        steps[sequence] = MemoryStep(sequence, since=of)
        log[sequence] = LoggedStep(frozenset(ALL), frozenset(ALL), frozenset(anchored))
        for at in [at for at, (when, _) in ends.items() if when <= sequence]:
            steps[at] = replace(steps[at], complete=ends.pop(at)[1])
            if not steps[at].complete:
                lost.add(at)
                book.broken(at)
        kept = needed(steps.values())
        newest = newest_checkpoint(steps.values())
        left = {at: logged for at, logged in log.items() if at in kept}
        if newest:
            last = newest[-1].sequence
            assert {each.sequence for each in newest} == used(log, last) == {at for at in kept if at <= last}
            assert chains(left, ALL, last) == chains(log, ALL, last)
        for at in [at for at in kept if steps[at].complete is None and steps[at].since is not None]:
            hopeless = not lost.isdisjoint(range(steps[at].since, at))
            assert hopeless or chains(left, ALL, at) == chains(log, ALL, at), "it may still become the newest"
        steps = {at: step for at, step in steps.items() if at in kept or step.complete is None}


def share(sequence, writer=0, since=None, **more):
    fitted = {"step": sequence + 1, "freshness": 0, **more}
    fields = fitted["step"], writer, 2, None, ""
    return Share(0, "node", 10 * sequence + writer, "life", 1, sequence, *fields, 0, fitted["freshness"], False, since)


def both(sequence, since=None, **more):
    return [share(sequence, writer, since, **more) for writer in (0, 1)]


def test_a_step_is_found_with_all_that_it_needs():
    shares = [*both(0), *both(1, 0), *both(2, 1)]
    found = checkpoints_of(shares)
    assert [(each.step, len(each.snapshots), each.is_complete, each.is_log) for each in found] == [
        (3, 2, True, True),
        (2, 2, True, True),
        (1, 1, True, False),
    ]
    beneath = beneath_of(found[0], snapshots_of(shares))
    assert [each.step for each in beneath] == [1], "what it has itself it takes from nowhere else"


def test_a_step_whose_chain_is_gone_still_gives_what_it_has_in_full():
    shares = [*both(1, 0), *both(4, 2), *both(6), *both(7, 6)]
    newest = checkpoints_of(shares)[0]
    assert (newest.step, len(newest.snapshots)) == (8, 2)
    assert [each.step for each in beneath_of(newest, snapshots_of(shares))] == [2, 5]


def test_what_is_left_out_has_no_anchor_any_more_and_is_owed_if_gradients_led_to_it():
    book = AnchorBook(ALL)
    book.begun(0, 1, ALL, ())
    book.begun(1, 2, ("a",), ("b",))
    assert book.steps().tolist() == [2, 1, -1]
    assert set(book.owed) == {"b"}
    assert book.since(2, ("a",), ("b",)) == 0
    assert book.since(2, (), ("a",)) == 1
    assert book.since(2, ("a",), ("c",)) is None
    assert book.without_anchor(("a", "c")) == {"c"}
    book.begun(2, 3, ("b",), ("a",))
    assert set(book.owed) == {"a"}
    book.broken(2)
    assert set(book.owed) == {"a", "b"}, "what was paid by the lost snapshot is owed again"
    assert book.steps().tolist() == [-1, -1, -1]
    book.begun(3, 4, ("a", "b"), ())
    book.broken(1)
    assert not book.owed, "it was paid after that"


def test_a_share_that_is_gone_makes_all_that_need_it_incomplete():
    found = checkpoints_of([*both(0), share(1, 0, 0), *both(2, 1), *both(3, 2)])
    assert {each.step: each.is_complete for each in found} == {4: True, 3: False, 2: False, 1: True}


def test_without_a_snapshot_or_with_a_stale_one_a_step_is_not_offered():
    assert [each.step for each in checkpoints_of([*both(0), *both(2, 0)])] == [1]
    assert [each.step for each in checkpoints_of([*both(0, freshness=STALE), *both(1, 0)])] == []
