"""Tokens are counted in CUDA graphs, which are acted here (``tests.support.acted_graphs``), as they are without."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpu.lives import GRAPHS
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.options import Memory
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import LocalStorage
from tests.support import acted_graphs, megatron_gpt
from tests.support.acted_graphs import GRAPHED, Graph
from tests.support.megatron_gpt import Setup
from tests.support.megatron_move import whole_tensors
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
ITERATIONS = 4
RECIPE = ["attn", "moe_router", "moe_preprocess"]
"""What NVIDIA's recipes for large MoE models capture."""
PLAIN = Setup(layers=2, num_microbatches=2, dropout=0.0)
BF16 = replace(PLAIN, precision="bf16")
"""The only type of the samples of ``cuda_graph_impl="transformer_engine"``."""


@dataclass(frozen=True)
class Case:
    how: str
    parts: list[str]
    setup: Setup = PLAIN
    options: dict[str, Any] = field(default_factory=dict)
    broken: tuple[str, Any] | None = None
    """(name in ``megatron.routing``, what stands for it in the run with graphs)."""


def evaluate(built: megatron_gpt.Built) -> None:
    """A validation, which Megatron-Core's own graphs are replayed in."""
    for chunk in built.chunks:
        chunk.eval()
    with torch.no_grad():
        megatron_gpt.forward_backward(built, 1000, forward_only=True)
    for chunk in built.chunks:
        chunk.train()


