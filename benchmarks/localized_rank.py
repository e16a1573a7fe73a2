"""The process that ``localized.py`` starts for each rank: a stage of a real Megatron pipeline, a node of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bubbles_rank import Stage, run_config
from benchmarks.ranks import end
from moe_ckpt import Memory, policies
from recipes.gpt_moe_megatron.model import start

WAYS = {"all go back": ("MoEvement", False), "one stage goes back": ("MoEvement", True), "nobody": ("Dense", False)}
"""Policy, and whether messages are logged. Under Dense, with a checkpoint at every iteration, none is lost."""
BLOCK = 6
"""Iterations in a row with and without a log; the first of them is not counted."""
ORDER = (False, True, True, False)
"""Of blocks, whether messages are logged: what drifts hits both alike."""
KILLED = "killed"
"""File in the round's directory with the moment of the kill by ``time.monotonic``, alike for all of a machine."""
_TIMEOUT_SECS = 120.0


def attached(stage: Stage, order: Mapping[str, Any], rank: int) -> Any:
    """Checkpoints into memory only; ``order["way"]`` says how."""
    from moe_ckpt import megatron

    name, logged = WAYS[order["way"]]
    policy = policies.MoEvement(window=order["window"]) if name == "MoEvement" else policies.Dense(every_n_steps=1)
    node = Path(order["root"], f"node_{rank}")
    node.mkdir(parents=True, exist_ok=True)
    upstream_bytes = order["log_bytes"] if logged else None
    return megatron.attach(
        stage.built.chunks,
        stage.built.optimizer,
        stage.built.scheduler,
        policy=policy,
        dirpath=Path(order["root"], "store"),
        memory=Memory(directory=node, storage_every=100_000, upstream_bytes=upstream_bytes),
        when_busy="wait",
        timeout_secs=_TIMEOUT_SECS,
        save_last=False,
    )


def die(stage: Stage, order: Mapping[str, Any], rank: int) -> None:
    """Trains until one rank is killed, and the others have kept what they have; all end by ``kill -9``."""
    ckpt = attached(stage, order, rank)
    done, consumed = ckpt.resume().iteration, 0
    try:
        while True:
            if done == order["done"] and rank == order["victim"]:
                time.sleep(0.5)  # as in the middle of an iteration that takes longer
                Path(order["root"], KILLED).write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            done, consumed = iterate(stage, ckpt, done, consumed)
    except RuntimeError as error:  # a peer is gone
        ckpt.close(10.0, error)
    os.kill(os.getpid(), signal.SIGKILL)


def iterate(stage: Stage, ckpt: Any, done: int, consumed: int) -> tuple[int, int]:
    """One iteration: how many are done, and samples consumed, after it."""
    stage.gradients(consumed)
    outcome = stage.update()
    consumed += stage.run.trainer.global_batch
    ckpt.after_step(done + 1, consumed_samples=consumed, updated=outcome.updated)
    return done + 1, consumed


def come_back(stage: Stage, order: Mapping[str, Any], rank: int, started: float) -> dict[str, Any]:
    """Until the first new iteration is done. Moments by ``time.monotonic``, alike for all processes of a machine."""
    ckpt = attached(stage, order, rank)
    progress = ckpt.resume()
    resumed, done, consumed, again = time.monotonic(), progress.iteration, progress.consumed_samples, 0
    while done <= order["done"]:
        done, consumed = iterate(stage, ckpt, done, consumed)
        again += done <= order["done"]
    results = {"started": started, "resumed": resumed, "new": time.monotonic(), "again": again}
    ckpt.finish()
    return results


def overhead(stage: Stage, order: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of iterations with and without a log, in turns, in one run; and bytes that one iteration logs."""
    ckpt = attached(stage, order, rank)
    done = consumed = ckpt.resume().iteration
    boundary = ckpt.upstream.boundary
    log, result, nbytes = boundary._log, list[tuple[bool, float]](), 0
    for block in range(order["cycles"] * len(ORDER)):
        logged = ORDER[block % len(ORDER)]
        for position in range(BLOCK):
            boundary._log = log if logged else None
            began = time.perf_counter()
            done, consumed = iterate(stage, ckpt, done, consumed)
            if position:
                result.append((logged, time.perf_counter() - began))
                nbytes = max(nbytes, log._sizes.get(done, 0)) if logged else nbytes
    boundary._log = log
    ckpt.finish()
    return {"iterations": result, "nbytes": nbytes}


def main(argv: list[str]) -> int:
    """argv: the order as JSON, and the rank."""
    began = time.monotonic()
    order, rank = json.loads(argv[0]), int(argv[1])
    os.environ |= {"RANK": argv[1], "WORLD_SIZE": str(order["stages"]), "MASTER_PORT": str(order["port"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    start(_TIMEOUT_SECS)
    stage = Stage(run_config(order), order["act_secs"])
    dist.barrier()
    if order["what"] == "die":
        die(stage, order, rank)
    if order["what"] == "overhead":
        return end(order, rank, overhead(stage, order, rank))
    return end(order, rank, {"began": began, **come_back(stage, order, rank, time.monotonic())})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
