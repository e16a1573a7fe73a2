"""One process of a Lightning run that restarts within its processes, as ``inprocess_run`` of a Megatron run.

``python -m tests.support.inprocess_lightning JSON``, in which is a ``crash_run.Run``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from moe_ckpt import inprocess
from moe_ckpt.callbacks import MoECheckpoint
from tests.integration import crash_run
from tests.integration.crash_run import Run, build
from tests.support.inprocess_run import FAST


class Journal(pl.Callback):
    """Writes down each step, and kills the process where it is told to."""

    def __init__(self, told: dict[str, Any], first_rank: str, call: int) -> None:
        self._told, self._first_rank, self._call = told, first_rank, call

    def note(self, **line: Any) -> None:
        with Path(f"{self._told['journal']}.{self._first_rank}").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **line}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note(call=self._call, rank=trainer.global_rank, resumed=trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if [int(self._first_rank), trainer.global_step + 1, self._call] in self._told["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.note(iteration=trainer.global_step)


def main(told: dict[str, Any]) -> None:
    first_rank = os.environ["RANK"]
    run = Run(**told["run"])

    @inprocess.restartable(told["ranks"], **FAST)
    def train(restart: inprocess.Restart) -> None:
        restart.init_process_group("gloo", timeout=timedelta(seconds=12))
        outside, rank = {**run.trainer, "plugins": [TorchElasticEnvironment()]}, int(os.environ["RANK"])
        trainer, module, _ = build(replace(run, trainer=outside), rank)
        [checkpoint] = [each for each in trainer.callbacks if isinstance(each, MoECheckpoint)]
        trainer.callbacks.insert(0, Journal(told, first_rank, restart.iteration))
        with restart.keeping(checkpoint):
            crash_run.train(run, rank, trainer, module)

    train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
