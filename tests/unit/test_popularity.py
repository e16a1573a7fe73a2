"""The order in which operators are anchored, and when it is made anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.core.window import Window
from moe_ckpt.policies.popularity import ORDERS, Ordering, popularity, shares
from moe_ckpt.run.run_ledger import RoutingActivity
from tests.unit.builders import catalog, context

MODEL = catalog(2, 3)
OTHERS = tuple(op.id for op in MODEL.always_saved)
BY_POPULARITY = [kind for kind in ORDERS if kind != "round_robin"]


def activity(hard, soft=None, decayed=None):
    hard = np.array(hard, dtype=np.int64)
    routing = RoutingActivity(hard.shape)
    routing._hard = hard
    routing._soft, routing._decayed = (routing._soft if table is None else np.array(table) for table in (soft, decayed))
    return routing


def uncounted():
    return activity(np.zeros((0, 0)))


def order(found, model=MODEL, window=None, step=5, **options):
    ordering = Ordering(**options)
    counts = found.popularity(ordering.counted)
    return ordering.order(context(model, step=step, popularity=counts, window=window))


def measured(kind, model, found):
    """By id, what this order goes by."""
    return popularity(kind, model, found.popularity(Ordering(kind).counted))


def experts(operators):
    return [op.removeprefix("expert/") for op in operators if op.startswith("expert/")]


def uneven():
    """A layer of two experts and one of four."""
    parts = []
    for layer, size in enumerate((2, 4)):
        parts += [
            Operator(f"expert/{layer}/{e}", OperatorKind.EXPERT, (Span(f"{layer}.{e}"),), layer, e) for e in range(size)
        ]
        parts.append(Operator(f"gate/{layer}", OperatorKind.GATE, (), layer))
    layers = (MoELayer(0, "a", 2), MoELayer(1, "b", 4))
    names = {span.parameter: (1,) for op in parts for span in op.spans}
    return Catalog(tuple(parts), layers, names)


def test_least_popular_experts_come_first_and_everybody_else_last():
    found, frequencies = order(activity([[5, 1, 4], [2, 9, 3]]))
    assert experts(found) == ["0/1", "1/0", "1/2", "0/2", "0/0", "1/1"]
    assert found[6:] == OTHERS == ("non_expert/embed", "gate/0", "gate/1")
    assert frequencies == pytest.approx(
        {
            "expert/0/0": 0.5,
            "expert/0/1": 0.1,
            "expert/0/2": 0.4,
            "expert/1/0": 2 / 14,
            "expert/1/1": 9 / 14,
            "expert/1/2": 3 / 14,
        }
    )


def test_equals_go_by_layer_and_index_and_so_does_everybody_before_anything_is_known():
    for found in (activity([[7, 7, 7], [7, 7, 7]]), uncounted(), activity([[0] * 3] * 2)):
        assert experts(order(found)[0]) == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    turned = Catalog(tuple(reversed(MODEL.operators)), MODEL.layers, MODEL.parameters)
    assert experts(order(uncounted(), turned)[0]) == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert order(uncounted())[1] is None
    assert order(activity([[0] * 3] * 2))[1] is None


def test_each_kind_goes_by_its_own_measure():
    found = activity([[3, 2, 1], [6, 5, 4]], soft=[[1.5, 2.5, 3.5], [0.1, 0.2, 0.3]], decayed=[[1, 3, 5], [2, 4, 6]])
    assert experts(order(found, kind="hard_count")[0]) == ["0/2", "0/1", "0/0", "1/2", "1/1", "1/0"]
    assert experts(order(found, kind="soft_count")[0]) == ["1/0", "1/1", "1/2", "0/0", "0/1", "0/2"]
    assert experts(order(found, kind="time_decayed")[0]) == ["0/0", "1/0", "0/1", "1/1", "0/2", "1/2"]


def test_capacity_is_an_even_share_of_the_layer():
    """Two experts of 100 tokens have room for 50 each, four of 100 for 25: 40 tokens are little here, much there."""
    model = uneven()
    found = activity([[60, 40, 0, 0], [10, 20, 30, 40]])
    values = measured("capacity_normalised", model, found)
    assert [values[op] for op in ("expert/0/0", "expert/0/1")] == pytest.approx([60 / 50, 40 / 50])
    assert [values[f"expert/1/{e}"] for e in range(4)] == pytest.approx([10 / 25, 20 / 25, 30 / 25, 40 / 25])
    by_capacity = experts(order(found, model, kind="capacity_normalised")[0])
    assert by_capacity == ["1/0", "0/1", "1/1", "0/0", "1/2", "1/3"]
    assert experts(order(found, model)[0]) == ["1/0", "1/1", "1/2", "0/1", "1/3", "0/0"]


@pytest.mark.parametrize(("kind", "field"), [("soft_count", "soft"), ("time_decayed", "decayed")])
def test_a_measure_that_a_router_does_not_tell_gives_way_to_tokens_in_all_layers(kind, field):
    told = [[9.0, 1.0, 5.0], [0.0, 0.0, 0.0]]
    found = activity([[3, 2, 1], [6, 5, 4]], **{field: told})
    assert measured(kind, MODEL, found) == measured("hard_count", MODEL, found)
    # A layer that got no token has nothing to tell.
    found = activity([[3, 2, 1], [0, 0, 0]], **{field: told})
    assert measured(kind, MODEL, found)["expert/0/0"] == 9.0


def test_counts_of_another_shape_are_not_believed():
    assert set(measured("hard_count", MODEL, activity([[1, 2]])).values()) == {0}


def test_a_dense_model_goes_from_the_output_to_the_input():
    names = ("embed", "layers.0", "layers.1", "head")
    parts = tuple(Operator(f"non_expert/{n}", OperatorKind.NON_EXPERT, (Span(n),)) for n in names)
    model = Catalog(parts, (), dict.fromkeys(names, (2, 2)))
    for kind in ORDERS:
        found = order(uncounted(), model, kind=kind)
        assert found == (tuple(f"non_expert/{n}" for n in reversed(names)), None)


def former(frequencies, first="expert/1/2"):
    """A window in an order that no activity of these tests gives."""
    rest = [op.id for op in MODEL.operators if op.id != first]
    return Window(1, ((first,), tuple(rest)), frequencies)


BEFORE = {op.id: 1 / 3 for op in MODEL.experts}


def shifted(portion, pairs):
    """300,000 tokens per layer; in ``pairs`` pairs of experts one gave ``portion`` of its share to the other."""
    hard = [[100_000] * 3 for _ in range(2)]
    moved = int(100_000 * portion)
    for layer in range(pairs):
        hard[layer][0] += moved
        hard[layer][1] -= moved
    return activity(hard)


@pytest.mark.parametrize(
    ("portion", "pairs", "reordered"),
    [(0.10, 2, False), (0.10001, 2, True), (0.5, 0, False), (0.10001, 1, True), (0.09999, 2, False)],
)
def test_the_order_is_kept_until_enough_experts_changed_enough(portion, pairs, reordered):
    """By default more than 10 % for at least 25 % of experts: two of six here."""
    window = former(BEFORE)
    found, frequencies = order(shifted(portion, pairs), window=window)
    assert (found != window.order) == reordered
    assert (frequencies != window.frequencies) == reordered


@pytest.mark.parametrize(("experts_changed", "reordered"), [(1, False), (2, True), (3, True)])
def test_exactly_a_quarter_of_the_experts_is_enough(experts_changed, reordered):
    before = {f"expert/0/{e}": 1 / 8 for e in range(8)}
    now = dict(before)
    for expert in range(experts_changed):
        now[f"expert/0/{expert}"] *= 1.2
    assert Ordering().changed(before, now, 8) == reordered


@pytest.mark.parametrize("share", [0.3, 0.1, 0.7, 1 / 3, 1e-6])
def test_exactly_a_tenth_is_not_more_than_a_tenth(share):
    """0.33 - 0.3 is above 0.03 in binary fractions; a rounding must not reorder."""
    for change in (0.1, 0.2, 0.05):
        ordering = Ordering(change=change, experts=1.0)
        assert not ordering.changed({"e": share}, {"e": share * (1 + change)}, 1)
        assert not ordering.changed({"e": share}, {"e": share * (1 - change)}, 1)
        assert ordering.changed({"e": share}, {"e": share * (1 + change) * 1.000001}, 1)
        assert ordering.changed({"e": share}, {"e": share * (1 - change) / 1.000001}, 1)


def test_thresholds_that_are_no_binary_fractions():
    before = {f"e{n}": 0.1 for n in range(30)}
    now = {**before, **{f"e{n}": 0.2 for n in range(9)}}
    assert Ordering(experts=0.3).changed(before, now, 30)  # 0.3 of 30 is 9
    assert not Ordering(experts=0.31).changed(before, now, 30)
    assert Ordering(experts=0).changed(before, before, 30)
    now = {f"e{n}": 0.2 for n in range(7)}
    assert Ordering(experts=0.07).changed(before, now, 100)  # the nearest binary fraction times 100 is above 7
    assert not Ordering(experts=0.07).changed(before, now, 101)


def test_an_expert_that_had_nothing_changes_with_its_first_token_and_one_that_loses_all_changes_too():
    ordering = Ordering(experts=1.0)
    assert ordering.changed({"e": 0.0}, {"e": 1e-9}, 1)
    assert ordering.changed({"e": 1e-9}, {"e": 0.0}, 1)
    assert not ordering.changed({"e": 0.0}, {"e": 0.0}, 1)


def test_what_is_known_for_the_first_time_is_a_change_and_what_is_not_known_is_none():
    window = former(None)
    assert order(shifted(0, 0), window=window)[1] == pytest.approx(BEFORE)
    assert order(uncounted(), window=window) == (window.order, None)
    window = former(BEFORE)
    assert order(uncounted(), window=window) == (window.order, BEFORE)
    # Only one layer got tokens: its three experts changed, the others count as unchanged, and 3 of 6 is enough.
    assert order(activity([[10, 20, 70], [0, 0, 0]]), window=window)[0] != window.order
    assert order(activity([[10, 20, 70], [0, 0, 0]]), window=window, experts=0.51)[0] == window.order


def test_the_order_of_another_model_is_not_used():
    window = Window(1, (("expert/0/0",), ("gate/7",)), BEFORE)
    assert set(order(shifted(0, 0), window=window)[0]) == {op.id for op in MODEL.operators}


def test_round_robin_puts_every_expert_in_every_place_once():
    window, places = None, {op.id: [] for op in MODEL.experts}
    for turn in range(6):
        found, frequencies = order(activity([[turn, 9, 1], [5, 0, turn]]), window=window, step=3, kind="round_robin")
        assert frequencies is None
        assert found[6:] == OTHERS
        for place, op in enumerate(found[:6]):
            places[op].append(place)
        # W may change from one window to the next; that changes no turn.
        window = Window(3, (found[: 1 + turn], found[1 + turn :]))
    assert all(sorted(found) == list(range(6)) for found in places.values())


def test_round_robin_without_a_former_window_begins_by_the_step():
    first = [order(uncounted(), step=step, kind="round_robin")[0][0] for step in range(7)]
    assert first == [*(op.id for op in MODEL.experts), "expert/0/0"]


tables = st.lists(st.lists(st.integers(0, 1000), min_size=3, max_size=3), min_size=2, max_size=2)


@given(st.sampled_from(BY_POPULARITY), tables, tables)
def test_any_order_has_every_operator_once_with_experts_by_ascending_popularity(kind, hard, other):
    found = activity(hard, soft=np.array(other) / 7, decayed=np.array(other) / 3)
    listed, frequencies = order(found, kind=kind)
    assert sorted(listed) == sorted(op.id for op in MODEL.operators)
    values = measured(kind, MODEL, found)
    popular = [values[op] for op in listed if op in values]
    assert popular == sorted(popular)
    assert (listed, frequencies) == order(found, kind=kind)
    for layer in range(2):
        own = [share for op, share in shares(MODEL, values).items() if op.startswith(f"expert/{layer}/")]
        assert not own or sum(own) == pytest.approx(1)
