"""Who writes what of the state that all ranks hold: each row once, and the peak within the proven bounds."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.core.placement import (
    GRAIN_BYTES,
    RowRange,
    ShardingUnit,
    everywhere,
    in_dealing_order,
    shares_adaptive,
    water_level,
)
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices.assignment import Sharder, weigh
from moe_ckpt.slices.local_state import LocalState
from tests.unit.builders import catalog, pieces_of


def unit(number: int, rows: int, row_bytes: int, whole_bytes: int = 0, first: int = 0) -> ShardingUnit:
    return ShardingUnit(f"non_expert/{number:03}", Span(f"p{number}"), first, first + rows, row_bytes, whole_bytes)


@st.composite
def cases(draw):
    """(units in dealing order, preload of each rank, grain)."""
    rows = st.tuples(st.integers(0, 60), st.integers(0, 12), st.sampled_from([0, 0, 4, 30]), st.integers(0, 5))
    units = [unit(i, *fields) for i, fields in enumerate(draw(st.lists(rows, max_size=9)))]
    preload = draw(st.lists(st.integers(0, 400), min_size=1, max_size=6))
    return in_dealing_order(units), preload, draw(st.sampled_from([0, 1, 7, 40, 10_000]))


def check(units, preload, shares):
    """Every row exactly once, state without rows exactly once, and loads that are the sum of it."""
    loads = list(preload)
    assert shares.parts.keys() == {u.name for u in units}
    for u in units:
        parts = shares.parts[u.name]
        assert [row for p in parts for row in range(p.start, p.stop)] == list(range(u.start, u.stop))
        assert len(parts) == 1 or all(p.start < p.stop for p in parts), "a part without rows"
        for number, p in enumerate(parts):
            loads[p.rank] += (p.stop - p.start) * u.row_bytes + (u.whole_bytes if number == 0 else 0)
    assert shares.loads == tuple(loads)
    assert sum(loads) == sum(preload) + sum(u.nbytes for u in units)


@given(cases())
@example(([unit(0, 1, 1), unit(1, 0, 0, 5)], [3], 0))
def test_each_row_goes_to_exactly_one_rank(case):
    units, preload, grain = case
    check(units, preload, shares_adaptive(units, preload, grain))
    check(units, preload, shares_adaptive(units, preload))


@given(cases())
def test_the_adaptive_peak_is_within_both_bounds(case):
    """The two lines of ``shares_adaptive``'s docstring."""
    units, preload, grain = case
    ranks, total = len(preload), sum(preload) + sum(u.nbytes for u in units)
    g = max((max(u.whole_bytes + u.row_bytes * (u.stop > u.start), min(grain, u.nbytes)) for u in units), default=0)
    level, peak = water_level(preload, sum(u.nbytes for u in units)), max(shares_adaptive(units, preload, grain).loads)
    assert peak <= max(*preload, 0, level + max(g, 1) - 1)
    assert ranks * peak <= max(ranks * max(preload), ranks * level, total + (ranks - 1) * g)


@given(cases())
def test_no_way_of_dealing_is_below_the_level(case):
    units, preload, grain = case
    lower = max(max(preload), water_level(preload, sum(u.nbytes for u in units)))
    assert max(shares_adaptive(units, preload, grain).loads) >= lower
    assert lower * len(preload) >= sum(preload) + sum(u.nbytes for u in units), "not below the mean"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 300))
def test_the_level_is_the_least_that_holds_all(preload, nbytes):
    def room(level):
        return sum(max(0, level - p) for p in preload)

    level = water_level(preload, nbytes)
    assert room(level) >= nbytes
    assert level == min(preload) or room(level - 1) < nbytes


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 3))
def test_unsplit_shares_are_within_four_thirds_of_the_best_whole_tensors(sizes, ranks):
    units = in_dealing_order([unit(i, 1, n) for i, n in enumerate(sizes)])
    shares = shares_adaptive(units, [0] * ranks, grain_bytes=sum(sizes))

    def peak(choice):
        return max(sum(n for n, r in zip(sizes, choice, strict=True) if r == rank) for rank in range(ranks))

    best = min(peak(choice) for choice in product(range(ranks), repeat=len(sizes)))
    assert 3 * max(shares.loads) <= 4 * best


