"""DTensors in plain state: a rank's own block stands for each."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_ckpt.errors import ConfigError, UnencodableStateError
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.modeling.blocks import has_blocks, with_blocks, without_blocks


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(mesh, rows: int) -> DTensor:
    shape = (2 * rows, 3)
    return DTensor.from_local(torch.rand(rows, 3), mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))


def test_blocks_become_the_dtensors_that_they_were(mesh):
    average = sharded(mesh, 2)
    state = {"step": 3, "average": {"w": average}, "list": [average, torch.ones(2)], "pair": (1, average)}
    blocks = with_blocks(state)
    assert has_blocks(blocks)
    assert not has_blocks(with_blocks({"step": 3, "w": [torch.ones(2)]}))
    here = {"average": {"w": sharded(mesh, 2)}, "list": [sharded(mesh, 2), None], "pair": (0, sharded(mesh, 2))}
    again = without_blocks(blocks, here, "ema")
    assert again["step"] == 3
    for tensor in (again["average"]["w"], again["list"][0], again["pair"][1]):
        assert isinstance(tensor, DTensor)
        assert tensor.shape == average.shape
        assert tensor.placements == average.placements
        assert torch.equal(tensor.to_local(), average.to_local())


def test_a_dtensor_that_nobody_has_replaced_is_refused_by_name(mesh):
    with pytest.raises(UnencodableStateError, match=r"'callbacks/ema/w' is a torch\.distributed.*DTensor"):
        encode_tree({"ema": {"w": sharded(mesh, 2)}}, "callbacks")


def test_another_layout_is_refused_by_name(mesh):
    blocks = with_blocks({"average": [sharded(mesh, 2)]})
    with pytest.raises(
        ConfigError, match=r"ema/average/0: .* \[2, 3\] of a DTensor .* \[4, 3\], .* \[1, 3\] of \[2, 3\]"
    ):
        without_blocks(blocks, {"average": [sharded(mesh, 1)]}, "ema")
    for here in ({"average": [torch.ones(4, 3)]}, {"average": []}, {}):
        with pytest.raises(ConfigError, match=r"ema/average/0 is a DTensor of shape .* and none in this process"):
            without_blocks(blocks, here, "ema")
