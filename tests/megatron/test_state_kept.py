"""Views are made once and used again: the same objects while nothing changes, and never those of another memory."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup

WARM = "tests.support.megatron_warm"


def facts(tensors: Any) -> list[tuple[Any, ...]]:
    return [(t.key, t.offsets, t.local.data_ptr(), t.local.stride(), tuple(t.local.shape)) for t in tensors]


def calls(function: Any) -> int:
    """Python functions that run when it is called."""
    found = []
    gc.disable()  # it may run what other tests left to be run at the end of their objects
    sys.setprofile(lambda frame, event, arg: found.append(event) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(found)


def notices(rank: int, world_size: int, setup: Setup) -> dict[str, Any]:
    from moe_ckpt.comm.communicator import make_communicator
    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.optimizers import leaves
    from moe_ckpt.megatron.training_state import MegatronTrainingState
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, 1)
    comm = make_communicator(60)

    def new() -> MegatronTrainingState:
        return MegatronTrainingState(take_inventory(built.chunks), built.optimizer, comm)

    state = new()
    found: dict[str, Any] = {}

    def check(what: str, changed: bool) -> None:
        before, specs = state._tensors, state._specs
        tensors = state.tensors()
        assert facts(tensors) == facts(new().tensors()), what
        assert state.specs() == new().specs(), what
        found[what] = (tensors is not before, state.specs() is not specs)
        assert found[what][0] is changed, what

    state.tensors()
    state.specs()
    check("nothing", False)
    megatron_gpt.train_step(built, 0)
    check("state appears", True)
    megatron_gpt.train_step(built, 1)
    check("another step", False)
    inner = next(leaf.optimizer for leaf in leaves(built.optimizer) if leaf.optimizer.state)
    key = next(iter(inner.state))
    inner.state[key]["exp_avg"] = inner.state[key]["exp_avg"].clone()
    check("a tensor is replaced", True)
    inner.state[key] = {name: value.clone() for name, value in inner.state[key].items()}
    check("all state of a parameter is replaced", True)
    inner.load_state_dict(inner.state_dict())
    check("state is loaded", True)
    for held in inner.state.values():
        for value in held.values():
            value.data = value.data.clone()
    check("the memory of state moves", True)
    held = list(inner.state.values())[-1]["exp_avg"]
    held.data = held.data.clone()
    check("the memory of one state tensor moves", True)
    for held in inner.state.values():
        held["step"].data = held["step"].data.clone()
    check("the memory of step counts moves, of which there are no views", False)
    for master in [slot.master for slot in state._slots.values() if slot.master is not None][-1:]:
        master.data = master.data.clone()
        check("the memory of a master weight moves", True)
    *_, last = inner.state
    there = inner.state.pop(last)
    state.tensors()
    inner.state[last] = there
    check("the state of one parameter comes back", True)
    other = next(p for group in inner.param_groups for p in group["params"] if p.shape == last.shape and p is not last)
    swapped = list(inner.state.items())
    inner.state.clear()
    inner.state.update((last if p is other else other if p is last else p, each) for p, each in swapped)
    check("two parameters change their state", True)
    inner.state.clear()
    inner.state.update(swapped)
    parameter = state._inventory.parameters[-1].parameter
    parameter.data = parameter.data.clone()
    check("the memory of a parameter moves", True)
    check("nothing again", False)
    found["calls"] = calls(lambda: (state.tensors(), state.specs()))
    found["parameters"] = len(state._inventory.parameters)
    assert all(isinstance(t.local, torch.Tensor) for t in state.tensors())
    return found


@pytest.mark.parametrize(
    "setup",
    [Setup(ep=2, layers=2, num_microbatches=1), Setup(ep=2, layers=2, dist_opt=True, precision="bf16")],
    ids=["fp32", "distributed bf16"],
)
def test_every_change_is_noticed_and_nothing_else(setup: Setup):
    for found in run_ranks(notices, 2, setup, preload=WARM):
        assert found["state appears"] == (True, True)
        assert found["another step"] == found["nothing again"] == (False, False)
        assert found["a tensor is replaced"] == (True, False), "what exists is the same, so specs are"
        assert found["calls"] < 60


def test_a_repeated_call_runs_no_code_per_expert():
    few, many = (
        run_ranks(notices, 1, Setup(layers=1, experts=experts, num_microbatches=1), preload=WARM)[0]
        for experts in (4, 16)
    )
    assert many["parameters"] > few["parameters"]
    assert many["calls"] == few["calls"]
