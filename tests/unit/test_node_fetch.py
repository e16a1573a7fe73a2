"""What several ranks of a node want of another one's memory goes over the network once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.reading.memory.node_fetch import Portion, SlotSpan, share_out

NODES = ["a", "a", "a", "b", "b"]


def test_one_of_a_node_fetches_and_the_others_get_it_from_that_one():
    all_of_it = SlotSpan(3, 0, 1, 0, 90)
    assert share_out(NODES, {rank: [all_of_it] for rank in (0, 1, 2)}) == [Portion(all_of_it, 0, (1, 2))]


def test_each_node_fetches_for_itself():
    nodes = ["a", "b", "b", "c"]
    wanted = SlotSpan(3, 0, 0, 5, 9)
    assert share_out(nodes, {0: [wanted], 2: [wanted], 1: [wanted]}) == [Portion(wanted, 0), Portion(wanted, 1, (2,))]


def test_what_only_some_want_goes_to_those():
    found = share_out(NODES, {0: [SlotSpan(3, 0, 0, 0, 10)], 1: [SlotSpan(3, 0, 0, 6, 16)]})
    assert found == [
        Portion(SlotSpan(3, 0, 0, 0, 6), 0),
        Portion(SlotSpan(3, 0, 0, 6, 10), 1, (0,)),
        Portion(SlotSpan(3, 0, 0, 10, 16), 1),
    ]


def test_the_ranks_of_a_node_take_turns():
    wanted = [SlotSpan(3, number, 0, 0, 8) for number in range(6)]
    found = share_out(NODES, dict.fromkeys((0, 1, 2), wanted))
    assert Counter(portion.fetcher for portion in found) == {0: 2, 1: 2, 2: 2}


spans = st.lists(st.integers(0, 40), unique=True, max_size=8).map(
    lambda edges: [tuple(sorted(edges)[at : at + 2]) for at in range(0, len(edges) - 1, 2)]
)


@given(st.dictionaries(st.sampled_from([0, 1, 2, 4]), st.dictionaries(st.integers(0, 1), spans), max_size=4))
def test_every_rank_gets_what_it_wants_and_every_node_fetches_it_once(asked):
    wanted = {
        rank: [SlotSpan(3, number, 0, *span) for number, found in slots.items() for span in found]
        for rank, slots in asked.items()
    }
    got: Counter[tuple[int, int, int]] = Counter()
    fetched: Counter[tuple[str, int, int]] = Counter()
    for portion in share_out(NODES, wanted):
        _, number, _, begin, end = portion.span
        assert {NODES[rank] for rank in portion.others} <= {NODES[portion.fetcher]}
        for byte in range(begin, end):
            fetched[NODES[portion.fetcher], number, byte] += 1
            got.update((rank, number, byte) for rank in (portion.fetcher, *portion.others))
    expected = {
        (rank, number, byte)
        for rank, those in wanted.items()
        for _, number, _, begin, end in those
        for byte in range(begin, end)
    }
    assert got == dict.fromkeys(expected, 1)
    assert fetched == dict.fromkeys({(NODES[rank], number, byte) for rank, number, byte in expected}, 1)
