"""Snapshots that are intact, of a state that training left long ago: refused, in memory and on storage."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from moe_ckpt.core.step import Contents, WindowPlace
from moe_ckpt.ledger.freshness import FRESH, STALE, UNKNOWN, LastChecksums, combined_freshness
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.slices.compiling import GRADIENTS
from moe_ckpt.slices.snapshot import FreshnessWatch
from moe_ckpt.storage import LocalStorage
from tests.unit.engine_parts import Life, ThreadRanks, run_threads, told
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory_only import at, committed, life, no_memory_of_other_tests, where  # noqa: F401

GATE = "gate/0"
KEYS = ("model/w", "optim/0/w/exp_avg", "side/0/buffer")


def named(*keys: str, operator: str = GATE) -> list[SimpleNamespace]:
    return [SimpleNamespace(key=key, operator=operator) for key in keys]


def seals(*given: tuple[int, list[int]]) -> list[int]:
    """(updates, checksums of the three slices) of each snapshot, and what it shows."""
    checksums, slices, numbers = LastChecksums(), named(*KEYS), np.arange(len(KEYS))
    return [checksums.seal(slices, numbers, np.array(digests, dtype=np.uint64), updates) for updates, digests in given]


@pytest.mark.parametrize(
    ("second", "shows"),
    [
        ((2, [1, 1, 1]), STALE),
        ((2, [1, 1, 9]), STALE),  # buffers are no witness
        ((2, [1, 9, 1]), FRESH),
        ((2, [9, 1, 1]), FRESH),
        ((1, [1, 1, 1]), UNKNOWN),  # no update since
        ((1, [9, 9, 9]), UNKNOWN),  # somebody else has changed it
    ],
)
def test_after_an_update_something_must_have_moved(second, shows):
    assert seals((1, [1, 1, 1]), second) == [UNKNOWN, shows]


def test_weights_alone_need_not_move():
    """Without optimizer state (plain SGD) a learning rate of 0 leaves them as they are."""
    checksums, slices = LastChecksums(), named("model/w")
    number, digest = np.arange(1), np.ones(1, dtype=np.uint64)
    assert [checksums.seal(slices, number, digest, updates) for updates in (1, 2)] == [UNKNOWN, UNKNOWN]
    assert checksums.seal(slices, number, digest + np.uint64(1), 3) == FRESH


def test_an_expert_without_tokens_says_nothing():
    """A window that began anew may have nothing else to compare at the end of training."""
    checksums, slices = LastChecksums(), named("optim/0/w/exp_avg", operator="expert/0/1")
    number, digest = np.arange(1), np.ones(1, dtype=np.uint64)
    assert [checksums.seal(slices, number, digest, updates) for updates in (1, 2)] == [UNKNOWN, UNKNOWN]
    assert checksums.seal(slices, number, digest + np.uint64(1), 3) == FRESH


def test_a_slice_is_compared_with_the_last_time_that_it_was_saved():
    checksums, slices = LastChecksums(), named("optim/0/a/m", "optim/0/b/m")
    one = np.ones(1, dtype=np.uint64)
    shown = [checksums.seal(slices, np.array([number]), one, updates) for number, updates in ((0, 1), (1, 2), (0, 3))]
    assert shown == [UNKNOWN, UNKNOWN, STALE]


def _part(kind: str, key: str, digest: int) -> SimpleNamespace:
    numbers, entries = np.zeros(1, dtype=np.int64), [SimpleNamespace(key=key, operator=GATE)]
    part = SimpleNamespace(kind=kind, cuts=(1,), slices=numbers, shelved=entries)
    return SimpleNamespace(compiled=part, checksums=np.asarray([digest], dtype=np.uint64))


@pytest.mark.parametrize(("logged", "shows"), [(False, STALE), (True, UNKNOWN)])
def test_an_optimizer_that_rests_is_not_stale_where_another_one_consumes_gradients(logged, shows):
    watch, anchors = FreshnessWatch(), _part("expert", "optim/0/state/w/exp_avg", 7)
    parts = [anchors, *([_part(GRADIENTS, "grad/0/v", 1)] if logged else [])]
    snapshot = SimpleNamespace(facts=SimpleNamespace(updates=1), contents=Contents(()))
    assert watch.seen(SimpleNamespace(**vars(snapshot), sealed=parts)) == UNKNOWN, "nothing was sealed before"
    snapshot.facts.updates = 2
    assert watch.seen(SimpleNamespace(**vars(snapshot), sealed=parts)) == shows


@pytest.mark.parametrize(
    ("digests", "shows"),
    [((7, 7), [UNKNOWN, STALE]), ((7, 8), [UNKNOWN, FRESH]), ((8, 7), [FRESH, FRESH])],
    ids=["none changed", "the last changed", "the first changed"],
)
def test_a_sparse_window_is_stale_if_nothing_in_all_its_slots_has_changed(digests, shows):
    """The operators of one slot may all be experts that got no tokens."""
    watch = FreshnessWatch()
    entries = [SimpleNamespace(key=f"optim/0/{name}/exp_avg", operator=GATE) for name in "vw"]

    def seen(updates: int, slot: int, digest: int) -> int:
        numbers = np.full(1, slot, dtype=np.int64)
        part = SimpleNamespace(kind="expert", cuts=(1,), slices=numbers, shelved=entries)
        contents, facts = Contents((), window=WindowPlace(1, 2, slot)), SimpleNamespace(updates=updates)
        sealed = SimpleNamespace(compiled=part, checksums=np.asarray([digest], dtype=np.uint64))
        return watch.seen(SimpleNamespace(contents=contents, facts=facts, sealed=(sealed,)))

    assert [seen(1, 0, 7), seen(2, 1, 7)] == [UNKNOWN, UNKNOWN], "nothing was sealed before"
    assert [seen(3, 0, digests[0]), seen(4, 1, digests[1])] == shows


def test_one_rank_that_saw_a_change_is_enough():
    assert combined_freshness([STALE, UNKNOWN, FRESH]) == FRESH
    assert combined_freshness([STALE, UNKNOWN]) == STALE
    assert combined_freshness([]) == UNKNOWN


def stand_still(only: Life) -> None:
    """What is checkpointed is not what is trained any more."""
    only.state.advance = lambda step: None  # type: ignore[method-assign]


def test_storage_refuses_what_no_update_has_changed(tmp_path, caplog):
    with Life(LocalStorage(tmp_path), policy=Dense()) as only:
        only.go(2, settle=True)
        stand_still(only)
        only.go(6, settle=True)
    assert committed(tmp_path) == ["step_00000001", "step_00000002"]
    assert "the checkpoint of step 3 was not committed; training continues. the snapshot is stale" in caplog.text


def test_a_partial_checkpoint_is_proved_too(tmp_path):
    with Life(LocalStorage(tmp_path), policy=MoC(k=1)) as only:
        only.go(6, settle=True)
        assert len(committed(tmp_path)) == 6, "each of them, though other experts were saved"


def test_a_step_whose_update_was_left_out_changes_nothing_and_is_not_stale(tmp_path):
    with Life(LocalStorage(tmp_path), policy=Dense()) as only:
        only.go(2, settle=True)
        only.session.before_update()
        only.step = 3
        only.session.after_update(3, told(0 * only.counts), only.capture, updated=False)
        only.settle()
        only.go(1, settle=True)
    assert len(committed(tmp_path)) == 4


def test_memory_does_not_take_it_and_no_later_life_comes_back_to_it(where, caplog):  # noqa: F811
    with life(where) as first:
        first.go(4, settle=True)
        stand_still(first)
        first.go(3, settle=True)
        assert first.session.tier.complete_step == 4
    assert caplog.text.count("memory does not hold the checkpoint of step 5: the snapshot is stale") == 1
    with life(where) as second:
        restored, _ = come_back(second)
        assert restored.manifest.step == 4
        assert_state(second, at(4))


def test_ranks_judge_together(tmp_path):
    """Rank 1's share stands still, as one of rows that nobody trains may; both do, and it is refused."""
    ranks = ThreadRanks(2)

    def body(comm):
        with Life(LocalStorage(tmp_path), policy=Dense(), comm=comm) as only:
            only.go(1, settle=True)
            if comm.rank:
                stand_still(only)
            only.go(1, settle=True)
            stand_still(only)
            only.go(1, settle=True)

    run_threads(ranks, body)
    assert committed(tmp_path) == ["step_00000001", "step_00000002"]
