"""FSDP2, tensor parallelism and HSDP on real gloo ranks: the parts tile the whole, and a restore is exact."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.ledger.coverage import Box, prove_cover
from moe_ckpt.modeling.blocks import block_of, own_rows
from moe_ckpt.modeling.discover import build_catalog
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.ports import TensorMeta
from tests.support.processes import run_ranks, start_ranks


class Experts(nn.Module):
    """Stacked experts; 5 of them, so that two ranks hold 3 and 2, and a bias that one rank may lack."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 8, 6) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 6, 8) * 0.2)
        self.bias = nn.Parameter(torch.zeros(experts, 8))

    def forward(self, x, top_k_index, top_k_weights):
        e = top_k_index[:, 0]
        h = torch.einsum("th,thf->tf", x, self.up[e]).relu()
        return (torch.einsum("tf,tfh->th", h, self.down[e]) + self.bias[e]) * top_k_weights


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 5, bias=False)
        self.experts = Experts()

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
        return x + self.experts(x, chosen, weights)


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(MoE() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))  # one row: the second rank's part is empty

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def sharded(seed: int, mesh=None) -> Model:
    from torch.distributed.fsdp import fully_shard

    model = Model(seed)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(20, 8, generator=generator)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def describe(state: TorchTrainingState) -> list[tuple]:
    return [
        (t.key, t.offsets, tuple(t.local.shape), t.global_shape, t.replicated, t.duplicate, t.local.clone())
        for t in state.tensors()
    ]


def metas(state: TorchTrainingState) -> dict[str, TensorMeta]:
    return {t.key: TensorMeta(dtype_name(t.local.dtype), t.global_shape, t.on_param_device) for t in state.tensors()}


def body_fsdp(rank: int, world_size: int):
    plain_catalog = build_catalog(Model(0))
    model = sharded(0)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    with torch.no_grad():
        model(torch.randn(4, 8))  # leaves whole parameters in the root module's place
    assert not hasattr(model.scale, "placements"), "this torch reshards after validation: the next lines show less"
    assert build_catalog(model).fingerprint == plain_catalog.fingerprint
    state = TorchTrainingState(model, [opt])
    assert build_catalog(model).fingerprint == plain_catalog.fingerprint
    train(model, opt, 2, 10)
    with torch.no_grad():
        model(torch.randn(4, 8))
    saved, wanted, plain = describe(state), metas(state), state.plain()
    tensors, specs = state.tensors(), state.specs()
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert state.tensors() is tensors, "the same after validation left whole tensors in their place"
    assert state.specs() is specs
    held = opt.state[model.scale]["exp_avg"]
    held._local_tensor = held._local_tensor.clone()
    assert state.tensors() is not tensors, "one tensor lies elsewhere now"
    assert state.specs() is specs
    whole = {f"model/{n}": p.full_tensor() for n, p in model.named_parameters()}
    whole |= {
        f"optim/0/{n}/{k}": v.full_tensor()
        for n, p in model.named_parameters()
        for k, v in opt.state[p].items()
        if v.ndim
    }
    expected = train(model, opt, 2, 20)

    other = sharded(7)
    other_opt = torch.optim.AdamW(other.parameters(), lr=0.9)
    other_state = TorchTrainingState(other, [other_opt])
    other_state.prepare(wanted)
    live = {t.key: t for t in other_state.tensors()}
    assert list(live) == [key for key, *_ in saved]
    for key, offsets, _, _, _, _, value in saved:
        assert live[key].offsets == offsets
        live[key].local.copy_(value)
    other_state.load_plain(plain)
    assert train(other, other_opt, 2, 20) == expected
    for (name, a), (_, b) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    return saved, whole


def check_tiling(results, replicated=()) -> None:
    """All ranks' written parts tile every tensor once, and hold the values of the whole."""
    whole = results[0][1]
    boxes = {key: [Box((0,) * value.ndim, tuple(value.shape))] for key, value in whole.items()}
    found = []
    for saved, _ in results:
        for key, offsets, shape, global_shape, everywhere, duplicate, value in saved:
            if key not in whole:
                assert global_shape == (), key
                assert everywhere
                continue
            assert global_shape == tuple(whole[key].shape)
            index = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
            assert torch.equal(whole[key][index], value), key
            if not duplicate and value.numel() and not (everywhere and saved is not results[0][0]):
                found.append((key, Box(offsets, shape)))
    prove_cover("parts", boxes, found)


def test_fully_sharded_parts_tile_the_whole_and_restore_exactly():
    results = run_ranks(body_fsdp, 2)
    check_tiling(results)
    parts = {key: (offsets, shape) for key, offsets, shape, *_ in results[1][0]}
    assert parts["model/layers.0.experts.up"] == ((3, 0, 0), (2, 8, 6))
    assert parts["optim/0/layers.1.experts.up/exp_avg"] == ((3, 0, 0), (2, 8, 6))
    assert parts["model/scale"][1] == (0,)


