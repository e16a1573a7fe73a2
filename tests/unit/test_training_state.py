"""State handed out and taken back: equal to the last bit, and training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from moe_ckpt.errors import ConfigError, UnencodableStateError, UnsupportedError
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.format.tree import decode_tree, encode_tree
from moe_ckpt.modeling.discover import build_catalog
from moe_ckpt.modeling.names import tied_aliases
from moe_ckpt.modeling.optimizer_state import OptimizerView, note_gradients
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.ports import TensorMeta
from moe_ckpt.slices.assignment import operator_bytes
from tests.support.moe_models import ListMoE, Stack


class Saved:
    """A copy of everything a training state hands out, as a checkpoint would hold it."""

    def __init__(self, state: TorchTrainingState) -> None:
        self.tensors = {t.key: t.local.clone() for t in state.tensors()}
        self.metas = {
            t.key: TensorMeta(dtype_name(t.local.dtype), t.global_shape, t.on_param_device) for t in state.tensors()
        }
        value, tensors = encode_tree(copy.deepcopy(state.plain()))
        self.plain = decode_tree(value, tensors.__getitem__)

    def restore(self, state: TorchTrainingState) -> None:
        state.prepare(self.metas)
        live = {t.key: t.local for t in state.tensors()}
        assert live.keys() == self.tensors.keys()
        for key, value in self.tensors.items():
            live[key].copy_(value)
        state.load_plain(self.plain)


class Adam16(torch.optim.Optimizer):
    """Moments in fp32 whatever the parameter's dtype, the step as a Python number, a flag as state."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, moment=torch.zeros_like(p, dtype=torch.float32), warm=False, scale=None)
                state["step"] += 1
                state["warm"] = state["step"] > 1
                state["moment"].lerp_(p.grad.float(), 1 - group["betas"][0])
                p.add_((state["moment"] / state["step"]).to(p.dtype), alpha=-group["lr"])


OPTIMIZERS = {
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "own": Adam16,
}


