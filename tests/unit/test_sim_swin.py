"""Swin Transformers with experts: parameters and work, beside the real layers and the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.workload.iteration import breakdown
from moe_ckpt_sim.workload.model import LayerShape, Precision
from moe_ckpt_sim.workload.swin import SwinSpec
from moe_ckpt_sim.workload.training import Batch

SWIN = SwinSpec(
    "swin",
    image_size=192,
    window_size=12,
    embed_dim=96,
    depths=(2, 2, 18, 2),
    num_heads=(3, 6, 12, 24),
    experts=8,
    top_k=1,
    moe_from_stage=2,
    classes=1000,
)
TINY = replace(SWIN, image_size=32, window_size=4, embed_dim=8, depths=(1, 2), num_heads=(2, 4), moe_from_stage=1)
ONE_GPU = Cluster("one", nodes=1, gpus_per_node=1, flops_per_sec=1e12, mfu=1.0)


def parameters(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def attention(width, heads):
    positions = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, heads, bias=False))
    return nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width), positions, nn.LayerNorm(width)


def mlp(width):
    return nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)


def test_operators_have_the_parameters_of_the_real_layers():
    expected = {
        "non_expert/patch_embedding": parameters(nn.Conv2d(3, 8, 4, stride=4), nn.LayerNorm(8)),
        "non_expert/layers.0.attention": parameters(*attention(8, 2)),
        "non_expert/layers.0.ffn": parameters(*mlp(8)),
        "non_expert/layers.1.merging": parameters(nn.Linear(32, 16, bias=False), nn.LayerNorm(32)),
        "non_expert/layers.1.attention": parameters(*attention(16, 4)),
        "non_expert/layers.1.ffn": parameters(*mlp(16)),
        "non_expert/layers.2.attention": parameters(*attention(16, 4)),
        "gate/0": parameters(nn.Linear(16, 8, bias=False)),
        **{f"expert/0/{expert}": parameters(*mlp(16)) for expert in range(8)},
        "non_expert/final_norm": parameters(nn.LayerNorm(16)),
        "non_expert/head": parameters(nn.Linear(16, 1000)),
    }
    assert list(TINY.build().elements.items()) == list(expected.items())


def test_without_the_experts_it_is_the_swin_of_the_papers():
    """SwinV2-S has 49.7 M parameters (arXiv 2111.09883, table 8), and one expert of each layer is used."""
    gates = sum(size for name, size in SWIN.build().elements.items() if name.startswith("gate/"))
    assert SWIN.build().active - gates == pytest.approx(49.7e6, rel=0.005)


def test_layers_get_wider_and_see_fewer_tokens():
    assert TINY.build().shapes == (LayerShape(64, 8, 16), LayerShape(16, 16, 16), LayerShape(16, 16, 16))
    assert [SWIN.shape(stage) for stage in range(4)] == [
        LayerShape(48 * 48, 96, 144),
        LayerShape(24 * 24, 192, 144),
        LayerShape(144, 384, 144),
        LayerShape(36, 768, 36),
    ]
    assert SWIN.build().seq == 144


def test_work_is_that_of_the_published_model():
    """SwinV2-S takes 11.5 G multiplications and additions forward at 256 x 256 with windows of 8 (table 8); three times
    that with backward, and each is two operations."""
    model = replace(SWIN, image_size=256, window_size=8).build()
    found = breakdown(ClusterLayout(model, ONE_GPU, Parallel()), Batch(1, 1), Precision())
    assert found.compute_secs * 1e12 == pytest.approx(6 * 11.5e9, rel=0.03)


def test_what_is_sent_goes_by_each_layers_own_width():
    """Ranks exchange the tokens of 9 layers of 144 x 384 and of one of 36 x 768; stages send at most 48 x 48 x 96."""
    cluster = replace(ONE_GPU, gpus_per_node=8, alpha_secs=0.0, nvlink_bytes_per_sec=1e9)
    found = breakdown(ClusterLayout(SWIN.build(), cluster, Parallel(ep=8)), Batch(8, 8), Precision())
    assert found.exchange_secs == pytest.approx(4 * 2 * (9 * 144 * 384 + 36 * 768) * 7 / 8 / 1e9)
    staged = breakdown(ClusterLayout(SWIN.build(), cluster, Parallel(pp=8)), Batch(8, 1), Precision())
    assert staged.send_secs == pytest.approx(2 * 2 * 48 * 48 * 96 / 1e9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"top_k": 9}, r"top_k=9, experts=8"),
        ({"num_heads": (3, 6)}, r"depths=\[2, 2, 18, 2\], num_heads=\[3, 6\]"),
        ({"depths": (), "num_heads": ()}, r"depths=\[\]"),
        ({"image_size": 200}, "image_size must be a multiple of 32"),
        ({"depths": (2, 2, 0, 2)}, r"depths\[2\]"),
        ({"moe_from_stage": 4}, "no layer is left for experts"),
        ({"embed_dim": 9.5}, "embed_dim"),
    ],
)
def test_what_makes_no_sense_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        replace(SWIN, **change)
