"""The process that ``bubbles.py`` starts for each rank: a stage of a real Megatron pipeline, and a node of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import end
from moe_ckpt import Memory
from moe_ckpt.policies import MoEtion, Needs, PolicyContext, SnapshotPlan, Wrapper
from recipes.gpt_moe_megatron.config import ModelConfig, ParallelConfig, RunConfig, TrainerConfig
from recipes.gpt_moe_megatron.model import build, start
from recipes.gpt_moe_megatron.train import Training

NONE, OFF, ON = "no checkpoint", "gating off", "gating on"
WARM = 7
"""Iterations until buffers, rates and bubbles are known, and the ones after that are measured."""
BLOCK = 4
"""Iterations in a row of one way; the first of them is not counted."""
ORDER = (NONE, OFF, ON, ON, OFF, NONE)
"""Of blocks: what drifts hits all alike."""
_TIMEOUT_SECS = 120.0

Iteration = dict[str, Any]
"""Of one rank: "cycle" (one ``ORDER``), "way", seconds "wall", "stall", "cpu", and bytes by ``_BYTES``."""
_BYTES = ("copied", "copied_in_bubbles", "sent", "sent_in_bubbles")


def run_config(order: Mapping[str, Any]) -> RunConfig:
    """One layer on each stage."""
    stages, width, micro_batch = order["stages"], order["width"], 2
    model = ModelConfig(
        layers=stages, hidden=width, heads=4, experts=order["experts"], top_k=2, expert_ffn=width, vocab=64, seq=16
    )
    trainer = TrainerConfig(
        micro_batch=micro_batch,
        global_batch=micro_batch * order["microbatches"],
        precision="fp32",
        transformer_engine="never",
        timeout_secs=_TIMEOUT_SECS,
    )
    return RunConfig(order["root"], model, ParallelConfig(pp=stages), trainer)


class _Slow(torch.autograd.Function):
    """The work of an accelerator: one unit forward, two backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, secs: float) -> torch.Tensor:
        ctx.secs = secs
        time.sleep(secs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.secs)
        return gradients[0], None


class Stage(Training):
    """Megatron's loop; act_secs: what an accelerator would compute in a forward pass, during which a core is free."""

    def __init__(self, run: RunConfig, act_secs: float) -> None:
        super().__init__(run, build(run))
        self.act_secs = act_secs

    def _forward_step(self, batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
        output, loss = super()._forward_step(batches, model)
        return (_Slow.apply(output, self.act_secs) if self.act_secs else output), loss  # type: ignore[no-untyped-call]


def way_of(iteration: int) -> str:
    """Iterations count from 1; those that warm up are gated."""
    block = (iteration - WARM - 1) // BLOCK
    return ORDER[block % len(ORDER)] if block >= 0 else ON


@dataclass(frozen=True)
class InTurns(Wrapper):
    """Saves nothing at steps whose copy would go beside an iteration without one."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, next_due=None)

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        return SnapshotPlan(context.run.step) if way_of(context.run.step + 1) == NONE else super().plan(context)


def turn(stage: Stage, order: Mapping[str, Any], root: Path) -> list[Iteration]:
    """Some blocks of iterations, in a store of their own."""
    results: list[Iteration] = []
    with _attached(stage, order, root) as ckpt:
        gate, consumed = ckpt.session._run.gate, 0
        for iteration in range(1, WARM + BLOCK * len(ORDER) * order["cycles"] + 1):
            block, position = divmod(iteration - WARM - 1, BLOCK)
            way = way_of(iteration)
            gate.holds = way == ON
            began, cpu, before = time.perf_counter(), time.process_time(), _moved(gate)
            stage.gradients(consumed)
            outcome = stage.update()
            consumed += stage.run.trainer.global_batch
            stall = ckpt.after_step(iteration, consumed_samples=consumed, updated=outcome.updated).stall_secs
            if block >= 0 and position:
                took = {"wall": time.perf_counter() - began, "cpu": time.process_time() - cpu, "stall": stall}
                moved = [now - then for now, then in zip(_moved(gate), before, strict=True)]
                took |= zip(_BYTES, moved, strict=True)
                results.append({"cycle": block // len(ORDER), "way": way, **took})
    return results


def _moved(gate: Any) -> tuple[int, int, int, int]:
    return gate.copied.nbytes, gate.copied.in_bubbles, gate.sent.nbytes, gate.sent.in_bubbles


@contextmanager
def _attached(stage: Stage, order: Mapping[str, Any], root: Path) -> Iterator[Any]:
    from moe_ckpt import megatron

    node = root / f"node_{dist.get_rank()}"
    node.mkdir(parents=True)
    dist.barrier()
    ckpt = megatron.attach(
        stage.built.chunks,
        stage.built.optimizer,
        stage.built.scheduler,
        policy=InTurns(MoEtion(experts=order["saved"])),
        dirpath=root / "store",
        memory=Memory(directory=node, replicas=1, storage_every=100_000),
        when_busy="wait",
        timeout_secs=_TIMEOUT_SECS,
        save_last=False,
    )
    try:
        ckpt.resume()
        yield ckpt
        ckpt.finish()
    finally:
        ckpt.close(10.0)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root)
        dist.barrier()


def main(argv: list[str]) -> int:
    """argv: the order as JSON, and the rank."""
    order, rank = json.loads(argv[0]), argv[1]
    os.environ |= {"RANK": rank, "WORLD_SIZE": str(order["stages"]), "MASTER_PORT": str(order["port"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start(_TIMEOUT_SECS)
    stage = Stage(run_config(order), order["act_secs"])
    results = []
    for _ in range(order["rounds"]):
        results.append(turn(stage, order, Path(order["root"], "turn")))
        dist.barrier()
    return end(order, int(rank), results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