def make(optimizer, seed=0, dtype=torch.float32):
    model = Stack(ListMoE, seed=seed).to(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    return model, opt, TorchTrainingState(model, [opt])


def train(model, opt, steps, seed=5, rows=3):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randn(rows, 8, generator=generator).to(next(model.parameters()).dtype)
        loss = model(x).float().square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("trained_before", [0, 2])
def test_round_trip_and_the_next_steps(optimizer, dtype, trained_before):
    model, opt, state = make(optimizer, dtype=dtype)
    train(model, opt, 3)
    saved = Saved(state)
    expected = train(model, opt, 2, seed=6, rows=20)

    other, other_opt, other_state = make(optimizer, seed=9, dtype=dtype)
    train(other, other_opt, trained_before, seed=8, rows=20)
    saved.restore(other_state)
    again = Saved(other_state)
    assert again.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(again.tensors[k], v) for k, v in saved.tensors.items())
    assert again.metas == saved.metas
    assert str(again.plain) == str(saved.plain)
    assert [torch.equal(a, b) for a, b in zip(train(other, other_opt, 2, seed=6, rows=20), expected, strict=True)] == [
        True,
        True,
    ]
    for (name, a), b in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_an_expert_never_used_has_no_state_and_gets_none():
    model, opt, state = make("adamw foreach")
    with torch.no_grad():
        for block in model.blocks:
            block["moe"].gate.weight[3] = -1e4 * torch.sign(block["norm"].bias + 1e-9)
            block["moe"].choose = lambda x: (torch.ones(len(x), 2), torch.zeros(len(x), 2, dtype=torch.int64))
    train(model, opt, 2)
    keys = [t.key for t in state.tensors()]
    assert any(k.startswith("optim/0/blocks.0.moe.experts.0.") for k in keys)
    assert not any(k.startswith("optim/0/blocks.0.moe.experts.3.") for k in keys)
    saved = Saved(state)
    other, other_opt, other_state = make("adamw foreach", seed=3)
    train(other, other_opt, 3, rows=30)
    assert other_opt.state[other.blocks[0]["moe"].experts[3][0].weight]
    saved.restore(other_state)
    assert other.blocks[0]["moe"].experts[3][0].weight not in other_opt.state
    train(other, other_opt, 1, rows=30)
    assert other_opt.state[other.blocks[0]["moe"].experts[3][0].weight]["step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_told_of_what_an_optimizer_updates_alone(dtype):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    state = TorchTrainingState(model, [torch.optim.SGD(model[0].parameters(), lr=0.1)])
    model(torch.ones(1, 4, dtype=dtype)).sum().backward()
    told = {spec.parameter: spec.gradient for spec in state.specs()}
    consumed = {name: dtype_name(p.grad.dtype) for name, p in model.named_parameters() if name.startswith("0.")}
    assert told == {**consumed, "1.weight": None, "1.bias": None}
    sizes = operator_bytes(build_catalog(model, []), state.specs(), {})
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(size.gradient for size in sizes.values()) == sum(p.grad.nbytes for p in model[0].parameters())
    assert sum(size.weights for size in sizes.values()) == weights
    state._optimizers[0].add_param_group({"params": list(model[1].parameters()), "momentum": 0.9})
    state._optimizers[0].step()
    state.tensors()
    assert all(spec.gradient for spec in state.specs() if spec.key.startswith("model/"))


def test_tensors_are_views_and_no_copies():
    model, opt, state = make("adamw fused")
    train(model, opt, 1)
    for tensor in state.tensors():
        tensor.local.fill_(0.5)
    assert all((p == 0.5).all() for p in model.parameters())
    assert all((v == 0.5).all() for s in opt.state.values() for v in s.values())
    assert not any(t.local.requires_grad for t in state.tensors())


def test_keys_shapes_and_ownership():
    model, opt, state = make("adafactor")
    train(model, opt, 1)
    tensors = {t.key: t for t in state.tensors()}
    row = tensors["optim/0/embed.weight/row_var"]
    assert (row.parameter, row.global_shape, row.offsets) == ("embed.weight", (8, 1), (0, 0))
    step = tensors["optim/0/embed.weight/step"]
    assert (step.global_shape, step.offsets, step.replicated, step.duplicate) == ((), (), True, False)
    assert "model/blocks.1.moe.experts.3.1.bias" in tensors


def test_prepare_keeps_the_memory_of_state_that_fits():
    model, opt, state = make("adamw foreach")
    train(model, opt, 1)
    before = {t.key: t.local.data_ptr() for t in state.tensors()}
    state.prepare(Saved(state).metas)
    assert {t.key: t.local.data_ptr() for t in state.tensors()} == before


def test_prepare_replaces_state_of_another_dtype_and_drops_what_is_not_wanted():
    model, opt, state = make("adamw foreach", dtype=torch.bfloat16)
    train(model, opt, 1)
    model_meta = {"model/embed.weight": TensorMeta("BF16", (8, 8))}
    state.prepare({**model_meta, "optim/0/embed.weight/exp_avg": TensorMeta("F32", (8, 8))})
    assert {t.key for t in state.tensors() if t.key.startswith("optim/")} == {"optim/0/embed.weight/exp_avg"}
    assert opt.state[model.embed.weight]["exp_avg"].dtype == torch.float32
    assert len(opt.state) == 1


def test_implementation_flags_stay_and_hyperparameters_return():
    model, opt, state = make("adamw fused")
    opt.param_groups[0].update(lr=0.5, weight_decay=0.25, betas=(0.8, 0.9), initial_lr=1.0)
    train(model, opt, 2)
    saved = Saved(state)
    other, other_opt, other_state = make("adamw for-loop")
    saved.restore(other_state)
    group = other_opt.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["initial_lr"]) == (0.5, 0.25, (0.8, 0.9), 1.0)
    assert (group["fused"], group["foreach"]) == (None, False)
    assert group["amsgrad"] is False
    train(other, other_opt, 1)


