"""One gradient waits, and with it DDP's reduction of its bucket."""

from __future__ import annotations

import torch
from torch import nn

from moe_ckpt.callbacks.held_gradient import HeldGradient


def passes(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def test_it_is_the_last_gradient_of_one_pass():
    model, told = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    held = HeldGradient(model)
    held.hold(lambda: told.append([each.grad is not None for each in model.parameters()]))
    passes(model)
    assert told == [[False, True, True, True]]
    held.release()
    passes(model)
    assert len(told) == 1
    assert not any(each._backward_hooks for each in model.parameters())


def test_a_new_pass_is_held_once():
    model, told = nn.Linear(2, 2), []
    held = HeldGradient(model)
    held.hold(lambda: told.append("of a pass that failed"))
    held.hold(lambda: told.append("of this one"))
    passes(model)
    assert told == ["of this one"]


def test_a_frozen_parameter_has_no_gradient_to_hold():
    model, told = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    for each in model[0].parameters():
        each.requires_grad_(False)
    held = HeldGradient(model)
    held.hold(lambda: told.append(model[1].bias.grad is None))
    passes(model)
    assert len(told) == 1
    for each in model.parameters():
        each.requires_grad_(False)
    held.hold(lambda: told.append(None))
    assert not any(each._backward_hooks for each in model.parameters())


def test_the_gradient_itself_is_what_it_was():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(model.state_dict())
    HeldGradient(model).hold(lambda: None)
    passes(model)
    passes(other)
    assert torch.equal(model.weight.grad, other.weight.grad)
