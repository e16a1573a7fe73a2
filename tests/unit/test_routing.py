"""Counts of routed tokens equal a recount made in another way from the same forward passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling import registry
from moe_ckpt.modeling.discover import find_moe_layers
from moe_ckpt.modeling.registry import register_moe
from moe_ckpt.modeling.routing import SOFT_UNIT, RoutingCounter, TrainingPasses, count_assignments
from moe_ckpt.run.agreement import Deferred, StepTokens
from tests.support.acted_gpu import CUDA, RUBBISH, ActedGPU
from tests.support.moe_models import FAMILIES, ListMoE, OwnMoE, Stack, family, loss_of
from tests.support.tiny_moe import WIDTH, TinyMoE

transformers = pytest.importorskip("transformers")


@pytest.fixture
def counted():
    """Make a counter for a model, and close it when the test ends."""
    counters = []

    def make(model: nn.Module) -> RoutingCounter:
        counters.append(RoutingCounter(model, find_moe_layers(model)))
        return counters[-1]

    yield make
    for counter in counters:
        counter.close()


def counts(taken: Deferred[StepTokens]) -> np.ndarray:
    return taken.result().applied


class Recount:
    """Expected counts [L][E], from what the routers returned or from the experts' own inputs."""

    def __init__(self, model: nn.Module) -> None:
        self.rows = [[0] * layer.info.experts for layer in find_moe_layers(model)]
        for at, layer in enumerate(find_moe_layers(model)):
            block = model.get_submodule(layer.info.name)
            if layer.source.kind == "rows":
                for e, expert in enumerate(layer.source.modules):
                    expert.register_forward_hook(lambda m, a, o, at=at, e=e: self._add(at, e, len(o.flatten(0, -2))))
            else:
                router = next(m for n, m in block.named_children() if n in ("gate", "router", "scorer"))
                router.register_forward_hook(lambda m, a, o, at=at: self._router(at, o))

    def _add(self, at: int, expert: int, n: int) -> None:
        if 0 <= expert < len(self.rows[at]):
            self.rows[at][expert] += n

    def _router(self, at: int, output: object) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        if any(isinstance(part, list) for part in parts):  # JetMoe returns sizes
            for e, n in enumerate(next(part for part in parts if isinstance(part, list))):
                self._add(at, e, n)
            return
        whole = [p for p in parts if isinstance(p, torch.Tensor) and not p.is_floating_point()]
        for e in (whole[0] if whole else parts[0].argmax(-1)).flatten().tolist():
            self._add(at, e, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_equal_a_recount_over_two_micro_batches(name, counted):
    model = family(name).train()
    counter, recount = counted(model), Recount(model)
    for seed in (1, 2):
        loss_of(model, seed).backward()
    taken = counts(counter.take())
    assert taken.dtype == np.int64
    assert taken.tolist() == recount.rows
    assert taken.sum() > 0
    assert counts(counter.take()).sum() == 0


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Llama4", "SwitchTransformers"])
def test_activation_checkpointing_counts_once(name, use_reentrant, counted):
    plain, checkpointed = family(name).train(), family(name).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    forwards = []
    router = next(m for n, m in checkpointed.named_modules() if n.endswith((".gate", ".router")))
    router.register_forward_pre_hook(lambda m, a: forwards.append(1))
    first, second = counted(plain), counted(checkpointed)
    torch.manual_seed(3)  # dropout
    loss_of(plain).backward()
    torch.manual_seed(3)
    loss_of(checkpointed).backward()
    assert np.array_equal(counts(first.take()), counts(second.take()))
    assert len(forwards) == 2, "the second forward pass did not run, so this shows nothing"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_module_list_experts_under_checkpoint(use_reentrant, counted):
    model = Stack(ListMoE)
    x = torch.randn(10, 8, requires_grad=True)
    counter, recount = counted(model), Recount(model)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    taken = counts(counter.take())
    assert taken.sum(1).tolist() == [20, 20]
    assert (2 * taken).tolist() == recount.rows


def test_rows_given_to_an_expert_are_counted_without_a_kernel(counted):
    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    model, x = Stack(ListMoE), torch.randn(10, 8)
    assert {layer.source.kind for layer in find_moe_layers(model)} == {"rows"}
    with Operations() as without:
        model(x)
    counter = counted(model)
    with Operations() as with_counter:
        model(x)
    assert with_counter.names == without.names
    assert counts(counter.take()).sum() == 40
    assert counts(counter.take()).sum() == 0
    model(x)
    counter.discard()
    assert counts(counter.take()).sum() == 0


def test_evaluation_is_not_counted(counted):
    model = family("Mixtral")
    counter = counted(model)
    model.eval()
    loss_of(model)
    assert counts(counter.take()).sum() == 0
    model.train()
    loss_of(model)
    model.eval()
    loss_of(model)
    assert counts(counter.take()).sum(1).tolist() == [32, 32]


def test_dropped_and_padding_indices_are_not_counted(counted):
    model = family("Mixtral").train()
    counter = counted(model)
    experts = model.model.layers[0].mlp.experts
    index = torch.tensor([[0, 4], [3, 4], [3, 0]])
    experts(torch.randn(3, 16), index, top_k_weights=torch.ones(3, 2))
    experts(torch.randn(3, 16), top_k_index=index, top_k_weights=torch.ones(3, 2))
    assert counts(counter.take()).tolist() == [[4, 0, 0, 4], [0, 0, 0, 0]]


def test_discard_and_close(counted):
    model = family("Mixtral").train()
    counter = counted(model)
    loss_of(model)
    counter.discard()
    assert counts(counter.take()).sum() == 0
    counter.close()
    counter.close()
    loss_of(model)
    assert counts(counter.take()).sum() == 0
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_layers_with_different_numbers_of_experts(counted):
    model = Stack(ListMoE)
    model.blocks[1]["moe"] = ListMoE(experts=6)
    counter, recount = counted(model), Recount(model)
    model(torch.randn(10, 8))
    taken = counts(counter.take())
    assert taken.shape == (2, 6)
    assert taken[0, :4].tolist() == recount.rows[0]
    assert taken[0, 4:].sum() == 0
    assert taken[1].tolist() == recount.rows[1]


@pytest.mark.parametrize("on", ["router", "layer"])
def test_registered_assignments(on, counted):
    before = dict(registry._REGISTERED)
    try:

        def on_layer(module, args, kwargs, output):
            return module.scorer(args[0]).argmax(-1)

        def on_router(module, args, kwargs, output):
            return output.argmax(-1)

        register_moe(
            OwnMoE,
            experts=("w_in", "w_out"),
            router="scorer",
            assignments=on_router if on == "router" else on_layer,
            on=on,
        )
        model = Stack(OwnMoE)
        counter, recount = counted(model), Recount(model)
        model(torch.randn(10, 8))
        taken = counts(counter.take())
        assert taken.sum(1).tolist() == [10, 10]
        if on == "router":  # the other function calls the router a second time
            assert taken.tolist() == recount.rows
    finally:
        registry._REGISTERED.clear()
        registry._REGISTERED.update(before)


def test_a_layer_that_chooses_by_itself_is_asked_for_what_it_kept(counted):
    """As docs/lightning.md shows it."""

    class Chooses(OwnMoE):
        def forward(self, x):
            self.chosen = (self.scorer(x).sigmoid() + torch.tensor([0.0, 0.1, 0.2, 0.3])).topk(2, dim=-1).indices
            return super().forward(x)

    before = dict(registry._REGISTERED)
    try:
        register_moe(
            Chooses,
            experts=("w_in", "w_out"),
            router="scorer",
            on="layer",
            assignments=lambda layer, args, kwargs, output: layer.chosen,
        )
        model = Stack(Chooses)
        counter = counted(model)
        model(torch.randn(10, 8))
        chosen = [block.moe.chosen.flatten().bincount(minlength=4).tolist() for block in model.blocks]
        assert counts(counter.take()).tolist() == chosen
    finally:
        registry._REGISTERED.clear()
        registry._REGISTERED.update(before)


def test_a_router_that_tells_nothing_is_an_error_with_advice(counted):
    before = dict(registry._REGISTERED)
    try:
        register_moe(OwnMoE, experts=("w_in", "w_out"), router="scorer")
        model = Stack(OwnMoE)
        counted(model)
        with pytest.raises(ConfigError, match=r"blocks\.0\.moe.*0 integer tensors.*assignments.*on='layer'"):
            model(torch.randn(10, 8))
    finally:
        registry._REGISTERED.clear()
        registry._REGISTERED.update(before)


def test_autocast_and_bf16(counted):
    model = family("Qwen3Moe").train()
    counter, recount = counted(model), Recount(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model)
    assert counts(counter.take()).tolist() == recount.rows
    model = family("Qwen3Moe").train().to(torch.bfloat16)
    counter, recount = counted(model), Recount(model)
    loss_of(model)
    assert counts(counter.take()).tolist() == recount.rows


def test_a_compiled_model_counts_the_same_in_one_graph(counted):
    eager, compiled = family("Mixtral").train(), torch.compile(family("Mixtral").train(), backend="aot_eager")
    first, second = counted(eager), counted(compiled)
    for seed in (1, 2):
        loss_of(eager, seed).backward()
        loss_of(compiled, seed).backward()
    assert np.array_equal(counts(first.take()), counts(second.take()))
    torch._dynamo.reset()


def test_a_model_compiled_in_eval_mode_counts_batches_of_training():
    passes, model = TrainingPasses(), torch.compile(family("Mixtral").eval(), backend="aot_eager")
    counter = RoutingCounter(model, find_moe_layers(model), passes=passes)
    for passes.in_batch, gradients, counted in ((True, True, 32), (False, True, 0), (True, False, 0), (True, True, 32)):
        with torch.set_grad_enabled(gradients):
            loss_of(model)
        assert counts(counter.take()).sum(1).tolist() == [counted] * 2
    counter.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "ListMoE"])