def test_a_tensor_learning_rate_stays_the_same_tensor():
    model, opt, state = make("adam tensor lr")
    train(model, opt, 1)
    opt.param_groups[0]["lr"].fill_(0.125)
    saved = Saved(state)
    _, other_opt, other_state = make("adam tensor lr")
    lr = other_opt.param_groups[0]["lr"]
    saved.restore(other_state)
    assert other_opt.param_groups[0]["lr"] is lr
    assert lr == 0.125
    _, float_opt, float_state = make("adam")
    float_state.load_plain(saved.plain)
    assert float_opt.param_groups[0]["lr"] == 0.125
    assert isinstance(float_opt.param_groups[0]["lr"], float)


def test_several_optimizers_and_groups():
    def build(seed):
        model = Stack(ListMoE, seed=seed)
        groups = [{"params": model.embed.parameters(), "lr": 0.1}, {"params": model.head.parameters()}]
        first = torch.optim.AdamW(groups)
        second = torch.optim.SGD(model.blocks.parameters(), lr=0.01, momentum=0.5)
        return model, first, second, TorchTrainingState(model, [first, second])

    model, first, second, state = build(0)
    model(torch.randn(9, 8)).square().mean().backward()
    first.step()
    second.step()
    keys = {t.key for t in state.tensors()}
    assert {"optim/0/head.bias/exp_avg", "optim/1/blocks.0.norm.weight/momentum_buffer"} <= keys
    saved = Saved(state)
    saved.restore(build(4)[3])
    model, first, *_ = build(4)
    swapped = TorchTrainingState(model, [first])
    with pytest.raises(ConfigError, match="holds 2 optimizers, this run has 1"):
        swapped.load_plain(saved.plain)
    swapped.prepare(saved.metas)
    prepared = {tensor.key for tensor in swapped.tensors() if tensor.key.startswith("optim/")}
    assert prepared == {key for key in saved.metas if key.startswith("optim/0/")}, "else restoring them would fail"


def test_groups_that_differ_are_named_and_nothing_is_changed():
    model, opt, state = make("sgd momentum")
    train(model, opt, 1)
    saved = Saved(state)
    other = Stack(ListMoE, seed=2)
    two = torch.optim.SGD([{"params": [other.embed.weight]}, {"params": [other.head.weight]}], lr=0.5, momentum=0.9)
    with pytest.raises(ConfigError, match="checkpoint has 1 param groups, this run has 2"):
        TorchTrainingState(other, [two]).load_plain(saved.plain)
    one = torch.optim.SGD([other.embed.weight, other.head.weight], lr=0.5, momentum=0.9)
    with pytest.raises(ConfigError, match=r"only in the checkpoint: \['blocks.0.moe.experts.0.0.bias'"):
        TorchTrainingState(other, [one]).load_plain(saved.plain)
    assert one.param_groups[0]["lr"] == 0.5


def test_a_parameter_that_is_not_the_models_is_refused():
    model = Stack(ListMoE)
    stray = nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedError, match=re.escape("optimizer 0 (SGD) holds a parameter of shape (3,)")):
        TorchTrainingState(model, [torch.optim.SGD([*model.parameters(), stray], lr=0.1)])


def test_a_group_value_that_is_no_plain_data_is_named():
    _, opt, state = make("sgd")
    opt.param_groups[0]["schedule"] = [1, object()]
    with pytest.raises(UnencodableStateError, match=r"optimizers/0/param_groups/0/schedule/1.*object"):
        encode_tree(state.plain())


def test_optimizer_state_in_tensor_subclasses_is_refused():
    model, opt, state = make("sgd")
    opt.state[model.embed.weight]["sparse"] = torch.zeros(8, 8).to_sparse()
    with pytest.raises(UnsupportedError, match=r"optim/0/embed\.weight/sparse"):
        state.tensors()


