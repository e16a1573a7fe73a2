"""Tokens of a step on which ranks had not agreed when one died: who computes it again counts them again."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_ckpt import Memory
from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.step import Facts, Step
from moe_ckpt.core.tokens import TokenBook
from moe_ckpt.errors import PeerLostError
from moe_ckpt.format.manifest import Manifest, ModelRecord
from moe_ckpt.localized.attempt import KeptState, LocalPart, Rejoining, with_recounted_tokens
from moe_ckpt.localized.segments import LocalRecovery, Segment, local_recoveries
from moe_ckpt.policies import Dense
from moe_ckpt.reading.memory.memory_shares import Share, is_agreed
from moe_ckpt.reading.memory.slot_views import Described, SnapshotFacts
from moe_ckpt.recovery.executing import Restored
from moe_ckpt.storage import LocalStorage
from moe_ckpt.survivors import newest_step
from tests.unit.engine_parts import Life, ThreadRanks, run_threads, told

BEFORE = np.array([[100, 200], [300, 400]])
COUNTED = [np.array([[1, 0], [0, 2]]), np.array([[10, 0], [20, 0]]), np.array([[0, 400], [0, 0]])]
"""Of each rank, in the step."""


def summed(recounted=(), *, agreed=False) -> list[list[int]]:
    """Tokens by the end of the step, as memory has them.

    recounted: ranks whose counts are not to be taken. agreed: rank 0 knows those of all.
    """
    found = SnapshotFacts()
    for rank, own in enumerate(COUNTED):
        found.add(Described((rank, "", 0), rank_tokens=None if agreed and rank == 0 else own))
    found.facts = Facts(0, "", BEFORE, counted=None if agreed else COUNTED[0])
    found.settle(recounted)
    return found.require_facts(7).applied.tolist()


def test_what_ranks_that_go_back_had_counted_does_not_count():
    assert summed() == (BEFORE + sum(COUNTED)).tolist()
    assert summed((1, 2)) == (BEFORE + COUNTED[0]).tolist()
    assert summed((1, 2), agreed=True) == BEFORE.tolist(), "where ranks had agreed, nothing is counted again"


def test_a_step_on_which_ranks_had_not_agreed_counts_as_kept():
    """Of each rank the newest: the last is lost, and the third stopped an update before the others."""
    identities = [Step("run", "life", 1, step, step, parting=True) for step in (8, 8, 7)]
    shares = [
        Share(rank, "a", rank, identity, rank, 4, None, "", sealer=rank, unagreed=identity.step == 8)
        for rank, identity in enumerate(identities)
    ]
    kept = KeptState(SimpleNamespace(shares=shares), 4)
    assert kept.steps() == [8, 8, 7, None]
    assert [is_agreed(kept.of_step(step).snapshots[0]) for step in (8, 7)] == [False, True]
    first = local_recoveries([0, 0, 1, 2], kept.steps())[0]
    assert first == LocalRecovery(8, (Segment(1, 2),), (2, 3)), "who had agreed on the step before does not hold it up"


def joined(experts: bool = True) -> Restored:
    """What the ranks that keep their state make of it."""
    applied = BEFORE + COUNTED[0] if experts else np.zeros((0, 0), dtype=np.int64)
    tokens = TokenBook(*applied.shape)
    tokens.applied = applied
    manifest = Manifest("run", 7, 1, 3, 0, 0.0, ModelRecord(()), (), {}, (), tokens=tokens.to_dict())
    return Restored(manifest, {}, applied.copy(), from_memory=True)


def part(*, goes_back: bool, recounts: bool) -> LocalPart:
    recovery = LocalRecovery(7, (Segment(1, 2),), (1, 2))
    return LocalPart(recovery, 5, goes_back, 0, {}, recounts)


@pytest.mark.parametrize("recounts", [False, True])
def test_all_ranks_go_on_with_what_those_counted_that_went_back(recounts):
    """In the last step only, and each of them once."""

    def body(comm):
        went_on = []
        session = SimpleNamespace(
            comm=comm,
            tier=SimpleNamespace(left_slots=SimpleNamespace(step_replayed=lambda *, equal: None)),
            run_ledger=SimpleNamespace(tokens=TokenBook(2, 2)),
            resume_from=lambda manifest, **rest: went_on.append((manifest, rest)),
        )
        rejoining = Rejoining(part(goes_back=comm.rank > 0, recounts=recounts), joined(), session)
        rejoining.wait()
        if comm.rank:
            rejoining.step_replayed(told(np.full((2, 2), 1_000_000)), last=False)
            rejoining.step_replayed(told(COUNTED[comm.rank]), last=True)
        [(manifest, rest)] = went_on
        return manifest.tokens["applied"], rest["tokens_from_host"].tolist()

    expected = (BEFORE + (sum(COUNTED) if recounts else COUNTED[0])).tolist()
    assert run_threads(ThreadRanks(3), body) == [(expected, expected)] * 3


def test_a_model_without_experts_has_nothing_to_count():
    none = np.zeros((0, 0), dtype=np.int64)
    found = with_recounted_tokens(joined(experts=False), none)
    assert found.manifest.tokens["applied"] == []
    assert found.tokens_from_host.shape == (0, 0)


class Hanging(SoloCommunicator):
    """One rank, as one of many, whose agreements are never answered once it ``hangs``; until ``abort``."""

    agrees_late = True
    hangs = False

    def __init__(self) -> None:
        super().__init__()
        self.unanswered: list[Future] = []

    def start_agreement(self, summed, largest):
        agreed = Future()
        if self.hangs:
            self.unanswered.append(agreed)
        else:
            agreed.set_result((summed(), largest))
        return agreed

    def abort(self, cause):
        for agreed in self.unanswered:
            agreed.set_exception(PeerLostError(0, "the other ranks", 1.0, cause))


def sealed_beside_a_silent_peer(where: Path, secs: float) -> newest_step.Survived:
    """What is sealed within ``secs``, where the peer that the agreement waits for lives, but is not going to answer."""
    comm, memory = Hanging(), where / "memory"
    memory.mkdir()
    with Life(LocalStorage(where / "store"), policy=Dense(), comm=comm, memory=Memory(directory=memory)) as life:
        survivor = life.session.follow(newest_step.Survivor)
        life.go(1, settle=True)
        comm.hangs = True
        life.go(1)
        found = survivor.seal(secs)
    assert (found.step, found.problem) == (2, "")
    return found


def test_a_snapshot_that_waits_for_the_agreement_is_not_in_the_way_of_what_survivors_seal(tmp_path, monkeypatch):
    monkeypatch.setattr(newest_step, "AGREEMENT_SECS", 0.1)
    sealed_beside_a_silent_peer(tmp_path, 10.0)


def test_a_short_time_to_seal_is_not_spent_on_the_agreement(tmp_path):
    found = sealed_beside_a_silent_peer(tmp_path, newest_step.AGREEMENT_SECS)
    assert found.secs < newest_step.AGREEMENT_SECS - 1.0, "sealing has most of it"
