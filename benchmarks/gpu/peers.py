"""Other checkpointers in their fastest modes, in the same training.

One save is under way at a time; steps that come meanwhile are left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.gpu.training import AfterStep, Training


def _state(training: Training) -> dict[str, Any]:
    return {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()["state"]}


@contextlib.contextmanager
def _in_group(peer: contextlib.AbstractContextManager[AfterStep]) -> Iterator[AfterStep]:
    """Runs a peer in a process group of one rank, which it asks for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    before = dict(os.environ)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo")
    try:
        with peer as saver:
            yield saver
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


class _Backlog:
    """Saves unless one is under way; times what the training thread spends."""

    def __init__(self, save: Callable[[int], Any], join: Callable[[], None] = lambda: None) -> None:
        self._save, self._join, self._upload = save, join, None
        self._secs = 0.0

    def before_update(self, *_: Any) -> None:
        began = time.perf_counter()
        self._join()
        self._secs += time.perf_counter() - began

    def after_step(self, number: int) -> dict[str, Any]:
        began = time.perf_counter()
        busy = self._upload is not None and not self._upload.done()
        if not busy:
            self._upload = self._save(number)
        secs, self._secs = self._secs + time.perf_counter() - began, 0.0
        return {"hooks_secs": secs, "begun": not busy, "left_out": busy}

    def end(self) -> None:
        self._join()
        if self._upload is not None:
            self._upload.result()


@contextlib.contextmanager
def _joined(training: Training, backlog: _Backlog, close: Callable[[], None] = lambda: None) -> Iterator[AfterStep]:
    hook = training.optimizer.register_step_pre_hook(backlog.before_update)
    try:
        yield backlog.after_step
    finally:
        hook.remove()
        backlog.end()
        close()


@contextlib.contextmanager
def _dcp(training: Training, directory: Path, *, process: bool) -> Iterator[AfterStep]:
    on_gpu = training.device == "cuda"
    once = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # a stager cannot be used twice before
    staging: list[Any] = [None, None]

    def stager() -> DefaultStager:
        return DefaultStager(StagingOptions(on_gpu, process, on_gpu, on_gpu))

    def save(number: int) -> Any:
        if staging[0] is None or once:
            if staging[0] is not None:
                staging[0].close()
            staging[0] = stager()
        kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        response = async_save(
            _state(training),
            checkpoint_id=directory / f"step_{number % 3}",
            async_checkpointer_type=kind,
            async_stager=staging[0],
        )
        staging[1] = getattr(response, "staging_completion", None)
        return getattr(response, "upload_completion", response)

    def join() -> None:
        completion, staging[1] = staging[1], None
        if completion is not None:
            completion.result()

    with _joined(
        training, _Backlog(save, join), lambda: staging[0].close() if staging[0] is not None else None
    ) as saver:
        yield saver


@contextlib.contextmanager
def _torch_checkpointing(training: Training, directory: Path) -> Iterator[AfterStep]:
    from torch_checkpointing.checkpoint_manager import CheckpointManager

    manager = CheckpointManager(CheckpointManager.Config.with_async_save())
    locks: list[Any] = []

    def join() -> None:
        if not locks:
            locks.append(manager.lock())
            locks[0].__enter__()

    def save(number: int) -> Any:
        while locks:
            locks.pop().__exit__(None, None, None)
        shutil.rmtree(directory / f"step_{number - 4}", ignore_errors=True)
        return manager.save(str(directory / f"step_{number}"), _state(training))

    with _joined(training, _Backlog(save, join), manager.close) as saver:
        yield saver


@contextlib.contextmanager
def _dlrover(training: Training, directory: Path) -> Iterator[AfterStep]:
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    checkpointer = DdpCheckpointer(str(directory))

    def after_step(number: int) -> dict[str, Any]:
        began = time.perf_counter()
        path = str(directory / f"step_{number}.pt")
        checkpointer.save_checkpoint(number, _state(training), path, storage_type=StorageType.MEMORY)
        return {"hooks_secs": time.perf_counter() - began, "begun": True}

    try:
        yield after_step
    finally:
        checkpointer._engine.close()
        saver = getattr(checkpointer._engine, "saver_proc", None)
        if saver is not None:
            saver.kill()


@contextlib.contextmanager
def _nvrx(training: Training, directory: Path, *, local: bool) -> Iterator[AfterStep]:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    if local:
        manager, calls = LocalCheckpointManager(directory), AsyncCallsQueue(persistent=False)
    else:
        manager = TorchAsyncCheckpoint(persistent_queue=True)
        calls = manager._async_calls_queue

    def after_step(number: int) -> dict[str, Any]:
        began = time.perf_counter()
        calls.maybe_finalize_async_calls(blocking=False, no_dist=True)
        busy = bool(calls.get_num_unfinalized_calls())
        if not busy and local:
            calls.schedule_async_request(
                manager.save(BasicTensorAwareStateDict(_state(training)), number, is_async=True)
            )
        elif not busy:
            manager.async_save(_state(training), str(directory / f"step_{number % 3}.pt"))
        return {"hooks_secs": time.perf_counter() - began, "begun": not busy, "left_out": busy}

    try:
        yield after_step
    finally:
        calls.maybe_finalize_async_calls(blocking=True, no_dist=True)
        calls.close()


PEERS: dict[str, Callable[[Training, Path], contextlib.AbstractContextManager[AfterStep]]] = {
    "dcp, thread": lambda training, path: _in_group(_dcp(training, path, process=False)),
    "dcp, process": lambda training, path: _in_group(_dcp(training, path, process=True)),
    "torch_checkpointing": _torch_checkpointing,
    "DLRover, memory": lambda training, path: _in_group(_dlrover(training, path)),
    "NVRx, async": lambda training, path: _in_group(_nvrx(training, path, local=False)),
    "NVRx, local": lambda training, path: _in_group(_nvrx(training, path, local=True)),
}