@pytest.mark.parametrize("name", [0, None, ("a", 1), "a/b", ""], ids=repr)
@pytest.mark.parametrize("listed", [False, True], ids=["at first", "later"])
def test_a_tensor_of_the_state_under_a_name_that_no_key_can_hold_is_refused(name, listed):
    model, opt, state = make("sgd momentum")
    train(model, opt, 1)
    if listed:
        state.tensors()
    opt.state[model.head.bias][name] = torch.zeros(8)
    said = f"optimizer 0 (SGD) keeps a tensor for parameter 'head.bias' under the name {name!r}"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=re.escape(said)):
            state.tensors()
    opt.state[model.head.bias][name] = 5
    assert "optim/0/head.bias/momentum_buffer" in {t.key for t in state.tensors()}
    saved = Saved(state)
    _, other_opt, other_state = make("sgd momentum", seed=3)
    saved.restore(other_state)
    assert other_opt.state[other_state._model.head.bias][name] == 5, "what is no tensor has its own name"


class Placeholders(torch.optim.Optimizer):
    """Keeps a tensor without elements beside its moment, and takes both for granted from the second step on."""

    def __init__(self, params, kind=torch.tensor):
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=self.kind(0), none=torch.empty((2, 0), dtype=torch.int32), moment=torch.zeros_like(p))
            state["step"] += 1
            assert not state["none"].numel()
            p.sub_(state["moment"].mul_(0.5).add_(p.grad), alpha=0.1)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    "optimizer", [Placeholders, lambda p: Placeholders(p, int), torch.optim.AdamW], ids=["tensor", "number", "adamw"]
)
def test_state_that_is_in_no_slice_returns(optimizer, steps_before):
    def build(steps):
        model = nn.Linear(3, 2)
        model.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))
        opt = optimizer(model.parameters())
        state = TorchTrainingState(model, [opt])
        update(model, opt, steps)
        return model, opt, state

    def update(model, opt, steps):
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            opt.step()

    model, opt, state = build(3)
    saved = Saved(state)
    assert not any(key.startswith("optim/0/nothing") or key.endswith("/none") for key in saved.tensors)
    other, other_opt, other_state = build(steps_before)
    saved.restore(other_state)
    for one, there in zip(model.parameters(), other.parameters(), strict=True):
        mine, its = opt.state[one], other_opt.state[there]
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            assert type(value) is type(its[name])
            assert value == its[name] if isinstance(value, int) else torch.equal(value, its[name]), name
            assert isinstance(value, int) or (value.dtype, value.shape) == (its[name].dtype, its[name].shape), name
    update(model, opt, 2)
    update(other, other_opt, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    *_, unused = build(0)
    Saved(unused).restore(other_state)
    assert not other_opt.state, "as it was before the first step"


def test_state_whose_memory_comes_later_is_told_as_it_is_now():
    model, opt, state = make("sgd momentum")
    train(model, opt, 1)
    held = opt.state[model.head.bias]["later"] = torch.empty(0)
    key = "optim/0/head.bias/later"
    assert key not in {t.key for t in state.tensors()}
    assert state.plain()["optimizers"][0]["unsliced"] == {"head.bias": {"later": {"dtype": "F32", "shape": [0]}}}
    held.data = torch.ones(8)
    assert "unsliced" not in state.plain()["optimizers"][0]
    assert key in {t.key for t in state.tensors()}
    held.data = torch.empty(0)
    assert key not in {t.key for t in state.tensors()}
    assert "later" in state.plain()["optimizers"][0]["unsliced"]["head.bias"]


class WithExtras(nn.Module):
    def __init__(self, value: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("seen", torch.tensor(value))
        self.value = value

    def get_extra_state(self):
        return {"value": self.value, "pair": (1, 2)}

    def set_extra_state(self, state):
        self.value = state["value"]

    def forward(self, x):
        return self.norm(x)


def test_buffers_and_extra_state():
    def build(value):
        model = nn.Sequential(nn.Linear(8, 8), WithExtras(value))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, opt, TorchTrainingState(model, [opt])

    model, _, state = build(7)
    model(torch.randn(5, 8))
    saved = Saved(state)
    assert set(saved.plain["buffers"]) == {
        "1.seen",
        "1.norm.running_mean",
        "1.norm.running_var",
        "1.norm.num_batches_tracked",
    }
    other, _, other_state = build(1)
    held = other[1].norm.running_mean
    saved.restore(other_state)
    assert other[1].norm.running_mean is held
    assert torch.equal(held, model[1].norm.running_mean)
    assert (other[1].seen.item(), other[1].value) == (7, 7)
    assert other[1].norm.num_batches_tracked == 1

    bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(ConfigError, match=r"buffers differ; only in the checkpoint: \['1.norm"):
        TorchTrainingState(bare, []).load_plain({**saved.plain, "optimizers": []})


def test_a_buffer_of_another_shape_is_refused_unless_training_changes_it():
    def build(rows):
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(rows))
        return model, TorchTrainingState(model, [])

    model, state = build(3)
    with pytest.raises(ConfigError, match=r"buffer 'seen' has shape \(3,\) in the checkpoint, \(4,\) in the model"):
        build(4)[1].load_plain(state.plain())
    model.seen = torch.ones(5)
    grown = state.plain()
    model.seen = torch.zeros(3)
    again, (other, other_state) = state.plain(), build(3)
    held = other.seen
    other_state.load_plain(grown)
    assert other.seen is held, "DDP and others hold it, too"
    assert torch.equal(held, torch.ones(5))
    other_state.load_plain(again)
    assert torch.equal(held, torch.zeros(3)), "as in the next step of a window"


def test_states_of_torchmetrics_return():
    torchmetrics = pytest.importorskip("torchmetrics")

    def build():
        model = nn.Module()
        model.layer = nn.Linear(2, 2)
        model.mean = torchmetrics.MeanMetric()
        model.mean.persistent(True)
        return model, TorchTrainingState(model, [])

    model, state = build()
    model.mean.update(torch.tensor([1.0, 5.0]))
    saved = Saved(state)
    other, other_state = build()
    other.mean.update(torch.tensor(100.0))
    saved.restore(other_state)
    assert other.mean.compute() == 3.0


def test_a_parameter_shared_by_two_modules_is_handed_out_once():
    model = Stack(ListMoE)
    model.head.weight = model.embed.weight
    state = TorchTrainingState(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    keys = [t.key for t in state.tensors()]
    assert keys.count("model/embed.weight") == 1
    assert "model/head.weight" not in keys


def test_a_compiled_model_has_the_same_keys():
    model = Stack(ListMoE)
    eager = TorchTrainingState(model, [])
    compiled = TorchTrainingState(torch.compile(model), [])
    assert [t.key for t in compiled.tensors()] == [t.key for t in eager.tensors()]


class Counting(nn.Module):
    """Has a buffer, a parameter and extra state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv", torch.ones(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self):
        return {"n": 1}

    def set_extra_state(self, state):
        pass


def sharing():
    model = nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    model.first.rotary = model.second.rotary = Counting()
    model.register_buffer("seen", model.first.rotary.inv)
    model.register_buffer("mean", torch.zeros(2))
    model.second.register_buffer("mean", model.mean)
    model.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))
    return model


def test_what_state_dict_has_besides_is_told():
    model = sharing()
    state = TorchTrainingState(model, [])
    plain = state.plain()
    names = {t.parameter for t in state.tensors()} | set(plain["buffers"]) | set(plain["unsliced"])
    names |= {f"{module}._extra_state" for module in plain["extra_state"]} | set(tied_aliases(model))
    assert not names & set(plain["aliases"])
    assert names | set(plain["aliases"]) == set(model.state_dict())
    assert plain["aliases"] == {
        "first.rotary.inv": "seen",
        "second.rotary.inv": "seen",
        "second.mean": "mean",
        "second.rotary._extra_state": "first.rotary._extra_state",
    }
    assert plain["unsliced"] == {"nothing": {"dtype": "BF16", "shape": [0, 4]}}
    model.second.mean = torch.ones(2)
    assert "second.mean" not in state.plain()["aliases"], "it is another one now"
    assert "second.mean" in state.plain()["buffers"]
    model.third = model.first
    assert state.plain()["aliases"]["third.rotary.inv"] == "seen"
    assert state.plain()["aliases"]["third.rotary._extra_state"] == "first.rotary._extra_state"
    found = TorchTrainingState(torch.compile(model), []).plain()
    assert found["aliases"] == state.plain()["aliases"]
    assert not {"aliases", "unsliced"} & TorchTrainingState(nn.BatchNorm1d(2), []).plain().keys()


def test_states_of_a_shared_metric_have_all_their_names():
    torchmetrics = pytest.importorskip("torchmetrics")
    model = nn.Module()
    model.mean = torchmetrics.MeanMetric()
    model.mean.persistent(True)
    model.other = nn.ModuleList([model.mean])
    plain = TorchTrainingState(model, []).plain()
    own = {f"{module}.{name}" for module, entries in plain["own_state"].items() for name in entries}
    assert own | set(plain["aliases"]) == set(model.state_dict())
    assert plain["aliases"]["other.0.mean_value"] == "mean.mean_value"


def test_a_state_dict_of_its_own_may_take_no_arguments_and_choose_from_the_modules():
    """As a LightningModule's may that keeps adapters alone: Lightning calls it without any."""

    class Chosen(nn.Linear):
        def state_dict(self):
            return {"bias": super().state_dict()["bias"], "release": 3}

    plain = TorchTrainingState(Chosen(2, 2), []).plain()
    assert plain["own_state"] == {"": {"release": 3}}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adagrad])
