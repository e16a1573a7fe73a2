"""Gradients that Megatron's inner optimizers consumed, replayed in another process: bits after every step."""

from __future__ import annotations

import functools

import pytest
import torch

from moe_ckpt.core.operators import Span
from tests.megatron.test_exact import SKIPS
from tests.support import megatron_gpt
from tests.support.gradient_log import Recorder, differing, require_exact, same_bits
from tests.support.megatron_gpt import Setup
from tests.support.processes import run_ranks

STEPS = 8
EXPERTS_DATA = {"ep": 2, "num_microbatches": 2, "layers": 2}
CASES = {
    "fp32": Setup(**EXPERTS_DATA),
    "fp32-sharded": Setup(**EXPERTS_DATA, dist_opt=True),
    "bf16-grouped": Setup(**EXPERTS_DATA, precision="bf16", grouped=True),
    "bf16-grouped-sharded": Setup(**EXPERTS_DATA, precision="bf16", grouped=True, dist_opt=True),
    "fp16-skips": Setup(**EXPERTS_DATA, **SKIPS),
    "fp16-skips-overlapped": Setup(**EXPERTS_DATA, **SKIPS, dist_opt=True, overlap_param_gather=True),
    "sgd-tensor-parallel": Setup(tp=2, ep=2, num_microbatches=2, layers=2, optimizer="sgd"),
}


def train(rank, world_size, setup, steps=STEPS):
    built = megatron_gpt.build(setup, seed=1)
    from moe_ckpt.gradient_log.megatron import capture_gradients
    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.optimizers import inner_optimizers, slots

    inventory = take_inventory(built.chunks)
    names = sorted({part.name for live in inventory.parameters for part in live.parts})
    optimizers = inner_optimizers(built.optimizer)
    attach = lambda consumer: capture_gradients(inventory, built.optimizer, built.chunks, consumer)  # noqa: E731
    recorder = Recorder(optimizers, {name: [Span(name)] for name in names}, attach)
    made = []
    for iteration in range(steps):
        made.append(megatron_gpt.train_step(built, iteration)[1])
        recorder.step()
    updated = {id(slot.updated): (parameter, slot.range) for parameter, slot in slots(built.optimizer).items()}
    weights = {}
    for key, tensor in recorder.tensors.items():
        parameter, own = updated[id(tensor)]
        low, high = own or (0, parameter.numel())
        weights[key] = parameter.detach().reshape(-1)[low:high].clone()
    return *recorder.finish(), made, weights, len(optimizers), recorder.copier.releases


@functools.cache
def trained(case):
    return run_ranks(train, 4, CASES[case], preload="tests.support.megatron_warm")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("fp32-sharded", "bf16-grouped", "fp16-skips", "sgd-tensor-parallel")
def test_every_step_comes_out_again_in_another_process(case):
    for log, states, made, weights, optimizers, releases in trained(case):
        assert releases >= 1, "copies are made late, when the buffers are about to be zeroed"
        assert optimizers == 2, "dense and expert parameters"
        assert [len(log.made[at]) for at in range(1, STEPS + 1)] == [optimizers * each for each in made]
        assert ("fp16" in case) == (False in made)
        require_exact(log, states)
        last = log.replay_of(STEPS)
        for key, weight in weights.items():
            assert same_bits(last.tensors[key].detach().reshape(-1).to(weight.dtype), weight), f"{key}: model's weight"
        assert any(".experts." in name for name in log.spans)


def test_hyperparameters_and_skips_are_needed():
    from dataclasses import replace

    log, states, made = trained("fp16-skips")[0][:3]
    groups = [tuple({**g, "lr": g["lr"] * 1.5} for g in u.groups) for us in log.made.values() for u in us]
    spoiled = iter(groups)
    other = {at: tuple(replace(u, groups=next(spoiled)) for u in us) for at, us in log.made.items()}
    assert differing(states[STEPS], replace(log, made=other).replayed(STEPS)) != []
    twice = {key: [replace(b, values=b.values * 2) for b in blocks] for key, blocks in log.consumed.items()}
    assert differing(states[STEPS], replace(log, consumed=twice).replayed(STEPS)) != []
    assert made[0] is False
    assert torch.equal(*(next(iter(states[at].values()))[0].values for at in (0, 1))), "a skipped step changes nothing"
