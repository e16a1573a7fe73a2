"""The coverage proof: random tilings pass; a box dropped, doubled, shifted, grown or foreign does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CoverageError
from moe_ckpt.ledger.coverage import Box, prove_cover


@st.composite
def tilings(draw, min_boxes=1):
    """A whole block, and boxes that tile it: cut again and again along a random dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = Box(tuple(draw(st.integers(0, 5)) for _ in shape), shape)
    boxes = [whole]
    for _ in range(draw(st.integers(0, 8))):
        i = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        box = boxes[i]
        if box.shape[dim] < 2:
            continue
        cut = draw(st.integers(1, box.shape[dim] - 1))
        low = replace(box, shape=(*box.shape[:dim], cut, *box.shape[dim + 1 :]))
        high = Box(
            (*box.offsets[:dim], box.offsets[dim] + cut, *box.offsets[dim + 1 :]),
            (*box.shape[:dim], box.shape[dim] - cut, *box.shape[dim + 1 :]),
        )
        boxes[i : i + 1] = [low, high]
    return whole, draw(st.permutations(boxes))


def refused(whole, boxes):
    with pytest.raises(CoverageError) as caught:
        prove_cover("step 3", {"w": [whole]}, [("w", box) for box in boxes])
    return str(caught.value)


@given(tilings())
def test_tilings_are_accepted(tiling):
    whole, boxes = tiling
    prove_cover("step 3", {"w": [whole]}, [("w", box) for box in boxes])
    prove_cover("step 3", {"w": boxes}, [("w", whole)])


@given(tilings(), st.data())
def test_a_dropped_box_is_missed(tiling, data):
    whole, boxes = tiling
    boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    assert "elements are missing" in refused(whole, boxes)


@given(tilings(), st.data())
def test_a_doubled_box_is_seen(tiling, data):
    whole, boxes = tiling
    boxes.append(data.draw(st.sampled_from(boxes)))
    assert "w is written twice" in refused(whole, boxes)


@given(tilings(), st.data())
def test_a_shifted_box_is_seen(tiling, data):
    whole, boxes = tiling
    i = data.draw(st.integers(0, len(boxes) - 1))
    dim = data.draw(st.integers(0, len(whole.shape) - 1))
    by = data.draw(st.sampled_from([-1, 1]))
    at = list(boxes[i].offsets)
    at[dim] += by
    boxes[i] = replace(boxes[i], offsets=tuple(at))
    refused(whole, boxes)


@given(tilings(), st.data())
def test_a_box_of_another_size_is_seen(tiling, data):
    whole, boxes = tiling
    i = data.draw(st.integers(0, len(boxes) - 1))
    dim = data.draw(st.integers(0, len(whole.shape) - 1))
    size = list(boxes[i].shape)
    size[dim] += data.draw(st.sampled_from([-1, 1]))
    boxes[i] = replace(boxes[i], shape=tuple(size))
    refused(whole, boxes)


@given(tilings())
def test_a_box_outside_is_seen(tiling):
    whole, boxes = tiling
    outside = Box(tuple(o + n for o, n in zip(whole.offsets, whole.shape, strict=True)), whole.shape)
    assert "elements outside the plan are written" in refused(whole, [*boxes, outside])


def test_a_hole_and_a_double_of_the_same_size_do_not_cancel():
    whole = Box((0,), (4,))
    assert "written twice, at [0] and at [1]" in refused(whole, [Box((0,), (2,)), Box((1,), (2,))])
    assert "1 of 4 elements are missing" in refused(whole, [Box((0,), (3,)), Box((4,), (1,))])


def test_a_long_box_is_compared_with_all_that_begin_before_it_ends():
    """Four columns-first boxes; the double and the hole have the same size, so volumes alone would agree."""
    whole = Box((0, 0), (4, 2))
    boxes = [Box((0, 0), (4, 1)), Box((0, 1), (1, 1)), Box((1, 0), (1, 1)), Box((2, 1), (2, 1))]
    assert "written twice, at [0, 0] and at [1, 0]" in refused(whole, boxes)


def test_a_scalar_is_one_element():
    scalar = Box((), ())
    prove_cover("load", {"step": [scalar]}, [("step", scalar)])
    for boxes, said in [([], "missing"), ([scalar, scalar], "twice")]:
        with pytest.raises(CoverageError, match=said):
            prove_cover("load", {"step": [scalar]}, [("step", box) for box in boxes])


def test_an_empty_tensor_needs_nothing():
    empty = Box((0, 0), (0, 3))
    prove_cover("load", {"w": [empty]}, [])
    prove_cover("load", {"w": [empty]}, [("w", empty)])


def test_unknown_keys_are_named_with_the_place():
    with pytest.raises(CoverageError, match=r"^step 3: ghost at \[2\] is written, but no operator") as caught:
        prove_cover("step 3", {}, [("ghost", Box((2,), (1,)))])
    assert caught.value.where == "step 3"
    assert len(caught.value.problems) == 1


def test_a_box_of_another_dimension_is_a_problem_and_no_crash():
    with pytest.raises(CoverageError, match="w has 2 dimensions, but is written with 1"):
        prove_cover("load", {"w": [Box((0, 0), (2, 3))]}, [("w", Box((0,), (6,)))])


def test_all_problems_are_kept_though_only_some_are_shown():
    wanted = {f"k{i}": [Box((0,), (1,))] for i in range(20)}
    with pytest.raises(CoverageError, match="and 12 more") as caught:
        prove_cover("commit", wanted, [])
    assert len(caught.value.problems) == 20


def test_a_key_that_wants_nothing_takes_nothing():
    with pytest.raises(CoverageError, match="elements outside the plan are written"):
        prove_cover("commit", {"w": []}, [("w", Box((0,), (6,)))])


def test_only_wanted_boxes_need_to_be_there():
    """A partial checkpoint wants the rows of the chosen experts only."""
    wanted = [Box((1, 0), (1, 4)), Box((3, 0), (1, 4))]
    found = [Box((3, 0), (1, 4)), Box((1, 0), (1, 2)), Box((1, 2), (1, 2))]
    prove_cover("commit", {"w": wanted}, [("w", box) for box in found])
    with pytest.raises(CoverageError, match=r"w at \[1, 0\]: 2 of 4 elements are missing"):
        prove_cover("commit", {"w": wanted}, [("w", box) for box in found[:2]])
