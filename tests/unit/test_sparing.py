"""Passes without gradients of some parameters: all others are the same, and what is not needed is not computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_ckpt.windows.freezing import ReentrantCheckpoints, WithoutGradients, with_loss, without_gradient
from tests.support.tiny_moe import WIDTH, TinyMoE


class Passing(torch.autograd.Function):
    """Writes down that the backward pass came by."""

    @staticmethod
    def forward(ctx, x, came, place):
        ctx.told = came, place
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.told[0].append(ctx.told[1])
        return gradient, None, None


class Layers(nn.Module):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.came: list[int] = []
        self.checkpoints = checkpoints

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = Passing.apply(x, self.came, place) if x.requires_grad else x
            x = F.gelu(layer(x) if self.checkpoints is None else checkpoint(layer, x, use_reentrant=self.checkpoints))
            x += 1.0  # in place, as on a module's output in training
        return x.square().mean()


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("frozen", ["experts", "embed", "norm", "head", "gate", "blocks.0", ""])
@pytest.mark.parametrize("connected", [False, True])
def test_gradients_of_everything_else_are_the_same(frozen, connected, stacked):
    torch.manual_seed(3)
    model, x = TinyMoE(dropout=0.0, stacked=stacked), torch.randn(32, WIDTH)
    whole = gradients(model, model(x).square().mean())
    names = [name for name in whole if frozen in name and not (frozen == "" and name == "head.bias")]
    chosen = [parameter for name, parameter in model.named_parameters() if name in names]
    sparing = WithoutGradients(model.modules(), chosen, connected=connected)
    found = gradients(model, model(x).square().mean())
    sparing.close()
    assert found.keys() == whole.keys() - set(names)
    assert all(torch.equal(found[name], whole[name]) for name in found)
    assert all(each.requires_grad for each in model.parameters())
    again = gradients(model, model(x).square().mean())
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_the_backward_pass_ends_behind_the_last_layer_that_needs_it():
    model, x = Layers(), torch.randn(3, 6)
    whole = gradients(model, model(x))
    assert model.came == [3, 2, 1]
    frozen = [*model.layers[0].parameters(), *model.layers[1].parameters()]
    for connected, came in ((False, [3]), (True, [3, 2, 1])):
        sparing = WithoutGradients(model.modules(), frozen, connected=connected)
        model.came.clear()
        found = gradients(model, model(x))
        sparing.close()
        assert model.came == came
        assert found.keys() == {name for name in whole if name[7] in "23"}
        assert all(torch.equal(found[name], whole[name]) for name in found)


def test_reentrant_checkpoints_keep_gradients_only_behind_inputs_that_require_some():
    model, x = Layers(True), torch.randn(3, 6)
    x.requires_grad_()
    whole = gradients(model, model(x))
    x.requires_grad_(False)
    first = nn.Linear(6, 6)

    def loss() -> torch.Tensor:
        return model(first(x) * 0 + x)

    lost = {}
    for connected in (False, True):
        sparing = WithoutGradients([first], list(first.parameters()), connected=connected)
        found = {} if not (out := loss()).requires_grad else gradients(model, out)
        sparing.close()
        lost[connected] = whole.keys() - found.keys()
        assert all(torch.equal(found[name], whole[name]) for name in found)
    assert lost == {False: whole.keys(), True: set()}


def test_checkpoints_are_noticed_where_they_are_reentrant():
    noticed = {}
    for kind in (None, False, True):
        watch, model = ReentrantCheckpoints(), Layers(kind)
        gradients(model, model(torch.randn(3, 6, requires_grad=True)))
        watch.close()
        noticed[kind] = watch.seen
    assert noticed == {None: False, False: False, True: True}
    watch.close()
    gradients(model, model(torch.randn(3, 6, requires_grad=True)))


def test_parameters_require_gradients_outside_of_their_modules_pass():
    model = Layers()
    sparing = WithoutGradients(model.modules(), list(model.parameters()), connected=True)
    asked = []
    model.layers[1].register_forward_hook(lambda *_: asked.append(all(p.requires_grad for p in model.parameters())))
    assert model(torch.randn(3, 6)).requires_grad, "a loss can go backward though nothing needs a gradient"
    assert asked == [True]
    with torch.no_grad():
        assert not model(torch.randn(3, 6)).requires_grad
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert all(each.requires_grad for each in model.parameters()), "a pass that fails leaves nothing behind"
    sparing.close()
    sparing.close()


def test_what_the_user_has_frozen_stays_so():
    model = Layers()
    model.layers[0].requires_grad_(False)
    WithoutGradients(model.modules(), list(model.parameters()), connected=False).close()
    assert [p.requires_grad for p in model.parameters()] == [False, False] + [True] * 6


def test_hooks_of_parameters_without_gradient_run():
    parameter, x = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    ran: list[object] = []
    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: ran.append(1))
    without_gradient(x * 2, [parameter]).sum().backward()
    assert ran
    assert parameter.grad is None
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_a_loss_is_found_where_lightning_finds_it():
    parameter, loss = nn.Parameter(torch.ones(2)), torch.ones((), requires_grad=True)
    assert with_loss(None, [parameter]) is None
    assert with_loss({"other": loss}, [parameter]) is None
    found = with_loss({"loss": loss, "n": 3}, [parameter])
    assert found["n"] == 3
    assert found["loss"].grad_fn is not None
    assert with_loss(loss * 2, [parameter]).requires_grad
