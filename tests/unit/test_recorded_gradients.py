"""What MoEvement records of parameters without a gradient: of all that were there before the update, or nothing."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.stopwatch import Stopwatch
from moe_ckpt.windows.lightning import Windows


def test_parameters_that_came_since_the_step_before_leave_it_unrecorded():
    model = nn.Module()
    model.used, model.unused = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchTrainingState(model, [optimizer])
    trainer = SimpleNamespace(callbacks=[], precision_plugin=Precision())
    windows = Windows(trainer, model, SimpleNamespace(layers=("an MoE layer",)), state, "MoEvement", Stopwatch())
    model.used.weight.grad = torch.ones(2, 2)
    for step, found in enumerate([["unused.weight"], None, ["added.weight", "unused.weight"]]):
        if step == 1:  # while a step is computed
            model.added = nn.Linear(2, 2, bias=False)
        windows.before_update(None)
        state.plain()  # the update is done
        assert sorted(windows.recorded().get("without_gradient", ())) == (found or [])
        assert ("without_gradient" in windows.recorded()) == (found is not None)
    windows.close()
