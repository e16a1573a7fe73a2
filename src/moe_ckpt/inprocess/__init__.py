"""Restarts training in the surviving processes, with NVIDIA's resiliency extension (``moe_ckpt[inprocess]``).

``restartable`` decorates a train function, which survivors of a failure call again; see docs/inprocess.md. When a rank
is gone, the extension's monitor thread runs ``Abort`` while the training thread may wait for that rank. It then raises
an exception in the training thread, gives the places of lost ranks to spares, and calls the function again in all
processes. Before that, this module seals the newest step in memory, from which the next call resumes.

The training thread, whose collective has failed, and the monitor may do so at the same time. Sealing has its own lock;
everything else that ends a checkpoint runs where the monitor cannot raise.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moe_ckpt.driver.run import CLOSE_SECS, close_guarded
from moe_ckpt.errors import (
    ConfigError,
    MissingPackageError,
    NoCheckpointError,
    RecoveryLoopError,
    UnsupportedError,
    UserError,
)

__all__ = ["Restart", "restartable"]

log = logging.getLogger("moe_ckpt")

_T = TypeVar("_T")
_HOPELESS = (UserError, RecoveryLoopError, NoCheckpointError)
"""Errors that another call would also end with."""
_PATIENCE_SECS = 5.0
"""Longest wait for a step that is under way, before the processes are restarted."""


class Restart:
    """One call of the train function; its first argument.

    Args:
        call: The extension's ``CallWrapper``.

    Attributes:
        iteration: Number of earlier calls of the function in this process: 0 for the first call.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self.iteration = int(call.iteration)
        self._sealing: Any = None

    def init_process_group(self, backend: str | None = None, timeout: timedelta | None = None, **more: Any) -> None:
        """Replaces ``torch.distributed.init_process_group``, with RANK and WORLD_SIZE of this call.

        Args:
            backend: As of that function.
            timeout: As of that function.
            **more: Its further arguments, without ``store``, ``rank`` and ``world_size``.
        """
        if dist.is_initialized():
            dist.destroy_process_group()  # that of the previous call, unless it was aborted
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A separate connection, since the extension's threads wait on theirs as long as nothing fails.
        connection = TCPStore(address, port, is_master=False, wait_for_workers=False)
        if timeout is not None:
            more["timeout"] = timeout
        dist.init_process_group(
            backend,
            store=PrefixStore(f"moe_ckpt/{self.iteration}", connection),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            **more,
        )

    @contextlib.contextmanager
    def keeping(self, checkpoint: object) -> Iterator[None]:
        """Seals the newest step after a failure, and releases all resources. To be used instead of ``with
        checkpoint:``.

        Args:
            checkpoint: The result of ``megatron.attach``, or the ``MoECheckpoint`` of the Trainer that trains in this
                block.

        Raises:
            UnsupportedError: ``checkpoint`` is neither.
        """
        sealing: Any = checkpoint
        if not all(hasattr(checkpoint, name) for name in ("survivors", "close")):
            raise UnsupportedError(
                f"restart.keeping({type(checkpoint).__name__}): give the result of megatron.attach, or a MoECheckpoint "
                "callback. Megatron-LM's own loop makes process groups and handles exceptions itself: start it with "
                "--inprocess-restart, by torchrun or a scheduler, without inprocess.restartable"
            )
        self._sealing = sealing
        try:
            yield
            if hasattr(sealing, "finish"):  # Lightning's Trainer has called the hooks that finish a run
                sealing.finish()
        except BaseException as error:
            close_guarded(self._call.atomic, sealing.close, error)
            raise
        finally:
            self._sealing = None
        sealing.close(CLOSE_SECS)

    def survive(self) -> None:
        """Seals the newest step before the processes are restarted. On the monitor thread."""
        survivors = None if self._sealing is None else self._sealing.survivors
        if survivors is not None:
            survivors.survive("the failure of another rank", _PATIENCE_SECS)