def test_soft_counts_are_the_gates_weights(name):
    """Where a tensor of the indices' shape shows them; else nothing, and hard counts are what there is."""
    model = nn.Sequential(ListMoE()) if name == "ListMoE" else family(name)
    model.train()
    layers = find_moe_layers(model)
    counter = RoutingCounter(model, layers, soft=True)
    expected = torch.zeros(len(layers), layers[0].info.experts, dtype=torch.float64)
    shown = []
    for at, layer in enumerate(layers):
        if layer.source.kind == "indices":
            position, argument = layer.source.argument

            def recount(module, args, kwargs, at=at, position=position, argument=argument):
                values = [*args, *kwargs.values()]
                chosen = args[position] if len(args) > position else kwargs[argument]
                weights = next(v for v in values if v.is_floating_point() and v.shape == chosen.shape)
                for e, w in zip(chosen.flatten().tolist(), weights.flatten().tolist(), strict=True):
                    expected[at, e] += w
                shown.append(at)

            layer.source.modules[0].register_forward_pre_hook(recount, with_kwargs=True)
    (model(torch.randn(15, 8)).sum() if name == "ListMoE" else loss_of(model)).backward()
    taken = counter.take().result()
    counter.close()
    assert taken.applied.sum() > 0
    assert np.abs(taken.soft / SOFT_UNIT - expected.numpy()).max() < 1e-3
    assert (name == "ListMoE") == (not shown)
    assert counter.take().result().soft.sum() == 0


