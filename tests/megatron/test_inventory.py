"""Three ways to keep experts are one model: SequentialMLP, and Transformer Engine's layout in its place."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
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
    from moe_ckpt.megatron.training_state import MegatronTrainingState

    comm = make_communicator(60)
    inventory = take_inventory(built.chunks)
    parts = {part.name: (id(live.parameter), part) for live in inventory.parameters for part in live.parts}
    state = MegatronTrainingState(inventory, built.optimizer, comm)
    tensors = {(t.key, t.offsets): (t.local.data_ptr(), t.local.stride(), t.duplicate) for t in state.tensors()}
    tensors_of_rank = {tensor.name: tensor for tensor in state.holding(0, 0).tensors}
    return parts, (tensors_of_rank, state.world.catalog), tensors


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


def compare_grouped(rank: int, world_size: int, setup: Setup) -> int:
    """As ``GroupedMLP.forward`` multiplies, without a transpose, by ``weight1.view(experts, hidden, -1)``."""
    from moe_ckpt.comm.communicator import make_communicator
    from moe_ckpt.megatron.inventory import take_inventory, unwrap_module
    from moe_ckpt.megatron.training_state import MegatronTrainingState
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, 1)
    state = MegatronTrainingState(take_inventory(built.chunks), built.optimizer, make_communicator(60))
    stored: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for tensor in state.tensors():
        stored.setdefault(tensor.key, {})[tensor.offsets] = tensor.local
    model: Any = unwrap_module(built.chunks[0])
    part = rank if setup.etp == 2 else 0
    share, names = setup.ffn // (setup.etp or 1), set()
    for number, layer in enumerate(model.decoder.layers):
        experts, hidden = layer.mlp.experts, layer.mlp.config.hidden_size
        first = experts.weight1.detach().view(experts.num_local_experts, hidden, -1)
        second = experts.weight2.detach().view(experts.num_local_experts, -1, hidden)
        for local, expert in enumerate(layer.mlp.local_expert_indices):
            name = f"model/decoder.layers.{number}.mlp.experts.{expert}"
            rows, columns = stored[f"{name}.linear_fc1.weight"], stored[f"{name}.linear_fc2.weight"]
            assert {*rows} == ({(part * share, 0), (setup.ffn + part * share, 0)} if setup.etp == 2 else {(0, 0)})
            assert torch.equal(torch.cat([rows[at] for at in sorted(rows)]), first[local].T), "gate, then up"
            assert {*columns} == {(0, part * share)}
            assert torch.equal(columns[0, part * share], second[local].T)
            names |= {f"{name}.linear_fc1.weight", f"{name}.linear_fc2.weight"}
    assert names == {key for key in stored if key.startswith("model/") and ".experts." in key}
    return len(names)


@pytest.mark.skipif(version("megatron-core") >= "0.19", reason="GroupedMLP went before 0.19")
@pytest.mark.parametrize("degrees", [{"ep": 2}, {"tp": 2, "etp": 2}], ids=["experts", "tensors"])
def test_experts_that_are_concatenated_and_transposed_are_those_of_sequential_mlp(degrees):
    model = {"layers": 2, "hidden": 16, "ffn": 24, "glu": True, "num_microbatches": 1}
    setup = Setup(**model, **degrees, precision="bf16", grouped=True)
    found = run_ranks(compare_grouped, 2, setup, preload=WARM)
    assert found == [2 * 2 * setup.experts // setup.ep] * 2


class Alternating(GroupedLikeTransformerEngine):
    """As ``TEGroupedMLP`` with rows of gate and up that alternate in blocks; their order changes no size."""

    def __init__(self, sequential: Any) -> None:
        super().__init__(sequential)
        self.computes = (sequential,)  # no module of this one: its parameters are the same

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.computes[0](*args, **kwargs)


def alternating(setup: Setup, seed: int, block: int | None) -> Any:
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, seed)
    chunk: Any = built.chunks[0]
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for layer in chunk.decoder.layers:
        layer.mlp.experts = Alternating(layer.mlp.experts)
        layer.mlp.experts.config.moe_mlp_glu_interleave_size = block
    return built


def first_matrices(built: Any) -> dict[str, torch.Tensor]:
    named = built.chunks[0].named_parameters()
    return {name: each.detach().clone() for name, each in named if ".experts.linear_fc1" in name}


def saves_alternating(rank: int, world_size: int, store: str, setup: Setup) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """What a rank saves with blocks of 8; what it opens again; what is said with other blocks, and by an export."""
    from moe_ckpt import megatron
    from tests.megatron.bad_input import CASE, said
    from tests.support import megatron_gpt
    from tests.support.megatron_log import attached

    built = alternating(setup, 1, 8)
    with attached(built, replace(CASE, policy=("Dense", {"every_n_steps": 1})), store) as ckpt:
        ckpt.resume()
        megatron_gpt.train_step(built, 0)
        ckpt.after_step(1, consumed_samples=2)
    export = said(lambda: megatron.export_torch_dist(f"{store}_torch", built.chunks))
    refused = {
        block: said(lambda block=block: attached(alternating(setup, 2, block), CASE, store)) for block in (4, None)
    }
    return first_matrices(built), opens_alternating(rank, world_size, store, setup), {**refused, "export": export}


def opens_alternating(rank: int, world_size: int, store: str, setup: Setup) -> dict[str, torch.Tensor]:
    from tests.megatron.bad_input import CASE
    from tests.support.megatron_log import attached

    built = alternating(setup, 3, 8)
    ckpt = attached(built, CASE, store)
    assert ckpt.resume().iteration == 1
    ckpt.close()
    return first_matrices(built)


def test_rows_of_gate_and_up_that_alternate_stay_together(tmp_path: Path):
    """Each block of gate rows keeps its block of up rows on every layout; in halves they are another tensor."""
    store, setup = str(tmp_path / "store"), Setup(layers=2, num_microbatches=1, dropout=0.0, glu=True)
    [(saved, opened, refused)] = run_ranks(saves_alternating, 1, store, setup, preload=WARM)
    halves = run_ranks(opens_alternating, 2, store, replace(setup, etp=2, ep=1, tp=1), preload=WARM)
    assert len(saved) == 2 * setup.experts
    for name, rows in saved.items():
        assert torch.equal(opened[name], rows)
        assert torch.equal(torch.cat([each[name] for each in halves]), rows)
    name = "decoder.layers.0.mlp.experts.0.linear_fc1.weight"
    for other, here in ((4, f"{name}.moe_mlp_glu_interleave_size_4"), (None, name)):
        assert refused[other][0] == "StoreError"
        assert f"{name}.moe_mlp_glu_interleave_size_8" in refused[other][1]
        assert here in refused[other][1]
    assert refused["export"][0] == "UnsupportedError"
    assert "moe_mlp_glu_interleave_size" in refused["export"][1]


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


def alternating_shared(rank: int, world_size: int, setup: Setup) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """Of the first layer's shared experts: name of their first matrix, and where its rows lie in the whole."""
    from moe_ckpt.megatron.inventory import take_inventory
    from tests.support import megatron_gpt

    built = megatron_gpt.build(setup, 1)
    [config] = [each.config for name, each in built.chunks[0].named_modules() if name.endswith("0.mlp.shared_experts")]
    config.moe_shared_expert_glu_interleave_size, found = 8, []
    for is_used in (True, False):
        config.use_grouped_gemm_for_shared_expert = is_used
        parts = [part for live in take_inventory(built.chunks).parameters for part in live.parts]
        [part] = [part for part in parts if "layers.0.mlp.shared_experts.linear_fc1" in part.name]
        found.append((part.name, [(each.start, each.stop, each.at) for each in part.axes[0].segments]))
    return found


def test_shared_experts_whose_rows_alternate_are_cut_by_whole_blocks():
    setup = Setup(tp=2, etp=2, layers=1, glu=True, shared_experts=True)
    name = "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"
    for rank, found in enumerate(run_ranks(alternating_shared, 2, setup, preload=WARM)):
        alternate = (f"{name}.moe_shared_expert_glu_interleave_size_8", [(0, 32, 32 * rank)])
        halves = (name, [(0, 16, 16 * rank), (16, 32, 32 + 16 * rank)])
        assert found == [alternate, halves]


def test_halves_of_a_gated_unit_lie_apart_in_the_whole_beside_adapters_too():
    found = run_ranks(
        segments_with_adapters, 2, Setup(tp=2, etp=2, layers=1, glu=True, shared_experts=True), preload=WARM
    )
    assert found == [{"to_wrap.weight": 2, "adapter.linear_in.weight": 1, "adapter.linear_out.weight": 2}] * 2
