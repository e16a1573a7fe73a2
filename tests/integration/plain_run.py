"""One life of a PyTorch loop that nobody but its user wrote, in a process of its own: ``plain_run.lived``."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import moe_ckpt
from moe_ckpt import policies
from moe_ckpt.data import RecoverableDistributedSampler
from tests.support.kills import OPENING, Kill, Killer
from tests.support.tiny_moe import CLASSES, WIDTH, Block
from tests.support.token_journal import TokenJournal

STEPS, BATCH, SAMPLES = 24, 4, 64
"""At one rank an epoch has 16 steps: the run crosses one."""


@dataclass(frozen=True)
class Loop:
    """One run.

    Attributes:
        policy: Name and arguments.
        memory: Checkpoints in memory that outlives the process.
        sharding: "none", "ddp" or "fsdp2".
        prepared: "fabric" wraps model, optimizers and loader, or "accelerate" model and optimizers.
        optimizers: Of one, or of experts and the rest apart.
        scaler: Loss is scaled, and one step overflows.
        accumulate: Batches a step.
        unused: The second layer lists its experts: one without tokens gets no gradient. DDP looks for those, FSDP2
            cannot be without.
        steps: In all.
        journal: What experts are and routers do is written to files that begin with this.
        options: Further ones of ``attach``.
    """

    policy: tuple[str, dict[str, Any]] = ("Dense", {})
    memory: bool = False
    sharding: str = "none"
    prepared: str = ""
    optimizers: int = 1
    scaler: bool = False
    accumulate: int = 1
    unused: bool = True
    steps: int = STEPS
    journal: str = ""
    options: dict[str, Any] = field(default_factory=dict)


def model(loop: Loop) -> nn.Module:
    torch.manual_seed(3)
    stacked = (True, not loop.unused)
    return nn.Sequential(*(Block(4, 2, 0.1, kind) for kind in stacked), nn.Linear(WIDTH, CLASSES))


def dataset() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(WIDTH, generator=generator), i % CLASSES) for i in range(SAMPLES)]


def fabric_of(loop: Loop, world_size: int) -> Any:
    """Fabric on these ranks, which it takes for torchrun's."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    strategy: Any = SingleDeviceStrategy(torch.device("cpu"))
    if loop.sharding == "ddp":
        strategy = DDPStrategy(find_unused_parameters=loop.unused)
    elif loop.sharding == "fsdp2":
        strategy = ModelParallelStrategy(
            lambda net, mesh: sharded(net, mesh=mesh["data_parallel"]),
            data_parallel_size=world_size,
            tensor_parallel_size=1,
        )
    plugins = [TorchElasticEnvironment()] if world_size > 1 else []
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    return fabric


def sharded(net: nn.Sequential, **settings: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in net:
        fully_shard(block, **settings)
    return fully_shard(net, **settings)


def prepared(loop: Loop, fabric: Any, net: nn.Module, optimizers: list[Any]) -> tuple[Any, list[Any], Any, Any]:
    """The model and the optimizers as the loop calls them, how it computes gradients, and what encloses each batch."""
    if fabric is not None:
        return net, [fabric.setup_optimizers(each) for each in optimizers], fabric.backward, contextlib.nullcontext
    if loop.prepared == "accelerate":
        from accelerate import Accelerator

        os.environ["MASTER_ADDR"] = "127.0.0.1"
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=loop.accumulate)
        net, *optimizers = accelerator.prepare(net, *optimizers)
        return net, optimizers, accelerator.backward, lambda: accelerator.accumulate(net)
    return net, optimizers, torch.Tensor.backward, contextlib.nullcontext


