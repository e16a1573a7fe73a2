"""Other people's checkpointers, used as their documentation says.

Two of them are optional: ``pip install torch_checkpointing dlrover``. What is not installed is left out
and named with the reason.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.contestants import Contestant, Gate, LightningAsync, LightningSync, Saving
from benchmarks.failing import Failures

_TIMEOUT_SECS = 300.0


class DCP(Contestant):
    """``torch.distributed.checkpoint.async_save``; one save at a time, as its tutorial has it.

    kind: "thread" (the default), "process", or "staged": thread with staging in the background too.
    """

    durable = True

    def __init__(self, kind: str) -> None:
        self.name = {
            "thread": "dcp.async_save, thread",
            "process": "dcp.async_save, process",
            "staged": "dcp.async_save, async staging",
        }[kind]
        self._kind = kind
        self._stager = DefaultStager(StagingOptions(False, False, True, False)) if kind == "staged" else None
        self._staging: Any = None
        self._upload: Any = None
        self._directory = Path()

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self.trainer_options = {"enable_checkpointing": False}
        self._directory = directory
        return [Saving(gate, self._save, join=self._join)]

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        model, optimizer = get_state_dict(trainer.lightning_module, trainer.optimizers)
        self.drain()
        kind = AsyncCheckpointerType.PROCESS if self._kind == "process" else AsyncCheckpointerType.THREAD
        answer = async_save(
            {"model": model, "optimizer": optimizer, "step": step},
            checkpoint_id=self._directory / f"step_{step}",
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
        self._staging = getattr(answer, "staging_completion", None)
        self._upload = getattr(answer, "upload_completion", answer)

    def _join(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.result()

    def drain(self) -> None:
        self._join()
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.result()

    def complete(self, entry: Path) -> bool:
        return (entry / ".metadata").exists()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class TorchCheckpointing(Contestant):
    """Meta's ``torch_checkpointing``: asynchronous staging, writing by another process."""

    name = "torch_checkpointing"

    def __init__(self) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager

        self._manager = CheckpointManager(CheckpointManager.Config.with_async_save())
        self._guard: Any = None
        self._write: Any = None
        self._directory = Path()

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self.trainer_options = {"enable_checkpointing": False}
        self._directory = directory
        return [Saving(gate, self._save, join=self._enter, leave=self._leave)]

    def _enter(self) -> None:
        self._guard = self._manager.lock()
        self._guard.__enter__()

    def _leave(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__(None, None, None)

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        state = {
            "model": trainer.lightning_module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "step": step,
        }
        self._write = self._manager.save(str(self._directory / f"step_{step}"), state)

    def drain(self) -> None:
        write, self._write = self._write, None
        if write is not None:
            write.result(_TIMEOUT_SECS)

    def close(self) -> None:
        self._manager.close()


class FlashCheckpoint(Contestant):
    """DLRover's Flash Checkpoint: a copy into shared memory, written by its agent's process.

    A save that finds the agent still writing is dropped; the column "saved" shows it.
    """

    name = "DLRover Flash Checkpoint"

    def __init__(self, home: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._disk = StorageType.DISK
        self._home = home / "dlrover"
        self._home.mkdir()
        self._checkpointer = DdpCheckpointer(str(self._home))
        self._directory = Path()
        self._steps = 0

    def begin(self, gate: Gate, directory: Path) -> list[pl.Callback]:
        self.trainer_options = {"enable_checkpointing": False}
        self._directory = directory
        return [Saving(gate, self._save)]

    def _save(self, trainer: pl.Trainer, step: int) -> None:
        state = {
            "model": trainer.lightning_module.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "step": step,
        }
        self._steps += 1  # it wants steps that rise for ever; those of the trainer begin anew in every fit
        path = str(self._directory / f"step_{step}.pt")
        self._checkpointer.save_checkpoint(self._steps, state, path, storage_type=self._disk)

    def drain(self) -> None:
        """Wait for the tracker file to name the newest step that was accepted."""
        newest = self._checkpointer._engine.latest_step
        deadline = time.monotonic() + _TIMEOUT_SECS
        tracker = self._home / "dlrover_latest.txt"
        while self._steps and not (tracker.exists() and tracker.read_text().strip() == str(newest)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"DLRover's agent has not written step {newest} in {_TIMEOUT_SECS} s")
            time.sleep(0.01)

    def close(self) -> None:
        self._checkpointer._engine.close()
        process = getattr(self._checkpointer._engine, "saver_proc", None)
        if process is not None:
            process.kill()


def need_process_group() -> None:
    """dcp and DLRover want one, even for a single process."""
    if dist.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo")


def available(home: Path, is_chosen: Callable[[str], bool]) -> tuple[list[Contestant], dict[str, str]]:
    """(the wanted peers that work here, name -> why others do not)."""
    peers: list[Contestant] = [LightningSync(), LightningAsync()]
    absent = Failures()
    makers: dict[str, Callable[[], Contestant]] = {
        "dcp.async_save, thread": lambda: DCP("thread"),
        "dcp.async_save, async staging": lambda: DCP("staged"),
        "dcp.async_save, process": lambda: DCP("process"),
        "torch_checkpointing": TorchCheckpointing,
        "DLRover Flash Checkpoint": lambda: FlashCheckpoint(home),
    }
    for name, make in makers.items():
        if not is_chosen(name):
            continue
        with absent.of(name):  # whatever keeps a peer from starting is its reason, not our failure
            need_process_group()
            peers.append(make())
    return peers, absent.reasons
