"""The checkpointers that are compared. Each saves at the end of an iteration while its gate is open.

A contestant brings Lightning callbacks (and perhaps a plugin); all that happens in them during training
is on its account. None may let training go on with state that is still being read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from benchmarks.acting import wait_until_written
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.format.manifest import MANIFEST_NAME
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies.base import Policy, PolicyContext
from moe_ckpt.policies.dense import Dense
from moe_ckpt.policies.moc import MoC
from moe_ckpt.policies.wrapper import Wrapper
from moe_ckpt_sim.run.sync import SyncDense


class Gate:
    """Open while checkpoints are to be taken, closed in the iterations that serve as reference."""

    is_open = False


class Contestant:
    """One way to checkpoint. ``begin`` before each fit, ``end`` after it, ``close`` once at the end.

    saves: it is to leave checkpoints behind; one that leaves none has failed.
    durable: an ended checkpoint has been synced to the disk, not only handed to the kernel.
    """

    name = ""
    saves = True
    durable = False
    trainer_options: dict[str, Any]

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self.trainer_options = {"enable_checkpointing": False}
        return []

    def drain(self) -> None:
        """Return when everything begun is written."""

    def end(self) -> None:
        """Training ended."""

    def close(self) -> None:
        """The benchmark ended, or this contestant failed: stop processes."""

    def complete(self, entry: Path) -> bool:
        """Whether a file or directory named ``step...`` is a whole checkpoint, not the rest of a failed one."""
        return True

    def made(self, asked: int, present: int) -> int:
        """Returns how many of the checkpoints that were asked for were made, when ``present`` are on storage."""
        return present


class Reference(Contestant):
    """Training without any checkpoint."""

    name = "no checkpoint"
    saves = False
    durable = True  # of nothing, all is on the disk


@dataclass(frozen=True)
class _GatedPolicy(Wrapper):
    """Any policy, silent while the gate is closed."""

    gate: Gate

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        return super().plan(context) if self.gate.is_open else SnapshotPlan(context.run.step)


class Ours(Contestant):
    """MoECheckpoint. When storage is slower than training it waits, so that no checkpoint is left out.

    Args:
        name: Of the contestant.
        policy: Saves at every iteration.
        keep_last: Of ``RetentionPolicy``; None for the default, which deletes as other checkpointers here do not.
    """

    durable = True

    def __init__(self, name: str, policy: Policy, keep_last: int | None = 1000) -> None:
        self.name = name
        self._policy, self._keep_last = policy, keep_last
        self._callback: MoECheckpoint | None = None

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self.trainer_options = {}
        self._callback = MoECheckpoint(
            _GatedPolicy(self._policy, gate),
            directory,
            save_last=False,
            when_busy="wait",
            retention=RetentionPolicy() if self._keep_last is None else RetentionPolicy(keep_last=self._keep_last),
        )
        return [self._callback]

    def drain(self) -> None:
        if self._callback is not None and self._callback._fit is not None:
            wait_until_written(self._callback._fit.session)

    def complete(self, entry: Path) -> bool:
        return (entry / MANIFEST_NAME).exists()

    def made(self, asked: int, present: int) -> int:
        last = None if self._callback is None else self._callback.last
        if self._keep_last is not None or last is None:
            return present
        return asked - last.skips - last.failed_checkpoints


class _GatedModelCheckpoint(ModelCheckpoint):
    def __init__(self, gate: Gate, directory: Path) -> None:
        super().__init__(dirpath=directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        self._gate = gate

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._gate.is_open:
            super().on_train_batch_end(*args, **kwargs)


class LightningSync(Contestant):
    """Lightning's ModelCheckpoint as it comes."""

    name = "Lightning ModelCheckpoint"

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self.trainer_options = {}
        return [_GatedModelCheckpoint(gate, directory)]


class LightningAsync(Contestant):
    """ModelCheckpoint with the AsyncCheckpointIO plugin."""

    name = "Lightning AsyncCheckpointIO"

    def __init__(self) -> None:
        self._plugin: AsyncCheckpointIO | None = None

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self._plugin = AsyncCheckpointIO()
        self.trainer_options = {"plugins": [self._plugin]}
        return [_GatedModelCheckpoint(gate, directory)]

    def drain(self) -> None:
        if self._plugin is not None:
            self._plugin.teardown()  # waits for its queue; the next save sets it up again


class Saving(pl.Callback):
    """Calls ``save`` after, and ``join`` and ``leave`` around, each optimizer step."""

    def __init__(
        self,
        gate: Gate,
        save: Callable[[pl.Trainer, int], None],
        join: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._gate, self._save, self._join, self._leave = gate, save, join, leave

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._join is not None:
            self._join()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._leave is not None:
            self._leave()
        if self._gate.is_open:
            self._save(trainer, trainer.global_step)


_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_train_batch_start", "on_train_batch_end"),
)


class HookClock:
    """Sums the time that the training thread spends in the hooks of some callbacks. Seconds.

    ``MoECheckpoint`` has hooks of layers and optimizers as well, so its own stopwatch tells.
    """

    def __init__(self, callbacks: list[pl.Callback]) -> None:
        self._total = 0.0
        self._ours = [callback for callback in callbacks if isinstance(callback, MoECheckpoint)]
        for callback in (callback for callback in callbacks if callback not in self._ours):
            for hook in (name for name in _HOOKS if hasattr(callback, name)):
                setattr(callback, hook, self._timed(getattr(callback, hook)))
        self._before = 0.0

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            try:
                hook(*args, **kwargs)
            finally:
                self._total += time.perf_counter() - began

        return timed

    def take(self) -> float:
        """The sum since the last call."""
        now = time.perf_counter()
        ours = sum(callback._fit.stopwatch.until(now) for callback in self._ours if callback._fit is not None)
        total = self._total + ours - self._before
        self._total, self._before = 0.0, ours
        return total


def own() -> list[Contestant]:
    """The reference and this library's contestants."""
    return [
        Reference(),
        Ours("moe_ckpt Dense, sync", SyncDense()),
        Ours("moe_ckpt Dense, async", Dense()),
        Ours("moe_ckpt MoC, K=1", MoC(k=1)),
        Ours("moe_ckpt Dense, default retention", Dense(), keep_last=None),
        Ours("moe_ckpt MoC, default retention", MoC(k=1), keep_last=None),
    ]
