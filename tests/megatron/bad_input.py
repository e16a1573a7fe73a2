"""What a user may get wrong with the Megatron adapter, each in a rank of its own; body of ``run_ranks``."""

from __future__ import annotations

import enum
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Case, attached, digests

SETUP = Setup(layers=2, num_microbatches=1)
CASE = Case("bad", SETUP, ("MoC", {"k": 1}))

Said = tuple[str, str]
"""(class of the error, what it says); ("", "") if nothing was refused."""


def said(call: Callable[[], Any]) -> Said:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@contextmanager
def changed(target: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value, or none (``DELETED``)."""
    had, old = name in vars(target), getattr(target, name, None)
    if value is DELETED:
        delattr(target, name)
    else:
        setattr(target, name, value)
    try:
        yield
    finally:
        if had or value is DELETED:
            setattr(target, name, old)
        else:
            delattr(target, name)


DELETED = object()


def attach(built: Any, root: str, **options: Any) -> Any:
    case = replace(CASE, policy=options.pop("policy", CASE.policy), options=options)
    return attached(built, case, os.path.join(root, "store"))


def without_groups(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Before anything of Megatron is set up."""
    from moe_ckpt import megatron

    model = nn.Linear(2, 2)
    no_groups = said(lambda: megatron.attach(model, None, dirpath=root))
    dist.destroy_process_group()
    no_processes = said(lambda: megatron.attach(model, None, dirpath=root))
    return {"no Megatron groups": no_groups, "no torch groups": no_processes}


def installation(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Megatron-Core absent, or another than is known."""
    from moe_ckpt.megatron import compat

    built = megatron_gpt.build(SETUP, 1)
    found = {}
    with changed_module("megatron.core", None):
        compat.megatron_core.cache_clear()
        found["not installed"] = said(lambda: attach(built, root))
    for module, name in compat.HOOK_POINTS:
        *path, last = name.split(".")
        owner: Any = sys.modules[module]
        for part in path:
            owner = getattr(owner, part)
        with ExitStack() as stack:  # a base class may have a method of this name too
            for each in [c for c in getattr(owner, "__mro__", [owner]) if last in vars(c)]:
                stack.enter_context(changed(each, last, DELETED))
            compat.megatron_core.cache_clear()
            found[f"{module}.{name}"] = said(lambda: attach(built, root))
    compat.megatron_core.cache_clear()
    return found


@contextmanager
def changed_module(name: str, value: Any) -> Iterator[None]:
    old = sys.modules[name]
    sys.modules[name] = value
    try:
        yield
    finally:
        sys.modules[name] = old


def optimizers(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Optimizers whose state is somewhere else, and those of another model."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer

    built = megatron_gpt.build(SETUP, 1)
    leaf = built.optimizer.chained_optimizers[0] if hasattr(built.optimizer, "chained_optimizers") else built.optimizer
    found = {}
    for name, bases in {
        "LayerWiseDistributedOptimizer": (ChainedOptimizer,),
        "SomeOptimizer": (MegatronOptimizer,),
        "SubclassOfFP32Optimizer": (FP32Optimizer,),
    }.items():
        kind = type(name, bases, {})
        kind.__abstractmethods__ = frozenset()
        odd = object.__new__(kind)
        odd.__dict__.update(leaf.__dict__, chained_optimizers=[leaf])
        found[name] = said(lambda odd=odd: attach(replace(built, optimizer=odd), root))
    muon = type("TensorParallelMuon", (torch.optim.Optimizer,), {})(leaf.optimizer.param_groups, {})
    with changed(leaf, "optimizer", muon):
        found["muon"] = said(lambda: attach(built, root))
    for option in ("use_precision_aware_optimizer", "optimizer_cpu_offload", "optimizer_cuda_graph"):
        with changed(leaf.config, option, True):
            found[option] = said(lambda: attach(built, root))
    with changed(leaf.config, "overlap_param_gather_with_optimizer_step", True):
        found["gathers in step"] = said(lambda: attach(built, root, policy=("MoEvement", {})))
    other = megatron_gpt.build(SETUP, 2)
    found["other chunks"] = said(lambda: attach(replace(built, optimizer=other.optimizer), root))
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    found["torch's own"] = said(lambda: attach(replace(built, optimizer=adam), root))
    found["none"] = said(lambda: attach(replace(built, optimizer=None), root))
    exchanged = {"optimizer": built.scheduler, "scheduler": built.optimizer}
    found["a scheduler"] = said(lambda: attach(replace(built, **exchanged), root))
    found["swapped"] = said(lambda: attach(replace(built, chunks=built.optimizer, optimizer=built.chunks), root))
    found["a list of two kinds"] = said(lambda: attach(replace(built, chunks=[*built.chunks, 1]), root))
    return found


class Fp8Recipe(str, enum.Enum):
    """As Megatron-Core's; configs may hold the name or this."""

    delayed = "delayed"
    tensorwise = "tensorwise"


class Histories(nn.Module):
    def get_extra_state(self) -> Any:
        return {"maxima": [1.0]}

    def set_extra_state(self, state: Any) -> None:
        pass


class PackedExperts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.packed = nn.Parameter(torch.zeros(4, 8))


def models(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Models that cannot be taken apart."""
    built = megatron_gpt.build(SETUP, 1)
    inner = built.chunks[0].module
    moe = inner.decoder.layers[1].mlp
    found = {}
    with changed(moe, "_modules", {**moe._modules, "experts": PackedExperts(moe.config)}):
        found["container"] = said(lambda: attach(built, root))
    with changed(moe, "local_expert_indices", [0, 1]):
        found["unnumbered"] = said(lambda: attach(built, root))
    with changed(moe, "local_expert_indices", [0, 1, 1, 2]):
        found["doubled"] = said(lambda: attach(built, root))
    with changed(moe, "_modules", {**moe._modules, "experts": nn.Identity()}), without_experts(built):
        found["no experts"] = said(lambda: attach(built, root))
    first, second = (layer.mlp.experts.local_experts for layer in inner.decoder.layers)
    shared = {**moe.experts._modules, "local_experts": nn.ModuleList([first[1], *second[1:]])}
    with changed(moe.experts, "_modules", shared), without_experts(built):
        found["shared expert"] = said(lambda: attach(built, root))
    other = inner.decoder.layers[0].mlp
    with changed(moe, "_modules", {**moe._modules, "experts": other.experts}), without_experts(built):
        found["shared experts"] = said(lambda: attach(built, root))
    for name, value in (("gtp_weight_remat_size", 2), ("moe_single_grouped_weight", True)):
        with changed(inner.config, name, value):
            found[name] = said(lambda: attach(built, root))
    for name, recipe in (("delayed", "delayed"), ("enum", Fp8Recipe.delayed), ("tensorwise", Fp8Recipe.tensorwise)):
        config = inner.config
        with changed(config, "fp8", "hybrid"), changed(config, "fp8_recipe", recipe):
            found[f"fp8 {name}"] = said(lambda name=name: attach(built, f"{root}/{name}").close())
    for name, recipe in (("attention", "tensorwise"), ("attention mxfp8", "mxfp8"), ("custom", "custom")):
        config = inner.config
        with (
            changed(config, "fp8", "hybrid"),
            changed(config, "fp8_recipe", recipe),
            changed(config, "fp8_dot_product_attention", name.startswith("attention")),
        ):
            found[f"fp8 {name}"] = said(lambda name=name: attach(built, f"{root}/{name}").close())
    inner.histories = Histories()
    found["extra state"] = said(lambda: attach(built, root))
    del inner.histories
    for name, value in (("transposed", torch.randn(16, 5).t()), ("without elements", torch.zeros(0, 16))):
        inner.odd = nn.Parameter(value)
        found[name] = said(lambda: attach(built, root))
        del inner.odd
    inner.odd = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    found["parameter of complex128"] = said(lambda: attach(built, root))
    del inner.odd
    inner.register_buffer("odd", torch.zeros(2, dtype=torch.uint16))
    found["buffer of uint16"] = said(lambda: attach(built, root))
    del inner.odd
    dense = megatron_gpt.build(replace(SETUP, layers=1, dense_first=True), 1)
    found["no MoE layers"] = said(lambda: attach(dense, root))
    found["hooks"] = (str(sum(len(m._forward_hooks) for m in inner.modules() if type(m).__name__ == "TopKRouter")), "")
    found["threads"] = (", ".join(t.name for t in threading.enumerate() if t.name.startswith("moe")), "")
    return found


@contextmanager
def without_experts(built: Any) -> Iterator[None]:
    """The optimizer has no parameters that the model lacks."""
    held = {id(p) for chunk in built.chunks for p in chunk.parameters()}
    leaves = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
    groups = [group for leaf in leaves for group in leaf.optimizer.param_groups]
    old = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) in held]
    try:
        yield
    finally:
        for group, params in zip(groups, old, strict=True):
            group["params"] = params


RING, OVERLAP = "use_ring_exchange_p2p", "overlap_moe_expert_parallel_comm"


def with_log(chunks: Any, name: str) -> None:
    """A log of two stages, and a setting of the model."""
    from moe_ckpt import Memory
    from moe_ckpt.localized.megatron import upstream_budget
    from moe_ckpt.run.options import make_options

    options = make_options("megatron.attach", None, "store", {"memory": Memory(upstream_bytes=1000)}, ())
    assert upstream_budget(options, {0: 0, 1: 1}, chunks) == 1000
    with changed(chunks[0].config, name, True):
        upstream_budget(options, {0: 0, 1: 1}, chunks)


def arguments(rank: int, world_size: int, root: str) -> dict[str, Said]:
    """Settings that contradict each other or the model, and calls in a wrong order."""
    from moe_ckpt import Memory, megatron
    from moe_ckpt.policies import MoC

    built = megatron_gpt.build(SETUP, 1)
    recompute = {"policy": ("MoEtion", {"recompute": True})}
    found = {
        "no peers": said(lambda: attach(built, root, memory=Memory(storage_every=10), **recompute)),
        "each to storage": said(lambda: attach(built, root, memory=Memory(replicas=1), **recompute)),
        "one stage": said(lambda: attach(built, root, memory=Memory(upstream_bytes="1MB"))),
        **{name: said(lambda name=name: with_log(built.chunks, name)) for name in (RING, OVERLAP)},
        "k": said(lambda: attach(built, root, policy=("MoC", {"k": 5}))),
        "class": said(lambda: megatron.attach(built.chunks, built.optimizer, policy=MoC, dirpath=root)),
        "resume": said(lambda: attach(built, root, resume="maybe")),
        "guard": said(lambda: attach(built, root, guard="pray")),
        "stateful": said(lambda: attach(built, root, stateful={"loader": object()})),
        "two schedulers": said(lambda: attach(built, root, stateful={"scheduler": built.scheduler})),
        "made": (", ".join(sorted(os.listdir(root))), ""),
    }
    ckpt = attach(built, root)
    ckpt.resume()
    found["resume twice"] = said(ckpt.resume)
    ckpt.before_step()
    found["wrong iteration"] = said(lambda: ckpt.after_step(2))
    megatron_gpt.train_step(built, 0)
    ckpt.after_step(1)
    found["no optimizer step"] = said(lambda: ckpt.after_step(2))
    ckpt.before_step()
    found["same iteration"] = said(lambda: ckpt.after_step(1))
    found["too late to resume"] = said(ckpt.resume)
    second = said(lambda: attach(built, root))
    found["in use"] = second
    megatron_gpt.train_step(built, 1)
    ckpt.after_step(2)
    ckpt.finish()
    found["after finish"] = said(ckpt.before_step)
    late = attach(built, root)
    found["resume forgotten"] = said(late.before_step)
    late.close()
    windows = attach(built, f"{root}/windows", policy=("MoEvement", {"window": 2}))
    windows.resume()
    for _ in range(2):
        megatron_gpt.train_step(built, 2)
    found["two updates"] = said(lambda: windows.after_step(1))
    windows.close()
    return found


def never_stepped(rank: int, world_size: int, root: str, setup: Setup) -> dict[str, Any]:
    """fp16 whose first steps overflow: a checkpoint of an optimizer without state, from which the run goes on."""
    told: dict[str, Any] = {}
    case = Case("overflow", setup, ("MoC", {"k": 1}))
    for life in range(2):
        built = megatron_gpt.build(setup, 1 + life)
        ckpt = attached(built, case, os.path.join(root, "store"))
        progress = ckpt.resume()
        told[f"begin {life}"] = (progress.iteration, digests(built), scale(built))
        made = []
        for iteration in range(progress.iteration + 1, (1 if life == 0 else 14) + 1):
            megatron_gpt.forward_backward(built, iteration - 1)
            ckpt.before_step()
            done, _ = megatron_gpt.update(built)
            made.append(done)
            record = ckpt.after_step(iteration, updated=done)
        ckpt.finish()
        told[f"end {life}"] = (made, digests(built), scale(built), record.routed_tokens, record.experts_saved)
    built = megatron_gpt.build(setup, 9)
    ckpt = attached(built, case, os.path.join(root, "store"))
    told["begin 2"] = (ckpt.resume().iteration, digests(built), scale(built))
    ckpt.close()
    return told


def scale(built: Any) -> float:
    leaf = getattr(built.optimizer, "chained_optimizers", [built.optimizer])[0]
    return float(leaf.grad_scaler.scale)


def train(rank: int, world_size: int, root: str, steps: int) -> dict[str, Any]:
    """A life that ends by ``close``: (iteration it began at, digests then and after each step, warnings)."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("moe_ckpt").addHandler(Listener(logging.WARNING))
    setup = replace(SETUP, ep=2)
    built = megatron_gpt.build(setup, 1 if steps else 2)
    ckpt = attached(built, Case("train", setup, ("Dense", {"every_n_steps": 1})), os.path.join(root, "store"))
    progress = ckpt.resume()
    told = {"began": progress.iteration, "at": digests(built), "heard": heard, "steps": {}}
    for iteration in range(progress.iteration + 1, steps + 1):
        megatron_gpt.forward_backward(built, iteration - 1)
        ckpt.before_step()
        megatron_gpt.update(built)
        ckpt.after_step(iteration)
        told["steps"][iteration] = digests(built)
    ckpt.close()
    return told


def recomputes(rank: int, world_size: int, root: str, setup: Setup) -> list[str]:
    """Warnings of three steps of MoEtion(recompute=True), each rank a node."""
    from moe_ckpt import Memory

    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    node = os.path.join(root, f"node_{rank}")
    os.mkdir(node)
    built = megatron_gpt.build(setup, 1)
    memory = Memory(directory=node, replicas=1, storage_every=1000)
    ckpt = attach(built, root, policy=("MoEtion", {"recompute": True}), memory=memory)
    ckpt.resume()
    for iteration in range(1, 4):
        megatron_gpt.forward_backward(built, iteration - 1)
        ckpt.before_step()
        megatron_gpt.update(built)
        ckpt.after_step(iteration)
    ckpt.close()
    return heard


def open_store(rank: int, world_size: int, root: str) -> Said:
    """Attach to a store that somebody else wrote."""
    built = megatron_gpt.build(SETUP, 1)
    found = said(lambda: attach(built, root))
    routers = [m for m in built.chunks[0].modules() if type(m).__name__ == "TopKRouter"]
    assert not any(router._forward_hooks for router in routers), "a refused attach leaves no hooks"
    return found


def leave_store(rank: int, world_size: int, root: str) -> None:
    built = megatron_gpt.build(SETUP, 1)
    ckpt = attach(built, root)
    ckpt.resume()
    ckpt.before_step()
    megatron_gpt.train_step(built, 0)
    ckpt.after_step(1)
    ckpt.finish()
