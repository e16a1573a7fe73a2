"""Work on what is frozen is left out of a Megatron replay: the other gradients are the same, on every rank."""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.exactness import WARM, Case, check, finish, kill, require_exact
from tests.megatron.test_exact import EXPERTS_DATA, GROUPED, INTERLEAVED, OVERLAPPED, PIPELINE_EXPERTS, SHARDED
from tests.megatron.test_exact import TENSOR_EXPERTS as TENSOR
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.processes import run_ranks


@dataclass(frozen=True)
class Window:
    """What ``Sparing`` asks of a replay."""

    names: frozenset[str]
    upcoming_path: str = "a window"

    def frozen_parameters(self) -> frozenset[str]:
        return self.names


def compare(rank: int, world_size: int, setup: Setup, seed: int) -> tuple[int, int]:
    """(parameters without a gradient, frozen ones) of this rank; raises unless all others have the same gradients."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.sparing import FACTS, GradientFacts, Sparing, may_spare

    built = megatron_gpt.build(setup, 1)
    inventory, optimizer = take_inventory(built.chunks), built.optimizer
    assert may_spare(built.chunks, optimizer)
    facts = GradientFacts(optimizer)
    assert facts.is_supported

    def gradients() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        megatron_gpt.forward_backward(built, 3)
        return {
            f"{at} {live.parts[0].name}": live.parameter.main_grad.clone()
            for at, live in enumerate(inventory.parameters)
        }

    whole = gradients()
    names = sorted({part.name for live in inventory.parameters for part in live.parts})
    draw = lambda name: random.Random(f"{name} {seed}").random() < 0.7  # noqa: E731 - the same on every rank
    window = Window(frozenset(filter(draw, names)))
    sparing = Sparing(built.chunks, inventory, optimizer, facts)
    sparing.prepare(window, {FACTS: {"norms": [], "overflows": []}})
    found = gradients()
    sparing.close()
    again = gradients()
    spared = frozen = 0
    for at, live in enumerate(inventory.parameters):
        key = f"{at} {live.parts[0].name}"
        assert torch.equal(again[key], whole[key]), f"{key} differs after the replay"
        if all(part.name in window.names for part in live.parts):
            frozen += 1
            spared += not found[key].any()
        else:
            assert torch.equal(found[key], whole[key]), f"{key} differs"
    assert all(each.parameter.requires_grad for each in inventory.parameters)
    return spared, frozen


SETUPS = {
    "pipeline": (Setup(**PIPELINE_EXPERTS, dense_first=True), 4),
    "tensor": (Setup(**TENSOR, **SHARDED, glu=True, shared_experts=True), 2),
    "recompute": (Setup(**EXPERTS_DATA, recompute=True, **GROUPED, **OVERLAPPED), 2),
    "mla": (Setup(**EXPERTS_DATA, **OVERLAPPED, mla=True), 4),
    "interleaved": (Setup(**INTERLEAVED, **SHARDED, capacity_factor=1.25), 4),
    "tied": (Setup(**EXPERTS_DATA, tied=True, precision="fp16"), 2),
}


@pytest.mark.parametrize("name", [n if n == "pipeline" else pytest.param(n, marks=pytest.mark.slow) for n in SETUPS])
def test_other_gradients_are_the_same(name):
    setup, ranks = SETUPS[name]
    for seed in range(1 if name == "pipeline" else 3):
        for spared, frozen in run_ranks(compare, ranks, setup, seed, timeout=300.0, preload=WARM):
            # Those of the embedding, which is in front of all layers, are made; a tied one has two uses.
            assert frozen - 2 <= spared <= frozen
            assert spared > 2


def tell(path: str) -> None:
    """Writes down, of each update of a replay, how many parameters the inner optimizers did not get."""
    from moe_ckpt.megatron.sparing import Sparing

    skip = Sparing._skip_updates

    def skipping(self: Any, frozen: Any) -> None:
        skip(self, frozen)

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            given = [each.grad is None for group in optimizer.param_groups for each in group["params"]]
            with open(path, "a") as file:
                file.write(f"{sum(given)} of {len(given)}\n")

        for leaf in self._leaves:
            self._handles.append(leaf.optimizer.register_step_pre_hook(note))

    Sparing._skip_updates = skipping  # type: ignore[method-assign]


def norms_not_given() -> None:
    from moe_ckpt.megatron.sparing import GradientFacts

    GradientFacts.prescribed = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]


@pytest.mark.skipif(version("megatron-core") < "0.19", reason="heads that are clipped by themselves came with 0.19")
def test_norms_of_groups_are_used_again_too(tmp_path):
    setup = Setup(layers=2, num_microbatches=1, ep=2, mtp=1, mtp_detached=True, clip=0.01)
    check(Case(setup, ("MoEvement", {"window": 4}), ((1, 10, "train"),), ranks=2, steps=11), tmp_path)


RUN = Case(Setup(**EXPERTS_DATA), ("MoEvement", {"window": 4}), ((1, 10, "train"),), ranks=2, steps=11)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed")
    kill(RUN, directory)
    return directory


def test_updates_of_what_is_frozen_are_left_out(killed, tmp_path):
    told = tmp_path / "told"
    ended = last_life(RUN, killed, tmp_path, functools.partial(tell, str(told)))
    assert len(ended.replayed(-1)) == 3
    counts = [int(each) for each in re.findall(r"(\d+) of", told.read_text())]
    assert counts
    assert max(counts) > 1
    require_exact(RUN, tmp_path / "run", ended)


def one_rank_must_not() -> None:
    from moe_ckpt.megatron import checkpoint, sparing

    def may_spare(chunks: Any, optimizer: Any) -> bool:
        return torch.distributed.get_rank() != 0

    for module in (checkpoint, sparing):
        module.may_spare = may_spare  # type: ignore[attr-defined]


def test_ranks_leave_out_work_together_or_not_at_all(killed, tmp_path):
    ended = last_life(RUN, killed, tmp_path, one_rank_must_not)
    assert len(ended.replayed(-1)) == 3
    require_exact(RUN, tmp_path / "run", ended)


def test_the_input_of_the_model_is_not_trained(tmp_path):
    frozen = Setup(**EXPERTS_DATA, frozen=("embedding", "layers.0.self_attention"))
    ended = check(replace(RUN, setup=frozen), tmp_path)
    assert len(ended.replayed(-1)) == 3


@pytest.mark.slow
def test_norms_are_those_of_all_gradients(killed, tmp_path):
    ended = last_life(RUN, killed, tmp_path, norms_not_given)
    with pytest.raises(AssertionError, match="rank"):
        require_exact(RUN, tmp_path / "run", ended)


def last_life(run, killed, tmp_path, sabotage):
    import shutil

    shutil.copytree(killed, tmp_path / "run")
    return finish(run, tmp_path / "run", sabotage)
