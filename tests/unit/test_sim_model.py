"""Models by their widths: how many parameters, of which operators, and on which pipeline stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.workload.model import LayerShape, ModelSpec, Precision

SMALL = ModelSpec("small", layers=4, hidden=8, experts=4, top_k=2, expert_ffn=16, vocab=100, seq=32, moe_every=2)
"""Two of four layers have experts."""


def test_parameters_are_counted_operator_by_operator():
    model = SMALL.build()
    attention = 4 * 8 * 8 + 4 * 8 + 2 * 2 * 8  # four matrices, their biases, two norms
    ffn, expert = 2 * 8 * 32 + 32 + 8, 2 * 8 * 16 + 16 + 8
    assert model.elements["non_expert/embedding"] == 800
    assert model.elements["non_expert/layers.0.attention"] == attention
    assert model.elements["non_expert/layers.0.ffn"] == ffn
    assert model.elements["expert/0/3"] == expert
    assert model.elements["gate/1"] == 8 * 4
    assert model.total == 2 * 800 + 4 * attention + 2 * ffn + 8 * expert + 2 * 32 + 16
    assert model.active == model.total - 2 * 2 * expert
    assert model.expert_total == 8 * expert
    assert model.shapes == (LayerShape(SMALL.seq, 8, SMALL.seq),) * 4


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"tied": True}, -800),
        ({"learned_positions": True}, 32 * 8),
        ({"shared_expert_ffn": 10}, 2 * (2 * 8 * 10 + 10 + 8)),
        ({"attention_params": 100}, 4 * (100 - 4 * 8 * 8 - 4 * 8)),
        ({"bias": False}, -(4 * (4 * 8 + 2 * 8) + 2 * (32 + 8) + 8 * (16 + 8) + 8)),
        ({"gated": True}, 2 * (8 * 32 + 32) + 8 * (8 * 16 + 16)),
        ({"ffn": 33}, 2 * (2 * 8 + 1)),
        ({"dense_layers": 2}, 2 * 8 * 32 + 32 + 8 - 4 * (2 * 8 * 16 + 16 + 8) - 32),
    ],
)
def test_what_a_width_adds(change, difference):
    assert replace(SMALL, **change).build().total - SMALL.build().total == difference


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"top_k": 5}, "top_k must not exceed experts"),
        ({"dense_layers": 4}, "no layer is left for experts"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1"),
        ({"vocab": 1.5}, "vocab must be a whole number"),
    ],
)
def test_what_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **change)


def test_bytes_follow_the_precision():
    sizes = SMALL.build().sizes(Precision(1, 2, 3))
    assert (sizes["gate/0"].full, sizes["gate/0"].compute) == (32 * 5, 32)


def layout(layers, **parallel):
    model = replace(SMALL, layers=layers, moe_every=1).build()
    return ClusterLayout(model, Cluster("c", nodes=32), Parallel(**parallel))


@pytest.mark.parametrize(
    ("layers", "parallel", "stages"),
    [
        # embedding, the layers, head
        (4, {"pp": 1}, [0, 0, 0, 0, 0, 0]),
        (4, {"pp": 2}, [0, 0, 0, 1, 1, 1]),
        (4, {"pp": 2, "vpp": 2}, [0, 0, 1, 0, 1, 1]),
        (5, {"pp": 4}, [0, 0, 0, 1, 2, 3, 3]),
        (2, {"pp": 3}, [0, 0, 1, 2]),
        (2, {"pp": 4}, [0, 1, 2, 3]),
    ],
)
def test_layers_are_dealt_over_stages(layers, parallel, stages):
    found = layout(layers, **parallel)
    assert [found.stage_at(layer) for layer in range(-1, layers + 1)] == stages
    assert set(stages) == set(range(parallel["pp"]))


def test_embedding_and_head_may_have_stages_of_their_own_but_none_may_be_empty():
    assert layout(4, pp=6).stage_of["non_expert/head"] == 5
    with pytest.raises(ConfigError, match="not enough for 7 stages"):
        layout(4, pp=7)


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigError, match="needs 512 ranks, but Cluster 'c' has 256 GPUs"):
        layout(4, dp=512)
