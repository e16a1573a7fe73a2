"""Names and places that no layout changes: what needs no Megatron-Core."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.blocks import BlockPart, placed_blocks
from moe_ckpt.megatron.inventory import (
    _require_known_state,
    non_expert_group,
    shape_and_axes,
    unwrap_module,
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings"),
        ("output_layer.weight", "output_layer"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm"),
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.3.attention"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.3.attention"),
        ("decoder.layers.12.self_attention.linear_kv_up_proj.weight", "decoder.layers.12.attention"),
        ("decoder.layers.3.pre_mlp_layernorm.bias", "decoder.layers.3.mlp"),
        ("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", "decoder.layers.3.mlp"),
        ("decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.0.mlp"),
        ("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight", "mtp.layers.0.mlp"),
    ],
)
def test_parameters_that_are_neither_experts_nor_routers_go_by_layer_and_half(name, group):
    assert non_expert_group(name) == group


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_blocks_put_together_are_the_whole(dim, gated):
    """Of a gated unit, each rank has its share of both halves."""
    whole = torch.arange(8 * 8).view(8, 8)
    ranks = 2
    found = torch.full((8, 8), -1)
    for rank in range(ranks):
        halves = whole.chunk(2, dim) if gated else [whole]
        mine = torch.cat([half.chunk(ranks, dim)[rank] for half in halves], dim).contiguous()
        shape, axes = shape_and_axes(tuple(mine.shape), dim, rank, ranks, gated=gated)
        assert shape == (8, 8)
        part = BlockPart("w", shape, 0, axes)
        for placed in placed_blocks(part, 0, part.stop):
            rows, columns = placed.offsets
            found[rows : rows + placed.shape[0], columns : columns + placed.shape[1]] = placed.view(mine.view(-1))
    assert torch.equal(found, whole)


def test_wrappers_are_looked_through():
    model = nn.Linear(1, 1)
    inner, outer = nn.Module(), nn.Module()
    inner.module, outer.module = model, inner
    assert unwrap_module(outer) is model


class Silent(nn.Module):
    """As Megatron-Core's linear layers."""

    def get_extra_state(self):
        return None


class Talking(nn.Module):
    def get_extra_state(self):
        return torch.ones(1)


def test_extra_state_that_nobody_saves():
    _require_known_state(nn.Sequential(Silent(), nn.Linear(1, 1)))
    with pytest.raises(UnsupportedError, match=r"^1 \(tests\.unit\.test_megatron_inventory\.Talking\).*stateful"):
        _require_known_state(nn.Sequential(Silent(), Talking()))


def test_transformer_engines_extra_state_is_its_own_matter():
    """Empty without fp8, and not needed but with delayed scaling."""
    kind = type("Linear", (Talking,), {"__module__": "transformer_engine.pytorch.module.linear"})
    wrapped = type("TELinear", (kind,), {})
    _require_known_state(nn.Sequential(wrapped()))
