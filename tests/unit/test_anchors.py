"""Which snapshots a step of a gradient log needs: for its writer, for memory that keeps them, and for a reader."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.step import Step
from moe_ckpt.ledger.freshness import STALE
from moe_ckpt.ledger.ledger import Anchors
from moe_ckpt.ledger.retention import needed_steps, newest_checkpoint
from moe_ckpt.reading.memory.memory_shares import Share, beneath_of, checkpoints_of, snapshots_of
from moe_ckpt_sim.run.durable import MovingLedger
from tests.support.gradient_chain import LoggedStep, chain
from tests.unit.builders import catalog, memory_step

MODEL = catalog(1, 1)
ALL = A, B, C = MODEL.everything


def test_without_anchors_nothing_can_be_logged():
    book = Anchors(MODEL)
    assert book.since(0, ()) is None
    assert book.since(0, (A, B)) is None
    assert book.since(0, ALL) == 0


def test_a_step_needs_all_back_to_its_oldest_anchor():
    book = Anchors(MODEL)
    book.begun(4, 9, ALL)
    assert book.since(5, (A,)) == 4
    book.begun(5, 10, (A,))
    book.begun(6, 12, (B,))
    assert book.steps.tolist() == [10, 12, 9]
    assert book.since(7, ()) == 4
    assert book.since(7, (C,)) == 5


def test_a_lost_snapshot_takes_all_anchors_before_it():
    book = Anchors(MODEL)
    for sequence, anchored in enumerate((ALL, (A,), (B,), (C,))):
        book.begun(sequence, sequence, anchored)
    book.broken(1)
    assert book.since(4, ()) is None, "a was anchored in what is lost"
    assert book.since(4, (A,)) == 2
    assert book.steps.tolist() == [-1, 2, 3]
    book.broken()
    assert book.since(4, (A, B)) is None


def test_the_oldest_anchor_is_that_of_a_recount():
    rng = random.Random(1)
    book, history = Anchors(MODEL), []
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
    return memory_step(sequence, since=since, **{"complete": True, **more})


def test_what_the_newest_complete_step_needs_stays():
    steps = [held(0), held(1, 0), held(2, 0), held(3, 1), held(4, 2, complete=None)]
    assert [each.number for each in newest_checkpoint(steps)] == [1, 2, 3]
    assert needed_steps(steps) == {1, 2, 3, 4}


def test_a_step_that_lost_one_of_its_own_is_no_checkpoint():
    steps = [held(0), held(1, 0, complete=False), held(2, 0)]
    assert [each.number for each in newest_checkpoint(steps)] == [0]
    assert [each.number for each in newest_checkpoint(steps[1:])] == []


def test_what_peers_have_of_a_log_stays_beside_the_newest():
    steps = [held(0), held(1, 0), held(2, 0), held(3, 2, copied=False), held(4, 3)]
    assert needed_steps(steps) == {0, 1, 2, 3, 4}, "4 is not whole at the peers, which lack 3"
    assert needed_steps([*steps, held(5, 4)]) == {4, 5}


@st.composite
def rounds(draw):
    """Of each snapshot what it anchors, None where it is lost, and how many after it begin before it is complete."""
    anchored = st.one_of(st.none(), st.sampled_from(ALL).map(lambda one: (one,)), st.just(ALL), st.just(()))
    return draw(st.lists(st.tuples(anchored, st.integers(0, 2)), min_size=1, max_size=14))


def chains(log, step):
    return {op: chain(log, op, step) for op in ALL}


def used(log, step):
    """Snapshots of which the newest one, or any operator's way to it, needs something."""
    ways = chains(log, step).values()
    return {step, *(at for way in ways for at in (way.anchor, *way.gradients))}


@given(rounds())
def test_what_stays_is_what_ways_to_the_newest_step_and_later_ones_need(given_rounds):
    """Against chains of operators: nothing that a step needs goes, and no whole snapshot stays that none needs."""
    book, steps, log, ends, lost = Anchors(MODEL), {}, {}, {}, set()
    for sequence, (anchored, late) in enumerate(given_rounds):
        ends[sequence] = sequence + late, anchored is not None
        since = book.since(sequence, anchored or ())
        anchored = ALL if since is None else anchored or ()
        book.begun(sequence, sequence, anchored)
        of = None if anchored == ALL else since
        steps[sequence] = memory_step(sequence, since=of)
        log[sequence] = LoggedStep(frozenset(ALL), frozenset(ALL), frozenset(anchored))
        for at in [at for at, (when, _) in ends.items() if when <= sequence]:
            steps[at] = replace(steps[at], complete=ends.pop(at)[1])
            if not steps[at].complete:
                lost.add(at)
                book.broken(at)
        kept = needed_steps(steps.values())
        newest = newest_checkpoint(steps.values())
        left = {at: logged for at, logged in log.items() if at in kept}
        if newest:
            last = newest[-1].number
            assert {each.number for each in newest} == used(log, last) == {at for at in kept if at <= last}
            assert chains(left, last) == chains(log, last)
        for at in [at for at in kept if steps[at].complete is None and steps[at].contents.since is not None]:
            hopeless = not lost.isdisjoint(range(steps[at].contents.since, at))
            assert hopeless or chains(left, at) == chains(log, at), "it may still become the newest"
        steps = {at: step for at, step in steps.items() if at in kept or step.complete is None}


