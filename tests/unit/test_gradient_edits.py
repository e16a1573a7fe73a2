"""What is seen of writes to weights and optimizer state beside the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_ckpt.gradient_log import edits
from moe_ckpt.gradient_log.capture import GradientCapture, GradientConsumer
from moe_ckpt.gradient_log.edits import EditWatch
from moe_ckpt.gradient_log.units import whole_unit
from moe_ckpt.ledger.coverage import Box


class Unread(GradientConsumer):
    def consume(self, gradients):
        pass

    def release(self, *, dropped=False):
        pass


class Training:
    """Steps of AdamW and SGD, each watched as ``RunLog`` does it."""

    def __init__(self, *, hook=None):
        weights = self.weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(6)]
        self.optimizers = [torch.optim.AdamW(weights[:4]), torch.optim.SGD(weights[4:], lr=0.1, momentum=0.9)]
        if hook is not None:
            self.optimizers[0].register_step_post_hook(hook)
        names = {id(weight): f"w{at}" for at, weight in enumerate(weights)}

        def describe(number, group, tensor):
            return whole_unit(names[id(tensor)], number, group, tensor, Box((0, 0), (3, 4)))

        self.watch = EditWatch(self.optimizers, ())
        self.watch.begin(GradientCapture(self.optimizers, describe, Unread()))

    def update(self, numbers=(0, 1)):
        for at, number in enumerate(numbers):
            for weight in self.weights:
                weight.grad = torch.ones_like(weight)
            self.watch.before_update(number, first=at == 0)
            self.optimizers[number].step()

    def step(self):
        self.update()
        found = self.watch.edited()
        self.watch.forget()
        return found


@pytest.fixture
def training():
    made = Training()
    for _ in range(3):
        assert made.step() == (), "momentum comes into being, and is put into its place again at each step"
    return made


def _count(training):
    with torch.no_grad():
        training.weights[1].clamp_(0.5, 0.6)


def _silent(training):
    training.weights[1].data.mul_(0.5)


def _replaced(training):
    training.weights[1].data = training.weights[1].data * 0.5


def _moment(training):
    training.optimizers[0].state[training.weights[1]]["exp_avg"].zero_()


def _count_of_steps(training):
    training.optimizers[0].state[training.weights[1]]["step"].zero_()


def _other_moment(training):
    training.optimizers[0].state[training.weights[1]]["exp_avg"] = torch.zeros(3, 4)


def _removed(training):
    del training.optimizers[0].state[training.weights[1]]


EDITS = [_count, _silent, _replaced, _moment, _count_of_steps, _other_moment, _removed]


@pytest.mark.parametrize("edit", EDITS)
def test_edits_behind_an_update_and_before_one_belong_to_their_step(training, edit):
    training.update()
    edit(training)
    assert training.watch.edited() == ("w1",)
    training.watch.forget()
    assert training.step() == (), "the step before was taken in as it was then"
    if edit is not _removed:  # the state that comes next is new
        edit(training)
        assert training.step() == ("w1",)
        assert training.step() == ()


@pytest.mark.parametrize("edit", EDITS[:4])
def test_edits_between_two_optimizers_updates(training, edit):
    training.update([0])
    edit(training)
    training.update([1])
    assert training.watch.edited() == ("w1",)


def test_what_a_hook_of_the_optimizer_writes_is_no_part_of_its_update():
    training = Training(hook=lambda optimizer, *_: optimizer.param_groups[0]["params"][2].detach().mul_(0.5))
    assert training.step() == ("w2",)


def test_a_step_without_an_update_may_be_edited_too(training):
    _count(training)
    assert training.watch.edited() == ("w1",)
    training.watch.forget()
    assert training.watch.edited() == ()


def test_of_many_weights_values_are_compared_in_turn(monkeypatch):
    monkeypatch.setattr(edits, "_MOST_TENSORS", 2)
    training, seen = Training(), set()
    for _ in range(4):
        training.update()
        for weight in training.weights:
            weight.data.mul_(0.5)
        seen.update(training.watch.edited())
        training.watch.forget()
    assert seen == {f"w{at}" for at in range(6)}


def test_of_a_large_weight_another_part_each_time():
    parts = [edits._part(torch.arange(60).view(3, 4, 5), 64, turn) for turn in range(30)]
    assert all(part.nbytes <= 64 for part in parts)
    assert {int(value) for part in parts for value in part.flatten()} == set(range(60))