def body_hsdp(rank: int, world_size: int):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(0, mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = TorchTrainingState(model, [opt])
    train(model, opt, 1, 10)
    return describe(state), {f"model/{n}": p.full_tensor() for n, p in model.named_parameters()} | {
        f"optim/0/{n}/momentum_buffer": opt.state[p]["momentum_buffer"].full_tensor()
        for n, p in model.named_parameters()
    }


def test_replicas_of_hybrid_sharding_are_written_once():
    results = run_ranks(body_hsdp, 2)
    check_tiling(results)
    assert {t[5] for t in results[0][0]} == {False}
    assert {t[5] for t in results[1][0]} == {True}


def body_tensor_parallel(rank: int, world_size: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Module()
    whole = torch.randn(3, 5)
    model.columns = nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    model.norm = nn.Parameter(distribute_tensor(whole[0], mesh, [Replicate()]))
    opt = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    state = TorchTrainingState(model, [opt])
    described = describe(state)
    opt.state[model.columns]["row"] = torch.zeros(3)
    with pytest.raises(UnsupportedError, match=r"optim/0/columns/row has shape \(3,\)"):
        state.tensors()
    with pytest.raises(UnsupportedError, match="optim/0/columns/row"):
        state.prepare({"optim/0/columns/row": TensorMeta("F32", (3,))})
    full = {f"model/{n}": p.full_tensor() for n, p in model.named_parameters()}
    full |= {
        f"optim/0/{n}/{k}": opt.state[p][k].full_tensor()
        for n, p in model.named_parameters()
        for k in ("exp_avg", "exp_avg_sq")
    }
    return described, full


def test_columns_and_replicated_tensors():
    results = run_ranks(body_tensor_parallel, 2)
    check_tiling(results)
    flags = {key: (replicated, duplicate) for key, _, _, _, replicated, duplicate, _ in results[1][0]}
    assert flags["model/columns"] == (False, False)
    assert flags["model/norm"] == (True, False)


def body_experts_and_fsdp(rank: int, world_size: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    whole = torch.arange(72.0).view(6, 6, 2)
    model = nn.Module()
    for name in ("rows", "columns"):
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh["ep"], [Shard(0)])))
    columns = model.columns
    fully_shard(model, mesh=mesh["efsdp"], shard_placement_fn=lambda p: Shard(1 if p is columns else 0))
    opt = torch.optim.SGD(model.parameters())
    described = describe(TorchTrainingState(model, [opt]))
    own = [own_rows(distribute_tensor(whole, mesh, p)).numel() for p in ([Shard(0), Replicate()], [Replicate()] * 2)]
    assert own == [whole.numel() // 2 * (rank % 2 == 0), whole.numel() * (rank == 0)], "what two hold counts once"
    strided = model.rows.placements[0]
    scattered = DTensor.from_local(torch.zeros(4, 6, 2), mesh, [strided, Replicate()], run_check=False)
    with pytest.raises(UnsupportedError, match=r"model/rows .* not one piece of the whole"):
        block_of(scattered, "model/rows")
    assert own_rows(whole) is whole
    return described, {"model/rows": whole, "model/columns": whole}


def test_experts_that_are_sharded_again_by_fsdp_tile_the_whole():
    """In the same dimension, where parts are strided and three rows are cut into two and one, and in another."""
    results = run_ranks(body_experts_and_fsdp, 4)
    check_tiling(results)
    rows = [
        next((offsets[0], shape[0]) for key, offsets, shape, *_ in saved if key == "model/rows") for saved, _ in results
    ]
    assert rows == [(0, 2), (3, 2), (2, 1), (5, 1)]


class Torn(RuntimeError):
    pass


def body_torn_forward(rank: int, world_size: int, peer_dies: bool):
    model = sharded(0)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = TorchTrainingState(model, [opt])
    train(model, opt, 2, 10)
    saved, tensors = describe(state), state.tensors()

    def tear(*_) -> None:
        if not peer_dies:
            raise Torn
        if rank == 1:
            os._exit(1)

    model.layers[0].gate.register_forward_hook(tear)
    with pytest.raises(RuntimeError):  # the root and the first layer are gathered
        train(model, opt, 1, 20)
    assert not hasattr(model.scale, "placements"), "this torch reshards when a forward pass fails: this shows nothing"
    assert state.tensors() is tensors
    assert opt.state.keys() == set(model.parameters())
    return saved, describe(state)


@pytest.mark.parametrize("peer_dies", [False, True])
def test_a_forward_pass_that_was_torn_off_leaves_the_sharded_state(peer_dies):
    """As a survivor seals its step when a peer has died in the middle of one."""
    outcomes = start_ranks(body_torn_forward, 2, peer_dies)
    assert [outcome.ok for outcome in outcomes] == [True, not peer_dies], outcomes
    for outcome in outcomes[: 2 - peer_dies]:
        saved, found = outcome.value
        assert [each[:6] for each in found] == [each[:6] for each in saved]
        assert all(torch.equal(a[6], b[6]) for a, b in zip(saved, found, strict=True))
