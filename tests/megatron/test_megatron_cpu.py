"""The unmodified Megatron-Core trains on the CPU, does so twice with the same bits, and alike in every layout.

``megatron`` is imported in child processes only, never in pytest's: ``megatron_cpu.install()`` changes names in
``torch`` for the life of a process, and every other test would run with them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import sys
import types
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.errors import ConfigError
from moe_ckpt.testing import megatron_cpu
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.processes import run_ranks

TESTS = Path(__file__).parents[1]
WARM = "tests.support.megatron_warm"
STEPS = 8


def train(setup, steps=STEPS, seed=1):
    """(losses, whether each update was made, norms of gradients, fingerprint) of a new run."""
    built = megatron_gpt.build(setup, seed)
    losses, made, norms = zip(*(megatron_gpt.train_step(built, i) for i in range(steps)), strict=True)
    return losses, made, norms, megatron_gpt.fingerprint(built)


def twice(rank, world_size, setup):
    first, second = train(setup), train(setup)
    assert first == second, "two runs differ"
    assert not torch.cuda.is_available()
    return first[:3]


def check(setup, ranks):
    """Runs ``setup`` twice: same bits, every update made, and the last pipeline stage's loss falls."""
    results = run_ranks(twice, ranks, setup, preload=WARM)
    for losses, made, norms in results:
        assert all(made)
        assert all(0 < norm < 5 for norm in norms)
        assert losses[0] is None or losses[-1] < losses[0] - 0.5
    seen = [losses[0] is not None for losses, *_ in results]
    assert seen == [False] * (ranks - ranks // setup.pp) + [True] * (ranks // setup.pp)


def twice_and_with_another_seed(rank, world_size, setup):
    return twice(rank, world_size, setup), train(setup, seed=2)[:3]


def test_one_process():
    (((losses, made, norms), other),) = run_ranks(twice_and_with_another_seed, 1, Setup(), preload=WARM)
    assert all(made)
    assert max(norms) < 5
    assert losses[-1] < losses[0] - 0.5
    assert all(a != b for a, b in zip(losses, other[0], strict=True))


def test_pipeline_and_experts_over_four_ranks():
    check(Setup(pp=2, ep=2), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "setup"),
    [
        (4, Setup(tp=2, ep=2)),
        (4, Setup(tp=2, ep=2, etp=None)),
        (4, Setup(pp=2, vpp=2, ep=2)),
        (4, Setup(pp=2, ep=2, tied=True, shared_experts=True, dense_first=True, glu=True)),
        (2, Setup(ep=2, dist_opt=True)),
        (2, Setup(ep=2, precision="bf16")),
        (2, Setup(ep=2, precision="bf16", dist_opt=True, overlap_param_gather=True)),
        (2, Setup(ep=2, precision="fp16", dist_opt=True)),
        (2, Setup(ep=2, precision="bf16", grouped=True, glu=True)),
        (2, Setup(pp=2, mla=True, precision="bf16", tied=True)),
        (2, Setup(ep=2, capacity_factor=1.25, recompute=True)),
        (4, Setup(pp=2, vpp=2, ep=2, experts=8, expert_bias=True, precision="bf16", dist_opt=True)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else difference(value),
)
def test_setup(ranks, setup):
    check(setup, ranks)


def difference(setup):
    fields = ((field.name, getattr(setup, field.name), field.default) for field in dataclasses.fields(setup))
    return " ".join(f"{name}={value}" for name, value, default in fields if value != default)


# --- What single replacements are for


def weights(built, part):
    """Copies of the parameters and buffers whose name holds ``part``."""
    return {
        f"{index}.{name}": tensor.detach().clone()
        for index, chunk in enumerate(built.chunks)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
        if part in name
    }


def start_of_experts(rank, world_size, setup):
    built = megatron_gpt.build(setup, seed=1)
    return weights(built, "local_experts.0.linear_fc1"), weights(built, "router")


def test_ranks_that_share_experts_out_start_with_different_ones():
    first, second = run_ranks(start_of_experts, 2, Setup(ep=2), preload=WARM)
    assert first[0].keys() == second[0].keys()
    assert all(not torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def bias_after_training(rank, world_size, setup):
    built = megatron_gpt.build(setup, seed=1)
    megatron_gpt.train_step(built, 0)
    return weights(built, "expert_bias")


@pytest.mark.slow
def test_expert_bias_is_updated_and_alike_on_all_ranks():
    first, second = run_ranks(bias_after_training, 2, Setup(ep=2, expert_bias=True), preload=WARM)
    assert len(first) == 4
    assert all(bias.abs().max() > 0 for bias in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


def overflow(rank, world_size, setup):
    built = megatron_gpt.build(setup, seed=1)
    before = megatron_gpt.fingerprint(built)
    skipped = megatron_gpt.train_step(built, 0)[1:]
    assert megatron_gpt.fingerprint(built) == before
    assert built.scheduler.num_steps == 0
    assert built.consumed_samples == 8
    return skipped


@pytest.mark.slow
def test_an_overflow_in_fp16_skips_the_update():
    assert run_ranks(overflow, 1, Setup(precision="fp16", loss_scale=2.0**32), preload=WARM) == [(False, None)]


def recomputed(rank, world_size, setup):
    plain, again = train(setup), train(dataclasses.replace(setup, recompute=True))
    return plain[0], again[0]


@pytest.mark.slow
def test_recomputing_activations_draws_the_same_dropout():
    ((plain, again),) = run_ranks(recomputed, 1, Setup(dropout=0.3), preload=WARM)
    assert again == pytest.approx(plain, rel=1e-5)


def grouped_like_sequential(rank, world_size):
    """Losses of SequentialMLP, and of GroupedMLP given its weights, transposed and side by side as experts.py says."""
    one = megatron_gpt.build(Setup(precision="bf16", dropout=0.0), seed=1)
    other = megatron_gpt.build(Setup(precision="bf16", dropout=0.0, grouped=True), seed=1)
    source = dict(one.chunks[0].named_parameters())
    for name, parameter in other.chunks[0].named_parameters():
        if name.endswith((".weight1", ".weight2")):
            head, linear = name[:-7], f"linear_fc{name[-1]}"
            parts = [source[f"{head}local_experts.{e}.{linear}.weight"].t().reshape(-1) for e in range(4)]
            parameter.data.copy_(torch.cat(parts).view_as(parameter))
        else:
            parameter.data.copy_(source[name])
    return megatron_gpt.forward_backward(one, 0), megatron_gpt.forward_backward(other, 0)


@pytest.mark.slow
def test_grouped_mlp_computes_what_sequential_mlp_does():
    ((sequential, grouped),) = run_ranks(grouped_like_sequential, 1, preload=WARM)
    assert grouped == pytest.approx(sequential, rel=1e-5)


def names_of_torch(rank, world_size):
    megatron_cpu.install()
    megatron_cpu.install()
    from megatron.core.tensor_parallel import random

    state = torch.get_rng_state()
    tracker = random.CudaRNGStatesTracker()
    tracker.add("other", 5)
    assert torch.equal(torch.get_rng_state(), state)
    with tracker.fork("other"):
        inside = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
    asked = {"__name__": "megatron.core.optimizer", "x": torch.zeros(1, dtype=torch.bfloat16)}
    exec("found = x.type()", asked)
    assert asked["found"] == "torch.cuda.BFloat16Tensor"
    assert asked["x"].type() == "torch.BFloat16Tensor"
    assert asked["x"].type(torch.float32).dtype == torch.float32
    entered = torch.cuda.stream(torch.cuda.Stream())
    with entered, entered:  # as megatron-core 0.19 does with several distributed-optimizer instances
        pass
    with pytest.raises(KeyError), entered:
        raise KeyError


def grouped_matmul_and_gradients(rank, world_size):
    megatron_cpu.install()
    if importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util") is None:  # gone since 0.19
        return
    from megatron.core.transformer.moe import grouped_gemm_util

    grouped_gemm_util.assert_grouped_gemm_is_available()
    drawing = torch.Generator().manual_seed(0)
    a = torch.randn(7, 3, generator=drawing, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 3, 5, generator=drawing, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor([4, 0, 3])
    out = grouped_gemm_util.ops.gmm(a, b, sizes, trans_b=False)
    assert torch.equal(out[:4], a[:4] @ b[0])
    assert torch.equal(out[4:], a[4:] @ b[2])
    assert torch.equal(grouped_gemm_util.ops.gmm(a, b.transpose(1, 2), sizes, trans_b=True), out)
    out.sum().backward()
    assert torch.equal(b.grad[1], torch.zeros(3, 5, dtype=torch.float64))
    with pytest.raises(NotImplementedError):
        grouped_gemm_util.ops.gmm(a, b, sizes, trans_a=True)


def single_names(rank, world_size):
    names_of_torch(rank, world_size)
    grouped_matmul_and_gradients(rank, world_size)


def test_replaced_names_in_one_process():
    run_ranks(single_names, 1)


def between_two(rank, world_size):
    """Uneven rows are gathered and scattered; what is being sent survives ``tensor.data = empty``."""
    megatron_cpu.install()
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import mappings

    sizes = torch.tensor([2, 3]).numpy()
    mine = torch.full((int(sizes[rank]), 2), rank + 1.0, requires_grad=True)
    gathered = mappings.gather_from_sequence_parallel_region(mine, group=dist.group.WORLD, output_split_sizes=sizes)
    assert gathered[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    (gathered * (rank + 1)).sum().backward()
    assert mine.grad.tolist() == [[3.0, 3.0]] * int(sizes[rank])

    names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
    tensors = dict.fromkeys(names) | {"group": dist.group.WORLD}
    tensors |= {"prev_pipeline_rank": 1 - rank, "next_pipeline_rank": 1 - rank}
    if rank == 0:
        sent = torch.ones(4096)
        requests = p2p_communication._p2p_ops(**tensors | {"tensor_send_next": sent})
        sent.data = torch.empty(1)
        rubbish = [torch.full((4096,), 7.0) for _ in range(8)]  # where the freed memory was
    dist.barrier()  # gloo reads what it sends when the other side is ready for it
    if rank == 1:
        received = torch.zeros(4096)
        requests = p2p_communication._p2p_ops(**tensors | {"tensor_recv_prev": received})
    for request in requests.values():
        request.wait()
    assert all(found.sum() == 7 * 4096 for found in rubbish) if rank == 0 else torch.equal(received, torch.ones(4096))


def test_replaced_names_between_two_processes():
    run_ranks(between_two, 2, preload=WARM)


# --- The same model in every layout


def fill(built):
    """Give every parameter values that depend on its name in the whole model alone, whatever the layout."""
    from megatron.core import parallel_state

    experts, tensors = (
        parallel_state.get_expert_tensor_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    first_expert = parallel_state.get_expert_model_parallel_rank() * built.setup.experts // built.setup.ep
    for chunk in built.chunks:
        layers = {name: m.layer_number - 1 for name, m in chunk.named_modules() if hasattr(m, "layer_number")}
        for name, parameter in chunk.named_parameters():
            if "norm" in name:
                continue  # ones in every layout
            group = experts if "local_experts" in name else tensors
            parts = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
            dim = parameter.partition_dim if parts > 1 else 0
            shape = [size * (parts if d == dim else 1) for d, size in enumerate(parameter.shape)]
            drawing = torch.Generator().manual_seed(zlib.crc32(whole_name(name, layers, first_expert).encode()))
            whole = torch.randn(shape, generator=drawing) * 0.05
            parameter.data.copy_(whole.chunk(parts, dim)[group.rank() if parts > 1 else 0])


def whole_name(name, layers, first_expert):
    """``name`` with the layer's and the expert's number in the whole model in place of those in this chunk."""
    for layer, number in layers.items():
        if re.search(r"layers\.\d+$", layer) and name.startswith(f"{layer}."):
            name = re.sub(r"layers\.\d+", f"layers.{number}", name, count=1)
            break
    return re.sub(r"local_experts\.(\d+)", lambda found: f"experts.{first_expert + int(found[1])}", name)


def filled_run(rank, world_size, setup):
    built = megatron_gpt.build(setup, seed=1)
    fill(built)
    return [megatron_gpt.train_step(built, i) for i in range(4)]


def losses_and_norms(setup, ranks):
    results = run_ranks(filled_run, ranks, dataclasses.replace(setup, dropout=0.0), preload=WARM)
    return [(loss, norm) for loss, _, norm in results[-1]]


@pytest.fixture(scope="module")
def plain():
    """Losses and norms by number of data-parallel ranks, with nothing split."""
    return {ranks: losses_and_norms(Setup(), ranks) for ranks in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data_ranks", "setup"),
    [
        (1, Setup(pp=2)),
        (1, Setup(pp=2, vpp=2)),
        (1, Setup(pp=4)),
        (1, Setup(tp=2, ep=2)),
        (1, Setup(tp=2, etp=None)),
        (2, Setup(ep=2)),
        (2, Setup(pp=2, vpp=2, ep=2)),
        (2, Setup(tp=2, ep=2, etp=None)),
        (2, Setup(tp=2, ep=2, dist_opt=True)),
        (2, Setup(dist_opt=True, overlap_param_gather=True)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else difference(value),
)
def test_a_layout_changes_nothing(plain, data_ranks, setup):
    found = losses_and_norms(setup, data_ranks * setup.tp * setup.pp)
    for (loss, norm), (plain_loss, plain_norm) in zip(found, plain[data_ranks], strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-4)
        assert norm == pytest.approx(plain_norm, rel=1e-3)


# --- Where install() refuses, and where it must not run


def test_install_refuses_what_it_cannot_do(monkeypatch):
    for part in ("_device", "_import_without_compiler"):
        monkeypatch.setattr(megatron_cpu, part, lambda: pytest.fail("went on"))
    with monkeypatch.context() as early:
        early.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
        with pytest.raises(ConfigError, match=r"after megatron\.core had been imported"):
            megatron_cpu.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="hide the GPU"):
        megatron_cpu.install()


def test_megatron_is_never_imported_here():
    assert "megatron.core" not in sys.modules
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(n.partition(".")[0] == "megatron" for n in names), f"{path}:{node.lineno}"
