"""The run's diary: one JSON line per step and event, in a file per rank, surviving any crash and restart.

A metric line is ``{"step": s, "generation": g, "time": t, "<metric>": value, ...}``, an event line has
``"event"`` besides. A step that was computed again after a restart appears once per generation; a line
torn by a crash is skipped when read. A step that was computed again to bring a sparse window back has
``moe_ckpt/replayed`` 1 and no other ``moe_ckpt/`` metric, for nothing is saved at it. Times are seconds since
the epoch. The event ``experts`` carries tables ``[L, E]``: ``ages`` (steps since each expert's newest committed
copy, -1 without one) and ``unsaved`` tokens. The event ``restored`` says on each rank how many bytes of the step that
it returned to came from where: ``own`` memory of the node, memory of ``peers``, ``storage``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Tier

PLACES = {Tier.HOST: "own", Tier.PEER: "peers", Tier.STORAGE: "storage"}


def generation() -> int:
    """How often torchrun has restarted the processes of this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class RunLog(Logger):
    """A Lightning logger that writes the diary. What callbacks log, such as ``moe_ckpt/...``, lands there."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.path = run_dir / f"metrics.rank{int(os.environ.get('RANK', '0'))}.jsonl"

    @property
    def name(self) -> str:
        return "run"

    @property
    def version(self) -> int:
        return generation()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._append({"step": step, **metrics})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The composed config is recorded by Hydra."""

    def event(self, kind: str, **facts: Any) -> None:
        self._append({"event": kind, **facts})

    def _append(self, record: dict[str, Any]) -> None:
        """One write call on a file opened for appending: a crash tears at most this line."""
        line = json.dumps({**record, "generation": generation(), "time": time.time()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write(b"\n" + line.encode() + b"\n")


class Diary(Callback):
    """Writes this rank's loss of every step, and the step that training began at."""

    def __init__(self, log: RunLog) -> None:
        self.run_log = log

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run_log.event("training", from_step=trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.run_log.log_metrics({"train/loss": float(outputs["language_loss"])}, step=trainer.global_step)


class ExpertDiary(Callback):
    """Writes where the state came from; and how old and how far behind each expert's newest copy is, on rank 0, for all
    ranks know the same of that.

    checkpoint: whose metrics are read. Its step is over only after every other callback's last hook of the batch, so
    a step is written when the next one begins, or training ends.
    """

    def __init__(self, log: RunLog, checkpoint: MoECheckpoint, every_n_steps: int = 1) -> None:
        self.run_log = log
        self.checkpoint = checkpoint
        self.every_n_steps = every_n_steps
        self._written: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        plan = self.checkpoint.recovery_plan
        if plan is None:
            return
        nbytes = dict.fromkeys(PLACES.values(), 0)
        for row in plan.rows():
            nbytes[PLACES[row.source.tier]] += row.nbytes
        self.run_log.event("restored", step=plan.step, **nbytes)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)
        record = self.checkpoint.last
        if record is not None and not record.replayed:  # loggers got the step before its last checkpoint was agreed on
            self.run_log.log_metrics({"moe_ckpt/oldest_expert_steps": record.oldest_expert_steps}, step=record.step)

    def _write(self, trainer: Trainer) -> None:
        record = self.checkpoint.last
        if record is None or record.step == self._written or record.step % self.every_n_steps:
            return
        if record.replayed:  # the ledger is still that of a run that has not begun
            return
        self._written = record.step
        if trainer.is_global_zero:
            metrics = self.checkpoint.metrics
            ages, unsaved = metrics["expert_ages"].compute(), metrics["unsaved_tokens"].compute()
            self.run_log.event("experts", step=record.step, ages=ages.tolist(), unsaved=unsaved.tolist())


def parameter_hash(module: torch.nn.Module) -> str:
    """Hex digest over names and bytes of all parameters and buffers: equal means ``torch.equal``."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
