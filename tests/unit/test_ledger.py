"""Which version of every operator is safe, what its experts have seen, and what is owed."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ckpt.core.step import Tier
from moe_ckpt.ledger.ledger import NEVER, Ledger
from moe_ckpt_sim.run.durable import Durable, MovingLedger
from moe_ckpt_sim.run.moving_ledger import MovingRunLedger
from tests.unit.builders import catalog, mixed

MODEL = catalog(2, 3)
EVERYTHING = MODEL.everything
ALWAYS = tuple(op.id for op in MODEL.always_saved)


def routed(*tokens: int) -> np.ndarray:
    """So many to each expert of both layers."""
    return np.array([tokens, tokens], dtype=np.int64)


def missing(ledger: Ledger) -> tuple[str, ...]:
    return ledger.catalog.ids_of(ledger.lacking) if ledger.lacking.any() else ()


@pytest.fixture
def ledger() -> MovingLedger:
    """Everything as of step 10, expert 0 of layer 0 as of step 12; 5, 3 and 2 tokens a step."""
    found = MovingLedger(MODEL)
    found.tokens.apply(routed(5, 3, 2))
    found.record(10, EVERYTHING, found.tokens.applied.copy())
    found.tokens.apply(routed(5, 3, 2))
    found.record(12, ("expert/0/0", *ALWAYS), found.tokens.applied.copy())
    return found


def test_versions_of_experts(ledger):
    assert ledger.expert_steps().tolist() == [[12, 10, 10], [10, 10, 10]]
    assert ledger.expert_ages(13).tolist() == [[1, 3, 3], [3, 3, 3]]


def test_before_the_first_checkpoint_there_is_nothing():
    ledger = Ledger(MODEL)
    assert missing(ledger) == EVERYTHING
    assert (ledger.expert_steps() == NEVER).all()
    assert (ledger.expert_ages(5) == -1).all()
    assert ledger.at_risk.tokens == 0


def test_layers_of_different_sizes_are_padded_with_never():
    ragged = Ledger(mixed(1, 3))
    ragged.record(4, ragged.catalog.everything, np.zeros((2, 3), dtype=np.int64))
    assert ragged.expert_steps().tolist() == [[4, NEVER, NEVER], [4, 4, 4]]


def test_what_the_newest_checkpoint_lacks_is_at_risk(ledger):
    assert ledger.at_risk.tokens == 3 + 2 + 5 + 3 + 2
    assert ledger.tokens.plt_after(ledger.at_risk.tokens) == 15 / 40
    assert ledger.at_risk.mlt == (5 / 20 + 10 / 20) / 2
    ledger.tokens.apply(routed(0, 0, 9))
    assert ledger.at_risk.mlt == (5 / 20 + 10 / 20) / 2, "of the step that a failure would return to"
    assert ledger.as_of(ledger.at_risk.routed).tokens.recover(12).mlt == ledger.at_risk.mlt
    assert ledger.tokens.unsaved().tolist() == [[0, 3, 11], [5, 3, 11]]


def test_memory_holds_what_was_kept_and_what_storage_got(ledger):
    ledger.tokens.apply(routed(1, 1, 1))
    ledger.record(13, ALWAYS, ledger.tokens.applied.copy(), in_host=("expert/1/1",))
    assert ledger.tokens.unsaved(Tier.HOST).tolist() == [[1, 4, 3], [6, 0, 3]]
    assert ledger.tokens.unsaved(Tier.STORAGE).tolist() == [[1, 4, 3], [6, 4, 3]]
    assert ledger.expert_steps().tolist() == [[12, 10, 10], [10, 10, 10]], "memory is no checkpoint"


def test_versions_only_move_forward_and_only_where_they_are_newer(ledger):
    seen = ledger.tokens.applied.copy()
    with pytest.raises(ValueError, match="expert/0/0 is recorded at step 12, cannot go back to step 11"):
        ledger.record(11, ("expert/0/1", "expert/0/0"), seen)
    assert ledger.expert_steps().tolist() == [[12, 10, 10], [10, 10, 10]], "nothing of it was recorded"
    ledger.record(11, ("expert/0/1",), seen)
    assert ledger.expert_steps().tolist() == [[12, 11, 10], [10, 10, 10]]


def test_a_window_is_a_version_that_no_partial_checkpoint_builds_on():
    ledger = Ledger(MODEL)
    ledger.record(4, EVERYTHING, routed(1, 1, 1), whole=False)
    assert missing(ledger) == EVERYTHING
    assert (ledger.expert_steps() == 4).all()
    ledger.record(5, EVERYTHING, routed(1, 1, 1))
    assert missing(ledger) == ()
    ledger.record(9, EVERYTHING, routed(1, 1, 1), whole=False)
    assert missing(ledger) == EVERYTHING, "what came before a window lies beneath it, too old to build on"
    ledger.record(10, EVERYTHING[1:], routed(1, 1, 1))
    assert list(missing(ledger)) == [EVERYTHING[0]]


def test_a_partial_checkpoint_saves_only_its_own():
    ledger = Ledger(MODEL)
    ledger.record(4, EVERYTHING[:-1], routed(1, 1, 1))
    assert list(missing(ledger)) == [EVERYTHING[-1]]


def test_what_is_forgotten_is_missing_and_unsaved(ledger):
    ledger.forget()
    assert missing(ledger) == EVERYTHING
    assert (ledger.expert_steps() == NEVER).all()
    assert ledger.at_risk.tokens == ledger.tokens.routed_tokens == 40


def test_what_is_owed_is_owed_until_a_checkpoint_of_that_very_change(ledger):
    ledger.owe(["gate/0", "expert/0/1"], 1)
    paid = ledger.mandatory
    ledger.owe(["gate/0"], 2)
    ledger.pay(paid)
    assert ledger.mandatory == {"gate/0": 2}
    ledger.pay({"gate/0": 2})
    assert ledger.mandatory == {}


def test_a_copy_as_of_other_tokens_shares_nothing(ledger):
    copied = ledger.as_of(routed(7, 7, 7))
    copied.record(20, EVERYTHING, routed(7, 7, 7))
    copied.owe(["gate/0"], 1)
    copied.forget()
    assert copied.tokens.applied.tolist() == routed(7, 7, 7).tolist()
    assert ledger.expert_steps().tolist() == [[12, 10, 10], [10, 10, 10]]
    assert ledger.mandatory == {}
    assert ledger.tokens.unsaved().sum() == 15


def test_a_ledger_moved_ahead_looks_the_same_from_there(ledger):
    unsaved, ages = ledger.tokens.unsaved(), ledger.expert_ages(13)
    ledger.move(7, routed(5, 3, 2))
    assert (ledger.tokens.unsaved() == unsaved).all()
    assert (ledger.expert_ages(13 + 7) == ages).all()
    assert ledger.tokens.applied.tolist() == routed(45, 27, 18).tolist()


def test_moving_a_ledger_that_never_saved_makes_no_versions():
    ledger = MovingLedger(MODEL)
    ledger.move(3, routed(1, 1, 1))
    assert (ledger.expert_steps() == NEVER).all()


def test_a_return_loses_what_neither_storage_nor_memory_that_is_alive_has_seen(ledger):
    ledger.tokens.apply(routed(1, 1, 1))
    ledger.record(13, ALWAYS, ledger.tokens.applied.copy(), in_host=("expert/1/1", "expert/1/2"))
    alive = np.zeros((2, 3), dtype=bool)
    alive[1, 1] = True
    books = MovingRunLedger(MODEL)
    fault = books.return_to(Durable(13, ledger, 0, None), alive, None)
    assert (fault.lost_tokens, fault.stale_experts) == (1 + 4 + 3 + 6 + 3, 5)
    again = books.return_to(Durable(13, books.ledger, 0, None), alive, None)
    assert again.lost_tokens == 4, "what memory had newer is not on storage yet, and memory is empty"


def test_a_simulated_run_comes_back_by_the_plan_that_a_trainer_makes():
    """Expert by expert: the newest copy up to the step, from own memory where that is alive, peers, storage."""
    ledger, tokens = MovingLedger(MODEL), routed(1, 1, 1)
    ledger.record(1, EVERYTHING, 1 * tokens, in_host=None)
    ledger.hold(EVERYTHING, 2, 2 * tokens, Tier.PEER)
    ledger.hold((*ALWAYS, "expert/0/0", "expert/0/1", "expert/1/2"), 4, 4 * tokens)
    ledger.hold(("expert/0/2",), 6, 6 * tokens)  # of a later state, to which nobody goes back
    ledger.record(3, ("expert/1/1",), 3 * tokens, in_host=None)
    ledger.tokens.applied = 5 * tokens
    alive = np.ones((2, 3), dtype=bool)
    alive[0, 1] = False
    books = MovingRunLedger(MODEL, outlives_process=True)
    fault = books.return_to(Durable(5, ledger, 0, None), alive, None)
    seen = [[4, 2, 2], [2, 3, 4]]
    assert fault.lost_tokens == (5 * tokens - seen).sum()
    newer = {"expert/0/0", "expert/0/1", "expert/0/2", "expert/1/0", "expert/1/2"}
    assert books.rescued == newer, "all but one that storage has as new"
    gone = books.return_to(Durable(5, ledger, 0, None), None, None)
    assert gone.lost_tokens == (5 * tokens - [[1, 1, 1], [1, 3, 1]]).sum()