def share(sequence, writer=0, since=None, **more):
    fitted = {"step": sequence + 1, "freshness": 0, **more}
    identity = Step("run", "life", 1, fitted["step"], sequence)
    return Share(0, "node", 10 * sequence + writer, identity, writer, 2, None, "", 0, fitted["freshness"], False, since)


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
    book = Anchors(MODEL)
    book.begun(0, 1, ALL, ())
    book.begun(1, 2, (A,), (B,))
    assert book.steps.tolist() == [2, 1, -1]
    assert set(book.log_operators) == {B}
    assert book.since(2, (A,), (B,)) == 0
    assert book.since(2, (), (A,)) == 1
    assert book.since(2, (A,), (C,)) is None
    assert book.without_anchor((A, C)) == {C}
    book.begun(2, 3, (B,), (A,))
    assert set(book.log_operators) == {A}
    book.broken(2)
    assert set(book.log_operators) == {A, B}, "what was paid by the lost snapshot is owed again"
    assert book.steps.tolist() == [-1, -1, -1]
    book.begun(3, 4, (A, B), ())
    book.broken(1)
    assert not book.log_operators, "it was paid after that"


def test_a_share_that_is_gone_makes_all_that_need_it_incomplete():
    found = checkpoints_of([*both(0), share(1, 0, 0), *both(2, 1), *both(3, 2)])
    assert {each.step: each.is_complete for each in found} == {4: True, 3: False, 2: False, 1: True}


def test_without_a_snapshot_or_with_a_stale_one_a_step_is_not_offered():
    assert [each.step for each in checkpoints_of([*both(0), *both(2, 0)])] == [1]
    assert [each.step for each in checkpoints_of([*both(0, freshness=STALE), *both(1, 0)])] == []


class Naive:
    """The same by dictionaries, one operator after the other."""

    def __init__(self):
        self.anchors, self.owed, self.repaid = {}, set(), {}

    def begun(self, sequence, step, anchored, gradients):
        self.anchors |= dict.fromkeys(anchored, (sequence, step))
        if gradients is not None:
            self.anchors = {op: at for op, at in self.anchors.items() if op in (*anchored, *gradients)}
            self.repaid |= dict.fromkeys(self.owed.intersection(anchored), sequence)
            self.owed = self.owed.difference(anchored).union(gradients)

    def broken(self, sequence):
        self.anchors = {op: at for op, at in self.anchors.items() if sequence is not None and at[0] > sequence}
        self.owed |= {op for op, at in self.repaid.items() if at == sequence}
        self.repaid = {op: at for op, at in self.repaid.items() if op not in self.owed}


some = st.sets(st.sampled_from(ALL)).map(lambda found: tuple(sorted(found)))


@given(st.lists(st.one_of(st.tuples(some, st.one_of(st.none(), some)), st.one_of(st.none(), st.integers(0, 9)))))
def test_arrays_tell_what_dictionaries_do(told):
    book, naive = Anchors(MODEL), Naive()
    for at, each in enumerate(told):
        if isinstance(each, tuple):
            full, gradients = each
            book.begun(at, 2 * at, full, gradients)
            naive.begun(at, 2 * at, full, gradients)
        else:
            book.broken(each)
            naive.broken(each)
        assert set(book.log_operators) == naive.owed
        assert book.steps.tolist() == [naive.anchors.get(op, (-1, -1))[1] for op in ALL]
        assert book.without_anchor(ALL) == set(ALL) - naive.anchors.keys()
        for gradients in (None, (B, C)):
            needed = {*(ALL if gradients is None else gradients)} - {A}
            expected = min(naive.anchors[op][0] for op in needed) if needed <= naive.anchors.keys() else None
            assert book.since(len(told), (A,), gradients) == expected


def test_the_ledger_moves_its_anchors_and_a_life_after_it_has_none():
    ledger = MovingLedger(MODEL)
    ledger.anchors.begun(0, 4, (A, B))
    before = ledger.anchors.steps
    ledger.move(10, ledger.tokens.applied)
    assert ledger.anchors.steps.tolist() == [14, 14, -1]
    assert before.tolist() == [4, 4, -1], "who was told of them before is not told otherwise"
    assert ledger.as_of(ledger.tokens.applied).anchors.steps.tolist() == [-1, -1, -1]
