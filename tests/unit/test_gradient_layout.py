"""What a rank's optimizers update, as plain data that a log keeps."""

from __future__ import annotations

import json

import pytest
import torch

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.tree import decode_tree, encode_tree
from moe_ckpt.gradient_log.units import Device, Unit, UnitBlock, UpdateLayout, whole_unit
from moe_ckpt.ledger.coverage import Box

UNITS = (
    whole_unit("w", 0, 0, torch.ones(3, 4).T),
    Unit("1: e[2:5]", 1, 0, "float32", (3,), (1,), (UnitBlock("e", Box((1, 0), (1, 3)), (3, 1), 0),), "fp32_param"),
)
LAYOUT = UpdateLayout(("torch.optim.AdamW", "torch.optim.SGD"), (0, 0), UNITS, Device("cpu", "x86_64 AVX2", 2))


def stored(layout: UpdateLayout) -> dict:
    encoded, tensors = encode_tree(layout.encoded())
    assert tensors == {}
    return decode_tree(encoded, tensors.__getitem__)


def test_a_layout_comes_back_as_it_was():
    assert UpdateLayout.decoded(stored(LAYOUT), "here") == LAYOUT


@pytest.mark.parametrize("key", ["classes", "keys", "units", "device"])
def test_a_layout_without_a_part_is_refused(key):
    told = {name: value for name, value in stored(LAYOUT).items() if name != key}
    with pytest.raises(DamagedError, match=r"here.*its layout of updates is none"):
        UpdateLayout.decoded(told, "here")


@pytest.mark.parametrize("dtype", ["load", "nn", "float33"])
def test_only_types_are_looked_up_by_a_name_that_was_read(dtype):
    told = stored(LAYOUT)
    row = json.loads(told["units"][0])
    row[3] = dtype
    with pytest.raises(DamagedError, match="layout of updates"):
        UpdateLayout.decoded({**told, "units": [json.dumps(row)]}, "here")


def test_a_device_says_what_it_is():
    assert str(Device("cpu", "x86_64 AVX2", 2)) == "cpu (x86_64 AVX2, 2 threads)"
    assert str(Device("cuda", "NVIDIA H200", 8)) == "cuda (NVIDIA H200)"
    assert Device.of(torch.device("cpu")).threads == torch.get_num_threads()
