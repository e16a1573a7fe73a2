"""Megatron on two nodes with copies of each other: a rank stands still (SIGSTOP) while a copy is on its way to it.

For less than the timeout, or for more; then training goes on, and a node is lost.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.integration.pauses import is_stopped, steps_of
from tests.megatron.exactness import LIFE_SECS, Case, life_of
from tests.megatron.running import Running, running
from tests.megatron.test_memory_phases import DATA, PIPELINE, POLICIES, WINDOWS, comes_back_from_memory, lose
from tests.support.waiting import retry_until

pytestmark = pytest.mark.slow

layouts = pytest.mark.parametrize("layout", [PIPELINE, DATA], ids=["pp2-ep2", "ep2-dp2"])
paused_ranks = pytest.mark.parametrize("paused", [0, 2], ids=["rank 0", "rank 2"])
lost_nodes = pytest.mark.parametrize("lost", [None, "the other", "the paused"])
AT, MORE, STEPS = 5, 5, 40
"""The iteration in which the rank stands still, and those that all make afterwards."""
TIMEOUT_SECS, SHORT_SECS = 4.0, 1.5


@dataclass
class Paused:
    """A rank of it stands still.

    sources: Ranks of the other node whose copies this rank holds; by rank, the newest of these.
    """

    life: Running
    rank: int

    @property
    def nodes(self) -> tuple[int, int]:
        """Its own, and the other one."""
        return self.rank // 2, 1 - self.rank // 2

    @property
    def sources(self) -> dict[int, int]:
        own, other = self.nodes
        [held] = self.life.node(own).glob(f"**/rank_{self.rank:05d}")
        found = {rank: steps_of(held, rank) for rank in (2 * other, 2 * other + 1)}
        return {rank: max(steps) for rank, steps in found.items() if steps}

    def said(self, rank: int) -> str:
        return self.life.said(rank)

    def goes_on(self) -> None:
        os.kill(self.life.pids[self.rank], signal.SIGCONT)

    def kill_all(self) -> int:
        """Some iterations later."""
        self.life.comes_to(AT + MORE)
        return self.life.kill_all()


@contextmanager
def standing_still(case: Case, directory: Path, rank: int, phase: str) -> Iterator[Paused]:
    """Once the ranks whose copies it holds have sealed the newest step, of which it gets none."""
    with running(case, directory, replace(life_of(case, directory), pause=(rank, AT, phase))) as life:
        assert retry_until(lambda: is_stopped(life.pids[rank]), LIFE_SECS)
        paused = Paused(life, rank)
        assert retry_until(lambda: all(life.newest(each) >= AT - 1 for each in paused.sources))
        assert paused.sources
        yield paused


def comes_back(paused: Paused, lost: str | None) -> int:
    """The iteration that all resume from, without a node; they then end as if nothing had been."""
    life = paused.life
    if lost is not None:
        lose(life.directory, paused.nodes[lost == "the other"])
    return comes_back_from_memory(life)


@layouts
@paused_ranks
def test_a_short_pause_costs_time_and_nothing_else(paused, layout, tmp_path):
    """The copies that were on their way arrive, and all after them: nothing is lost with the node that they are of."""
    case = replace(layout, steps=STEPS, reseed=False)
    with standing_still(case, tmp_path, paused, "forward") as still:
        time.sleep(SHORT_SECS)
        assert set(still.sources.values()) <= {AT - 3, AT - 2}, "copies are on their way"
        assert still.life.reached() == AT - 1, "training waits in its own collectives"
        still.goes_on()
        newest = still.kill_all()
    assert not any("gets no more copies" in still.said(rank) for rank in range(4))
    assert comes_back(still, "the other") >= newest - 2


@layouts
@paused_ranks
@lost_nodes
def test_a_long_pause_costs_what_only_the_lost_node_had(lost, paused, layout, tmp_path):
    """The rank that stood still gets no more copies, and goes on sending its own: so the other node's loss costs the
    iterations since, and its own none. Training waits in its own collectives, and goes on."""
    case = replace(layout, steps=STEPS, reseed=False, options={"timeout_secs": TIMEOUT_SECS})
    with standing_still(case, tmp_path, paused, "forward") as still:
        copied = still.sources
        assert set(copied.values()) <= {AT - 3, AT - 2}, "copies are on their way"
        missed = {
            source: f"rank {paused} gets no more copies of rank {source} until the run is restarted: no byte was "
            f"transferred for {TIMEOUT_SECS:g} s ({AT - 1 - step} steps behind)"
            for source, step in copied.items()
        }
        time.sleep(TIMEOUT_SECS / 2)
        assert not any("gets no more copies" in still.said(rank) for rank in range(4)), "not before the timeout"
        for source, text in missed.items():
            assert retry_until(lambda: text in still.said(source), 5 * TIMEOUT_SECS), still.said(source)  # noqa: B023
        assert still.life.reached() == AT - 1
        still.goes_on()
        newest = still.kill_all()
    for rank in range(4):
        assert still.said(rank).count("gets no more copies") == (rank in copied), "no other way is cut"
    if lost == "the other":
        assert comes_back(still, lost) == min(copied.values())
    else:
        assert comes_back(still, lost) >= newest - 2


@layouts
@paused_ranks
@lost_nodes
def test_a_rank_that_does_not_come_to_the_end_of_an_iteration_ends_training(lost, paused, layout, tmp_path):
    """The others have ended the iteration, and wait by messages of the library's. Each says that it missed a rank, and
    keeps its newest iteration. All go on from there, or, without one node, from the newest that has copies."""
    case = replace(layout, steps=STEPS, reseed=False, options={"timeout_secs": TIMEOUT_SECS}, survives=True)
    with standing_still(case, tmp_path, paused, "updated") as still:
        left_with = {None: AT, "the other": min(still.sources.values()), "the paused": AT - 1}[lost]
        assert left_with >= AT - 3
        time.sleep(2 * TIMEOUT_SECS)
        still.goes_on()
    for rank, outcome in enumerate(still.life.outcomes):
        missed = f"PeerLostError: rank {rank} .{{,80}}waiting for all ranks to come to the same step"
        assert outcome.exitcode == 1, outcome
        assert re.search(missed, outcome.error or "")
    assert f"training stops (PeerLostError): rank 0 keeps its state of iteration {AT} in memory" in still.said(0)
    assert comes_back(still, lost) == left_with


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "dense"])
@pytest.mark.parametrize(("is_long", "lost"), [(False, "the other"), (True, "the other"), (True, "the paused")])
def test_under_every_exact_policy_a_pause_costs_no_bit(is_long, lost, policy, tmp_path):
    """Rank 2 stands still for less than the timeout, or for longer: no more copies then. A node is lost later."""
    case = replace(DATA, policy=POLICIES[policy], steps=STEPS, reseed=False, options={"timeout_secs": TIMEOUT_SECS})
    with standing_still(case, tmp_path, 2, "forward") as still:
        sources = still.sources
        if is_long:
            for each in sources:
                assert retry_until(lambda: "gets no more copies" in still.said(each), 5 * TIMEOUT_SECS)  # noqa: B023
        else:
            time.sleep(SHORT_SECS)
        still.goes_on()
        newest = still.kill_all()
    assert any("gets no more copies" in still.said(rank) for rank in range(4)) == is_long
    step = comes_back(still, lost)
    if is_long and lost == "the other":
        assert step < AT, "the node that stood still has none of the later copies"
    else:
        assert step >= newest - WINDOWS
