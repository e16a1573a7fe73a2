"""The process that ``sent_bytes.py`` starts for each rank: a few steps of a real run, and the bytes that it sends."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.ranks import end
from moe_ckpt import Memory
from moe_ckpt.peers.replication import Replicator
from moe_ckpt.policies import Dense, GradientLog, MoEtion, Policy
from moe_ckpt.policies.base import ALL_SENT
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices import compiling
from moe_ckpt.slices.local_state import MirroredShares

WARM = 3
"""Steps that are not counted: optimizer state comes into being, and the first checkpoints hold everything."""
EXPERTS = 8
_TIMEOUT_SECS = 120.0
POLICIES: dict[str, Policy] = {
    "Dense": Dense(1),
    "MoEtion": MoEtion(experts=EXPERTS // 4, capacity_boost=None),
    "MoEtion, gradients": MoEtion(experts=EXPERTS // 4, capacity_boost=None, recompute=True),
    "MoEtion, 6 of 8": MoEtion(experts=3 * EXPERTS // 4, capacity_boost=None),
    "MoEtion, 6 of 8, gradients": MoEtion(experts=3 * EXPERTS // 4, capacity_boost=None, recompute=True),
    "GradientLog": GradientLog(window=4),
}

Sent = dict[str, int]
"""Bytes "sent" to peers and, of what they hold, those that they had ("saved"), of this rank in all counted steps."""


class _NothingAlike(MirroredShares):
    """Takes nothing from its own tensors, and says so."""

    sends = ALL_SENT

    def __init__(self, catalog: Any, placement: Any, sources: Any, tensors: Any) -> None:
        super().__init__(catalog, placement, (), tensors)


@contextmanager
def redundancy(*, used: bool) -> Iterator[None]:
    """used: Algorithm 2 is on."""
    with mock.patch.object(compiling, "MirroredShares", MirroredShares if used else _NothingAlike):
        yield


class _Count:
    """Of one session; waits after each step until peers have its copies."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._before = (0, 0)
        self.found: Sent = {"sent": 0, "saved": 0}

    def step_ended(self, session: CheckpointSession, step: int) -> None:
        """step: from 1."""
        replicator: Replicator = session.tier.replicator  # type: ignore[assignment]
        session.drain(step)
        until = time.monotonic() + _TIMEOUT_SECS
        while replicator.lag_steps:
            if time.monotonic() > until:
                raise RuntimeError(f"step {step}: peers do not answer")
            time.sleep(0.001)
        now = replicator.sent_bytes, replicator.saved_bytes
        if step == WARM:
            self._before = now
        if step == WARM + self._steps:
            self.found = {name: at - then for name, at, then in zip(self.found, now, self._before, strict=True)}


def _memory(root: Path, rank: int) -> Memory:
    node = root / f"node_{rank}"
    node.mkdir(parents=True)
    return Memory(directory=node, replicas=1, storage_every=100_000)


def lightning(order: Mapping[str, Any], rank: int, policy: Policy, root: Path) -> Sent:
    """Under DDP or FSDP2 (``ModelParallelStrategy``)."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from benchmarks.workload import endless_batches
    from moe_ckpt.callbacks import MoECheckpoint
    from recipes.gpt_moe_lightning.model import GPTMoEConfig, GPTMoELightning

    class Model(GPTMoELightning):
        def configure_model(self) -> None:
            if order["strategy"] == "fsdp2":
                mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
                for block in self.model.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.model, mesh=mesh)  # whose forward is called

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            self.look(trainer)

        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.look(trainer)

        def look(self, trainer: pl.Trainer) -> None:
            if trainer.global_step and checkpoint._fit is not None:
                count.step_ended(checkpoint._fit.driver.session, trainer.global_step)

    config = GPTMoEConfig(layers=4, hidden=order["width"], heads=4, context=32, experts=EXPERTS)
    options: Any = {"when_busy": "wait", "timeout_secs": _TIMEOUT_SECS, "save_last": False}
    checkpoint = MoECheckpoint(policy, root / "store", memory=_memory(root, rank), **options)
    count, ranks = _Count(order["steps"]), order["ranks"]
    pl.seed_everything(1, verbose=False)  # so that each way has the same loads, and the same experts are chosen
    ddp = order["strategy"] == "ddp"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=(
            DDPStrategy(process_group_backend="gloo")
            if ddp
            else ModelParallelStrategy(ranks, 1, process_group_backend="gloo")
        ),
        max_steps=WARM + order["steps"],
        max_epochs=-1,
        logger=False,
        callbacks=[Watch(), checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(config), endless_batches(config, 2))
    return count.found


def megatron(order: Mapping[str, Any], rank: int, policy: Policy, root: Path) -> Sent:
    """Under EP2, with as many data-parallel ranks as the world leaves over."""
    from moe_ckpt import megatron as adapter
    from recipes.gpt_moe_megatron.config import ModelConfig, ParallelConfig, RunConfig, TrainerConfig
    from recipes.gpt_moe_megatron.model import build
    from recipes.gpt_moe_megatron.train import Training

    width = order["width"]
    model = ModelConfig(2, width, 4, EXPERTS, 2, expert_ffn=2 * width, vocab=64, seq=16)
    trainer = TrainerConfig(micro_batch=1, global_batch=order["ranks"], precision=order["precision"])
    run = RunConfig(str(root), model, ParallelConfig(ep=2, distributed_optimizer=order["divided"]), trainer)
    training = Training(run, build(run))
    count, built = _Count(order["steps"]), training.built
    ckpt = adapter.attach(
        built.chunks,
        built.optimizer,
        policy=policy,
        dirpath=root / "store",
        memory=_memory(root, rank),
        when_busy="wait",
        timeout_secs=_TIMEOUT_SECS,
        save_last=False,
    )
    ckpt.resume()
    for iteration in range(1, WARM + order["steps"] + 1):
        training.gradients(iteration * run.trainer.global_batch)
        ckpt.after_step(iteration, updated=training.update().updated)
        count.step_ended(ckpt.session, iteration)
    ckpt.finish()
    return count.found


def main(argv: list[str]) -> int:
    """argv: the order as JSON, and the rank."""
    order, rank = json.loads(argv[0]), int(argv[1])
    ranks = str(order["ranks"])
    os.environ |= {"RANK": argv[1], "LOCAL_RANK": argv[1], "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"]), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"NODE_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "sent_bytes"}
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    is_megatron, root = "precision" in order, Path(order["root"], "run")
    if is_megatron:
        from recipes.gpt_moe_megatron.model import start

        start(_TIMEOUT_SECS)
    with redundancy(used=order["redundancy"]):
        result = (megatron if is_megatron else lightning)(order, rank, POLICIES[order["policy"]], root)
    return end(order, rank, result)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
