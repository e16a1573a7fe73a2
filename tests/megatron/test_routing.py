"""The counter agrees with a count by hand of what the real Megatron-Core routes, and changes nothing.

The count by hand computes each router's choice again from the router's input and weight, and asks the experts and the
router's weights what was dispatched; it never looks at a routing map. One process runs all cases on one rank, the tests
then look at what each of them saw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support import megatron_gpt
from tests.support.acted_graphs import GRAPHED
from tests.support.megatron_gpt import Setup
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
ONE = Setup(layers=2, num_microbatches=2)
TOKENS = ONE.seq * ONE.micro_batch * ONE.num_microbatches
CAPACITY = {0.5: 8, 1.25: 20}
"""Tokens an expert takes of one micro-batch: factor x 32 tokens x top-2 / 4 experts."""


def built_with(setup: Setup, **options: Any) -> megatron_gpt.Built:
    """``build``, with further options of the TransformerConfig. In a process of its own: it replaces a name."""
    original = megatron_gpt._moe_options
    megatron_gpt._moe_options = lambda setup: original(setup) | options
    try:
        built = megatron_gpt.build(setup, seed=1)
    finally:
        megatron_gpt._moe_options = original
    return built


def moe_layers(built: megatron_gpt.Built) -> list[tuple[int, Any]]:
    """(index among the MoE layers of the whole model, MoELayer) of this rank."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    dense = int(built.setup.dense_first)
    found = [module for chunk in built.chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    return [(layer.layer_number - 1 - dense, layer) for layer in found]


def counter_of(built: megatron_gpt.Built, **options: Any) -> Any:
    from moe_ckpt.megatron.routing import RouterCounter

    layers = built.setup.layers - built.setup.dense_first
    routers = [(at, layer.router) for at, layer in moe_layers(built)]
    return RouterCounter(routers, layers, built.setup.experts, **options)


class ByHand:
    """chosen [L, E]: recomputed. dispatched [L, E]: rows that this rank's experts get (EP 1 only). weighed [L, E]:
    gate weights. positive [L, E]: entries of the gate weights above 0. padding: True where a token is padding."""

    def __init__(self, built: megatron_gpt.Built) -> None:
        shape = (built.setup.layers - built.setup.dense_first, built.setup.experts)
        self.chosen, self.dispatched, self.positive = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.weighed = np.zeros(shape)
        self.handles = []
        for at, layer in moe_layers(built):
            self.handles.append(layer.router.register_forward_pre_hook(self._choose(at)))
            self.handles.append(layer.router.register_forward_hook(self._weigh(at)))
            self.handles.append(layer.experts.register_forward_pre_hook(self._receive(at)))

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _choose(self, at: int) -> Any:
        def hook(router: Any, args: tuple[Any, ...]) -> None:
            hidden, padding = (*args, None)[:2]
            logits = hidden.detach().float().reshape(-1, hidden.shape[-1]) @ router.weight.detach().float().T
            if router.expert_bias is not None:
                logits = logits.sigmoid() + router.expert_bias
            best = logits.topk(router.config.moe_router_topk, dim=1).indices
            if padding is not None:
                best = best[~padding.reshape(-1)]
            self.chosen[at] += np.bincount(best.reshape(-1).numpy(), minlength=self.chosen.shape[1])

        return hook

    def _weigh(self, at: int) -> Any:
        def hook(router: Any, args: tuple[Any, ...], output: Any) -> None:
            self.weighed[at] += output[0].detach().double().sum(0).numpy()
            self.positive[at] += (output[0].detach() > 0).sum(0).numpy()

        return hook

    def _receive(self, at: int) -> Any:
        def hook(experts: Any, args: tuple[Any, ...]) -> None:
            if len(args[1]) == self.dispatched.shape[1]:
                self.dispatched[at] += np.asarray(args[1])

        return hook


def trained(setup: Setup, steps: int = 2, bias: list[float] | None = None, **options: Any) -> dict[str, Any]:
    """Two steps counted by two counters and by hand, and the same without: what each saw."""
    runs = []
    for counting in (False, True):
        built = built_with(setup, **options)
        if bias is not None:
            for _, layer in moe_layers(built):
                layer.router.expert_bias.copy_(torch.tensor(bias))
        counters = [counter_of(built, soft=True), counter_of(built)] if counting else []
        by_hand = ByHand(built) if counting else None
        losses = [megatron_gpt.train_step(built, i)[0] for i in range(steps)]
        runs.append((losses, megatron_gpt.fingerprint(built)))
    counted, second = (counter.take().result() for counter in counters)
    after = counters[0].take().result()
    for counter in counters:
        counter.close()
    return {
        "counted": counted,
        "second": second,
        "after": after,
        "by_hand": {name: getattr(by_hand, name) for name in ("chosen", "dispatched", "weighed", "positive")},
        "same_training": runs[0] == runs[1],
        "losses": runs[1][0],
    }


def hooks_and_name() -> dict[str, Any]:
    """What closing leaves behind."""
    from megatron.core.transformer.moe import router as module

    original = module.apply_router_token_dropping
    built = built_with(ONE, moe_expert_capacity_factor=0.5)
    routers = [layer.router for _, layer in moe_layers(built)]

    def hooks() -> list[int]:
        return [len(r._forward_hooks) + len(r._forward_pre_hooks) for r in routers]

    seen: dict[str, Any] = {"before": hooks()}
    first, second = counter_of(built), counter_of(built)
    seen["wrapped"] = module.apply_router_token_dropping is not original
    megatron_gpt.train_step(built, 0)
    first.close()
    first.close()
    seen["wrapped after the first close"] = module.apply_router_token_dropping is not original
    megatron_gpt.train_step(built, 1)
    seen["first"], seen["second"] = first.take().result(), second.take().result()
    second.close()
    seen["restored"] = module.apply_router_token_dropping is original
    seen["after"] = hooks()
    megatron_gpt.train_step(built, 2)
    seen["closed"] = second.take().result()
    return seen


def modes() -> dict[str, Any]:
    """Evaluation, discarding, and a capacity factor that is set when the counter is there already."""
    built = built_with(ONE)
    counter = counter_of(built, soft=True)
    for chunk in built.chunks:
        chunk.eval()
    megatron_gpt.forward_backward(built, 0)
    seen: dict[str, Any] = {"eval": counter.take().result()}
    for chunk in built.chunks:
        chunk.train()
    megatron_gpt.train_step(built, 0)
    counter.discard()
    seen["discarded"] = counter.take().result()
    megatron_gpt.train_step(built, 1)
    built.config.moe_expert_capacity_factor = 0.5
    megatron_gpt.train_step(built, 2)
    seen["half dropping"] = counter.take().result()
    counter.close()
    return seen


def padded(capacity_factor: float | None) -> dict[str, Any]:
    """One forward pass of an MoE layer, the last 5 of each sequence's tokens padding, in both pieces of a batch."""
    built = built_with(ONE, moe_expert_capacity_factor=capacity_factor)
    counter, by_hand = counter_of(built), ByHand(built)
    _, layer = moe_layers(built)[1]
    padding = torch.zeros(2, ONE.seq, dtype=torch.bool)
    padding[0, -5:] = True
    padding[1, :3] = True
    layer(torch.randn(ONE.seq, 2, ONE.hidden), padding_mask=padding)
    seen = {"counted": counter.take().result(), "chosen": by_hand.chosen}
    by_hand.close()
    try:
        with torch.no_grad():  # else the auxiliary loss trips over it first
            layer.router(torch.randn(ONE.seq, 2, ONE.hidden), torch.zeros(ONE.seq, 4, dtype=torch.bool))
        seen["refused"] = None
    except Exception as error:
        seen["refused"] = f"{type(error).__name__}: {error}"
    counter.close()
    return seen


def refusals() -> dict[str, str]:
    """Everything that is not as expected is said when the counter is made, or at the first forward pass."""
    from megatron.core.transformer.moe import router as module

    from moe_ckpt.boost.megatron import RouterPort
    from moe_ckpt.megatron.routing import RouterCounter

    built = built_with(ONE, moe_expert_capacity_factor=0.5)
    router = moe_layers(built)[0][1].router
    seen = {}

    def trying(name: str, routers: list[Any], then: Any = None) -> None:
        counter = None
        try:
            counter = RouterCounter(routers, 2, 4)
            if then is not None:
                then()
            seen[name] = "nothing"
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
        finally:
            if counter is not None:
                counter.close()

    class Moved(module.TopKRouter):
        def routing(self, logits: Any, padding_mask: Any = None) -> Any:
            chosen = torch.ones(logits.shape[0] * logits.shape[1], 4, dtype=torch.bool)
            return chosen.float(), chosen

    class Indices(module.TopKRouter):
        def forward(self, input: Any, padding_mask: Any = None) -> Any:
            return input, torch.zeros(3, 2, dtype=torch.int64)

    class Renamed(module.TopKRouter):
        def forward(self, hidden: Any, padding_mask: Any = None) -> Any:
            raise AssertionError

    hidden = torch.randn(ONE.seq, 2, ONE.hidden)
    trying("not a router", [(0, torch.nn.Linear(2, 2))])
    for kind in (Moved, Indices, Renamed):
        router.__class__ = kind
        trying(kind.__name__, [(0, router)], lambda: router(hidden))
    router.__class__ = module.TopKRouter
    dropping = module.apply_router_token_dropping
    del module.apply_router_token_dropping
    trying("no such name", [(0, router)])
    module.apply_router_token_dropping = dropping
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_moe_experts": 4}
    for name, how, parts in (
        ("graphs of layers", "local", []),
        ("graphs of the router", "transformer_engine", ["attn", "moe_router"]),
        ("graph of all", *(("full_iteration", []) if GRAPHED == "cuda_graph_modules" else ("local", "full_iteration"))),
        ("graphs without chunks", "local", ["moe_router"]),
    ):
        router.config = type(built.config)(**sizes, add_bias_linear=False, cuda_graph_impl=how, **{GRAPHED: parts})
        router.config.overlap_moe_expert_parallel_comm = name == "graphs without chunks"
        trying(name, [(0, router)])
        seen[f"boost, {name}"] = RouterPort(name, router).refusal()
    return seen


def one_rank(rank: int, world_size: int) -> dict[str, Any]:
    selective = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {
        "plain": trained(ONE),
        "full recompute": trained(Setup(layers=2, num_microbatches=2, recompute=True)),
        "selective recompute": trained(ONE, **selective),
        "capacity 0.5": trained(ONE, moe_expert_capacity_factor=0.5),
        "capacity 0.5, full recompute": trained(
            Setup(layers=2, num_microbatches=2, recompute=True), moe_expert_capacity_factor=0.5
        ),
        "capacity 0.5, selective recompute": trained(ONE, moe_expert_capacity_factor=0.5, **selective),
        "capacity 1.25": trained(ONE, moe_expert_capacity_factor=1.25),
        "padded 1.25": trained(ONE, moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True),
        "padded 0.5": trained(ONE, moe_expert_capacity_factor=0.5, moe_pad_expert_input_to_capacity=True),
        "by position": trained(ONE, moe_expert_capacity_factor=0.5, moe_token_drop_policy="position"),
        "bias": trained(Setup(layers=2, num_microbatches=2, expert_bias=True), bias=[0.0, 0.3, -0.3, 0.1]),
        "dense first": trained(Setup(layers=3, num_microbatches=2, dense_first=True), steps=1),
        "closing": hooks_and_name(),
        "modes": modes(),
        "padding": padded(None),
        "padding, capacity": padded(0.5),
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    [result] = run_ranks(one_rank, 1, preload=WARM)
    return result


def equal(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype == np.int64 and np.array_equal(a, b)


@pytest.mark.parametrize("case", ["plain", "bias", "dense first"])
def test_counts_are_those_by_hand(seen, case):
    counted, by_hand = seen[case]["counted"], seen[case]["by_hand"]
    steps = len(seen[case]["losses"])
    assert equal(counted.applied, by_hand["chosen"])
    assert equal(counted.applied, by_hand["dispatched"])
    assert (counted.applied.sum(axis=1) == steps * TOKENS * ONE.top_k).all()
    assert len(np.unique(counted.applied)) > 2, "all experts alike would prove little"
    assert counted.assigned is None
    assert counted.popularity is counted.applied


def test_bias_moves_the_counts(seen):
    assert not equal(seen["bias"]["counted"].applied, seen["plain"]["counted"].applied)


CASES = [
    "plain", "full recompute", "selective recompute", "capacity 0.5", "capacity 0.5, full recompute",
    "capacity 0.5, selective recompute", "capacity 1.25", "padded 1.25", "padded 0.5", "by position", "bias",
    "dense first",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_with_a_counter(seen, case):
    assert seen[case]["same_training"]
    assert None not in seen[case]["losses"]


@pytest.mark.parametrize("case", CASES)
def test_two_counters_agree_and_take_starts_again(seen, case):
    counted, second, after = seen[case]["counted"], seen[case]["second"], seen[case]["after"]
    assert equal(counted.applied, second.applied)
    assert equal(counted.popularity, second.popularity)
    assert second.soft is None
    assert counted.applied.any()
    assert not after.applied.any()
    assert not after.popularity.any()
    assert not after.soft.any()


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("dropping", ["", "capacity 0.5, "])
def test_recompute_does_not_count_twice(seen, granularity, dropping):
    expected = seen[dropping.rstrip(", ") or "plain"]["counted"]
    counted = seen[f"{dropping}{granularity} recompute"]["counted"]
    assert equal(counted.applied, expected.applied)
    assert equal(counted.popularity, expected.popularity)
    assert equal(counted.soft, expected.soft)


@pytest.mark.parametrize(("case", "factor"), [("capacity 0.5", 0.5), ("capacity 1.25", 1.25), ("by position", 0.5)])
def test_dropped_tokens_are_assigned_but_not_applied(seen, case, factor):
    counted, by_hand = seen[case]["counted"], seen[case]["by_hand"]
    assert equal(counted.assigned, by_hand["chosen"])
    assert (counted.assigned.sum(axis=1) == 2 * TOKENS * ONE.top_k).all()
    assert equal(counted.applied, by_hand["dispatched"])
    assert (counted.applied <= 2 * ONE.num_microbatches * CAPACITY[factor]).all()
    assert (counted.applied <= counted.assigned).all()
    assert counted.applied.sum() < counted.assigned.sum()


@pytest.mark.parametrize(("case", "factor"), [("padded 1.25", 1.25), ("padded 0.5", 0.5)])
def test_padding_to_capacity_does_not_count(seen, case, factor):
    counted, by_hand = seen[case]["counted"], seen[case]["by_hand"]
    assert (by_hand["dispatched"] == 2 * ONE.num_microbatches * CAPACITY[factor]).all(), "Megatron pads"
    assert equal(counted.assigned, by_hand["chosen"])
    assert equal(counted.applied, by_hand["positive"])
    assert (counted.applied.sum() < by_hand["dispatched"].sum()) == (factor > 1), "padding in one of the two"


@pytest.mark.parametrize("case", ["plain", "bias", "capacity 0.5", "padded 0.5"])
def test_soft_counts_are_the_gate_weights(seen, case):
    counted, by_hand = seen[case]["counted"], seen[case]["by_hand"]
    assert counted.soft.dtype == np.int64
    assert np.abs(counted.soft - by_hand["weighed"] * 2**16).max() <= 1
    assert counted.soft.any()


def test_closing_leaves_nothing(seen):
    closing = seen["closing"]
    assert closing["wrapped"]
    assert closing["wrapped after the first close"]
    assert closing["restored"]
    assert closing["before"] == closing["after"]
    assert closing["first"].assigned.sum() == 2 * TOKENS * ONE.top_k
    assert closing["second"].assigned.sum() == 2 * 2 * TOKENS * ONE.top_k
    assert not closing["closed"].popularity.any()


def test_evaluation_and_what_is_discarded_do_not_count(seen):
    for name in ("eval", "discarded"):
        assert not seen["modes"][name].applied.any()
        assert not seen["modes"][name].soft.any()


def test_a_capacity_factor_may_come_later(seen):
    assert seen["modes"]["eval"].assigned is None
    counted = seen["modes"]["half dropping"]
    assert (counted.assigned.sum(axis=1) == 2 * TOKENS * ONE.top_k).all()
    assert (counted.applied.sum(axis=1) < counted.assigned.sum(axis=1)).all()


@pytest.mark.parametrize("case", ["padding", "padding, capacity"])
def test_padding_tokens_do_not_count(seen, case):
    counted = seen[case]["counted"]
    assert equal(counted.popularity, seen[case]["chosen"])
    assert counted.popularity[1].sum() == (2 * ONE.seq - 8) * ONE.top_k
    assert not counted.popularity[0].any()
    assert (counted.applied.sum() < counted.popularity.sum()) == (counted.assigned is not None)
    assert "padding_mask of (16, 4) reaches a router that routes 32 tokens" in seen[case]["refused"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("not a router", "UnsupportedError: torch.nn.modules.linear.Linear is no megatron.core.transformer.moe.router"),
        (
            "Moved",
            "UnsupportedError: megatron.core.transformer.moe.router.apply_router_token_dropping of megatron-core 0",
        ),
        ("Indices", "UnsupportedError: megatron.core.transformer.moe.router.TopKRouter.forward of megatron-core 0"),
        ("Renamed", "Renamed.forward of megatron-core 0"),
        ("no such name", "has no megatron.core.transformer.moe.router.apply_router_token_dropping"),
        ("graphs of layers", "nothing"),
        ("graphs of the router", "nothing"),
        ("boost, graphs of the router", "CUDA graphs replay the capacity and the choice that they captured"),
        ("graph of all", "captures a whole iteration in one CUDA graph"),
        ("graphs without chunks", "cuda_graph_impl='local' with overlap_moe_expert_parallel_comm"),
    ],
)
def test_what_is_not_as_expected_is_refused(seen, case, said):
    assert said in seen["refusals"][case]


def spread(rank: int, world_size: int, setup: Setup) -> dict[str, Any]:
    """Two steps; what this rank counted, and counted by hand."""
    built = built_with(setup)
    counter, by_hand = counter_of(built), ByHand(built)
    mine = [at for at, _ in moe_layers(built)]
    for i in range(2):
        megatron_gpt.train_step(built, i)
    seen = {"counted": counter.take().result(), "chosen": by_hand.chosen, "mine": mine}
    if setup.tp > 1:  # what makes the sum over ranks right is Megatron's own refusal
        built.config.sequence_parallel = False
        with pytest.raises(ValueError, match="without also enabling sequence parallelism"):
            moe_layers(built)[0][1](torch.randn(setup.seq, setup.micro_batch, setup.hidden))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "ranks", "data_ranks"),
    [
        (Setup(pp=2, ep=2), 4, 2),
        (Setup(pp=2, vpp=2, capacity_factor=0.5), 2, 1),
        (Setup(tp=2, ep=2, layers=2, recompute=True), 2, 1),
    ],
    ids=["PP2 EP2", "PP2 VPP2 capacity", "TP2 EP2 recompute"],
)
def test_the_sum_over_ranks_is_every_token_once(setup, ranks, data_ranks):
    results = run_ranks(spread, ranks, setup, preload=WARM)
    total = sum(result["counted"].popularity for result in results)
    tokens = 2 * setup.num_microbatches * data_ranks * setup.micro_batch * setup.seq
    assert total.shape == (setup.layers, setup.experts)
    assert (total.sum(axis=1) == tokens * setup.top_k).all()
    for result in results:
        others = sorted(set(range(setup.layers)) - set(result["mine"]))
        assert not result["counted"].applied[others].any()
        assert (
            result["counted"].popularity[result["mine"]].sum(axis=1) == tokens * setup.top_k * setup.pp // ranks
        ).all()
        if not setup.recompute:
            assert equal(result["counted"].popularity, result["chosen"])
