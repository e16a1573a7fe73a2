"""What hangs on an optimizer and a model while a loop runs, and is gone afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

from moe_ckpt.driver.messages import Messages
from moe_ckpt.driver.states import Moment
from moe_ckpt.errors import ConfigError, StoreError, UnencodableStateError
from moe_ckpt.megatron import optimizers
from moe_ckpt.megatron.checkpoint import on_first_forward
from moe_ckpt.megatron.host import Loop, Progress, other_layout, restore_stateful
from moe_ckpt.megatron.optimizers import StepWatch
from moe_ckpt.stopwatch import Stopwatch


def no(*_: Any) -> None:
    """Does nothing."""


def watched(optimizer: Any, before: Any = no, after: Any = no, note: Any = no, inner: Any = ()) -> StepWatch:
    return StepWatch(optimizer, inner, before=before, after=after, note=note, stopwatch=Stopwatch())


class Optimizer:
    def __init__(self, *results: Any) -> None:
        self.calls: list[Any] = []
        self._results = iter(results)

    def step(self, scale: float = 1.0) -> Any:
        self.calls.append(scale)
        return next(self._results)


def test_a_step_is_watched_until_the_watch_is_closed():
    optimizer, told = Optimizer((True, 1.0, None), (False, None, None), None, None), []
    watch = watched(optimizer, lambda: told.append("before"), lambda: told.append(len(optimizer.calls)))
    assert optimizer.step(scale=2.0) == (True, 1.0, None)
    assert (told, optimizer.calls, watch.updated) == (["before", 1], [2.0], True)
    optimizer.step()
    assert watch.updated is False, "fp16 skipped it"
    optimizer.step()
    assert watch.updated is True, "an optimizer that returns nothing has made the update"
    watch.close()
    watch.close()
    assert "step" not in vars(optimizer)
    optimizer.step()
    assert len(told) == 6


def test_a_watch_under_another_wrapper_only_passes_on():
    optimizer, told = Optimizer(1, 2), []
    own = optimizer.step = optimizer.step
    watch = watched(optimizer, lambda: told.append("before"))
    inner = optimizer.step
    optimizer.step = outer = lambda: inner() * 10
    assert optimizer.step() == 10
    watch.close()
    assert optimizer.step is outer
    assert optimizer.step() == 20
    assert told == ["before"]
    alone = watched(SimpleNamespace(step=own))
    alone.close()
    assert alone._optimizer.step is own, "what stood there comes back"


def test_the_moments_of_a_step():
    inner, told = torch.optim.SGD([nn.Parameter(torch.zeros(1))]), []
    watch = watched(inner, note=told.append, inner=[inner])
    inner.step()
    assert told == [Moment.REDUCING, Moment.WRITING, Moment.WRITTEN]
    watch.close()
    inner.step()
    assert len(told) == 3


class Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ArithmeticError


@pytest.mark.parametrize("within", [True, False])
def test_an_update_is_completed_unless_it_failed_within_an_inner_optimizer(monkeypatch, within: bool):
    first, second = (kind([nn.Parameter(torch.zeros(1))]) for kind in (torch.optim.SGD, Fails))
    told, completed = [], []
    monkeypatch.setattr(optimizers, "finish_update", lambda optimizer, ended: completed.append([*ended]))

    def step() -> None:
        first.step()
        if within:
            second.step()
        raise ArithmeticError  # where weights are gathered

    optimizer = SimpleNamespace(step=step)
    watch = watched(optimizer, note=told.append, inner=[first, second])
    with pytest.raises(ArithmeticError):
        optimizer.step()
    watch.close()
    if within:
        assert (completed, told) == ([], [Moment.REDUCING, Moment.WRITING, Moment.WRITING])
    else:
        assert (completed, told) == ([[id(first)]], [Moment.REDUCING, Moment.WRITING, Moment.WRITTEN_ALONE])


def test_the_first_training_forward_pass_of_the_model():
    model, other, told = nn.Sequential(nn.Linear(1, 1), nn.Dropout()), nn.Linear(1, 1), []
    first = on_first_forward([model], lambda: told.append(model.training))
    other(torch.ones(1, 1))
    model.eval()(torch.ones(1, 1))
    assert told == []
    model.train()
    model[1](torch.ones(1, 1))  # some schedules call layers one by one
    model(torch.ones(1, 1))
    assert told == [True]
    first.remove()
    on_first_forward([model], lambda: None).remove()
    assert not nn_module._global_forward_pre_hooks


def test_iterations_in_another_order():
    loop = Loop()
    loop.begin_at(Progress(4, 8, restored=True, counters={"a": 1}))
    assert not loop.moved
    loop.is_updating = True
    loop.require_joined(5)
    loop.count_iteration("after_step", 5, 10, None)
    assert (loop.counters, loop.moved) == ({"a": 1}, True)
    with pytest.raises(ConfigError, match=r"after_step\(6\): neither optimizer.step\(\).*since iteration 5"):
        loop.require_joined(6)
    loop.count_iteration("skip", 6, 12, {"a": [2]})
    with pytest.raises(ConfigError, match=r"skip\(6\) follows iteration 6"):
        loop.count_iteration("skip", 6, 12, None)
    with pytest.raises(UnencodableStateError, match="counters/a"):
        loop.count_iteration("after_step", 7, 14, {"a": object()})
    assert (loop.step, loop.consumed_samples, loop.counters) == (6, 12, {"a": [2]})


class OptimizerParamScheduler:
    """Refuses another schedule as Megatron's of that name does."""

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": 8}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["num_steps"] == 8, "class input value and checkpointvalue for total number of iterations differ"


def test_a_longer_schedule_is_refused_with_what_to_give():
    with pytest.raises(StoreError, match="--override-opt_param-scheduler") as refused:
        restore_stateful({"scheduler": OptimizerParamScheduler()}, {"scheduler": {"num_steps": 16}}, "state.json")
    assert "move the step directory away" not in str(refused.value)


def test_a_schedule_that_was_loaded_before_stands_where_the_checkpoint_says():
    """Megatron-LM's --load loads it first, and Megatron's class adds what it is given."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as Megatrons

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    ends = {"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "start_wd": 0.0, "end_wd": 1.0}
    steps = {"lr_warmup_steps": 0, "lr_decay_steps": 100, "wd_incr_steps": 100}
    schedule = Megatrons(optimizer, **ends, **steps, lr_decay_style="linear", wd_incr_style="linear")
    schedule.step(16)
    stored = schedule.state_dict()
    schedule.step(4)
    restore_stateful({"scheduler": schedule}, {"scheduler": stored}, "state.json")
    assert (schedule.num_steps, optimizer.param_groups[0]["lr"]) == (16, 0.84)


def test_another_layout_is_warned_of_once_and_by_its_degrees(caplog):
    for rank in range(2):
        for here in ({"expert": 4, "data": 4}, {"expert": 2, "data": 4}):
            Messages("iteration", "store", rank).inexact(other_layout({"expert": 2, "data": 4}, here))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "another layout (expert 2, now 4)" in record.message
    assert "random numbers come from the new seed" in record.message
