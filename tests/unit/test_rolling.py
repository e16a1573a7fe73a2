"""What a rolling schedule weighs: the formula, and rounds against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.policies.gradient_log import Rounds


def even_slots(sizes, most):
    operators = tuple(Operator(op, OperatorKind.NON_EXPERT, (Span(op),)) for op in sizes)
    catalog = Catalog(operators, (), dict.fromkeys(sizes, (1,)))
    return Rounds(catalog, sizes, everywhere((), 1)).slots(most)


def slot_bytes(slots, sizes):
    """What each step of a round saves: its anchors, and gradients of all other operators."""
    gradients = sum(size.gradient for size in sizes.values())
    return [gradients + sum(sizes[op].full - sizes[op].gradient for op in slot) for slot in slots]


def cuts(order, slots):
    """Every cut of ``order`` into ``slots`` runs, none empty."""
    for inner in combinations(range(1, len(order)), slots - 1):
        yield tuple(tuple(order[a:b]) for a, b in pairwise((0, *inner, len(order))))


@st.composite
def models(draw):
    drawn = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=6))
    return {f"o{at}": OperatorBytes(gradient + more, 0, gradient) for at, (more, gradient) in enumerate(drawn)}


def test_equal_operators_weigh_what_the_formula_says():
    sizes = {f"o{at}": OperatorBytes(12, 0, 2) for at in range(20)}
    weights = slot_bytes(even_slots(sizes, 5), sizes)
    assert set(weights) == {20 * (12 + 2 * 4) / 5}, "full/W + g (W - 1)/W of each parameter"


@given(models(), st.integers(1, 6))
def test_the_evenest_round(sizes, most):
    order = tuple(sizes)
    found = even_slots(sizes, most)
    best = min(
        max(slot_bytes(cut, sizes)) for slots in range(1, min(most, len(order)) + 1) for cut in cuts(order, slots)
    )
    assert tuple(op for slot in found for op in slot) == order
    assert max(slot_bytes(found, sizes)) == best
