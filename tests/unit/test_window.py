"""Sparse windows: what a slot saves and weighs, and the cuts into slots, against every cut there is."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.placement import Placement
from moe_ckpt.core.window import (
    Lane,
    OperatorBytes,
    Window,
    _lane_in_turns,
    balance,
    lanes_of,
    merge_coupled,
    share_bytes,
    side_by_side,
    slot_bytes,
    slot_plan,
)


def pack(order, sizes, limit, most_slots=None):
    return Lane(tuple(order), 1).pack(sizes, limit, most_slots)


def sized(*pairs):
    """Operators o0, o1, ... of (full, compute) bytes each."""
    return {f"o{number}": OperatorBytes(*pair) for number, pair in enumerate(pairs)}


@st.composite
def models(draw, min_size=1, max_size=7):
    """Sizes over orders of magnitude: experts, norms of a few bytes, empty gates, operators without optimizer state."""
    full = st.one_of(st.integers(0, 20), st.integers(0, 10**9))
    share = st.sampled_from([0.0, 1 / 6, 1 / 3, 0.5, 1.0])
    drawn = draw(st.lists(st.tuples(full, share), min_size=min_size, max_size=max_size))
    return sized(*((n, int(n * part)) for n, part in drawn))


def every_cut(order):
    for count in range(len(order)):
        for ends in combinations(range(1, len(order)), count):
            at = [0, *ends, len(order)]
            yield tuple(tuple(order[a:b]) for a, b in pairwise(at))


def brute(order, sizes):
    return [(max(slot_bytes(cut, sizes)), cut) for cut in every_cut(order)]


def test_a_slot_saves_its_anchors_in_full_and_what_comes_later_as_compute():
    window = Window(10, (("a",), ("b", "c"), ("d",)))
    plan = slot_plan(window, 1, 11)
    assert (plan.step, plan.window, plan.slot) == (11, window, 1)
    assert plan.full == ("b", "c")
    assert plan.compute == ("d",)
    assert slot_plan(window, 2, 12).compute == ()
    assert (window.size, window.order, window.frozen(0)) == (3, ("a", "b", "c", "d"), ("b", "c", "d"))


def test_bytes_by_hand():
    sizes = sized((12, 4), (120, 40), (6, 6))
    assert slot_bytes((("o0",), ("o1",), ("o2",)), sizes) == (12 + 40 + 6, 120 + 6, 6)
    assert slot_bytes((("o2", "o0"), ("o1",)), sizes) == (6 + 12 + 40, 120)
    assert slot_bytes((tuple(sizes),), sizes) == (138,)


def test_equal_operators_in_fp32_with_adam():
    """Three times four bytes in full, four as compute; shares of a dense checkpoint at W = 3."""
    sizes = sized(*[(12, 4)] * 54)
    order, dense = tuple(sizes), 54 * 12
    equal_counts = tuple(tuple(order[at : at + 18]) for at in (0, 18, 36))  # MoEvement, Algorithm 1
    shares = [nbytes / dense for nbytes in slot_bytes(equal_counts, sizes)]
    assert shares == pytest.approx([5 / 9, 4 / 9, 3 / 9])
    assert max(shares) == pytest.approx(0.55, abs=0.01)
    assert sum(shares) / 3 == pytest.approx(0.45, abs=0.01)
    # Equal weights: the heaviest slot is lighter, but more is saved as compute before it is anchored.
    balanced = balance(order, sizes, 3)
    shares = [nbytes / dense for nbytes in slot_bytes(balanced, sizes)]
    assert [len(slot) for slot in balanced] == [12, 18, 24]
    assert max(shares) == pytest.approx(0.48, abs=0.01)
    assert sum(shares) / 3 == pytest.approx(0.47, abs=0.01)


def test_packing_needs_fewer_slots_than_equal_counts():
    sizes = sized(*[(12, 2)] * 24)  # bf16 compute weights
    order = tuple(sizes)
    # 5 anchors and 19 frozen weigh 98. Algorithm 1 anchors 5 in each slot: W = ceil(24 / 5) = 5.
    assert [len(slot) for slot in pack(order, sizes, 98)] == [5, 6, 7, 6]
    # 1 anchor and 23 frozen weigh 58, the least there is. Algorithm 1: W = 24.
    assert [len(slot) for slot in pack(order, sizes, 58)] == [1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 3]
    assert pack(order, sizes, 57) is None


@pytest.mark.parametrize(
    ("compute", "counted", "packed"),
    [(2, [3, 4, 5, 7, 10, 25], [3, 3, 4, 5, 7, 10]), (4, [4, 10, 40, None, None, None], [3, 5, 8, None, None, None])],
)
def test_windows_for_limits_as_docs_moevement_lists_them(compute, counted, packed):
    sizes = sized(*[(12, compute)] * 1200)
    for percent, by_count, by_bytes in zip((50, 40, 35, 30, 25, 20), counted, packed, strict=True):
        limit = 1200 * 12 * percent // 100
        fitting = [n for n in range(1, 1201) if 12 * n + compute * (1200 - n) <= limit]
        assert (-(-1200 // max(fitting)) if fitting else None) == by_count
        found = pack(tuple(sizes), sizes, limit)
        assert (found and len(found)) == by_bytes


@given(models(), st.integers(0, 3 * 10**9), st.randoms(use_true_random=False))
def test_pack_finds_the_fewest_slots_of_all_cuts(sizes, limit, random):
    order = random.sample(list(sizes), len(sizes))
    within = [len(cut) for heaviest, cut in brute(order, sizes) if heaviest <= limit]
    packed = pack(order, sizes, limit)
    if not within:
        assert packed is None
        return
    assert [op for slot in packed for op in slot] == order
    assert all(packed)
    assert max(slot_bytes(packed, sizes)) <= limit
    assert len(packed) == min(within)
    assert pack(order, sizes, limit, len(packed)) == packed
    assert pack(order, sizes, limit, len(packed) - 1) is None


@given(models(), st.integers(1, 8), st.randoms(use_true_random=False))
def test_balance_finds_the_lightest_heaviest_slot_of_all_cuts(sizes, most, random):
    order = random.sample(list(sizes), len(sizes))
    cuts = [(heaviest, len(cut), sum(slot_bytes(cut, sizes)), cut) for heaviest, cut in brute(order, sizes)]
    best = min(heaviest for heaviest, count, _, _ in cuts if count <= most)
    balanced = balance(order, sizes, most)
    assert [op for slot in balanced for op in slot] == order
    assert max(slot_bytes(balanced, sizes)) == best
    fewest = min(count for heaviest, count, _, _ in cuts if heaviest == best)
    assert len(balanced) == fewest <= most
    lightest = min(total for heaviest, count, total, _ in cuts if (heaviest, count) == (best, fewest))
    assert sum(slot_bytes(balanced, sizes)) == lightest


@given(models(max_size=40), st.integers(1, 40))
def test_no_window_weighs_more_than_its_formula_and_none_is_lighter_than_what_it_must_hold(sizes, most):
    order = list(sizes)
    slots = balance(order, sizes, most)
    weights = slot_bytes(slots, sizes)
    for number, slot in enumerate(slots):
        later = [op for rest in slots[number + 1 :] for op in rest]
        assert weights[number] == sum(sizes[op].full for op in slot) + sum(sizes[op].compute for op in later)
    assert max(weights) <= sum(size.full for size in sizes.values())
    assert max(weights) >= max(size.full for size in sizes.values())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7), st.integers(0, 60))
def test_pack_and_balance_hold_where_compute_weights_outweigh_an_operator(pairs, limit):
    """A copy in a wider dtype than the parameter's: a longer slot may then be lighter than a shorter one."""
    sizes = sized(*pairs)
    order = list(sizes)
    cuts = brute(order, sizes)
    within = [len(cut) for heaviest, cut in cuts if heaviest <= limit]
    packed = pack(order, sizes, limit)
    assert (packed and len(packed)) == (min(within) if within else None)
    for most in (1, 2, 3):
        wanted = min(heaviest for heaviest, cut in cuts if len(cut) <= most)
        assert max(slot_bytes(balance(order, sizes, most), sizes)) == wanted


