"""Three ways to keep experts are one model: SequentialMLP, and Transformer Engine's layout in its place."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup

WARM = "tests.support.megatron_warm"


class GroupedLikeTransformerEngine(nn.Module):
    """Parameters as TEGroupedMLP of megatron.core.transformer.moe.experts has them: ``linear_fc1.weight0``, ...

    Transformer Engine does not run without a GPU. These are the very parameters of a SequentialMLP, renamed.
    """

    def __init__(self, sequential: Any) -> None:
        super().__init__()
        self.config = sequential.config
        for name in ("linear_fc1", "linear_fc2"):
            linear = nn.Module()
            for at, expert in enumerate(sequential.local_experts):
                linear.register_parameter(f"weight{at}", getattr(expert, name).weight)
            self.add_module(name, linear)


def describe(built: Any) -> tuple[Any, Any, Any]:
    """(parameters of the model, what this rank tells the others, its state tensors): all that the rest is built on."""
    from moe_ckpt.comm.communicator import make_communicator
    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.state import MegatronTrainingState
    from moe_ckpt.megatron.topology import bind

    comm = make_communicator(60)
    inventory = take_inventory(built.chunks)
    parts = {part.name: (id(live.parameter), part) for live in inventory.parameters for part in live.parts}
    state = MegatronTrainingState(inventory, built.optimizer)
    world = bind(state, comm)
    tensors = {(t.key, t.offsets): (t.local.data_ptr(), t.local.stride(), t.duplicate) for t in state.tensors()}
    tensors_of_rank = {tensor.name: tensor for tensor in state.holding(0, 0).tensors}
    return parts, (tensors_of_rank, world.catalog), tensors


def compare(rank: int, world_size: int, setup: Setup) -> list[str]:
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, 1)
    megatron_gpt.train_step(built, 0)
    before = describe(built)
    chunk: Any = built.chunks[0]
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for layer in chunk.decoder.layers:
        layer.mlp.experts = GroupedLikeTransformerEngine(layer.mlp.experts)
    assert not any("local_experts" in name for name, _ in built.chunks[0].named_parameters())
    assert describe(built) == before
    return [name for name in before[0] if ".experts." in name]


@pytest.mark.parametrize(
    ("ranks", "setup"),
    [
        (2, Setup(ep=2, layers=2, glu=True, num_microbatches=1)),
        pytest.param(2, Setup(ep=2, layers=2, dist_opt=True, precision="bf16"), marks=pytest.mark.slow),
        pytest.param(2, Setup(tp=2, etp=2, layers=2, glu=True, num_microbatches=1), marks=pytest.mark.slow),
    ],
    ids=["gated", "distributed", "tensor_parallel"],
)
def test_transformer_engines_experts_are_those_of_sequential_mlp(ranks: int, setup: Setup):
    names = run_ranks(compare, ranks, setup, preload=WARM)
    own = setup.experts // setup.ep
    for rank, found in enumerate(names):
        first = rank * own if setup.ep > 1 else 0
        expected = {
            f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc{matrix}.weight"
            for layer in range(2)
            for expert in range(first, first + own)
            for matrix in (1, 2)
        }
        assert set(found) == expected


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter beside it, named and divided over ranks as Megatron Bridge's LoRA is."""

    def __init__(self, linear: Any, ranks: int) -> None:
        super().__init__()
        rows, columns = linear.weight.shape
        self.to_wrap, self.adapter = linear, nn.Module()
        for name, shape in {"linear_in": (8 // ranks, columns), "linear_out": (rows, 8)}.items():
            part = nn.Module()
            part.weight = nn.Parameter(linear.weight.new_zeros(shape))
            part.weight.tensor_model_parallel, part.weight.partition_dim, part.weight.partition_stride = True, 0, 1
            self.adapter.add_module(name, part)


def segments_with_adapters(rank: int, world_size: int, setup: Setup) -> dict[str, int]:
    """Of the shared experts' first matrices: in how many pieces a rank's rows lie in the whole."""
    from moe_ckpt.megatron.inventory import take_inventory
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, 1)
    chunk: Any = built.chunks[0]
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for layer in chunk.decoder.layers:
        shared = layer.mlp.shared_experts
        shared.linear_fc1 = Adapted(shared.linear_fc1, world_size)
    found = {part.name: part for live in take_inventory(built.chunks).parameters for part in live.parts}
    return {
        name.partition("linear_fc1.")[2]: len(part.axes[0].segments)
        for name, part in found.items()
        if "layers.0.mlp.shared_experts.linear_fc1" in name
    }


def test_halves_of_a_gated_unit_lie_apart_in_the_whole_beside_adapters_too():
    found = run_ranks(
        segments_with_adapters, 2, Setup(tp=2, etp=2, layers=1, glu=True, shared_experts=True), preload=WARM
    )
    assert found == [{"to_wrap.weight": 2, "adapter.linear_in.weight": 1, "adapter.linear_out.weight": 2}] * 2