@given(cases(), st.randoms())
def test_the_order_in_which_units_are_found_does_not_matter(case, random):
    units, preload, grain = case
    shuffled = list(units)
    random.shuffle(shuffled)
    assert shares_adaptive(in_dealing_order(shuffled), preload, grain) == shares_adaptive(units, preload, grain)


def test_what_does_not_fit_is_split_and_fills_the_ranks_evenly():
    big, small = unit(0, 100, 10, 4), unit(1, 1, 100)
    shares = shares_adaptive([big, small], [0, 300, 0], grain_bytes=64)
    assert shares.parts[big.name] == (RowRange(0, 0, 46), RowRange(2, 46, 92), RowRange(1, 92, 100))
    assert shares.parts[small.name] == (RowRange(1, 0, 1),)
    assert shares.loads == (464, 480, 460)


def test_without_splitting_it_is_the_papers_greedy():
    units = in_dealing_order([unit(0, 10, 10), unit(1, 6, 10), unit(2, 4, 10)])
    shares = shares_adaptive(units, [0, 50], grain_bytes=sum(u.nbytes for u in units))
    assert {u.operator[-1]: shares.parts[u.name][0].rank for u in units} == {"0": 0, "1": 1, "2": 0}
    assert shares.loads == (140, 110)


def test_a_rank_busy_with_experts_gets_nothing_else():
    shares = shares_adaptive([unit(0, 100, 10)], [0, 5000, 0], grain_bytes=1)
    assert shares.loads == (500, 5000, 500)


def test_small_tensors_stay_whole_and_splits_are_few():
    units = in_dealing_order([unit(i, 1000, 1 << 10) for i in range(300)])
    shares = shares_adaptive(units, [0, 1 << 20, 7 << 20, 0, 0, 0, 3 << 20, 0])
    assert sum(len(parts) - 1 for parts in shares.parts.values()) <= len(shares.loads)
    level = water_level([0, 1 << 20, 7 << 20, 0, 0, 0, 3 << 20, 0], sum(u.nbytes for u in units))
    assert max(shares.loads) < level + GRAIN_BYTES
    tiny = [unit(0, 8, 100)]
    assert [len(parts) for parts in shares_adaptive(tiny, [0, 0]).parts.values()] == [1]


# --- from live tensors ---