def test_counts_of_experts_that_came_back_older_go_on(kind):
    """As the one of a stack does: moments are as old as the expert, and what only counts is as of the newest step."""
    torch.manual_seed(0)
    model = ListMoE()
    optimizer = kind(model.parameters(), lr=0.01)
    states = []
    for step in range(5):
        for name, parameter in model.named_parameters():
            seldom = "experts.2." in name and step in (1, 3)
            parameter.grad = None if seldom else torch.randn_like(parameter)
        optimizer.step()
        states.append({name: copy.deepcopy(optimizer.state[p]) for name, p in model.named_parameters()})
    ages = {name: age for name in states[0] for age, of in enumerate(("0.", "1.", "2."), 1) if f"experts.{of}" in name}
    assert set(ages.values()) == {1, 2, 3}
    state = TorchTrainingState(model, [optimizer])
    for name, parameter in model.named_parameters():
        for key, value in states[4 - ages.get(name, 0)][name].items():
            optimizer.state[parameter][key].copy_(value)
    state.advance_counts(ages)
    for name, parameter in model.named_parameters():
        found, then = optimizer.state[parameter], states[4 - ages.get(name, 0)][name]
        for key, value in then.items():
            if value.dim():
                assert torch.equal(found[key], value), (name, key)
            elif ages.get(name) != 3:
                assert torch.equal(found[key], states[4][name][key]), (name, key)
        if ages.get(name) == 3:  # it was passed over before and since: it goes on by the steps, no further
            assert found["step"] == then["step"] + 3 == 4


@pytest.mark.parametrize(
    ("gradient", "zeroed"),
    [(torch.zeros(4), ["w"]), (torch.zeros(8)[:4], [])],
    ids=["own memory", "DDP bucket"],
)
def test_gradients_are_set_to_zero_where_the_same_tensor_is_used_again(gradient, zeroed):
    """But a view of DDP's bucket is the same tensor again also after it was set to None."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        weight.grad = gradient
        optimizer.step()
        note_gradients(optimizer)
    assert OptimizerView(0, optimizer, {id(weight): "w"}).zeroed() == zeroed
