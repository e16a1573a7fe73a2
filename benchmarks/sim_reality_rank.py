"""The process that ``sim_reality.py`` starts for each rank of a Megatron loop, and for each spare.

It trains until it is killed. Its diary is in the form of the recipe's (``recipes.gpt_moe_lightning.runlog``), a file
per rank, with one generation per call of the train function.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.bubbles_rank import Stage, run_config
from moe_ckpt import Memory, policies
from moe_ckpt.localized.exchange import LogExchange, Received
from moe_ckpt.localized.recording import UpstreamLog
from moe_ckpt.run.events import StepRecord
from recipes.gpt_moe_megatron.config import ParallelConfig, RunConfig
from recipes.gpt_moe_megatron.model import prepare_cpu, start

_TIMEOUT_SECS = 30.0
_IMPORTED = (
    *("megatron.core", "megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.pipeline_parallel"),
    *("moe_ckpt.megatron", "moe_ckpt.inprocess"),
)
_MONITORS = (
    *("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval"),
    "last_call_wait",
)
_MONITORED_SECS = 0.2
"""Intervals of the extension, as where docs/inprocess.md measured it."""


class Diary:
    """Of one call of the train function.

    Args:
        directory: Of the run.
        generation: How often the function was called before in this process.
    """

    def __init__(self, directory: Path, generation: int) -> None:
        self._path = directory / f"metrics.rank{os.environ['RANK']}.jsonl"
        self._generation = generation

    def note(self, **line: Any) -> None:
        """One write call on a file opened for appending: a kill tears at most this line."""
        text = json.dumps({**line, "generation": self._generation, "time": time.time()})
        with self._path.open("ab", buffering=0) as file:
            file.write(b"\n" + text.encode() + b"\n")

    def step(self, record: StepRecord, log: UpstreamLog | None) -> None:
        """``train/loss`` marks a step for whoever reads the diary; the loss itself is on the last stage only. log: Of
        this rank's messages, with what it has of the step and in all."""
        summary = {
            "stall_ms": record.stall_secs * 1e3,
            "begun": record.begun,
            "bytes": record.nbytes,
            "plt": record.plt,
        }
        summary |= {"replayed": record.replayed, "plt_if_failed_now": record.at_risk_plt}
        if log is not None:
            logged = sum(nbytes for one, nbytes in log._sizes.items() if one.step == record.step)
            summary |= {"logged": logged, "log_held": log.nbytes}
        self.note(
            step=record.step, **{"train/loss": 0.0}, **{f"moe_ckpt/{name}": item for name, item in summary.items()}
        )


def train(restart: Any, order: Mapping[str, Any]) -> None:
    """Never ends by itself. restart: of ``inprocess.restartable``, or None."""
    from moe_ckpt import megatron

    diary = Diary(Path(order["directory"]), 0 if restart is None else restart.iteration)
    diary.note(event="start", pid=os.getpid())
    if restart is None:
        start(_TIMEOUT_SECS)
    else:
        _start_in_place(restart)
    stage = Stage(_run(order), order["act_secs"])
    if order["log_bytes"] is not None:
        _note_brought(diary)
    name, arguments = order["policy"]
    ckpt = megatron.attach(
        stage.built.chunks,
        stage.built.optimizer,
        stage.built.scheduler,
        policy=getattr(policies, name)(**arguments),
        dirpath=Path(order["directory"], "checkpoints"),
        memory=Memory(directory=_node(order), storage_every=100_000, upstream_bytes=order["log_bytes"]),
        when_busy="wait",
        timeout_secs=_TIMEOUT_SECS,
        save_last=False,
        profile=str(Path(order["directory"], "profile.json")),
    )
    with ckpt if restart is None else restart.keeping(ckpt):
        progress = ckpt.resume()
        diary.note(event="training", from_step=progress.iteration)
        done, consumed = progress.iteration, progress.consumed_samples
        while True:
            stage.gradients(consumed)
            outcome = stage.update()
            done, consumed = done + 1, consumed + stage.run.trainer.global_batch
            record = ckpt.after_step(done, consumed_samples=consumed, updated=outcome.updated)
            diary.step(record, None if ckpt.upstream is None else ckpt.upstream._log)


def _note_brought(diary: Diary) -> None:
    """Bytes of messages that this rank gets from logs, per iteration that it computes again."""
    received = LogExchange.received

    def noting(exchange: LogExchange) -> dict[int, Received]:
        result = received(exchange)
        total = sum(message.nbytes for step in result.values() for item in step.values() for message, _ in item)
        diary.note(event="brought", bytes=total / max(1, len(result)))
        return result

    LogExchange.received = noting  # type: ignore[assignment, method-assign]


def _run(order: Mapping[str, Any]) -> RunConfig:
    """One layer on each of the stages; where there is one stage, experts are split over all ranks."""
    run = run_config({**order, "root": order["directory"]})
    return run if order["stages"] > 1 else replace(run, parallel=ParallelConfig(ep=order["ranks"]))


def _node(order: Mapping[str, Any]) -> Path:
    """Its memory: one directory is one node."""
    node = Path(order["memory"], f"node_{int(os.environ['RANK']) // order['ranks_per_node']}")
    node.mkdir(parents=True, exist_ok=True)
    return node


def _start_in_place(restart: Any) -> None:
    """As ``start`` of the recipe, in a process that may have trained before."""
    prepare_cpu()
    restart.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECS))
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    tensor_parallel.get_cuda_rng_tracker().reset()


def main(argv: list[str]) -> None:
    """argv: the order as JSON. RANK, WORLD_SIZE and the like are as a launcher sets them."""
    order = json.loads(argv[0])
    logging.getLogger("moe_ckpt").setLevel(logging.INFO)  # what is sealed, and who goes back, for the run's output
    torch.set_num_threads(1)
    if not order["in_place"]:
        train(None, order)
        return
    from moe_ckpt import inprocess

    every: dict[str, Any] = {name: timedelta(seconds=_MONITORED_SECS) for name in _MONITORS}
    inprocess.restartable(order["ranks"], **every)(train)(order)


for _module in _IMPORTED:  # forks of a process that has this one find them there
    if _module == "megatron.core":
        prepare_cpu()
    importlib.import_module(_module)

if __name__ == "__main__":
    main(sys.argv[1:])
