"""The catalog proves that operators tile the parameters; every mutation of a good one is caught."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.core.operators import Catalog, Operator, OperatorKind, Span
from moe_ckpt.errors import CoverageError, UserError
from tests.unit.builders import catalog


def rebuilt(model, operators):
    return Catalog(tuple(operators), model.layers, model.parameters)


def mutations(model):
    """(what was done, operators) for every operator dropped, doubled or shifted by a row."""
    for i, op in enumerate(model.operators):
        others = [*model.operators[:i], *model.operators[i + 1 :]]
        yield f"drop {op.id}", others
        yield f"double {op.id}", [*model.operators, replace(op, id=op.id + "b")]
        yield f"list {op.id} twice", [*model.operators, replace(op, spans=())]
        for j, span in enumerate(op.spans):
            spans = [*op.spans[:j], *op.spans[j + 1 :]]
            yield f"drop span {j} of {op.id}", [*others, replace(op, spans=tuple(spans))]
            if span.start is not None:
                moved = Span(span.parameter, span.start + 1, span.stop + 1)
                yield f"shift {op.id}", [*others, replace(op, spans=(*spans, moved))]


def is_accepted(model, operators):
    try:
        rebuilt(model, operators)
    except CoverageError:
        return False
    return True


@pytest.mark.parametrize("stacked", [True, False])
def test_every_mutation_is_caught(stacked):
    model = catalog(2, 3, stacked=stacked)
    tried = list(mutations(model))
    assert len(tried) >= 4 * len(model.operators)
    assert [what for what, operators in tried if is_accepted(model, operators)] == []


def test_messages_name_parameter_and_operators():
    model = catalog(1, 3)
    without = [op for op in model.operators if op.id != "expert/0/1"]
    with pytest.raises(CoverageError, match=r"layers\.0\.moe\.w rows \[1, 2\) belong to no operator"):
        rebuilt(model, without)
    twice = [*model.operators, Operator("extra", OperatorKind.EXPERT, (Span("layers.0.moe.w", 0, 1),))]
    with pytest.raises(CoverageError, match=r"rows \[0, 1\) belong to both expert/0/0 and extra") as caught:
        rebuilt(model, twice)
    assert isinstance(caught.value, (UserError, ValueError))
    beyond = [*model.operators, Operator("extra", OperatorKind.EXPERT, (Span("layers.0.moe.w", 3, 4),))]
    with pytest.raises(CoverageError, match="has 3 rows, but extra claims up to row 4"):
        rebuilt(model, beyond)
    unknown = [*model.operators, Operator("extra", OperatorKind.NON_EXPERT, (Span("nobody"),))]
    with pytest.raises(CoverageError, match="extra names unknown parameter nobody"):
        rebuilt(model, unknown)


@given(rows=st.integers(1, 30), cuts=st.sets(st.integers(1, 29)), data=st.data())
def test_any_partition_of_rows_is_accepted_and_any_hole_is_not(rows, cuts, data):
    edges = [0, *sorted(c for c in cuts if c < rows), rows]
    operators = [
        Operator(f"expert/0/{i}", OperatorKind.EXPERT, (Span("w", a, b),), 0, i)
        for i, (a, b) in enumerate(pairwise(edges))
    ]
    order = data.draw(st.permutations(operators))
    Catalog(tuple(order), (), {"w": (rows, 2)})
    with pytest.raises(CoverageError):
        Catalog(tuple(order[1:]), (), {"w": (rows, 2)})


def test_a_scalar_parameter_is_one_row():
    op = Operator("non_expert/x", OperatorKind.NON_EXPERT, (Span("scale"),))
    assert Catalog((op,), (), {"scale": ()}).spans_of["scale"] == ((op, op.spans[0]),)


@pytest.mark.parametrize(("start", "stop"), [(None, 2), (2, None), (2, 2), (3, 1), (-1, 1)])
def test_impossible_spans_are_refused(start, stop):
    with pytest.raises(ValueError, match="span of w"):
        Span("w", start, stop)


def test_kinds_are_told_apart():
    model = catalog(2, 3)
    assert [op.id for op in model.experts] == [f"expert/{layer}/{e}" for layer in (0, 1) for e in range(3)]
    assert [op.id for op in model.always_saved] == ["non_expert/embed", "gate/0", "gate/1"]
    assert model.by_id["gate/1"].layer == 1


def test_state_that_cannot_be_split_lives_with_the_gate_for_stacks_only():
    assert catalog(1, 2).home["layers.0.moe.w"] == "gate/0"
    unstacked = catalog(1, 2, stacked=False).home
    assert unstacked["layers.0.moe.experts.1.w"] == "expert/0/1"
    assert unstacked["embed.weight"] == "non_expert/embed"


def test_spans_come_in_row_order():
    model = catalog(1, 4)
    shuffled = rebuilt(model, reversed(model.operators))
    assert [op.expert for op, _ in shuffled.spans_of["layers.0.moe.w"]] == [0, 1, 2, 3]


def test_fingerprint_depends_on_structure_and_on_nothing_else():
    model = catalog(2, 3)
    assert model.fingerprint == rebuilt(model, reversed(model.operators)).fingerprint
    others = [catalog(2, 4), catalog(3, 3), catalog(2, 3, stacked=False)]
    others.append(Catalog(model.operators, model.layers, {**model.parameters, "embed.weight": (8, 4)}))
    assert len({m.fingerprint for m in [model, *others]}) == 5
