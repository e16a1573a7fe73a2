"""Adam as Apex and Transformer Engine have it: state made in the first step, one count of steps per param group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ckpt.megatron import optimizers
from tests.support import run_ranks
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT, Life, live

WARM = "tests.support.megatron_warm"


class FusedAdam(torch.optim.Optimizer):
    """What ``apex.optimizers.FusedAdam`` and Transformer Engine's keep, where they keep it, without their kernel."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:  # both pass over it
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                self._update(parameter, state, group)

    def _update(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        (first, second), step = group["betas"], group["step"]
        state["exp_avg"].lerp_(parameter.grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
        denominator = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] / (1 - first**step) * state["exp_avg"] / denominator)


def fused(rank: int, world_size: int, life: Life) -> dict[str, Any]:
    from moe_ckpt.testing import megatron_cpu

    megatron_cpu.install()
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with (
        mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
    ):
        return live(rank, world_size, life)


@pytest.mark.parametrize(
    ("setup", "policy"),
    [
        (Setup(layers=2, num_microbatches=1, precision="bf16", dist_opt=True), ("Dense", {"every_n_steps": 2})),
        pytest.param(
            Setup(layers=2, num_microbatches=1, precision="bf16", ep=2),
            ("MoEvement", {"window": 2}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["distributed", "window"],
)
def test_a_run_goes_on_exactly(tmp_path: Path, setup: Setup, policy: tuple[str, dict[str, Any]]):
    life = Life(str(tmp_path / "unbroken"), 5, setup, policy, options={"save_last": False})
    broken = replace(life, store=str(tmp_path / "broken"))
    unbroken = run_ranks(fused, setup.ep, life, preload=WARM)
    run_ranks(fused, setup.ep, replace(broken, steps=3), preload=WARM)
    again = run_ranks(fused, setup.ep, replace(broken, seed=9), preload=WARM)
    assert 0 < again[0]["progress"].iteration < 3
    for one, other in zip(unbroken, again, strict=True):
        assert one["steps"] == 5
        for part in EXACT:
            assert one[part] == other[part], part


def test_a_count_of_none_is_that_of_an_optimizer_that_never_stepped(monkeypatch: pytest.MonkeyPatch):
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = FusedAdam([weight], 0.1, (0.9, 0.99), 1e-8, 0.0, True)
    monkeypatch.setattr(optimizers, "leaves", lambda optimizer: (SimpleNamespace(optimizer=optimizer),))
    optimizers.write_step(adam, 7)
    assert optimizers.read_step(adam) == 7
    optimizers.write_step(adam, None)
    assert optimizers.read_step(adam) is None
