"""Any flat range of any piece of memory is found again in the whole tensor, element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.megatron.blocks import Axis, AxisSegment, BlockPart, placed_blocks, untransposed_axes


def gathered(part: BlockPart, start: int, stop: int) -> torch.Tensor:
    """The whole tensor, -1 where the range has nothing, from memory that is numbered from 0."""
    memory = torch.arange(start, stop)
    found = torch.full(part.global_shape, -1, dtype=torch.int64)
    for placed in placed_blocks(part, start, stop):
        block = placed.view(memory)
        assert tuple(block.shape) == placed.shape
        target = found
        for axis, (low, length) in enumerate(zip(placed.offsets, placed.shape, strict=True)):
            target = target.narrow(axis, low, length)
        assert (target == -1).all(), "written twice"
        target.copy_(block)
    return found


def only(expected: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return torch.where((expected >= start) & (expected < stop), expected, -1)


@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=4), data=st.data())
def test_any_flat_range_of_a_whole_parameter(shape, data):
    part = BlockPart("w", tuple(shape), 0, untransposed_axes(tuple(shape)))
    start = data.draw(st.integers(0, part.stop))
    stop = data.draw(st.integers(start, part.stop))
    everything = torch.arange(part.stop).view(shape)
    assert torch.equal(gathered(part, start, stop), only(everything, start, stop))
    most = max(1, 2 * len(shape) - 1)
    assert len(list(placed_blocks(part, start, stop))) <= most


@given(data=st.data(), tp=st.integers(1, 3), rank=st.integers(0, 2), f=st.integers(1, 4), h=st.integers(1, 4))
def test_halves_of_a_gated_unit_and_a_transposed_expert(data, tp, rank, f, h):
    """GroupedMLP's second expert of two: memory [H, 2f/tp] of the rank's gate and up columns, whole tensor [2F, H]."""
    rank %= tp
    columns = Axis(0, (AxisSegment(0, f, rank * f), AxisSegment(f, 2 * f, tp * f + rank * f)))
    part = BlockPart("w", (2 * tp * f, h), 2 * f * h, (Axis(1, (AxisSegment(0, h, 0),)), columns))
    start = data.draw(st.integers(0, part.stop))
    stop = data.draw(st.integers(start, part.stop))
    mine = torch.arange(part.start, part.stop).view(h, 2 * f)
    expected = torch.full(part.global_shape, -1, dtype=torch.int64)
    expected[rank * f : (rank + 1) * f] = mine[:, :f].t()
    expected[tp * f + rank * f :][:f] = mine[:, f:].t()
    assert torch.equal(gathered(part, start, stop), only(expected, start, stop))


def test_a_block_of_columns_keeps_its_place():
    part = BlockPart("w", (2, 6), 0, (Axis(0, (AxisSegment(0, 2, 0),)), Axis(1, (AxisSegment(0, 3, 3),))))
    assert gathered(part, 0, 6).tolist() == [[-1, -1, -1, 0, 1, 2], [-1, -1, -1, 3, 4, 5]]


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (0, 0), (12, 20)])
def test_nothing_in_common(start, stop):
    assert list(placed_blocks(BlockPart("w", (2, 3), 6, untransposed_axes((2, 3))), start, stop)) == []
