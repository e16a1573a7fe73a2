"""What tells that somebody has written to weights or optimizer state, as callbacks do it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.survivors.newest_step import Fingerprint


@pytest.fixture
def module():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 200).to(torch.bfloat16), nn.BatchNorm1d(3))


@pytest.fixture
def state(module):
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return TorchTrainingState(module, [optimizer])


def in_place(module):
    with torch.no_grad():
        module[0].weight[2, 2] += 1.0


def averaged(module):
    """As Lightning's ``WeightAveraging`` swaps weights: torch does not count it."""
    before = module[1].weight._version
    module[1].weight.data.copy_(0.5 * module[1].weight.data)
    assert module[1].weight._version == before


def rebound(module):
    module[0].bias.data = module[0].bias.data.clone()


def swapped_and_back(module):
    kept = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict({name: value * 0 for name, value in kept.items()})
    module.load_state_dict(kept)


@pytest.mark.parametrize("change", [in_place, averaged, rebound, swapped_and_back])
def test_what_others_write_is_seen(change, module, state):
    noted = Fingerprint(state.tensors())
    assert noted.fits(state.tensors())
    change(module)
    assert not noted.fits(state.tensors())


def test_moments_are_looked_at_and_gradients_are_not(module, state):
    noted = Fingerprint(state.tensors())
    module[0].weight.grad.zero_()
    module.eval()
    with torch.no_grad():
        module[0](torch.ones(2, 7))
    assert noted.fits(state.tensors())
    moments = next(each for each in state.tensors() if each.key.endswith("exp_avg_sq"))
    moments.local.mul_(2)
    assert not noted.fits(state.tensors())


ODD = [torch.full((3, 4), torch.nan), torch.empty(0), torch.tensor(5), torch.ones(6, 4).t()]


@pytest.mark.parametrize("value", ODD)
def test_any_tensor_has_one(value):
    parameter = nn.Parameter(value.float(), requires_grad=False)
    holder = nn.ParameterList([parameter])
    state = TorchTrainingState(holder, [])
    assert Fingerprint(state.tensors()).fits(state.tensors())
