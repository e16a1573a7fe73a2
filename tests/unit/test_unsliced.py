"""Tensors of which a store has no slice: told and made again, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.contents import UNSLICED, describe_tensor, make_tensor, state_contents
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.format.tree import decode_tree, encode_tree
from tests.support.store_builder import generators


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2), (), (2,)])
def test_what_is_told_makes_the_same_tensor(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    value, tensors = encode_tree(describe_tensor(tensor, "x"))
    assert len(tensors) == bool(tensor.numel())
    entry = decode_tree(value, tensors.__getitem__)
    assert UNSLICED(entry) == ""
    found = make_tensor(entry)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.float(), tensor.float()) if not dtype.is_complex else torch.equal(found, tensor)


def test_a_type_that_cannot_be_stored_is_named():
    with pytest.raises(UnsupportedError, match=r"parameter 'w': tensors of torch\.complex128"):
        describe_tensor(torch.empty(0, dtype=torch.complex128), "parameter 'w'")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F32", "shape": [1 << 60]}, "without a value"),
        ({"dtype": "F32", "shape": [0, -1]}, "shape"),
        ({"dtype": "F33", "shape": [0]}, "an element type"),
        ({"dtype": ["F32"], "shape": [0]}, "an element type"),
        ({"dtype": "F32", "shape": 0}, "a list"),
        ({"dtype": "F32"}, "shape"),
        ({"dtype": "F32", "shape": [2], "value": torch.zeros(3)}, "another type or shape"),
        ({"dtype": "F32", "shape": [2], "value": [0.0, 0.0]}, "a tensor"),
        ({"dtype": "F32", "shape": [0], "cpu": 1}, "true or false"),
    ],
)
def test_what_is_no_such_entry_is_found_when_a_state_is_read(entry, said):
    assert said in UNSLICED(entry)
    optimizer = {"class": "torch.optim.SGD", "param_groups": [], "unsliced": {"w": {"m": entry}}}
    plain = {"buffers": {}, "frozen": [], "optimizers": [optimizer]}
    checkpoint = {"global_step": 1, "loops": {"fit_loop": {}}, "lr_schedulers": []}
    configured = {"optimizers": [], "schedulers": [], "training": {}, "frozen": ""}
    state = {
        "framework": "lightning",
        "checkpoint": checkpoint,
        "plain": plain,
        "rng": generators(0),
        "configured": configured,
    }
    assert said in state_contents(state)
    plain["optimizers"] = []
    assert state_contents(state) == ""
    assert said in state_contents(state | {"plain": plain | {"unsliced": {"w": entry}}})
    assert "text" in state_contents(state | {"plain": plain | {"aliases": {"b": 1}}})
    for other in (7, {}, {"prefix": 1, "class": "x", "config": {}, "generation_config": None}):
        assert "pretrained" in state_contents(state | {"plain": plain | {"pretrained": [other]}})