def test_counts_leave_a_device_by_events(monkeypatch):
    """Two steps, and nobody looks before both are over: each has its own counts, and whoever looks too early none."""
    model, rows = TinyMoE(), []
    with ActedGPU() as gpu:
        model.to(CUDA)
        counter, recount = RoutingCounter(model, find_moe_layers(model), soft=True), Recount(model)
        steps = []
        for tokens in (10, 20):
            model(torch.randn(tokens, WIDTH).to(CUDA))
            steps.append(counter.take())
            rows.append(np.array(recount.rows) - sum(rows))
        assert (gpu.waits, gpu.departures) == ([], 4), "one transfer of counts and one of weights in each step"
        with monkeypatch.context() as patch:
            patch.setattr(Deferred, "result", lambda deferred: deferred._make())
            assert (counts(steps[0]) == int.from_bytes(bytes([RUBBISH] * 8), "little")).all()
        with ThreadPoolExecutor(1) as other:
            found = [other.submit(step.result).result() for step in steps]
        assert gpu.waits == []
    assert np.array_equal([step.applied for step in found], rows)
    assert all((step.soft.sum(1) > 0).all() for step in found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_leave_a_real_device_without_a_wait():
    model = TinyMoE().cuda()
    counter = RoutingCounter(model, find_moe_layers(model), soft=True)
    model(torch.randn(10, WIDTH).cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        taken = counter.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts(taken).sum(1).tolist() == [20, 20]
    assert counts(counter.take()).sum() == 0


def test_soft_counts_are_only_taken_when_asked_for():
    model = family("Mixtral")
    assert RoutingCounter(model, find_moe_layers(model)).take().result().soft is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(0,), (300,), (40, 3), (1, 1)])
def test_indices_of_each_type_are_counted_and_others_are_dropped(dtype, shape):
    experts = torch.randint(0 if dtype is torch.uint8 else -4, 12, shape).to(dtype)
    strided = experts.t() if experts.ndim == 2 else experts
    counts = torch.zeros(9, dtype=torch.int64)
    for given in (experts, strided):
        count_assignments(counts, given)
    expected = torch.tensor([2 * int((experts == expert).sum()) for expert in range(8)])
    assert torch.equal(counts[:-1], expected)
    assert int(counts.sum()) == 2 * experts.numel()
