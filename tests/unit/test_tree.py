"""The tree of messages: everybody is in it once, subtrees are runs of ranks, and its height is a logarithm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_ckpt.comm.lane import TreeNode
from moe_ckpt.run.agreement import StepConsensus, pack
from moe_ckpt.tiers import memory_tier

SCALE = Path(__file__).parents[2] / "docs" / "scale.md"


def hops(ranks: int) -> int:
    """Messages one after the other until every rank has the combined value: up the tree, and down."""
    return 2 * (ranks - 1).bit_length()


def most_messages(ranks: int) -> int:
    """The most that any one rank sends for one combined value: rank 0, one to each child."""
    return (ranks - 1).bit_length()


GENERATIONS = 2
"""Numbers that a lane adds to each agreement: the run's generation, twice."""
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 100]


def subtree(rank: int, ranks: int) -> list[int]:
    return [rank, *(one for child in TreeNode(rank, ranks).children for one in subtree(child, ranks))]


def depth(rank: int) -> int:
    parent = TreeNode(rank, 1 << 30).parent
    return 0 if parent is None else 1 + depth(parent)


@pytest.mark.parametrize("ranks", SIZES)
def test_parents_and_children_fit_and_every_rank_is_reached_once(ranks):
    for rank in range(ranks):
        for child in TreeNode(rank, ranks).children:
            assert TreeNode(child, ranks).parent == rank
    assert subtree(0, ranks) == list(range(ranks)), "in the order of ranks"


@pytest.mark.parametrize("ranks", SIZES)
def test_formulas_are_those_of_the_tree(ranks):
    nodes = [TreeNode(rank, ranks) for rank in range(ranks)]
    messages = [len(node.children) + (node.parent is not None) for node in nodes]
    assert sum(messages) == 2 * (ranks - 1)
    assert max(messages) == most_messages(ranks) or ranks == 1
    assert hops(ranks) >= 2 * max(depth(rank) for rank in range(ranks))
    assert hops(ranks) <= 2 * max(1, ranks - 1).bit_length()


def test_large_worlds():
    assert (hops(8), hops(1024), hops(131_072)) == (6, 20, 34)
    assert most_messages(131_072) == 17


def test_the_table_in_the_docs_is_that_of_the_formulas():
    """Bytes are those of the numbers that ranks really send; ``dist/test_agreement_tree`` counts messages and bytes."""
    alone = len(pack(StepConsensus(), leads=True)) + GENERATIONS
    text = SCALE.read_text().replace("\N{MULTIPLICATION SIGN}", "x")
    assert f"8 x ({alone} + L x E) bytes" in text
    row_of_five = r"^\| " + r" \| ".join([r"([\d ]+)"] * 5) + r" \|$"
    rows = re.findall(row_of_five, text, re.MULTILINE)
    assert [int(row[0].replace(" ", "")) for row in rows] == [8, 64, 512, 2048, 16_384, 131_072]
    for row in rows:
        ranks, found_hops, most, every, kib = (int(number.replace(" ", "")) for number in row)
        assert (found_hops, most, every) == (hops(ranks), most_messages(ranks), 2 * (ranks - 1))
        assert kib == round(most_messages(ranks) * 8 * (alone + 61 * 256) / 1024)


def test_what_memory_adds_to_an_agreement_is_that_of_the_docs():
    reports = 2 * 2 * memory_tier._REPORTED
    alone = len(pack(StepConsensus(), leads=True)) + GENERATIONS
    assert f"and {alone} numbers more ({alone + reports} with `Memory()`)" in SCALE.read_text()
