"""Which parameters are trained, and which have no gradient: always as of this moment."""

from __future__ import annotations

import torch
from torch import nn

from moe_ckpt.modeling.module_state import Frozen


def test_what_is_frozen_and_thawed_is_named():
    parameters = {str(at): nn.Parameter(torch.randn(2), requires_grad=at != 1) for at in range(4)}
    frozen = Frozen()
    first = frozen.names(parameters)
    assert first == ["1"]
    assert frozen.names(parameters) is first
    parameters["1"].requires_grad_(True)
    parameters["3"].requires_grad_(False)
    second = frozen.names(parameters)
    assert second == ["3"]
    for changed in ("2", "2", "0"):
        parameters[changed].requires_grad_(not parameters[changed].requires_grad)
        frozen.names(parameters)
    assert frozen.names(parameters) == ["0", "3"]
    third = frozen.names(parameters)
    (parameters["1"] * 1).sum().backward()
    parameters["2"].register_hook(lambda gradient: gradient)
    assert frozen.names(parameters) is third
    assert frozen.names({"0": parameters["0"]}) == ["0"]


def test_swapped_tensors_are_asked_as_well():
    parameters = {"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.randn(2), requires_grad=False)}
    frozen = Frozen()
    names = frozen.names(parameters)
    torch.utils.swap_tensors(parameters["a"], nn.Parameter(torch.randn(2)))  # another object behind the same tensor
    assert frozen.names(parameters) is names
    parameters["a"].requires_grad_(False)
    assert frozen.names(parameters) == ["a", "b"]
    torch.utils.swap_tensors(parameters["a"], nn.Parameter(torch.randn(2)))
    assert frozen.names(parameters) == ["b"]
