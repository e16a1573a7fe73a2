"""Agreement off the critical path: messages travel while the next step is computed, and what is saved is exact."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import TokenBook
from moe_ckpt.errors import PeerLostError
from moe_ckpt.policies import Dense, Guarded, MoC, Needs
from moe_ckpt.run.events import SnapshotBegan
from moe_ckpt.storage import LocalStorage
from tests.unit.engine_parts import PATIENCE_SECS, Life, manifests, told


class LateCommunicator(SoloCommunicator):
    """One rank whose agreements take ``delay_secs``, as those of many ranks do; ``hold`` keeps them back."""

    agrees_late = True

    def __init__(self, delay_secs: float = 0.0, patience_secs: float = PATIENCE_SECS) -> None:
        super().__init__()
        self.delay_secs, self.patience_secs = delay_secs, patience_secs
        self.open = threading.Event()
        self.open.set()

    def agree(self, summed, largest):
        return self.start_agreement(lambda: summed, largest).result()

    def start_agreement(self, summed, largest):
        agreed = Future()

        def answer():
            time.sleep(self.delay_secs)
            if self.open.wait(self.patience_secs):
                agreed.set_result((summed(), largest.copy()))
            else:
                agreed.set_exception(TimeoutError("somebody waits, or a test forgot to open"))

        threading.Thread(target=answer, daemon=True).start()
        return agreed


def test_manifests_hold_the_tokens_of_their_own_step(tmp_path):
    """Though the ranks agree on them only when the snapshot is under way."""
    with Life(LocalStorage(tmp_path), policy=MoC(k=1), comm=LateCommunicator(), when_busy="wait") as life:
        life.go(5, settle=True)
        life.finish()
    for manifest in manifests(tmp_path):
        assert manifest.tokens["applied"] == (manifest.step * life.counts).tolist(), manifest.step
    assert [manifest.step for manifest in manifests(tmp_path)] == [1, 2, 3, 4, 5, 5], "the last in full, too"


def test_books_end_as_those_of_a_run_that_agreed_at_once(tmp_path):
    ended = []
    for at, comm in enumerate((SoloCommunicator(), LateCommunicator())):
        with Life(LocalStorage(tmp_path / str(at)), policy=Dense(), comm=comm, when_busy="wait") as life:
            life.go(6, settle=True)
            life.finish()
        last = life.session.completed(life.records[-1])
        ended.append((life.session.run_ledger.tokens.to_dict(), last.routed_tokens, last.committed_step))
    assert ended[0] == ended[1]


def test_a_plan_goes_by_what_was_true_a_step_before(tmp_path):
    seen = []

    class Asking(Dense):
        needs = Needs(popularity="tokens")

        def plan(self, context):
            seen.append((context.run.step, int(context.tokens.popularity.sum()), context.tokens.routed_tokens))
            return SnapshotPlan(context.run.step)

    with Life(LocalStorage(tmp_path), policy=Asking(), comm=LateCommunicator()) as life:
        life.go(3)
    one = int(life.counts.sum())
    assert seen == [(1, 0, 0), (2, one, one), (3, 2 * one, 2 * one)]


@pytest.mark.parametrize("policy", [MoC(1, 5, plt_budget=0.05), Guarded(MoC(1, 5), None, mlt_budget=0.05)], ids=str)
def test_a_budget_counts_the_step_that_is_not_agreed_on(tmp_path, policy):
    with Life(LocalStorage(tmp_path), policy=policy, comm=LateCommunicator(), when_busy="wait") as life:
        life.go(40, settle=True)
    lost = [TokenBook.from_dict(manifest.tokens, 2, 4).recover(manifest.step) for manifest in manifests(tmp_path)]
    portions = [fault.mlt if policy.plt_budget is None else fault.lost_tokens / fault.routed_tokens for fault in lost]
    assert 0.04 < max(portions) <= 0.05, portions


def test_training_goes_on_while_a_commit_waits_for_its_tokens(tmp_path):
    comm = LateCommunicator()
    with Life(LocalStorage(tmp_path), policy=Dense(), comm=comm, when_busy="wait") as life:
        comm.open.clear()
        life.go(1)  # returns, though nobody has agreed on step 1
        assert manifests(tmp_path) == []
        comm.open.set()
        life.settle()
        assert [manifest.step for manifest in manifests(tmp_path)] == [1]
        life.go(1)
        assert life.records[-1].committed_step is None, "heard a step later"
        life.go(1)
        assert life.records[-1].committed_step == 1


def test_only_the_join_before_an_update_waits_for_what_the_ranks_agree_on(tmp_path):
    comm = LateCommunicator()
    with Life(LocalStorage(tmp_path), policy=Dense(), comm=comm, when_busy="wait") as life:
        comm.open.clear()
        life.go(1)
        life.session.before_update(receive=False)  # an epoch ends, or a validation begins
        joining = threading.Thread(target=life.session.before_update)
        joining.start()
        joining.join(0.1)
        assert joining.is_alive()
        comm.open.set()
        joining.join(PATIENCE_SECS)
        comm.open.clear()
        life.session.after_update(2, told(life.counts), life.capture)  # returns, though nobody has agreed on step 2
        comm.open.set()


def test_a_plan_that_waits_is_committed_when_the_step_returns(tmp_path):
    class Waiting(Dense):
        def plan(self, context):
            return replace(SnapshotPlan(context.run.step, context.model.catalog.everything), wait=True)

    with Life(LocalStorage(tmp_path), policy=Waiting(), comm=LateCommunicator(0.05)) as life:
        life.go(1)
        assert [manifest.step for manifest in manifests(tmp_path)] == [1]


def test_a_peer_that_is_gone_is_noticed_at_the_next_step(tmp_path):
    class Alone(LateCommunicator):
        agree = SoloCommunicator.agree

        def start_agreement(self, summed, largest):
            agreed = Future()
            agreed.set_exception(PeerLostError(0, "all ranks to come to the same step", 1.0, "gone", ""))
            return agreed

    with Life(LocalStorage(tmp_path), policy=Dense(), comm=Alone()) as life:
        life.go(1)
        with pytest.raises(PeerLostError, match="all ranks to come to the same step"):
            life.go(1)
    assert manifests(tmp_path) == [], "without the tokens of its step there is no manifest"


def test_a_run_that_comes_back_counts_on_exactly(tmp_path):
    with Life(LocalStorage(tmp_path), policy=MoC(k=1), comm=LateCommunicator(), when_busy="wait") as life:
        life.go(4, settle=True)
    newest = manifests(tmp_path)[-1]
    with Life(LocalStorage(tmp_path), policy=MoC(k=1), comm=LateCommunicator(), when_busy="wait") as again:
        again.session.resume_from(newest)
        again.step = newest.step
        assert np.array_equal(again.session.run_ledger.tokens.applied, newest.step * life.counts)
        again.go(2, settle=True)
        again.finish()
    assert manifests(tmp_path)[-1].tokens["applied"] == (6 * life.counts).tolist()


def test_a_failure_between_a_snapshot_and_its_agreement_does_not_hang_the_end(tmp_path):
    def fail_at_third(event):
        begun.append(isinstance(event, SnapshotBegan))
        if begun[-1] and sum(begun) == 3:
            raise RuntimeError("something else")

    begun = []
    observers = [fail_at_third]
    with Life(LocalStorage(tmp_path), policy=Dense(), comm=LateCommunicator(), observers=observers) as life:
        life.go(2, settle=True)
        with pytest.raises(RuntimeError, match="something else"):
            life.go(1)
        life.session.close(PATIENCE_SECS)
    assert not [thread for thread in threading.enumerate() if thread.name == "moe_ckpt-persist"]
    assert [manifest.step for manifest in manifests(tmp_path)] == [1, 2]