def model_and_tensors(sharded: tuple[str, ...] = ()) -> tuple[Catalog, list[StateTensor]]:
    """A big embedding, 4 experts in a stack; AdamW's state. ``sharded`` parameters are this rank's half."""
    parameters = {"embed": (1000, 64), "norm": (64,), "scale": (), "gate": (4, 64), "stack": (5, 64, 32)}
    operators = (
        Operator("non_expert/embed", OperatorKind.NON_EXPERT, (Span("embed"),)),
        Operator("non_expert/0", OperatorKind.NON_EXPERT, (Span("norm"), Span("scale"))),
        Operator("gate/0", OperatorKind.GATE, (Span("gate"), Span("stack", 4, 5)), 0),
        *(Operator(f"expert/0/{e}", OperatorKind.EXPERT, (Span("stack", e, e + 1),), 0, e) for e in range(4)),
    )
    found = []
    for name, shape in parameters.items():
        states = {"model": shape, "optim/exp_avg": shape, "optim/exp_avg_sq": shape, "optim/col": shape[-1:]}
        for key, its_shape in (*states.items(), ("optim/step", ())):
            local = torch.arange(torch.Size(its_shape).numel(), dtype=torch.float32).view(its_shape)
            cut_up = name in sharded and its_shape == shape
            kept = local[: shape[0] // 2] if cut_up else local
            where = (0,) * len(its_shape)
            found.append(StateTensor(f"{key}/{name}", name, kept, where, its_shape, replicated=not cut_up))
    return Catalog(operators, (MoELayer(0, "moe", 4, 1),), parameters), found


def test_state_is_weighed_with_what_is_cut_like_it():
    model, tensors = model_and_tensors()
    weights = weigh(model, tensors)
    row = 64 * 32 * 4
    assert weights.experts == {f"expert/0/{e}": 3 * row for e in range(4)}
    found = {u.name: (u.start, u.stop, u.row_bytes, u.whole_bytes) for u in weights.units}
    assert found == {
        ("non_expert/embed", Span("embed")): (0, 1000, 3 * 64 * 4, 64 * 4 + 4),
        ("non_expert/0", Span("norm")): (0, 64, 4 * 4, 4),
        ("non_expert/0", Span("scale")): (0, 0, 0, 5 * 4),
        ("gate/0", Span("gate")): (0, 4, 3 * 64 * 4, 64 * 4 + 4),
        ("gate/0", Span("stack", 4, 5)): (4, 5, 3 * row, 0),
        ("gate/0", Span("stack")): (0, 0, 0, 32 * 4 + 4),
    }
    assert sum(u.nbytes for u in weights.units) + sum(weights.experts.values()) == sum(t.local.nbytes for t in tensors)


def test_state_that_the_framework_shards_weighs_nothing_and_is_written_where_it_lies():
    model, tensors = model_and_tensors(sharded=("embed", "stack"))
    everything = frozenset(model.by_id)
    dealt = Sharder(model, everywhere(model.layers, 2), tensors).assign(everything)
    assert sum(dealt.shares.loads) == sum(t.local.nbytes for t in tensors if t.replicated)
    for rank in range(2):
        held = {p.entry.key for p in pieces_of(LocalState(model, tensors), everything, dealt, rank)}
        assert {"model/embed", "optim/exp_avg/embed", "model/stack"} <= held


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("experts", [(), (0,), (0, 1), (0, 1, 2, 3)])
def test_what_is_cut_weighs_what_was_dealt(ranks, experts):
    model, tensors = model_and_tensors()
    chosen = {op.id for op in model.always_saved} | {f"expert/0/{e}" for e in experts}
    dealt = Sharder(model, everywhere(model.layers, ranks), tensors).assign(chosen)
    shares = [pieces_of(LocalState(model, tensors), chosen, dealt, rank) for rank in range(ranks)]
    assert tuple(sum(p.entry.nbytes for p in share) for share in shares) == dealt.shares.loads
    names = [p.entry.name for share in shares for p in share]
    assert len(names) == len(set(names))


def test_shares_follow_the_experts():
    model, tensors = model_and_tensors()
    always = {op.id for op in model.always_saved}
    sharder = Sharder(model, everywhere(model.layers, 2), tensors)
    first, second = (sharder.assign(always | {f"expert/0/{e}"}).shares for e in (0, 3))
    assert first.parts != second.parts
    assert first == sharder.assign(always | {"expert/0/0"}).shares


def test_a_tensor_that_appears_is_weighed():
    model, tensors = model_and_tensors()
    early = [t for t in tensors if t.key.startswith("model/")]
    for now in (early, tensors, early):
        shares = Sharder(model, everywhere(model.layers, 2), now).assign(frozenset(model.by_id)).shares
        assert sum(shares.loads) == sum(t.local.nbytes for t in now)


def test_dealing_is_balanced_where_the_embedding_is_most_of_the_model():
    model, tensors = model_and_tensors()
    chosen = frozenset(op.id for op in model.always_saved) | {"expert/0/0"}
    shares = Sharder(model, everywhere(model.layers, 4), tensors).assign(chosen).shares
    embedding = max(unit.nbytes for unit in shares.units)
    assert max(shares.loads) < embedding / 2


def test_stacked_state_without_rows_has_one_writer_in_every_checkpoint():
    model = catalog(2, 4)
    tensors = [StateTensor(f"optim/0/{name}/step", name, torch.tensor(1.0), (), ()) for name in model.parameters]
    chosen = frozenset(op.id for op in model.always_saved)
    dealt = Sharder(model, everywhere(model.layers, 3), tensors).assign(chosen)
    written = [p.entry.key for rank in range(3) for p in pieces_of(LocalState(model, tensors), chosen, dealt, rank)]
    assert sorted(written) == sorted(t.key for t in tensors)