def test_edges():
    assert pack((), {}, 0) == ()
    assert balance((), {}, 3) == ()
    nothing = sized((0, 0), (0, 0))
    assert pack(tuple(nothing), nothing, 0) == (("o0", "o1"),)
    giant = sized((1, 1), (1000, 1), (1, 1), (1, 1))
    assert [len(slot) for slot in balance(tuple(giant), giant, 4)] == [1, 3]  # 1000 + 2 in any further cut
    with pytest.raises(ValueError, match="0 slots"):
        balance(("o0",), giant, 0)


def test_glued_operators_are_one_with_the_sum_of_their_bytes():
    sizes = {op: OperatorBytes(full, full // 4) for op, full in (("a", 4), ("b", 8), ("c", 12), ("d", 16))}
    order, weights, members = merge_coupled(("a", "b", "c", "d"), sizes, [{"a", "c"}])
    assert order == ["b", "c", "d"]
    assert members == {"b": ("b",), "c": ("a", "c"), "d": ("d",)}
    assert weights["c"] == OperatorBytes(16, 4)
    alone = (["a", "b"], {op: sizes[op] for op in "ab"}, {"a": ("a",), "b": ("b",)})
    assert merge_coupled(("a", "b"), sizes, ()) == alone


# --- pipeline stages: each is cut by itself, over its own ranks ---


def stages(sizes, of_second):
    placement = Placement((), (0,), (1, 3), {op: int(op in of_second) for op in sizes})
    return lanes_of(tuple(sizes), placement)


def test_one_lane_where_nobody_says_otherwise():
    one = Placement((), (0,), (3,))
    assert lanes_of(["a", "b"], one) == (Lane(("a", "b"), 3),)


def test_each_stage_keeps_the_order_and_has_its_ranks():
    sizes = {op: OperatorBytes(6, 1) for op in "abcd"}
    assert stages(sizes, "bd") == (Lane(("a", "c"), 1), Lane(("b", "d"), 3))


def test_slots_of_stages_stand_side_by_side():
    assert side_by_side([(("a",), ("c",)), (("b", "d"),)]) == (("a", "b", "d"), ("c",))


def test_the_share_is_that_of_the_rank_with_most():
    sizes = {op: OperatorBytes(6, 1) for op in "abcd"}
    lanes = stages(sizes, "bd")
    # Slot 0: a in full and c as compute weights on one rank, b and d in full on three. Slot 1: c in full.
    assert share_bytes((("a", "b", "d"), ("c",)), sizes, lanes) == (7, 6)
    assert share_bytes((("b", "d"), ("a", "c")), sizes, lanes) == (4, 12)


@given(data=st.data(), count=st.integers(1, 8), width=st.integers(1, 3))
def test_stages_cut_by_themselves_never_weigh_more_than_cut_as_one(data, count, width):
    order = [f"op{at}" for at in range(count)]
    pairs = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=count, max_size=count))
    weights = {op: OperatorBytes(full, min(full, compute)) for op, (full, compute) in zip(order, pairs, strict=True)}
    placement = Placement((), (0,), (width, width), {op: data.draw(st.integers(0, 1)) for op in order})
    lanes = lanes_of(order, placement)
    for most in range(1, count + 1):
        apart = side_by_side([balance(lane.order, weights, most) for lane in lanes])
        assert sorted(op for slot in apart for op in slot) == sorted(order)
        together = balance(order, weights, most)
        assert max(share_bytes(apart, weights, lanes)) <= max(share_bytes(together, weights, lanes))


