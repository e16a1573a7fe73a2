"""Token bookkeeping against an independent recount: a plain list of events, replayed from scratch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import FaultRecord, TokenBook, tokens_at_risk

LAYERS, EXPERTS = 2, 3


def counts(*rows):
    return np.array(rows, dtype=np.int64)


steps = st.lists(
    st.lists(st.integers(0, 9), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS).map(
        lambda flat: np.array(flat, dtype=np.int64).reshape(LAYERS, EXPERTS)
    ),
    min_size=1,
    max_size=4,
)
pairs = st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)))
lives = st.lists(st.lists(st.tuples(steps, pairs), max_size=4), min_size=1, max_size=4)
"""A run: lives ended by faults; a life is (optimizer steps, experts then saved in a committed checkpoint)."""


class Recount:
    """The same run told by a routing log: which tokens each expert's weights have really seen."""

    def __init__(self):
        self.log = []  # per optimizer step of the surviving line of history, the routed counts
        self.seen = {}  # (layer, expert) -> indices of the steps in its newest saved copy
        self.lost_for_ever = {}  # (layer, expert) -> steps whose updates a recovery threw away
        self.restart_at = 0
        self.lost = 0

    def checkpoint(self, experts):
        for pair in experts:
            self.seen[pair] = len(self.log)
        self.restart_at = len(self.log)
        self.committed = (dict(self.seen), dict(self.lost_for_ever), self.lost)

    committed = ({}, {}, 0)

    def fault(self):
        """Back to the newest checkpoint; each expert is its newest saved copy."""
        self.seen, self.lost_for_ever, self.lost = (dict(self.committed[0]), dict(self.committed[1]), self.committed[2])
        del self.log[self.restart_at :]
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                pair = (layer, expert)
                first = max(self.seen.get(pair, 0), self.lost_for_ever.get(pair, 0))
                self.lost += sum(int(step[pair]) for step in self.log[first:])
                self.lost_for_ever[pair] = len(self.log)


@settings(max_examples=150)
@given(lives)
def test_lost_tokens_equal_a_recount_over_faults_and_restarts(run):
    book, recount = TokenBook(LAYERS, EXPERTS), Recount()
    stored = json.dumps(book.to_dict())  # what the newest committed manifest holds
    for life in run:
        for routed, saved in life:
            for routed_now in routed:
                book.apply(routed_now)
                recount.log.append(routed_now)
            book.mark_saved(Tier.STORAGE, saved, book.applied.copy())
            recount.checkpoint(saved)
            stored = json.dumps(book.to_dict())
        book.apply(np.ones((LAYERS, EXPERTS), dtype=np.int64))  # a step after the checkpoint, gone with the fault
        recount.log.append(np.ones((LAYERS, EXPERTS), dtype=np.int64))
        book = TokenBook.from_dict(json.loads(stored), LAYERS, EXPERTS)
        book.recover(recount.restart_at)
        recount.fault()
        assert book.lost_tokens == recount.lost
        routed_in_all = sum(int(step.sum()) for step in recount.log)
        assert book.routed_tokens == routed_in_all
        assert book.plt == (recount.lost / routed_in_all if routed_in_all else 0.0)


def test_plt_by_hand():
    """Two steps of 8 assignments; expert (0, 1) was saved after the first only, (1, 2) never."""
    book = TokenBook(LAYERS, EXPERTS)
    book.apply(counts([1, 2, 1], [2, 1, 1]))
    book.mark_saved(Tier.STORAGE, [(0, 1)], book.applied.copy())
    book.apply(counts([1, 3, 0], [2, 1, 1]))
    book.mark_saved(Tier.STORAGE, [(0, 0), (0, 2), (1, 0), (1, 1)], book.applied.copy())
    assert book.unsaved().tolist() == [[0, 3, 0], [0, 0, 2]]
    assert book.plt == 0
    assert book.plt_after(int(book.unsaved().sum())) == 5 / 16
    assert book.recover(2) == FaultRecord(2, lost_tokens=5, stale_experts=2, routed_tokens=16, mlt=5 / 16)
    assert book.plt == book.plt_after(int(book.unsaved().sum())) == 5 / 16
    assert book.unsaved().sum() == 0


def test_a_commit_that_comes_late_counts_as_of_its_snapshot():
    book = TokenBook(1, 2)
    book.apply(counts([4, 4]))
    at = book.applied.copy()
    book.apply(counts([1, 2]))
    book.mark_saved(Tier.STORAGE, [(0, 0)], at)
    assert book.unsaved().tolist() == [[1, 6]]


def test_an_older_commit_does_not_take_back_a_newer_one():
    book = TokenBook(1, 1)
    old = book.applied.copy()
    book.apply(counts([5]))
    book.mark_saved(Tier.STORAGE, [(0, 0)], book.applied.copy())
    book.mark_saved(Tier.STORAGE, [(0, 0)], old)
    assert book.unsaved().tolist() == [[0]]


