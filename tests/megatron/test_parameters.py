"""Parameters that are laid out otherwise than most: found as they are, or refused."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup

WARM = "tests.support.megatron_warm"


@contextmanager
def changed_config(**values: Any):
    """Options that ``Setup`` does not have."""
    from tests.support import megatron_gpt

    made = megatron_gpt._transformer_config

    def config(setup: Setup) -> Any:
        found = made(setup)
        for name, value in values.items():
            setattr(found, name, value)
        return found

    with mock.patch.object(megatron_gpt, "_transformer_config", config):
        yield


@contextmanager
def routers_in_fp32():
    """As models do that keep some parameters wide beside 16-bit ones."""
    from megatron.core.transformer.module import Float16Module

    made = Float16Module.__init__

    def init(self: Any, config: Any, module: Any) -> None:
        made(self, config, module)
        for name, parameter in self.named_parameters():
            if name.endswith("router.weight"):
                parameter.data = parameter.data.float()

    with mock.patch.object(Float16Module, "__init__", init):
        yield


def wide_routers(rank: int, world_size: int, setup: Setup) -> list[str]:
    """Names of parameters whose shard, as the adapter finds it, does not hold their values."""
    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.optimizers import slots
    from moe_ckpt.testing import megatron_cpu
    from tests.support import megatron_gpt

    megatron_cpu.install()
    with routers_in_fp32():
        built = megatron_gpt.build(setup, 1)
    assert {p.dtype for p in built.chunks[0].parameters()} == {torch.bfloat16, torch.float32}
    found = slots(built.optimizer)
    wrong = []
    for live in take_inventory(built.chunks).parameters:
        slot = found[live.parameter]
        start, stop = slot.range or (0, live.parameter.numel())
        values = live.parameter.detach().view(-1)[start:stop].float()
        if slot.updated is None or not torch.equal(slot.updated.detach().float().view(-1), values):
            wrong.append(live.parts[0].name)
        assert (slot.master is None) == (live.parameter.dtype == torch.float32)
    return wrong


def test_16_and_32_bit_parameters_in_one_distributed_optimizer():
    setup = Setup(layers=2, num_microbatches=1, dist_opt=True, precision="bf16")
    assert run_ranks(wide_routers, 1, setup, preload=WARM) == [[]]


class Quantized(nn.Parameter):
    """Stands for Transformer Engine's fp8 weights: its parameters are tensors of a class of their own."""


def tensor_parallel(rank: int, world_size: int, setup: Setup) -> dict[str, Any]:
    from moe_ckpt.errors import UnsupportedError
    from moe_ckpt.megatron.inventory import take_inventory, unwrap_module
    from tests.support import megatron_gpt

    with changed_config(softmax_type="learnable"):
        built = megatron_gpt.build(setup, 1)
    layer = unwrap_module(built.chunks[0]).decoder.layers[0]
    layer.latent = nn.Linear(4, 6, bias=False)  # as TELinear(parallel_mode="duplicated") is, once made
    layer.latent.parallel_mode = None
    layer.latent.weight.tensor_model_parallel, layer.latent.weight.partition_dim = True, 0
    parts = {part.name: part for live in take_inventory(built.chunks).parameters for part in live.parts}
    found: dict[str, Any] = {
        name: (parts[f"decoder.layers.0.{name}"].global_shape, parts[f"decoder.layers.0.{name}"].axes[0].segments[0].at)
        for name in ("latent.weight", "self_attention.core_attention.softmax_offset")
    }
    for name, parameter in (("undivided", nn.Parameter(torch.zeros(2))), ("quantized", Quantized(torch.zeros(2)))):
        parameter.tensor_model_parallel = True
        layer.register_parameter(name, parameter)
        try:
            take_inventory(built.chunks)
        except UnsupportedError as error:
            found[name] = str(error)
        delattr(layer, name)
    return found


def test_what_tensor_parallel_ranks_divide_without_saying_so_and_what_they_do_not_divide():
    for rank, found in enumerate(run_ranks(tensor_parallel, 2, Setup(tp=2, ep=2, layers=2), preload=WARM)):
        assert found["self_attention.core_attention.softmax_offset"] == ((2,), rank)
        assert found["latent.weight"] == ((6, 4), 0)
        assert "decoder.layers.0.undivided" in found["undivided"]
        assert "partition_dim" in found["undivided"]
        assert "decoder.layers.0.quantized is a Quantized" in found["quantized"]
