"""What kernels read of each parameter under autocast: seen, not assumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_ckpt.windows.compute_types import AS_STORED, ComputeTypeProbe
from tests.support.tiny_moe import TinyMoE

BF16 = torch.bfloat16


def watched(model, loss, dtype=BF16):
    probe = ComputeTypeProbe(model)
    probe.start()
    with torch.autocast("cpu", dtype=dtype):
        value = loss(model)
    value.float().backward()
    probe.stop()
    return probe.types(probe.reads())


@pytest.mark.parametrize("stacked", [True, False])
def test_linear_layers_are_read_narrow_and_norms_as_they_are(stacked):
    model = TinyMoE(stacked=stacked)
    types = watched(model, lambda m: m(torch.randn(64, 16)).logsumexp(-1).mean())
    norms = {name for name, _ in model.named_parameters() if ".norm." in name}
    assert types.keys() == {name for name, _ in model.named_parameters()} - norms
    assert set(types.values()) == {BF16}


class Twice(nn.Module):
    """Cast, and read as it is besides."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.how = how

    def forward(self, x):
        return x @ self.weight + self.how(self.weight)


@pytest.mark.parametrize(
    "how",
    [lambda w: w.sum(), lambda w: w[0].exp(), lambda w: w.to(torch.float16).sum(), lambda w: w.t().clone().mean()],
    ids=["sum", "row", "another type", "clone"],
)
def test_one_other_use_is_enough(how):
    assert watched(Twice(how), lambda m: m(torch.randn(2, 4)).sum()) == {}


def test_views_read_nothing_and_what_is_never_used_is_left_out():
    model = Twice(lambda w: w.t()[0].detach().to(BF16).sum())
    model.unused = nn.Linear(4, 4)
    assert watched(model, lambda m: m(torch.randn(2, 4)).sum()) == {"weight": BF16}


def test_tied_parameters_and_memory_that_two_share():
    flat = torch.randn(32)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    assert watched(model, lambda m: (torch.randn(2, 4) @ m.a @ m.b).sum()) == {}


def test_without_autocast_nothing_is_narrow():
    model = TinyMoE()
    probe = ComputeTypeProbe(model)
    probe.start()
    model(torch.randn(8, 16)).mean().backward()
    probe.stop()
    probe.stop()
    assert probe.types(probe.reads()) == {}
    assert AS_STORED in probe.reads()


def test_the_ranks_answers_are_joined():
    """One rank did not use an expert, another read it as it is."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    probe = ComputeTypeProbe(model)
    assert probe.types([1, 3, 2]) == {"a.weight": BF16, "c.weight": torch.float16}
