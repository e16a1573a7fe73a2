"""The simulator lets those stages go back together that a trainer would, whichever ranks are dead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.localized.segments import Segment, local_recovery
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.run import run
from moe_ckpt_sim.run.failing import Failing
from moe_ckpt_sim.run.run import simulate
from tests.sim.builders import LOCAL, sparse

FIRST_SECS = 100.5
LAYOUTS = [
    *((Parallel(pp=pp, dp=dp, ep=ep), gpus) for pp, dp, ep in ((4, 1, 2), (4, 2, 1), (2, 2, 2)) for gpus in (1, 2, 4)),
    *((Parallel(pp=6), gpus) for gpus in (1, 2, 3)),
]
"""With ranks of a node; at 3 of 6, and 4 of 8, a node has several stages."""


class Watched(Failing):
    """Notes the segments that recover when the last failure has come."""

    def _local(self, *given: Any) -> Any:
        attempts = super()._local(*given)
        seen.append(tuple(sorted(each.segment for each in attempts)))
        return attempts


seen: list[tuple[Segment, ...]] = []


@pytest.fixture(autouse=True, scope="module")
def watched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Failing", Watched)
        yield


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(LAYOUTS), st.data())
def test_segments_are_those_of_the_trainers_rule(laid_out, data):
    """Nodes die one after the other, or some at once, before any recovery is over."""
    parallel, gpus = laid_out
    nodes = parallel.ranks // gpus
    dead = data.draw(st.lists(st.integers(0, nodes - 1), unique=True, min_size=1, max_size=nodes - 1), label="nodes")
    pauses = data.draw(st.lists(st.sampled_from([0.0, 0.4]), min_size=len(dead), max_size=len(dead)), label="pauses")
    processes = data.draw(st.lists(st.booleans(), min_size=len(dead), max_size=len(dead)), label="processes")
    events, at = [], FIRST_SECS
    for node, pause, process in zip(dead, pauses, processes, strict=True):
        at += pause
        events.append(FailureEvent(at, node, process=process))
    tried = sparse(
        4,
        failures=Trace(recorded=tuple(events)),
        parallel=parallel,
        cluster={"nodes": nodes, "gpus_per_node": gpus},
        system={**LOCAL, "replicas": nodes - 1},
        duration_secs=200.0,
    )
    seen.clear()
    simulate(tried)

    stage_of = [rank // parallel.stage_ranks for rank in range(parallel.ranks)]
    kept = [None if rank // gpus in dead else 9 for rank in range(parallel.ranks)]
    expected = local_recovery(stage_of, kept)
    if expected is None:  # every stage lost a rank: the simulator takes it for one segment of all
        assert seen[-1] == (Segment(0, parallel.pp - 1),)
    else:
        assert seen[-1] == expected.segments
