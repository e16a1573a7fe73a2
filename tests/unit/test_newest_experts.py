"""Older snapshots stay in memory for the experts that no newer one has, and for those alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.ledger.retention import MemoryStep, with_newest_experts
from tests.unit.builders import memory_step

EXPERTS = 6


def of(bits: int) -> np.ndarray:
    """A table of those experts whose bit is set."""
    return np.array([bits >> expert & 1 for expert in range(EXPERTS)], dtype=bool)


@st.composite
def held(draw: st.DrawFn) -> list[MemoryStep]:
    found = []
    for sequence in range(draw(st.integers(0, 10))):
        experts = draw(st.integers(0, (1 << EXPERTS) - 1))
        found.append(
            memory_step(
                sequence,
                complete=draw(st.sampled_from([True, True, False, None])),
                copied=draw(st.booleans()),
                experts=of(experts),
                sent=of(experts & draw(st.integers(0, (1 << EXPERTS) - 1))),
                on_storage=draw(st.integers(0, 4)) == 0,
            )
        )
    return found


@given(held())
def test_the_newest_version_of_every_expert_stays_in_each_memory(steps: list[MemoryStep]):
    kept = with_newest_experts(steps)
    needed = set()
    for peers in (False, True):
        for expert in range(EXPERTS):
            having = [
                step
                for step in steps
                if step.complete and (step.copied or not peers) and (step.sent if peers else step.experts)[expert]
            ]
            newest = max(having, key=lambda step: step.number, default=None)
            if newest is not None and not newest.on_storage:
                needed.add(newest.number)
    assert kept == needed


def test_turns_are_kept_for_a_round_and_no_longer():
    """Two of six experts at each step: three snapshots have all, and peers get one of six, which takes six."""
    steps = [
        memory_step(at, complete=True, experts=of(1 << at % 6 | 1 << (at + 1) % 6), sent=of(1 << at % 6))
        for at in range(20)
    ]
    assert with_newest_experts(steps) == {14, 15, 16, 17, 18, 19}
    alone = [memory_step(at, complete=True, copied=False, experts=of(3 << 2 * at % 6)) for at in range(20)]
    assert with_newest_experts(alone) == {17, 18, 19}
    assert with_newest_experts([memory_step(0, complete=True, experts=of(63)), *alone[1:]]) == {17, 18, 19}
