"""The sum that proves a tiling: equal for equal sets of elements, and for no others."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.ledger.coverage import PRIME, Box, cover_sum


def cells(box: Box) -> list[tuple[int, ...]]:
    return list(product(*(range(at, at + n) for at, n in zip(box.offsets, box.shape, strict=True))))


def test_a_box_weighs_what_its_elements_weigh_one_by_one():
    box = Box((2, 0, 5), (3, 4, 2))
    one_by_one = cover_sum(("w", Box(cell, (1, 1, 1))) for cell in cells(box))
    assert cover_sum([("w", box)]) == one_by_one


def test_any_way_to_cut_a_tensor_gives_the_same_sum():
    whole = [("w", Box((0, 0), (6, 4)))]
    assert cover_sum([("w", Box((0, 0), (1, 4))), ("w", Box((1, 0), (5, 4)))]) == cover_sum(whole)
    assert cover_sum([("w", Box((0, 0), (6, 1))), ("w", Box((0, 1), (6, 3)))]) == cover_sum(whole)


def test_what_is_missing_doubled_moved_or_of_another_tensor_shows():
    whole, scalar = ("w", Box((0, 0), (6, 4))), ("s", Box((), ()))
    claim = cover_sum([whole, scalar])
    wrong = [
        [whole],
        [whole, scalar, scalar],
        [whole, ("t", Box((), ()))],
        [scalar, ("w", Box((0, 0), (5, 4)))],
        [scalar, ("w", Box((1, 0), (6, 4)))],
        [scalar, ("w", Box((0, 0), (4, 6)))],
        [scalar, ("v", Box((0, 0), (6, 4)))],
        [scalar, ("w", Box((0, 0), (5, 4))), ("w", Box((4, 0), (1, 4)))],  # one row twice, one missing
    ]
    for boxes in wrong:
        assert cover_sum(boxes) != claim


def test_nothing_weighs_nothing():
    assert cover_sum([]) == 0
    assert cover_sum([("w", Box((3, 0), (0, 4)))]) == 0


def test_differences_of_ranks_add_up_in_any_order():
    parts = [("w", Box((row, 0), (1, 4))) for row in range(6)]
    wanted = cover_sum([("w", Box((0, 0), (6, 4)))])
    shares = [cover_sum(parts[:1]) - wanted, cover_sum(parts[1:4]), cover_sum(parts[4:])]
    assert sum(shares) % PRIME == sum(reversed(shares)) % PRIME == 0


boxes = st.builds(
    lambda a, b, c, d: Box((a, b), (c, d)), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)
)


some = st.lists(st.tuples(st.sampled_from("uv"), boxes), max_size=5)


@settings(max_examples=300)
@given(some, some)
def test_sums_agree_exactly_where_the_elements_do(one, other):
    def elements(pairs):
        return sorted((key, cell) for key, box in pairs for cell in cells(box))

    assert (cover_sum(one) == cover_sum(other)) == (elements(one) == elements(other))