def test_an_expert_weighs_on_its_owner_alone():
    """Two owners of two experts each, on a stage of two ranks; the gate is divided."""
    sizes = {op: OperatorBytes(6, 1) for op in ("expert/0/0", "expert/0/1", "expert/0/2", "expert/0/3", "gate/0")}
    placement = Placement(((0, 0, 1, 1),), (0, 1), (2,), expert_ranks=1)
    lanes = lanes_of(tuple(sizes), placement)
    together = (("expert/0/0", "expert/0/1", "gate/0"), ("expert/0/2", "expert/0/3"))
    apart = (("expert/0/0", "expert/0/2", "gate/0"), ("expert/0/1", "expert/0/3"))
    # Rank 0: both experts in full and half of the gate; rank 1: two as compute weights and half of the gate.
    assert share_bytes(together, sizes, lanes) == (12 + 3, 12)
    assert share_bytes(apart, sizes, lanes) == (6 + 1 + 3, 6)
    shared = Placement(((0, 0, 2, 2),), (0, 1), (4,), expert_ranks=2)
    assert share_bytes(together, sizes, lanes_of(tuple(sizes), shared)) == (6 + 2, 6)


@given(data=st.data(), weights=models(min_size=2, max_size=20), ranks=st.integers(1, 3), width=st.integers(1, 3))
def test_owners_take_turns_and_what_each_has_of_a_slot_is_added_up(data, weights, ranks, width):
    """By the sentences of ``lanes_of`` and ``Lane``, operator by operator."""
    order = data.draw(st.permutations(list(weights)))
    owner_of = {op: data.draw(st.integers(0, 3)) for op in order if data.draw(st.booleans())}
    dealt = _lane_in_turns(order, 1, owner_of, 1).order
    queues = {}
    for op in filter(owner_of.__contains__, order):
        queues.setdefault(owner_of[op], []).append(op)
    turns = [queue[at] for at in range(len(order)) for queue in queues.values() if at < len(queue)]
    assert dealt == tuple(turns.pop(0) if op in owner_of else op for op in order)
    cut = data.draw(st.integers(0, len(order)))
    slots = (dealt[:cut], dealt[cut:])
    found = Lane(dealt, ranks, owner_of, width).most_on_a_rank(slots, weights)
    for at, slot in enumerate(slots):
        nbytes = Counter()
        for op in slot:
            nbytes[owner_of.get(op)] += weights[op].full
        for op in (op for later in slots[at + 1 :] for op in later):
            nbytes[owner_of.get(op)] += weights[op].compute
        even = nbytes.pop(None, 0)
        assert found[at] == -(-even // ranks) + -(-max(nbytes.values(), default=0) // width)
