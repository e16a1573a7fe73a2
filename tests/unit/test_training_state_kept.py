"""What is described once and used again: the same objects while nothing changes, and never those of another state.

The judge of every change is a training state made anew: it has remembered nothing.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from operator import is_

import numpy as np
import pytest
import torch
from torch import nn

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.sealed import seal
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.ports import Reading
from tests.unit.test_training_state import OPTIMIZERS, make, train

LARGE = 1400
"""Experts, of three modules, three parameters and nine tensors of state each."""


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.up = nn.Linear(4, 4)


class Model(nn.Module):
    """Experts in a list, a frozen part that no optimizer has, buffers."""

    def __init__(self, experts=3):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)


def build(experts=3, kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = Model(experts)
    trained = [p for name, p in model.named_parameters() if not name.startswith("frozen")]
    opt = kind(trained, lr=0.1, **options)
    step(model, opt)
    return model, opt, TorchTrainingState(model, [opt])


def step(model, opt):
    for p in (p for group in opt.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    opt.step()


def facts(tensors):
    return [
        (t.key, t.parameter, t.local.data_ptr(), t.local.shape, t.local.dtype, t.offsets, t.global_shape, t.mixes_rows)
        for t in tensors
    ]


def assert_like_new(model, opts, state):
    new = TorchTrainingState(model, opts)
    assert facts(state.tensors()) == facts(new.tensors())
    assert state.specs() == new.specs()
    (here, tensors), (there, others) = encode_tree(state.plain()), encode_tree(new.plain())
    assert seal({"state": here}) == seal({"state": there})
    assert tensors.keys() == others.keys()
    assert all(tensors[name].data_ptr() == others[name].data_ptr() for name in tensors if name.startswith("buffers"))


@pytest.fixture(params=["at once", "in parts"])
def parts(request, monkeypatch):
    """The same for models with more modules than are compared at a time."""
    if request.param == "in parts":
        monkeypatch.setattr("moe_ckpt.modeling.watching._PART", 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_very_same_objects_while_nothing_changes(optimizer, parts):
    model, opt, state = make(optimizer)
    train(model, opt, 2, rows=40)
    tensors, specs = state.tensors(), state.specs()
    train(model, opt, 2, rows=40)
    state.plain()
    assert state.tensors() is tensors
    assert state.specs() is specs
    assert_like_new(model, [opt], state)


def test_specs_are_the_same_object_where_names_types_and_shapes_are_as_before():
    model, opt, state = build()
    tensors, specs = state.tensors(), state.specs()
    opt.load_state_dict(opt.state_dict())  # torch keeps the tensors, in other dicts
    assert facts(state.tensors()) == facts(tensors)
    assert state.specs() is specs
    model.frozen.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    assert facts(state.tensors()) != facts(tensors)
    assert state.specs() is specs


def first(model):
    return model.experts[0].gate.weight


def state_goes(model, opt):
    del opt.state[first(model)]


def state_moves_to_another_parameter(model, opt):
    last = model.norm.bias
    opt.state[model.experts[0].up.weight] = opt.state.pop(first(model))
    assert last in opt.state


def a_tensor_of_the_state_appears(model, opt):
    opt.state[first(model)]["largest"] = torch.zeros(4, 4)


def a_tensor_of_the_state_goes(model, opt):
    del opt.state[first(model)]["exp_avg"]


def a_tensor_of_the_state_is_replaced(model, opt):
    opt.state[first(model)]["exp_avg"] = torch.zeros(4, 4)


def a_tensor_of_the_state_is_renamed(model, opt):
    held = opt.state[model.norm.bias]
    held["other"] = held.pop("exp_avg_sq")


def a_tensor_of_the_state_becomes_a_number(model, opt):
    opt.state[first(model)]["step"] = 7


def a_number_of_the_state_appears(model, opt):
    opt.state[first(model)]["seen"] = 7


def all_state_is_replaced(model, opt):
    held = {key: {name: value.clone() for name, value in each.items()} for key, each in opt.state.items()}
    opt.state.update(held)


def the_memory_of_all_state_moves(model, opt):
    for held in opt.state.values():
        for value in held.values():
            value.data = value.data.clone()


def the_memory_of_one_tensor_of_the_state_moves(model, opt):
    opt.state[first(model)]["exp_avg"].data = torch.zeros(4, 4)


def the_memory_of_one_step_count_moves(model, opt):
    opt.state[model.experts[1].up.bias]["step"].data = torch.tensor(1.0)


def state_is_loaded(model, opt):
    other = torch.optim.AdamW(opt.param_groups[0]["params"], lr=0.1)
    step(model, other)
    opt.load_state_dict(other.state_dict())


def the_memory_of_a_parameter_moves(model, opt):
    first(model).data = torch.zeros(4, 4)


def the_memory_of_a_frozen_parameter_moves(model, opt):
    model.frozen.bias.data = torch.zeros(4)


def a_frozen_parameter_is_replaced(model, opt):
    model.frozen.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def a_parameter_is_replaced_for_the_optimizer_too(model, opt):
    old, new = first(model), nn.Parameter(torch.zeros(4, 4))
    model.experts[0].gate.weight = new
    params = opt.param_groups[0]["params"]
    params[[p is old for p in params].index(True)] = new


def a_group_is_added(model, opt):
    opt.add_param_group({"params": list(model.frozen.parameters()), "lr": 0.5})


def the_order_of_a_group_changes(model, opt):
    opt.param_groups[0]["params"].reverse()


def a_rate_changes(model, opt):
    opt.param_groups[0]["lr"] = 0.25


def a_buffer_is_replaced(model, opt):
    model.norm.running_mean = torch.ones(4)


def a_buffer_of_a_module_with_buffers_appears(model, opt):
    model.norm.register_buffer("seen", torch.ones(1))


IN_STATE = [
    state_goes,
    state_moves_to_another_parameter,
    a_tensor_of_the_state_appears,
    a_tensor_of_the_state_goes,
    a_tensor_of_the_state_is_replaced,
    a_tensor_of_the_state_is_renamed,
    a_tensor_of_the_state_becomes_a_number,
    a_number_of_the_state_appears,
    all_state_is_replaced,
    the_memory_of_all_state_moves,
    the_memory_of_one_tensor_of_the_state_moves,
    the_memory_of_one_step_count_moves,
    state_is_loaded,
    the_memory_of_a_parameter_moves,
    the_memory_of_a_frozen_parameter_moves,
    a_frozen_parameter_is_replaced,
    a_parameter_is_replaced_for_the_optimizer_too,
    a_group_is_added,
    the_order_of_a_group_changes,
    a_rate_changes,
    a_buffer_is_replaced,
    a_buffer_of_a_module_with_buffers_appears,
]


def a_parameter_is_added(model, opt):
    model.experts[1].bias = nn.Parameter(torch.zeros(4))


def a_missing_parameter_is_set(model, opt):
    model.experts[1].gate.bias = nn.Parameter(torch.zeros(4))


def a_parameter_is_renamed(model, opt):
    model.experts[0].gate._parameters["w"] = model.experts[0].gate._parameters.pop("weight")


def a_parameter_moves_to_the_next_module(model, opt):
    model.norm._parameters["bias"], model.frozen._parameters["bias"] = (
        model.frozen._parameters["bias"],
        model.norm._parameters["bias"],
    )


def a_module_is_added(model, opt):
    model.experts.append(Expert())


def a_module_is_replaced(model, opt):
    model.frozen = nn.Linear(4, 4).requires_grad_(False)


def a_module_is_renamed(model, opt):
    model._modules["other"] = model._modules.pop("frozen")


def a_module_is_wrapped(model, opt):
    model.experts[0] = nn.Sequential(model.experts[0])


def a_table_of_parameters_is_replaced(model, opt):
    model.frozen.__dict__["_parameters"] = {"weight": nn.Parameter(torch.ones(4, 4)), "bias": None}


def all_attributes_of_a_module_are_replaced(model, opt):
    model.frozen.__dict__ = nn.Linear(4, 4).requires_grad_(False).__dict__


def a_table_of_children_is_replaced(model, opt):
    model.experts._modules = dict(reversed(model.experts._modules.items()))


def a_table_of_buffers_is_replaced(model, opt):
    model.experts[1]._buffers = {"seen": torch.ones(1)}


def a_first_buffer_appears(model, opt):
    model.experts[2].register_buffer("seen", torch.ones(1))


def a_module_gets_extra_state(model, opt):
    class WithState(Expert):
        def get_extra_state(self):
            return {"seen": 3}

    model.experts[2].__class__ = WithState


IN_A_MODULE = [
    a_parameter_is_added,
    a_missing_parameter_is_set,
    a_parameter_is_renamed,
    a_parameter_moves_to_the_next_module,
    a_module_is_added,
    a_module_is_replaced,
    a_module_is_renamed,
    a_module_is_wrapped,
    a_table_of_parameters_is_replaced,
    all_attributes_of_a_module_are_replaced,
    a_table_of_children_is_replaced,
    a_table_of_buffers_is_replaced,
    a_first_buffer_appears,
    a_module_gets_extra_state,
]


@pytest.mark.parametrize("change", IN_STATE + IN_A_MODULE, ids=lambda f: f.__name__)
def test_a_change_is_noticed_by_the_next_call(change, parts):
    model, opt, state = build()
    state.tensors()
    state.plain()
    change(model, opt)
    assert_like_new(model, [opt], state)


@pytest.mark.parametrize("change", IN_STATE + IN_A_MODULE, ids=lambda f: f.__name__)
def test_a_change_is_noticed_by_plain_state_alone(change, parts):
    model, opt, state = build()
    state.tensors()
    state.plain()
    change(model, opt)
    found, new = (encode_tree(each.plain())[0] for each in (state, TorchTrainingState(model, [opt])))
    assert seal({"state": found}) == seal({"state": new})


def test_a_single_change_among_thousands_is_noticed_by_the_next_call():
    """One after the other, of a model that takes several parts to compare; the cases above have each kind of change."""
    model, opt, state = build(experts=LARGE)
    assert len(list(model.modules())) > 4096 < len(state.tensors())
    for change in (a_tensor_of_the_state_is_replaced, the_memory_of_one_step_count_moves, a_module_is_replaced):
        change(model, opt)
        assert facts(state.tensors()) == facts(TorchTrainingState(model, [opt]).tensors()), change


def test_state_that_is_made_anew_at_every_step_is_never_an_old_one():
    class Functional(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                held = self.state[p]
                held["mean"] = held.get("mean", torch.zeros(())) + 1
                held["count"] = held.get("count", 0) + 1

    model, opt, state = build(kind=Functional)
    for _ in range(3):
        step(model, opt)
        assert_like_new(model, [opt], state)


def test_what_changes_nothing_is_compared_once_and_makes_nothing_anew(parts):
    model, opt, state = build()
    tensors = state.tensors()
    weight, held = first(model), opt.state[first(model)]
    model.eval()
    model.experts[1].seen = 3
    model.experts[0].gate._parameters["weight"] = nn.Parameter(torch.zeros(4, 4))
    model.experts[0].gate._parameters["weight"] = weight
    held["mean"] = held.pop("exp_avg_sq")
    held["exp_avg_sq"] = held.pop("mean")
    opt.state[model.norm.bias] = opt.state.pop(model.norm.bias)
    assert state.tensors() is tensors
    assert state.tensors() is tensors
    assert_like_new(model, [opt], state)


@pytest.mark.parametrize("times", [1, 3])
def test_a_change_that_is_refused_stays_noticed(times, parts):
    model, opt, state = build()
    state.tensors()
    weight = first(model)
    model.experts[0].gate.weight = nn.Parameter(torch.zeros(4, 4))
    for _ in range(times):
        with pytest.raises(UnsupportedError, match="not among the model's named_parameters"):
            state.tensors()
    model.experts[0].gate.weight = weight
    assert_like_new(model, [opt], state)


def test_the_order_of_an_ordered_table_changes():
    model = Model()
    model.experts._modules = OrderedDict(model.experts._modules)
    state = TorchTrainingState(model, [])
    state.tensors()
    model.experts._modules.move_to_end("0")
    assert_like_new(model, [], state)


def test_state_under_another_key_at_the_same_place(parts):
    model, opt, state = build()
    del opt.state[first(model)]
    state.tensors()
    opt.state[first(model)] = opt.state.pop(model.norm.bias)
    assert_like_new(model, [opt], state)


def test_models_that_say_themselves_what_their_parameters_are_are_asked_at_every_call():
    class Own(Model):
        names = ("frozen",)

        def named_parameters(self, *args, **kwargs):
            found = super().named_parameters(*args, **kwargs)
            return ((name, p) for name, p in found if name.startswith(self.names))

    model = Own()
    state = TorchTrainingState(model, [])
    assert {t.key for t in state.tensors()} == {"model/frozen.weight", "model/frozen.bias"}
    model.names = ("norm",)
    assert {t.key for t in state.tensors()} == {"model/norm.weight", "model/norm.bias"}


def calls(experts):
    """Python functions and methods that are called when nothing has changed."""
    _, _, state = build(experts)

    def ask():
        state.tensors()
        state.specs()
        encode_tree(state.plain())

    ask()
    found = []
    gc.disable()  # it may run what other tests left to be run at the end of their objects
    sys.setprofile(lambda frame, event, arg: found.append(event) if event in ("call", "c_call") else None)
    try:
        ask()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(found)


def test_a_repeated_description_runs_no_code_per_expert():
    few, many = calls(4), calls(64)
    assert few == many < 2000
    assert calls(3000) <= many + 300, "per 1024 modules that are compared"
    with torch.device("cpu"):  # makes Python run for each function of torch
        assert calls(4) == calls(64)


@pytest.mark.parametrize(
    "change",
    [the_memory_of_a_parameter_moves, the_memory_of_one_tensor_of_the_state_moves, the_memory_of_all_state_moves],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("over", [False, True], ids=["of these", "of tensors of before"])
def test_where_parameters_that_are_read_lie_is_looked_at_and_where_others_do_is_not(change, over):
    model, opt, state = build()
    before = state.tensors()
    change(model, opt)
    name = "experts.0.gate.weight"
    others = reading(before, lambda tensor: tensor.parameter != name)
    if change is not the_memory_of_all_state_moves:
        assert state.tensors(of=others) is before
    assert state.tensors(of=reading((), lambda tensor: True), listed=True) is before
    of_other_tensors = reading(list(before), lambda tensor: tensor.parameter != name)
    key = "model/experts.0.gate.weight"
    one = of_other_tensors if over else reading(before, lambda tensor: tensor.key == key)
    found = state.tensors(of=one, listed=True)
    assert facts(found) == facts(TorchTrainingState(model, [opt]).tensors()), "then all are described anew"


def reading(tensors, chosen) -> Reading:
    return Reading(tensors, np.array([at for at, tensor in enumerate(tensors) if chosen(tensor)], dtype=np.int64))


def test_names_of_parameters_are_encoded_once():
    model, opt, state = build()
    one, other = (encode_tree(state.plain())[0]["optimizers"][0]["param_groups"][0]["params"] for _ in range(2))
    assert one is other
    assert one.value == [name for name, p in model.named_parameters() if not name.startswith("frozen")]
    opt.add_param_group({"params": list(model.frozen.parameters())})
    groups = state.plain()["optimizers"][0]["param_groups"]
    assert [group["params"] for group in groups] == [one.value, ["frozen.weight", "frozen.bias"]]


def test_views_that_are_kept_are_of_live_memory():
    model, opt, state = build()
    tensors = {t.key: t for t in state.tensors()}
    step(model, opt)
    again = {t.key: t for t in state.tensors()}
    assert all(map(is_, tensors.values(), again.values()))
    assert torch.equal(tensors["model/experts.0.gate.weight"].local, first(model))
    assert torch.equal(tensors["optim/0/experts.0.gate.weight/step"].local, torch.tensor(2.0))