def counted(case: Case, how: str) -> dict[str, Any]:
    """What a few iterations count, with a validation after each, and how often Python ran in a router meanwhile."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moe_ckpt.megatron.routing import RouterCounter

    built = acted_graphs.build(case.setup, how, case.parts, **case.options)
    layers = [each for chunk in built.chunks for each in chunk.modules() if isinstance(each, MoELayer)]
    routers = [(layer.layer_number - 1, layer.router) for layer in layers]
    counter = RouterCounter(routers, case.setup.layers, case.setup.experts, chunks=built.chunks, soft=True)
    python = 0

    def runs(*_: Any) -> None:
        nonlocal python
        python += 1

    for _, router in routers:
        router.register_forward_hook(runs)
    seen: dict[str, Any] = {"losses": [], "tokens": [], "python": [], "captures": Graph.captures}
    for iteration in range(ITERATIONS):
        if iteration == 1 and how == "transformer_engine":
            acted_graphs.capture_as_transformer_engine(built)
        before = python
        seen["losses"].append(megatron_gpt.train_step(built, iteration))
        seen["python"].append(python - before)
        evaluate(built)
        seen["tokens"].append(counter.take().result())
    seen["captures"] = Graph.captures - seen["captures"]
    seen["weights"] = megatron_gpt.fingerprint(built)
    return seen


def with_and_without(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    from moe_ckpt.megatron import routing

    acted_graphs.install()
    eager = counted(case, "none")
    name, function = case.broken or ("version", routing.version)
    with mock.patch(f"{routing.__name__}.{name}", function):
        return {"eager": eager, "graphs": counted(case, case.how)}


def same(one: Any, other: Any) -> bool:
    return all(
        (a is b is None) or np.array_equal(a, b)
        for a, b in ((getattr(one, name), getattr(other, name)) for name in ("applied", "assigned", "soft"))
    )


SIGMOID = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.0}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
DROPS = {"moe_expert_capacity_factor": 0.5}
EVEN = DROPS | {"moe_pad_expert_input_to_capacity": True}
WHOLE_OUTPUTS = {"deallocate_pipeline_outputs": False}  # Megatron-Core refuses to free those of its own graphs
CASES = {
    "engine": Case("transformer_engine", RECIPE, BF16),
    "engine-bias": Case("transformer_engine", ["moe_router", "moe_preprocess"], BF16, SIGMOID),
    "engine-dropping": Case("transformer_engine", ["attn", "moe_router"], BF16, DROPS),
    "engine-layers": Case("transformer_engine", [], BF16, EVEN),
    "own": Case("local", RECIPE),
    "own-recomputed": Case("local", RECIPE, options=RECOMPUTED),
    "own-layers": Case("local", [], options=EVEN),
}
LAYOUTS = {
    "own-stages": Case("local", RECIPE, Setup(layers=4, pp=2, num_microbatches=3, dropout=0.0), WHOLE_OUTPUTS),
    "own-experts": Case("local", RECIPE, Setup(layers=2, ep=2, num_microbatches=2, dropout=0.0)),
}


EARLY = GRAPHED == "cuda_graph_scope"
"""Before 0.18, where the iteration that captures Megatron-Core's own graphs changes weights while they are copied: its
checkpoint is refused, and the run goes on."""


def since_0_18(case: str) -> Any:
    is_late = case.startswith("own-") and EARLY
    return pytest.param(case, marks=pytest.mark.skipif(is_late, reason="before, its own graphs train something else"))


@pytest.mark.parametrize("case", list(map(since_0_18, (*CASES, *LAYOUTS))))
@pytest.mark.quick("engine", "own-recomputed")
def test_counts_are_those_without_graphs(case):
    for found in run_ranks(with_and_without, 2 if case in LAYOUTS else 1, (CASES | LAYOUTS)[case], preload=WARM):
        eager, graphs = found["eager"], found["graphs"]
        assert graphs["losses"] == eager["losses"]
        assert graphs["weights"] == eager["weights"]
        assert graphs["captures"] > 0
        assert eager["python"][-1] > 0 == graphs["python"][-1], "a replay ran Python, so this shows nothing"
        assert all(map(same, graphs["tokens"], eager["tokens"]))
        assert all(tokens.applied.any() for tokens in eager["tokens"])


def samples_count() -> bool:
    return False


def validation_counts(counter: Any, chunk: Any, args: Any) -> None:
    counter._factor.fill_(1)


def recomputation_counts(counter: Any, chunk: Any, args: Any, output: Any) -> None:
    """Leaves the factor as it was in the forward pass."""


BROKEN = {
    "engine": ("runs_on_samples", samples_count, [1]),
    "own": ("RouterCounter._opens", validation_counts, [0, 1, 2, 3]),
    "own-recomputed": ("RouterCounter._closes", recomputation_counts, [1, 2, 3]),
}


@pytest.mark.parametrize("case", list(map(since_0_18, BROKEN)))
@pytest.mark.quick("own")
def test_what_is_counted_wrongly_is_noticed(case):
    *broken, wrong = BROKEN[case]
    [found] = run_ranks(with_and_without, 1, replace(CASES[case], broken=tuple(broken)), preload=WARM)
    differing = [not same(*each) for each in zip(found["graphs"]["tokens"], found["eager"]["tokens"], strict=True)]
    assert np.flatnonzero(differing).tolist() == wrong


# --- whole runs with checkpoints ---

LAST, STOP = 8, 5
EXACT = {
    "Dense": {"every_n_steps": 1},
    "GradientLog": {"window": 2},
    "MoEvement": {"window": 2, "order": "soft_count"},
}
POLICIES = EXACT | {
    "MoC": {"k": 1, "selector": "load_aware"},
    "MoEtion": {"capacity_boost": None},
}


def life(case: Case, how: str, policy: str, arguments: dict[str, Any], place: Path, last: int) -> dict[str, Any]:
    """Trains up to ``last`` in a store, where it may have been before, and ends without a last checkpoint."""
    import moe_ckpt.policies
    from moe_ckpt import megatron

    built = acted_graphs.build(case.setup, how, case.parts, **case.options)
    (place / "memory").mkdir(parents=True, exist_ok=True)
    ckpt = megatron.attach(
        *(built.chunks, built.optimizer, built.scheduler),
        policy=getattr(moe_ckpt.policies, policy)(**arguments),
        dirpath=place,
        when_busy="wait",
        retention=RetentionPolicy(keep_last=100),
        memory=Memory(place / "memory", storage_every=1) if policy == "GradientLog" else None,
    )
    begun = ckpt.resume().iteration
    for iteration in range(begun, last):
        if iteration == begun + 1 and how == "transformer_engine":
            acted_graphs.capture_as_transformer_engine(built)
        megatron_gpt.train_step(built, iteration)
        if case.setup.dropout:  # Megatron-Core's own graphs draw numbers in a validation, which belong to the iteration
            evaluate(built)
        ckpt.after_step(iteration + 1, consumed_samples=iteration)
        if not case.setup.dropout:
            evaluate(built)
    tensors = whole_tensors(ckpt._host.state)
    ckpt.session.drain(last)
    ckpt.close()
    reader = StoreReader(LocalStorage(place))
    manifests = {name: reader.manifest(name) for name in reader.directories()}
    return {
        "begun": begun,
        "tensors": tensors,
        "tokens": {name: manifest.tokens for name, manifest in manifests.items()},
        "steps": {name: [each.step for each in manifest.operators.values()] for name, manifest in manifests.items()},
    }


def lives(rank: int, world_size: int, case: Case, policy: str, root: Path) -> dict[str, Any]:
    acted_graphs.install()
    chosen = policy, POLICIES[policy]
    return {
        how: [
            life(case, how, *chosen, root / how / "whole", LAST),
            life(case, how, *chosen, root / how / "parts", STOP),
            life(case, how, *chosen, root / how / "parts", LAST),
        ]
        for how in ("none", case.how)
    }


DROPOUT = {
    "engine-dropout": replace(CASES["engine"], setup=replace(BF16, dropout=0.1)),
    "own-dropout": replace(CASES["own"], setup=replace(PLAIN, dropout=0.1)),
}
"""The captured modules draw random numbers, and so do the passes before a capture."""


def lives_with_dropout(rank: int, world_size: int, case: Case, root: Path) -> dict[str, Any]:
    """``broken``: the whole life with graphs, where nothing puts generators back."""
    from moe_ckpt.megatron import checkpoint

    found = lives(rank, world_size, case, "Dense", root)
    with mock.patch.object(checkpoint, "unmoved_by_captures", nullcontext):
        return found | {"broken": life(case, case.how, "Dense", POLICIES["Dense"], root / "broken", LAST)}


@pytest.mark.parametrize("case", list(map(since_0_18, DROPOUT)))
@pytest.mark.quick("engine-dropout", "own-dropout")
def test_a_capture_moves_no_random_number(case, tmp_path):
    """A resumed run captures at another iteration than the run that it continues."""
    case = DROPOUT[case]
    [found] = run_ranks(lives_with_dropout, 1, case, tmp_path, preload=WARM)
    whole, _, second = found[case.how]
    assert 0 < second["begun"] <= STOP
    assert second["tensors"] == whole["tensors"]
    if case.how == "transformer_engine":  # others draw in validations, too
        assert whole["tensors"] == found["none"][0]["tensors"]
    assert whole["tensors"] != found["broken"]["tensors"], "no pass before a capture drew a number"


@pytest.mark.parametrize("how", ["engine", pytest.param("own", marks=pytest.mark.skipif(EARLY, reason="see EARLY"))])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.quick("MoC-engine", "MoEvement-engine")
def test_a_run_with_graphs_is_the_run_without(policy, how, tmp_path):
    """All lives save the same experts, count the same tokens and end with the same bits."""
    case = CASES[how]
    [found] = run_ranks(lives, 1, case, policy, tmp_path, preload=WARM)
    whole, first, second = found[case.how]
    assert found["none"] == found[case.how]
    assert 0 == whole["begun"] == first["begun"] < second["begun"] <= STOP
    if policy in EXACT:
        assert second["tensors"] == whole["tensors"]
    assert any(np.sum(tokens["applied"]) for tokens in whole["tokens"].values())


# --- the check for a real GPU, ``benchmarks.gpu``, with graphs that are acted ---


def life_of_the_benchmark(rank: int, world_size: int, model: str, directory: Path, steps: int) -> dict[str, Any]:
    from benchmarks.gpu import lives as benchmark

    acted_graphs.install()
    arguments = {"device": "cpu", "shape": "cpu", "policy": "dense", "model": model}
    arguments |= {"directory": str(directory), "steps": str(steps)}
    with redirect_stdout(io.StringIO()) as printed, mock.patch("torch.distributed.init_process_group"):
        benchmark.main([part for name, value in arguments.items() for part in (f"--{name}", value)])
    return json.loads(printed.getvalue().splitlines()[-1])


@pytest.mark.skipif(EARLY, reason="see EARLY")
def test_the_benchmark_compares_graphs(tmp_path):
    runs = (GRAPHS, "whole", LAST), (GRAPHS, "parts", STOP), (GRAPHS, "parts", LAST), ("megatron", "plain", LAST)
    whole, _, resumed, plain = (
        run_ranks(life_of_the_benchmark, 1, model, tmp_path / name, steps, preload=WARM)[0]
        for model, name, steps in runs
    )
    assert (whole["has_captured"], plain["has_captured"]) == (True, False)
    assert resumed["step"] == STOP
    assert resumed["digests"] == whole["digests"]
    assert resumed["tokens"] == whole["tokens"] == plain["tokens"]
