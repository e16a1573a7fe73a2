"""Adam as Apex and Transformer Engine have it: state made in the first step, one count of steps per param group."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """What ``apex.optimizers.FusedAdam`` and Transformer Engine's keep, where they keep it, without their kernel."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
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