def restartable(
    ranks: int | None = None, *, max_restarts: int = 100, **options: Any
) -> Callable[[Callable[..., _T]], Callable[..., _T | None]]:
    """Decorates a train function ``train(restart, ...)``, so that survivors of a failure call it again.

    Processes are started without torchrun, one per rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Those
    beyond ``ranks`` are spares, which wait, and replace lost ranks. If fewer than ``ranks`` are left, every process
    ends with the extension's ``RestartAbort``, and the next start of the job resumes from memory.

    Args:
        ranks: Number of processes that train; None: all, so there are no spares.
        max_restarts: Number of times the function is called again; then every process ends with ``RestartAbort``.
            Errors that a user must fix (``errors.UserError``, and repeated failures of the recovery) end them at once.
        **options: Of ``nvidia_resiliency_ext.inprocess.Wrapper``, such as ``soft_timeout``; not ``rank_assignment``.

    Returns:
        A decorator. The decorated function returns None on spares that were not needed.

    Raises:
        MissingPackageError: The extension is not installed.
        ConfigError: Options contradict each other, or the processes were started by torchrun.
    """
    if "rank_assignment" in options:
        raise ConfigError(
            "inprocess.restartable(rank_assignment=...): checkpoints need as many ranks as before, and survivors in "
            "their places. Leave it out, and give ranks= instead"
        )
    try:
        inprocess: Any = importlib.import_module("nvidia_resiliency_ext.inprocess")
    except ImportError as error:
        raise MissingPackageError("nvidia-resiliency-ext", "moe_ckpt.inprocess", "inprocess") from error

    def decorate(train: Callable[..., _T]) -> Callable[..., _T | None]:
        @functools.wraps(train)
        def restarting(*args: Any, **kwargs: Any) -> _T | None:
            _require_plain_processes(ranks)
            parts = _Parts(inprocess, ranks, max_restarts, dict(options))  # now, since scripts set WORLD_SIZE late
            result: _T | None = parts.wrapper(parts.attempt(train))(None, *args, **kwargs)
            return result

        return restarting

    return decorate


def _require_plain_processes(ranks: int | None) -> None:
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        raise ConfigError(
            "inprocess.restartable: torchrun stops all processes of a node when one fails, so none survives. "
            "Start one process per rank by srun, mpirun or a script, with RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT; or leave the decorator out, and let torchrun start the job again"
        )
    world = int(os.environ.get("WORLD_SIZE", 1))
    if ranks is not None and ranks > world:
        raise ConfigError(f"inprocess.restartable(ranks={ranks}), but WORLD_SIZE is {world}: start more processes")


class _Parts:
    """Builds the extension's ``Wrapper``."""

    def __init__(self, inprocess: Any, ranks: int | None, max_restarts: int, options: dict[str, Any]) -> None:
        self._inprocess = inprocess
        self._now: Restart | None = None
        assignment, compose = inprocess.rank_assignment, inprocess.Compose
        abort = options.pop("abort", inprocess.abort.AbortTorchDistributed())
        first = options.pop("initialize", None)
        needed = ranks if ranks is not None else int(os.environ.get("WORLD_SIZE", 1))
        enough = inprocess.initialize.RetryController(max_iterations=max_restarts + 1, min_active_world_size=needed)
        self.wrapper: Any = inprocess.Wrapper(
            # The first that is applied comes last. FillGaps leaves survivors in their places.
            rank_assignment=compose(assignment.MaxActiveWorldSize(needed), assignment.FillGaps()),
            initialize=enough if first is None else compose(first, enough),
            abort=self._sealing(inprocess.abort.Abort, abort),
            **options,
        )

    def _sealing(self, base: type, then: Any) -> Any:
        def call(abort: Any, state: Any) -> Any:
            if self._now is not None:
                self._now.survive()
            return state if then is None else then(state)

        return type("SealingAbort", (base,), {"__call__": call})()

    def attempt(self, train: Callable[..., _T]) -> Callable[..., _T]:
        """Returns ``train`` as the extension calls it."""

        def attempt(call: Any, *args: Any, **kwargs: Any) -> _T:
            now = self._now = Restart(call)
            if now.iteration:
                log.info("inprocess: call %d of the train function, as rank %s", now.iteration, os.environ["RANK"])
            try:
                return train(now, *args, **kwargs)
            except _HOPELESS as error:
                raise self._inprocess.exception.RestartAbort(str(error)) from error

        attempt.__annotations__ = {"call": self._inprocess.CallWrapper}  # by which the extension finds the argument
        return attempt
