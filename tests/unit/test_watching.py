"""The memory of tensors: every move is seen where it is looked for, and writing moves nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from moe_ckpt.modeling.watching import TensorAddresses
from moe_ckpt.ports import Reading, StateTensor


def some():
    """Tensors of all kinds that a model and its optimizers hold."""
    torch.manual_seed(0)
    flat = torch.randn(64)
    return [
        nn.Parameter(torch.randn(4, 4)),
        nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False),
        torch.tensor(3.0),
        flat[8:24].view(4, 4),
        nn.Parameter(flat[24:40]),
        torch.from_numpy(np.arange(6.0)),
        torch.randn(4, 4).t(),
        nn.Parameter(torch.randn(8)).detach(),
    ]


def memory_of(tensors):
    """Each tensor belongs to a parameter of its own."""
    views = [StateTensor(f"model/{at}", str(at), tensor, (), (), False) for at, tensor in enumerate(tensors)]
    return TensorAddresses(((str(at), tensor) for at, tensor in enumerate(tensors)), views), views


def of(views, places):
    return Reading(views, np.array(places, dtype=np.int64))


def its_data_is_another(tensor):
    tensor.data = tensor.data.clone()


def its_data_begins_elsewhere(tensor):
    tensor.data = tensor.new_empty(100)[10:].as_strided(tensor.shape, tensor.stride())


def it_is_set(tensor):
    with torch.no_grad():
        tensor.set_(torch.empty_like(tensor).untyped_storage(), 0, tensor.shape)


def it_is_swapped(tensor):
    torch.utils.swap_tensors(tensor, type(tensor)(tensor.detach().clone()))


def its_storage_is_made_larger(tensor):
    tensor.untyped_storage().resize_(1 << 20)


def its_data_is_shifted_within_the_storage(tensor):
    tensor.data = tensor.as_strided((1,), (1,), tensor.storage_offset() + (tensor.numel() > 1)).data


MOVES = [its_data_is_another, its_data_begins_elsewhere, it_is_set, it_is_swapped]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("at", [0, 2])
def test_each_move_is_seen_where_it_is_looked_for(move, at):
    tensors = some()
    memory, views = memory_of(tensors)
    assert memory.same()
    assert memory.same(of(views, range(len(tensors))))
    assert memory.same(of((), []))
    move(tensors[at])
    assert not memory.same()
    assert not memory.same(of(views, [1, at]))
    others = [other for other in range(len(tensors)) if other != at]
    assert memory.same(of(views, others))
    assert not memory.same(of([*views], others))  # places among other views say nothing
    assert memory.same(of((), []))
    assert memory_of(tensors)[0].same()


@pytest.mark.parametrize(
    "move", [its_storage_is_made_larger, its_data_is_shifted_within_the_storage], ids=lambda move: move.__name__
)
def test_a_move_that_leaves_the_storage_the_same_is_seen(move):
    tensor = nn.Parameter(torch.randn(4))
    memory, _ = memory_of([tensor])
    move(tensor)
    assert not memory.same()


def test_writing_moves_nothing():
    tensors = some()
    memory, _ = memory_of(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)
            tensor.grad = None
    assert memory.same()
