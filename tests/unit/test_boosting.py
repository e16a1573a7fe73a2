"""A boosted router on live models: who gets how many tokens, against a count by hand, and what stays as it was."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from moe_ckpt.boost.layer import UNIT, LayerBoost, parts_of
from moe_ckpt.boost.ports import TopKPort, boost_ports
from moe_ckpt.modeling import registry
from moe_ckpt.modeling.discover import find_moe_layers
from moe_ckpt.modeling.registry import register_moe
from moe_ckpt.modeling.routing import RoutingCounter, TrainingPasses
from tests.support.moe_models import FAMILIES, ListMoE, OwnMoE, Stack, family, loss_of

BY_ARGMAX = {"NllbMoe", "SwitchTransformers", "Phimoe"}
OF_OTHERS = {"LongcatFlash": "scores of zero-computation experts too", "Zaya": "a null expert's score too"}


def boost_of(left, boost: float = 0.5) -> LayerBoost:
    rows = torch.tensor(left, dtype=torch.int64)
    return LayerBoost(rows, torch.zeros_like(rows), parts_of(boost))


def by_hand(scores: np.ndarray, chosen: np.ndarray, behind: set[int], most: dict[int, int]) -> np.ndarray:
    """The choice with a boost, token by token: each nearest to one expert, the nearest ones of each taken."""
    found = chosen.copy()
    offers: dict[int, list[tuple[float, int, int]]] = {expert: [] for expert in behind}
    for token, experts in enumerate(chosen):
        givers = [(scores[token, e], slot) for slot, e in enumerate(experts) if e not in behind]
        takers = [e for e in sorted(behind) if most[e] > 0 and e not in experts]
        if givers and takers:
            weakest, slot = min(givers)
            nearest = max(takers, key=lambda e: (scores[token, e], -e))
            offers[nearest].append((np.float32(weakest) - np.float32(scores[token, nearest]), token, slot))
    for expert, given in offers.items():
        for _, token, slot in sorted(given)[: most[expert]]:
            found[token, slot] = expert
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_nearest_tokens_are_brought_in_and_nobody_behind_gives_any(seed):
    rng = np.random.default_rng(seed)
    tokens, experts, k = int(rng.integers(1, 60)), int(rng.integers(2, 9)), 2 if seed % 2 else 1
    scores = torch.from_numpy(rng.normal(size=(tokens, experts)).astype(np.float32))
    chosen = scores.topk(k, dim=-1).indices
    left = rng.integers(0, 12, size=experts) * (rng.random(experts) < 0.6)
    boost = boost_of(left.tolist())
    assigned = np.bincount(chosen.flatten().numpy(), minlength=experts)
    most = {e: min(int(assigned[e] // 2), int(left[e])) for e in range(experts)}
    found = boost.select(scores, chosen)
    wanted = by_hand(scores.numpy(), chosen.numpy(), {e for e in range(experts) if left[e]}, most)
    assert found.tolist() == wanted.tolist()
    after = np.bincount(found.flatten().numpy(), minlength=experts)
    boost.commit()
    assert ((after - assigned)[left > 0] == (left - boost.backlog.numpy())[left > 0]).all(), "what came is made up"
    assert ((after - assigned)[left == 0] <= 0).all()


def test_padding_is_neither_counted_nor_given_to_others():
    scores = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    chosen = scores.topk(1, dim=-1).indices
    real = torch.arange(40) < 20
    padded, alone = boost_of([9, 0, 0, 0]), boost_of([9, 0, 0, 0])
    found = padded.select(scores, chosen, real=real)
    assert found[:20].tolist() == alone.select(scores[:20], chosen[:20]).tolist()
    assert found[20:].tolist() == chosen[20:].tolist()


def test_tokens_stay_within_the_groups_that_they_may_choose():
    scores = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    within = torch.zeros(60, 4, dtype=torch.bool)
    within[:, 2:] = True
    chosen = scores.masked_fill(~within, -9.0).topk(1, dim=-1).indices
    found = boost_of([30, 0, 30, 0], 1.0).select(scores, chosen, within=within)
    assert (found >= 2).all()
    assert (found == 2).sum() > (chosen == 2).sum()


def test_capacities_of_a_layer_are_shared_out_anew():
    boost = boost_of([100, 0, 3, 0], 0.1)
    assert boost.capacities(torch.tensor([60, 20, 60, 39]), 40).tolist() == [44, 33, 43, 40]
    assert boost.capacities(torch.tensor([60, 39, 60, 40]), 40).tolist() == [41, 39, 40, 40], "one token is unused"
    boost.discard()
    assert boost.capacities(torch.tensor([60, 20, 60, 39]), 40).tolist() == [44, 33, 43, 40], "as if it had not been"
    boost.commit()
    assert boost.backlog.tolist() == [96, 0, 0, 0]


def test_the_portion_is_kept_over_small_passes_and_the_fraction_survives():
    scores = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3)
    chosen = scores.argmax(dim=-1, keepdim=True)
    boost, taken = boost_of([100, 0], 0.1), []
    for step in range(1, 41):
        taken.append(int((boost.select(scores, chosen) == 0).sum()) - 3)
        boost.commit()
        assert sum(taken) == 3 * step // 10, "10 % of three tokens per pass"
        boost = LayerBoost(boost.backlog.clone(), boost.carried.clone(), parts_of(0.1))  # a restart
    assert boost.backlog.tolist() == [100 - 12, 0]
    assert 0 <= int(boost.carried[0]) < UNIT


def counts_of(model: nn.Module, run) -> np.ndarray:
    counter = RoutingCounter(model, find_moe_layers(model))
    try:
        run()
        return counter.take().result().applied
    finally:
        counter.close()


@pytest.mark.parametrize("name", [*sorted(set(FAMILIES) - BY_ARGMAX - set(OF_OTHERS)), "ListMoE"])
def test_layers_that_choose_by_topk_give_an_expert_more_by_its_portion(name):
    model = Stack(ListMoE) if name == "ListMoE" else family(name)
    run = (
        (lambda: model(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))))
        if name == "ListMoE"
        else (lambda: loss_of(model))
    )
    model.train()
    layers = find_moe_layers(model)
    for gate in layers[0].gate:  # of one that begins with zeros, all tokens choose the same experts
        nn.init.normal_(model.get_parameter(gate), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    before = counts_of(model, run)
    ports = boost_ports(layers)
    first = layers[0]
    # Of the first layer alone, because later ones see other tokens; not an expert that all tokens choose anyway.
    weakest = int(np.where(before[0] >= 2, before[0], 99).argmin())
    boost = boost_of([1000 if e == weakest else 0 for e in range(first.info.experts)])
    ports[0].attach(boost)
    torch.manual_seed(3)
    found = counts_of(model, run)
    assert ports[0].refusal() is None
    assert found[0].sum() == before[0].sum()
    assert found[0][weakest] == before[0][weakest] + before[0][weakest] // 2
    boost.commit()
    assert boost.backlog[weakest] == 1000 - before[0][weakest] // 2
    ports[0].detach()
    torch.manual_seed(3)
    assert (counts_of(model, run) == before).all(), "nothing stays behind"


@pytest.mark.parametrize("name", [*sorted(BY_ARGMAX | set(OF_OTHERS)), "OwnMoE"])
def test_a_layer_that_chooses_otherwise_is_left_alone_and_says_why(name, monkeypatch):
    if name == "OwnMoE":
        monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
        register_moe(
            OwnMoE, experts=("w_in", "w_out"), router="scorer", assignments=lambda m, a, k, out: out.argmax(-1)
        )
    model = Stack(OwnMoE) if name == "OwnMoE" else family(name)
    layers = find_moe_layers(model)
    port = boost_ports(layers)[0]
    assert port.refusal() is None, "not known before the first forward pass"
    boost = boost_of([9] * layers[0].info.experts)
    port.attach(boost)
    model(torch.randn(4, 8)) if name == "OwnMoE" else loss_of(model)
    assert "calls no torch.topk" in port.refusal()
    assert type(layers[0].layer).__name__ in port.refusal()
    boost.commit()
    assert set(boost.backlog.tolist()) == {9}


def test_weights_of_the_new_choice_are_the_routers_own():
    """The mixture of a boosted token is what the layer computes for that choice, with no bias in its weights."""
    torch.manual_seed(1)
    layer = Stack(ListMoE).blocks[0]["moe"]
    x = torch.randn(40, 8)
    chosen = layer.choose(x)[1]
    boost = boost_of([8, 0, 0, 0], 1.0)
    scores = layer.gate(x).softmax(-1)
    wanted = copy.deepcopy(boost).select(scores, chosen)
    assert (wanted != chosen).any()
    expected = torch.zeros_like(x)
    for token, experts in enumerate(wanted.tolist()):
        for expert in experts:
            expected[token] += layer.experts[expert](x[token]) * scores[token, expert]
    model = nn.ModuleDict({"moe": layer})
    port = boost_ports(find_moe_layers(model))[0]
    port.attach(boost)
    assert torch.allclose(layer(x), expected, atol=1e-6)
    layer.eval()
    unboosted = layer(x)
    port.detach()
    assert torch.equal(layer(x), unboosted), "evaluation takes no boost"


@pytest.mark.parametrize("left", [0, 10_000])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_repeats_the_choice_and_counts_it_once(use_reentrant, left):
    """Three passes before any backward, two of the same tokens, with a boost that ends among them."""
    torch.manual_seed(1)
    model = Stack(ListMoE)
    inputs = [torch.randn(30, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 1)]
    results = []
    for checkpointed in (False, True):
        model.zero_grad()
        layers = find_moe_layers(model)
        boosts = [boost_of([left if left else 7] * 2 + [0] * 2) for _ in layers]
        ports = boost_ports(layers)
        for port, boost in zip(ports.values(), boosts, strict=True):
            port.attach(boost)
        outputs = []
        for x in inputs:
            x = x.clone().requires_grad_()
            outputs.append(checkpoint(model, x, use_reentrant=use_reentrant) if checkpointed else model(x))
        for output in outputs:
            output.square().sum().backward()
        for port, boost in zip(ports.values(), boosts, strict=True):
            boost.commit()
            port.detach()
        results.append(([p.grad.clone() for p in model.parameters()], [boost.backlog.tolist() for boost in boosts]))
    assert results[0][1] == results[1][1]
    assert left or results[0][1][0] != [7, 7, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))


def test_a_boost_that_has_nothing_left_changes_no_bit():
    torch.manual_seed(1)
    model = family("Olmoe")
    loss = loss_of(model)
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for layer, port in boost_ports(find_moe_layers(model)).items():
        port.attach(boost_of([0] * 4))
        assert isinstance(port, TopKPort)
        assert layer in (0, 1)
    again = loss_of(model)
    again.backward()
    assert torch.equal(loss, again)
    assert all(torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True))


def test_a_model_that_is_trained_in_eval_mode_is_boosted_in_its_batches():
    passes, model = TrainingPasses(), Stack(ListMoE).eval()
    port, boost = boost_ports(find_moe_layers(model), passes=passes)[0], boost_of([5] * 4)
    port.attach(boost)
    model(torch.randn(6, 8))
    assert not boost.asked
    passes.in_batch = True
    with torch.no_grad():
        model(torch.randn(6, 8))
    assert not boost.asked
    model(torch.randn(6, 8))
    assert boost.asked
    port.detach()


def test_a_forward_pass_that_fails_leaves_torch_as_it_was():
    model = Stack(ListMoE)
    port = boost_ports(find_moe_layers(model))[0]
    port.attach(boost_of([5] * 4))
    with pytest.raises(RuntimeError):
        model.blocks[0]["moe"](torch.randn(3, 5))
    scores = torch.randn(5, 4)
    assert scores.topk(2).indices.tolist() == scores.sort(descending=True).indices[:, :2].tolist()


class TensorParallelMoE(ListMoE):
    """Chooses by a DTensor, as torchtitan does with tensor-parallel ranks."""

    def choose(self, x):
        mesh = init_device_mesh("cpu", (2,))
        scores = DTensor.from_local(self.gate(x).softmax(-1), mesh, [Replicate()], run_check=False)
        weights, chosen = scores.topk(self.top_k, dim=-1)
        return weights.to_local(), chosen.to_local()


def test_tensor_parallel_scores_take_no_boost_and_training_goes_on():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        torch.manual_seed(1)
        model, x = Stack(TensorParallelMoE), torch.randn(8, 8)
        wanted = model(x)
        port, boost = boost_ports(find_moe_layers(model))[0], boost_of([5] * 4)
        port.attach(boost)
        assert torch.equal(model(x), wanted)
        assert "its scores are a DTensor, so tensor-parallel ranks may route the same tokens" in port.refusal()
        port.detach()
    finally:
        dist.destroy_process_group()


def test_an_interrupted_forward_pass_leaves_torch_as_it_was():
    """After what is no ``Exception``, such as an in-process restart, torch runs no hook."""
    model = Stack(ListMoE)
    layers = find_moe_layers(model)
    port = boost_ports(layers)[0]
    port.attach(boost_of([5] * 4))

    def interrupt(*_):
        raise KeyboardInterrupt

    model.blocks[0]["moe"].experts[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(8, 8))
    port.detach()
    assert torch.overrides._get_current_function_mode_stack() == []


class AskingMoE(ListMoE):
    """Asks by itself, with a capacity."""

    moe_boost = None

    def choose(self, x):
        weights, chosen = super().choose(x)
        capacity = len(x) * self.top_k // len(self.experts)
        assigned = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        room = torch.full_like(assigned, capacity)
        if self.moe_boost is not None:
            room = self.moe_boost.capacities(assigned, capacity)
        flat = chosen.flatten()
        earlier = nn.functional.one_hot(flat, len(self.experts)).cumsum(0).gather(1, flat[:, None])[:, 0] - 1
        return weights, torch.where(earlier < room[flat], flat, -1).view_as(chosen)


@pytest.mark.parametrize("kind", [ListMoE, AskingMoE])
def test_a_copy_of_a_boosted_model_routes_by_itself(kind):
    torch.manual_seed(1)
    model, x = Stack(kind), torch.randn(64, 8)
    wanted = model(x)
    port, boost = boost_ports(find_moe_layers(model))[0], boost_of([50, 50, 50, 0])
    port.attach(boost)
    assert not torch.equal(model(x), wanted)
    boost.discard()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), wanted)
    boost.commit()
    assert boost.backlog.tolist() == [50, 50, 50, 0], "a teacher's passes make nothing up"
    port.detach()


def test_a_layer_that_asks_by_itself_gets_capacity_that_others_leave():
    torch.manual_seed(1)
    model = Stack(AskingMoE)
    layers = find_moe_layers(model)
    x = torch.randn(64, 8)
    before = counts_of(model, lambda: model(x))
    full = int(before[0].argmax())
    assert before[0][full] == 32
    assert before[0].sum() < 128
    port = boost_ports(layers)[0]
    port.attach(boost_of([9 if e == full else 0 for e in range(4)], 0.1))
    counts = [counts_of(model, lambda: model(x))[0] for _ in range(4)]
    assert [int(found[full]) - 32 for found in counts] == [3, 3, 3, 0], "10 % of 32, until nine are made up"
    assert all((np.delete(a, full) == np.delete(b, full)).all() for a, b in pairwise(counts))
    model.eval()
    model(x)
    assert model.blocks[0]["moe"].moe_boost is None
    port.detach()
    assert model.blocks[0]["moe"].moe_boost is None