class AverageOfBlocks:
    """A moving average of FSDP2's parameters, which are DTensors."""

    def __init__(self, net: nn.Module) -> None:
        self._values = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}

    def update_parameters(self, net: nn.Module) -> None:
        for name, parameter in net.named_parameters():
            self._values[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["values"].items():
            self._values[name].copy_(value)


def lived(rank: int, world_size: int, root: str, loop: Loop, kill: Kill | None = None) -> dict[str, Any]:
    """The state at the end; a process that is killed returns nothing."""
    killer = Killer(kill, rank, f"{root}/store")
    killer.at(OPENING)
    torch.set_num_threads(1)
    torch.manual_seed(7 + rank)
    net = inner = model(loop)
    torch.manual_seed(11 + rank)
    sampler = None
    fabric = fabric_of(loop, world_size) if loop.prepared == "fabric" else None
    if fabric is not None:
        net = fabric.setup_module(inner)
    elif loop.sharding == "ddp":
        net = DistributedDataParallel(inner, find_unused_parameters=loop.unused)
    elif loop.sharding == "fsdp2":
        sharded(inner)
    if world_size > 1 and fabric is None:
        sampler = RecoverableDistributedSampler(dataset(), world_size, rank, shuffle=True, seed=1)
    loader: Any
    if sampler is None:
        order: dict[str, Any] = {"shuffle": True}
        if world_size > 1:
            order = {"sampler": DistributedSampler(dataset(), world_size, rank, seed=1)}
        loader = StatefulDataLoader(dataset(), batch_size=BATCH, **order)
        if fabric is not None:
            loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    else:  # not among what is saved: it must not draw from the run's generator when a life begins in an epoch's middle
        loader = DataLoader(dataset(), batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    names = [name for name, _ in inner.named_parameters()]
    groups = [names] if loop.optimizers == 1 else [[n for n in names if ("experts" in n) is e] for e in (True, False)]
    parameters = dict(inner.named_parameters())
    optimizers = [torch.optim.AdamW([parameters[n] for n in group], lr=1e-2) for group in groups]
    net, given, backward, batch = prepared(loop, fabric, net, optimizers)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, loop.steps) for optimizer in optimizers]
    stateful: dict[str, Any] = {"data": sampler or loader, **{f"schedule {n}": s for n, s in enumerate(schedules)}}
    average: Any = None
    if loop.sharding == "none":
        average = stateful["average"] = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    elif loop.sharding == "fsdp2":
        average = stateful["average"] = AverageOfBlocks(inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5) if loop.scaler else None
    if scaler is not None:
        stateful["scaler"] = scaler
    memory = moe_ckpt.Memory(directory=root, replicas=0) if loop.memory else None
    name, arguments = loop.policy
    policy = getattr(policies, name)(**arguments)
    ckpt = moe_ckpt.attach(
        net, given, policy=policy, dirpath=f"{root}/store", stateful=stateful, memory=memory, **loop.options
    )
    with ckpt:
        progress = ckpt.resume()
        began, step, batches = progress.step, progress.step, progress.step * loop.accumulate
        tokens = ckpt.session.run_ledger.tokens
        journal = TokenJournal(f"{loop.journal}.{rank}", inner) if loop.journal else None
        if journal is not None:
            journal.begin(step, tokens)
        records = []
        while step < loop.steps:
            for x, y in loader:
                killer.at(step)
                with batch():
                    loss = F.cross_entropy(net(x), y)
                    if scaler is not None:
                        loss = scaler.scale(loss) * (torch.inf if step == 4 else 1)
                    backward(loss)
                    if loop.prepared == "accelerate":  # its optimizers wait for a step's last batch
                        for optimizer in given:
                            optimizer.step()
                batches += 1
                if sampler is not None:
                    sampler.advance(BATCH)
                if batches % loop.accumulate:
                    continue
                for optimizer in given if loop.prepared != "accelerate" else ():
                    optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None:
                    scaler.update()
                for schedule, optimizer in zip(schedules, optimizers, strict=True):
                    schedule.step()
                    optimizer.zero_grad()
                if average is not None:  # of the run's weights, in a replay too
                    average.update_parameters(inner)
                step += 1
                if journal is not None:
                    journal.step(step)
                records.append(ckpt.after_step(step))
                if step == loop.steps:
                    break
            if sampler is not None and step < loop.steps:
                sampler.set_epoch(sampler.epoch + 1)
        ckpt.finish()
        if journal is not None:
            journal.end(tokens)
    state = {"began": began, "restored": ckpt.restored_step, "replayed": sum(record.replayed for record in records)}
    whole = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # noqa: E731
    tensors = {f"model/{key}": whole(value) for key, value in inner.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for at, entries in sorted(optimizer.state_dict()["state"].items()):
            tensors |= {f"optimizer {number}/{at}/{key}": whole(value) for key, value in sorted(entries.items())}
    if average is not None:
        values = average.state_dict()
        tensors |= {f"average/{key}": whole(value) for key, value in values.get("values", values).items()}
    tensors["rng"] = torch.get_rng_state()
    return state | {"plt": tokens.plt, "owed": [record.owed_tokens or 0 for record in records], "tensors": tensors}
