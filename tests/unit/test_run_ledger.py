"""The run_ledger: what a policy is told while snapshots are under way, and after they end or a restore."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents, Step, Tier, WindowPlace
from moe_ckpt.core.tokens import TokenBook
from moe_ckpt.core.window import Window
from moe_ckpt.format.manifest import Manifest, ModelRecord, OperatorRecord
from moe_ckpt.metrics import facts_of
from moe_ckpt.run.run_ledger import InFlight, RunLedger
from moe_ckpt.session.session import StepRecord
from tests.unit.builders import catalog

MODEL = catalog(1, 3)
EVERYTHING = tuple(op.id for op in MODEL.operators)
NEVER = [[-1, -1, -1]]


def counts(*tokens):
    return np.array([tokens], dtype=np.int64)


def entry(run_ledger, number, step, operators, held=(), window=None, slot=0):
    at = None if window is None else WindowPlace(window.start, window.size, slot)
    contents, identity = Contents(operators, held, window=at), Step("run", "", 0, step, number)
    return InFlight(identity, contents, run_ledger.tokens.applied.copy())


def begin(run_ledger, number, step, operators, held=()):
    run_ledger.begun(entry(run_ledger, number, step, operators, held))


def context(run_ledger, step):
    return run_ledger.context(step, everywhere(MODEL.layers, 1))


def saved_at_one():
    """Everything is committed at step 1; 5, 3 and 2 tokens came since."""
    run_ledger = RunLedger(MODEL)
    run_ledger.routed(counts(1, 1, 1))
    begin(run_ledger, 0, 1, EVERYTHING)
    run_ledger.resolved(0, committed=True)
    run_ledger.routed(counts(5, 3, 2))
    return run_ledger


def test_what_is_under_way_counts_as_saved_only_where_that_is_expected():
    run_ledger = saved_at_one()
    begin(run_ledger, 1, 2, ("expert/0/0",))
    run_ledger.routed(counts(4, 0, 0))
    now = context(run_ledger, 3)
    assert now.tokens.unsaved.tolist() == [[9, 3, 2]]
    assert now.tokens.expected_unsaved[Tier.STORAGE].tolist() == [[4, 3, 2]]
    assert now.tokens.chosen_at[Tier.STORAGE].tolist() == [[2, 1, 1]]
    assert (now.run.last_step, now.run.index) == (2, 2)


def test_nothing_builds_on_a_window_that_is_under_way_or_on_what_came_before_it():
    run_ledger, window = saved_at_one(), Window(2, (EVERYTHING[:2], EVERYTHING[2:]))
    for slot in range(2):
        assert context(run_ledger, 2 + slot).run.missing == ()
        run_ledger.begun(entry(run_ledger, 1 + slot, 2 + slot, EVERYTHING, (), window, slot), window)
    assert context(run_ledger, 4).run.missing == EVERYTHING
    begin(run_ledger, 3, 4, EVERYTHING[1:])
    assert context(run_ledger, 5).run.missing == EVERYTHING[:1]
    for sequence in (1, 2, 3):
        run_ledger.resolved(sequence, committed=True)
        assert context(run_ledger, 5).run.missing == EVERYTHING[:1]


def test_nothing_builds_on_a_slot_whose_window_was_broken_off():
    run_ledger, window = saved_at_one(), Window(2, (EVERYTHING[:2], EVERYTHING[2:]))
    for step in (2, 3, 4):
        slot = step % 2
        run_ledger.begun(entry(run_ledger, step, step, window.slots[slot], (), window, slot), window)
    for sequence in (2, 3):
        run_ledger.resolved(sequence, committed=True)
    assert context(run_ledger, 5).run.missing == EVERYTHING, (
        "that of step 4 is under way, and its window will never end"
    )


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_under_way_a_checkpoint_that_adds_what_is_missing_is_whole(seed):
    """Parts, windows that end and windows that are broken off, in any order, while up to two are being written."""
    rng, run_ledger = random.Random(seed), RunLedger(MODEL)
    under_way: list[InFlight] = []
    held, window, slot = set(), None, 0  # operators that a partial checkpoint may build on, as of what is committed
    for step in range(1, 60):
        while len(under_way) > rng.randrange(3):
            snapshot = under_way.pop(0)
            contents = snapshot.contents
            if contents.is_checkpoint:
                held = set() if contents.window is not None else held | set(contents.full)
                assert contents.window is not None or held == set(EVERYTHING), f"step {snapshot.step} lacks operators"
            run_ledger.resolved(snapshot.identity.number, committed=True)
        missing = context(run_ledger, step).run.missing
        if window is not None and rng.random() < 0.8:
            slot += 1
        elif rng.random() < 0.4:
            cut = rng.randrange(1, len(EVERYTHING))
            window, slot = Window(step, (EVERYTHING[:cut], EVERYTHING[cut:])), 0
        else:
            window, slot = None, 0
        chosen = set(missing) | {op for op in EVERYTHING if rng.random() < 0.3}
        operators = window.slots[slot] if window is not None else tuple(op for op in EVERYTHING if op in chosen)
        if not operators:
            continue
        snapshot = entry(run_ledger, step, step, operators, (), window, slot)
        run_ledger.begun(snapshot, window)
        under_way.append(snapshot)
        window = None if window is None or slot + 1 == window.size else window


def test_what_failed_counts_for_nothing():
    run_ledger = saved_at_one()
    begin(run_ledger, 1, 2, ("expert/0/0",))
    run_ledger.resolved(1, committed=False)
    now = context(run_ledger, 3)
    assert now.tokens.unsaved.tolist() == now.tokens.expected_unsaved[Tier.STORAGE].tolist() == [[5, 3, 2]]
    assert now.tokens.chosen_at[Tier.STORAGE].tolist() == [[1, 1, 1]]


def test_nothing_is_missing_while_the_first_checkpoint_is_under_way_and_all_of_it_again_when_it_failed():
    run_ledger = RunLedger(MODEL)
    assert (context(run_ledger, 1).run.missing, context(run_ledger, 1).tokens.chosen_at[Tier.STORAGE].tolist()) == (
        EVERYTHING,
        NEVER,
    )
    begin(run_ledger, 0, 1, EVERYTHING)
    assert context(run_ledger, 2).run.missing == ()
    run_ledger.resolved(0, committed=False)
    assert (context(run_ledger, 2).run.missing, context(run_ledger, 2).tokens.chosen_at[Tier.STORAGE].tolist()) == (
        EVERYTHING,
        NEVER,
    )


def test_at_risk_is_what_the_newest_committed_checkpoint_lacks_not_what_was_routed_since():
    run_ledger = saved_at_one()
    begin(run_ledger, 1, 2, ("expert/0/0",), held=("expert/0/1",))
    run_ledger.routed(counts(100, 100, 100))
    run_ledger.resolved(1, committed=True)
    assert run_ledger.ledger.at_risk.tokens == 3 + 2
    assert run_ledger.tokens.unsaved(Tier.HOST).tolist() == [[100, 100, 102]]


def restored(same_store=True, held=None):
    """RunLedger after a return to step 2, which holds expert 0; the others are of step 1."""
    before = saved_at_one()
    before.tokens.mark_saved(Tier.STORAGE, [(0, 0)], before.tokens.applied)
    steps = dict.fromkeys(EVERYTHING, 2) | {"expert/0/1": 1, "expert/0/2": 1}
    manifest = Manifest(
        run_id="r", step=2, generation=0, world_size=1, index=7, created_unix_secs=0.0, model=ModelRecord(""),
        files=(), operators={op: OperatorRecord(step, ()) for op, step in steps.items()}, states=(), policy={},
        tokens=before.tokens.to_dict(),
    )  # fmt: skip
    run_ledger = RunLedger(MODEL)
    return run_ledger, run_ledger.resume_from(manifest, same_store=same_store, tokens_from_host=held)


def test_a_restored_run_goes_on_counting_from_its_checkpoint():
    run_ledger, fault = restored()
    now = context(run_ledger, 3)
    assert (fault.lost_tokens, fault.stale_experts, fault.routed_tokens) == (5, 2, 13)
    assert (now.run.last_step, now.run.index, now.run.missing) == (2, 8, ())
    assert now.tokens.chosen_at[Tier.STORAGE].tolist() == [[2, 1, 1]]
    assert (now.run.lost_tokens, now.tokens.routed_tokens, now.run.faults) == (5, 13, (fault,))
    # A return to it again would lose the same tokens.
    assert (run_ledger.committed_step, run_ledger.ledger.at_risk.tokens) == (2, 0)


def test_what_came_back_from_memory_is_at_risk_until_storage_holds_it():
    run_ledger, fault = restored(held=counts(0, 4, 0))
    assert fault.lost_tokens == 2
    assert run_ledger.tokens.unsaved().tolist() == [[0, 3, 0]]
    assert run_ledger.ledger.at_risk.tokens == 3


def test_what_only_memory_had_is_not_at_risk_where_storage_is_of_one_step():
    """A return to storage computes those steps again: only what its experts lack of its own step would be lost."""
    dense, lacking = saved_at_one(), saved_at_one()
    before = dense.tokens.applied - counts(5, 3, 2)
    dense.tokens.applied = before
    lacking.tokens.applied = before + counts(0, 2, 0)
    for stored, at_risk in ((dense, 0), (lacking, 2)):
        run_ledger, manifest = RunLedger(MODEL), manifest_of(saved_at_one(), 4)
        fault = run_ledger.resume_from(
            manifest, same_store=True, tokens_from_host=manifest_tokens(manifest), beneath=manifest_of(stored, 1)
        )
        assert (fault.lost_tokens, run_ledger.committed_step) == (0, 1)
        assert run_ledger.ledger.at_risk.tokens == at_risk


def manifest_of(run_ledger, step):
    return Manifest(
        run_id="r", step=step, generation=0, world_size=1, index=7, created_unix_secs=0.0, model=ModelRecord(""),
        files=(), operators=dict.fromkeys(EVERYTHING, OperatorRecord(step, ())), states=(), policy={},
        tokens=run_ledger.tokens.to_dict(),
    )  # fmt: skip


def manifest_tokens(manifest):
    return np.array(manifest.tokens["applied"], dtype=np.int64)


def test_a_checkpoint_of_another_store_lends_its_history_and_no_copy():
    run_ledger, fault = restored(same_store=False)
    now = context(run_ledger, 3)
    chosen_at = now.tokens.chosen_at[Tier.STORAGE].tolist()
    assert (now.run.missing, chosen_at, now.run.last_step) == (EVERYTHING, NEVER, 2)
    assert (run_ledger.committed_step, fault.lost_tokens) == (None, 5)


def test_the_metrics_are_told_what_committed_copies_lack():
    run_ledger = saved_at_one()
    begin(run_ledger, 1, 2, ("expert/0/0",))
    told = facts_of(StepRecord(3), run_ledger)
    assert told["unsaved"].tolist() == [[5, 3, 2]]
    assert told["ages"].tolist() == [[2, 2, 2]]


def test_experts_that_only_memory_had_newer_are_rescued_however_much_was_lost_besides():
    """Storage has seen 4 tokens of each expert, memory 5, 4 and 8, and 10 were routed."""
    model = catalog(1, 3)
    book = TokenBook(1, 3)
    book.applied = np.full((1, 3), 10)
    book.saved = {Tier.STORAGE: np.full((1, 3), 4)}
    operators = dict.fromkeys(model.everything, OperatorRecord(4, ()))
    of_run = {"run_id": "r", "generation": 0, "world_size": 1, "index": 0, "created_unix_secs": 0.0, "files": ()}
    manifest = Manifest(step=10, model=ModelRecord(""), operators=operators, states=(), tokens=book.to_dict(), **of_run)
    ledger = RunLedger(model, outlives_process=True)
    ledger.resume_from(manifest, same_store=False, tokens_from_host=np.array([[5, 4, 8]]))
    assert ledger.rescued == {"expert/0/0", "expert/0/2"}
