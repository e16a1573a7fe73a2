"""MoC(k="auto", snapshot_k="auto") under the real Megatron-Core, EP2 x DP2: K is that of the slowest rank, on all.

What ranks measure is acted: every few steps another rank is the slow one, at another rate. What they save and lose is
counted again from the store and from their own logs (``moc_recount``), over a failure that the processes survive and
over a ``kill -9``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from moe_ckpt.policies.base import Measured
from moe_ckpt.run.meter import Meter
from tests.megatron.moc_recount import Store, _by_bytes, check, partial, read_lives, run_cases
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Case, lives

RANKS, EVERY = 4, 2
SETUP = Setup(ep=2, layers=2, experts=8, num_microbatches=1)
REST_BYTES, EXPERT_BYTES = 12 * 13_120, 12 * 2_048
"""Gates and non-experts, of which each rank saves a quarter; and one expert. Each rank saves experts of its own."""
BUDGETS = [80_000, 105_000, 130_000, 155_000]
"""Bytes that the slow rank writes between two checkpoints, turn by turn. Beside a step it copies a fifth more."""
TURN_LAPS, KNOWN_LAPS = 4, 10
"""A restart begins with what the checkpoint tells of ten laps."""
AUTO = Case(
    "auto",
    SETUP,
    ("MoC", {"k": "auto", "snapshot_k": "auto", "every_n_steps": EVERY}),
    steps=22,
    kills=((1, 16),),
    faults=(7,),
)


def acted(rank: int, world_size: int, root: str, todo: tuple[tuple[Case, int], ...]) -> None:
    """``lives`` of a rank that is the slow one at every fourth turn."""

    def told(meter: Meter) -> Measured:
        turn = len(meter._recent["recent_iteration_secs"]) // TURN_LAPS
        rate = BUDGETS[turn % len(BUDGETS)] / EVERY * (1 if turn % world_size == rank else 100)
        return Measured(recent_iteration_secs=1.0, copy_bytes_per_sec=2.4 * rate, persist_bytes_per_sec=rate)

    Meter.measured = told  # type: ignore[method-assign]
    lives(rank, world_size, root, todo)


def largest_k(budget: float) -> int:
    """By hand: as many experts of each layer as the ranks, which own a quarter of each layer, can save together."""
    each = int((budget - REST_BYTES / RANKS) // EXPERT_BYTES)
    return min(RANKS * each // SETUP.layers, SETUP.experts)


def test_all_ranks_have_the_k_of_the_slowest_and_what_is_lost_is_counted(tmp_path: Path):
    run_cases(acted, [AUTO], tmp_path)
    found = check(AUTO, tmp_path, by_bytes=True)  # and that all ranks tell the same K
    told, store = read_lives(AUTO, tmp_path), Store.read(tmp_path / AUTO.name)
    began = [life[0][0]["step"] for life in told]
    assert began[:2] == [0, 6]
    assert began[2] in (12, 14), "the newest that was committed when rank 1 was killed"
    assert [fault[0] for fault in found.faults] == began[1:]
    assert found.faults[1][1] > 0, "all processes are new: experts are as old as storage has them"
    steps = [(life, lines[0]) for life, each in enumerate(told) for lines in each if lines[0]["event"] == "step"]
    records = {(life, line["step"]): line["record"] for life, line in steps}
    for (life, step), record in records.items():
        assert record["begun"] == (step % EVERY == 0)
        if not record["begun"] and (life, step - 1) in records:
            assert record["k"] == records[life, step - 1]["k"], "K changes where a checkpoint begins"
    ks = set()
    for life, step in partial(store, AUTO):
        laps = step - began[life] - 1 + (KNOWN_LAPS if life else 0)
        k = largest_k(BUDGETS[laps // TURN_LAPS % len(BUDGETS)])
        assert records[life, step]["k"] == k
        assert Counter(layer for layer, _ in store.writers((life, step))) == dict.fromkeys(range(SETUP.layers), k)
        ks.add(k)
    assert ks == {2, 4, 6, 8}
    stored = store.versions((0, 6))
    back = _by_bytes(found, told[1][0], stored)
    held = {name: sum(version == 6 for version in each.values()) for name, each in (("k", stored), ("both", back))}
    assert held == {"k": SETUP.layers * largest_k(105_000), "both": SETUP.layers * largest_k(1.2 * 105_000)}