def test_tiers_are_kept_apart():
    book = TokenBook(1, 2)
    book.apply(counts([3, 4]))
    book.mark_saved(Tier.STORAGE, [(0, 0)], book.applied.copy())
    book.mark_in_host([(0, 0), (0, 1)], book.applied.copy())
    assert book.unsaved(Tier.STORAGE).tolist() == [[0, 4]]
    assert book.unsaved(Tier.HOST).tolist() == [[0, 0]]
    assert book.unsaved(Tier.PEER).tolist() == [[0, 4]], "a tier that holds nothing leaves storage"


def test_host_memory_holds_one_checkpoint_only():
    book = TokenBook(1, 2)
    book.apply(counts([3, 4]))
    book.mark_in_host([(0, 0)], book.applied.copy())
    book.mark_in_host([(0, 1)], book.applied.copy())
    assert book.unsaved(Tier.HOST).tolist() == [[3, 0]]


def test_what_came_from_host_memory_is_not_lost_but_storage_still_lacks_it():
    book = TokenBook(1, 3)
    book.apply(counts([3, 4, 5]))
    book.mark_saved(Tier.STORAGE, [(0, 0)], book.applied.copy())
    fault = book.recover(1, tokens_from_host=counts([0, 4, 0]))
    assert (fault.lost_tokens, fault.stale_experts) == (5, 1)
    assert book.unsaved().tolist() == [[0, 4, 0]]
    assert book.recover(1).lost_tokens == 4, "a second fault, and now the memory is gone too"


def test_nothing_routed_is_nothing_lost():
    book = TokenBook(LAYERS, EXPERTS)
    assert (book.plt, book.plt_after(int(book.unsaved().sum())), book.recover(0).lost_tokens) == (0.0, 0.0, 0)


def test_counts_stay_exact_beyond_what_a_float_holds():
    book = TokenBook(1, 1)
    book.apply(counts([2**53]))
    book.apply(counts([1]))
    again = TokenBook.from_dict(json.loads(json.dumps(book.to_dict())), 1, 1)
    assert again.routed_tokens == 2**53 + 1


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (2, 3)])
def test_a_book_survives_being_written(shape):
    book = TokenBook(*shape)
    book.apply(np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape))
    book.mark_saved(Tier.HOST, [(0, 0)] if shape[0] else [], book.applied.copy())
    book.recover(7)
    again = TokenBook.from_dict(json.loads(json.dumps(book.to_dict())), *shape)
    assert again.to_dict() == book.to_dict()
    assert again.faults == book.faults
    assert again.applied.shape == shape


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (3, 2), (0, 0)])
def test_a_book_of_another_model_is_refused(shape):
    with pytest.raises(ValueError, match="token counts have shape"):
        TokenBook.from_dict(TokenBook(*shape).to_dict(), LAYERS, EXPERTS)


def test_reading_does_not_alias_what_was_read():
    read = counts([1])
    book = TokenBook.from_dict({"applied": read, "saved": {}, "faults": [], "mlt": []}, 1, 1)
    book.apply(counts([1]))
    assert read.tolist() == [[1]]


# --- momentary lost tokens ---


@pytest.mark.parametrize(
    ("unsaved", "routed", "portion"),
    [
        (((0, 0), (0, 0)), ((50, 50), (90, 10)), 0.0),
        (((3, 0), (1, 2)), ((50, 50), (90, 10)), 0.03),  # 3 % of each layer, not 6 % as in the paper's sum
        (((5, 0), (0, 0)), ((5, 5), (900, 100)), 0.25),  # half of one layer, however few tokens that are
        (((50, 50), (90, 10)), ((50, 50), (90, 10)), 1.0),
        (((0, 0), (4, 0)), ((0, 0), (8, 8)), 0.125),  # a layer without tokens loses none
        (((0, 0), (0, 0)), ((0, 0), (0, 0)), 0.0),
        ((), (), 0.0),
    ],
)
def test_tokens_at_risk_are_the_mean_portion_of_a_layers_own(unsaved, routed, portion):
    assert tokens_at_risk(counts(*unsaved), counts(*routed)) == portion


def test_tokens_at_risk_of_a_checkpoint_are_what_a_recovery_from_it_loses():
    book = TokenBook(1, EXPERTS)
    book.apply(counts((10, 20, 70)))
    book.mark_saved(Tier.STORAGE, [(0, 1), (0, 2)], book.applied.copy())
    risk = tokens_at_risk(book.unsaved(), book.applied)
    assert risk == 0.1
    assert book.recover(5).mlt == risk
    assert (book.plt, tokens_at_risk(book.unsaved(), book.applied)) == (risk, 0.0)


def test_mlt_is_that_of_one_recovery_and_plt_that_of_all():
    """Layer 0 has four times the tokens of layer 1, and each fault takes one expert of one of them."""
    book = TokenBook(2, 2)
    for lost in ((1, 1), (0, 0)):
        book.apply(counts((40, 40), (10, 10)))
        kept = [(layer, expert) for layer in range(2) for expert in range(2) if (layer, expert) != lost]
        book.mark_saved(Tier.STORAGE, kept, book.applied.copy())
        book.recover(1)
    assert [fault.mlt for fault in book.faults] == [(0 + 10 / 20) / 2, (40 / 160 + 0) / 2]
    assert (max(fault.mlt for fault in book.faults), book.plt) == (0.25, (10 + 40) / 200)
