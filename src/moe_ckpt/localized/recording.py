"""Logs the messages that this rank sends over its stage's boundaries, step by step, within a budget.

The training thread copies each message, and another thread checksums and writes it. A step's log is valid once sealed.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.localized.log_files import Channel, LogHeader, LogWriter, SealedLog, remove_log
from moe_ckpt.memory.directory import log_path
from moe_ckpt.threads import TaskThread, ThreadName

log = logging.getLogger("moe_ckpt")

_CLOSE_SECS = 10.0
"""Longest wait for messages that are not written yet, when training ends."""


class _Log(NamedTuple):
    """The log of one step. path: Of its files, without a suffix."""

    step: int
    path: Path


class UpstreamLog:
    """The logs of one rank in one life. ``append``, ``step_ends`` and ``drop`` are called on the training thread.

    Args:
        directory: Directory of the rank, in memory that outlives the process.
        header: Header with the fields that all steps have in common.
        budget_bytes: Most bytes of all logs, with messages that are not written yet and logs of earlier lives. The
            oldest logs are deleted first.
        earlier: Logs of earlier lives, which this life owns.

    Attributes:
        problem: Why nothing is logged any more; empty while messages are logged.
    """

    def __init__(
        self, directory: Path, header: LogHeader, budget_bytes: int, earlier: Iterable[SealedLog] = ()
    ) -> None:
        self.problem = ""
        self._directory, self._budget = directory, budget_bytes
        self._header = header
        self._sizes: dict[_Log, int] = {}
        """Bytes of each log, those of earlier lives first, in the order in which they are deleted."""
        for sealed in sorted(earlier, key=lambda sealed: sealed.header.step):
            self._sizes[_Log(sealed.header.step, sealed.path)] = sealed.header.nbytes
        self._sent: Counter[Channel] = Counter()
        self._now: _Log | None = None
        self._failure = ""
        self._waiting = 0
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        self._stream: torch.cuda.Stream | None = None
        self._tasks = TaskThread(ThreadName.UPSTREAM, self._failed)

    @property
    def nbytes(self) -> int:
        """The bytes of all logs, including messages that are not written yet."""
        return sum(self._sizes.values())

    def continue_history(self, history: int) -> None:
        """Makes new logs continue those of ``history`` (``LogHeader``), since not all ranks went back."""
        self._header = replace(self._header, history=history)

    def continue_generation(self, generation: int) -> None:
        """Gives new logs the generation of the checkpoints from now on (``CheckpointSession.generation``)."""
        self._header = replace(self._header, generation=generation)

    def step_begins(self, step: int) -> None:
        """Begins the log of ``step``."""
        if self._goes_on():
            self._now = _Log(step, log_path(self._directory, step))
            self._sizes[self._now] = 0
            self._sent.clear()
            self._tasks.put(lambda: self._begin(step))

    def append(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Copies one message, which may change when this returns. A copy from a GPU uses a separate stream."""
        now = self._now
        if now is None or not self._goes_on():
            return
        try:
            dtype_name(tensor.dtype)
        except UnsupportedError as error:
            self.give_up(f"{channel} cannot be logged: {error}")
            return
        nbytes = tensor.numel() * tensor.element_size()
        if not self._has_room(nbytes):
            self.give_up(
                f"the messages of step {now.step} alone take more than the budget of {self._budget:,} bytes: raise "
                "Memory(upstream_bytes=...)"
            )
            return
        with self._lock:
            self._waiting += nbytes
            waiting = self._waiting
        if waiting > self._budget:
            self.give_up(
                f"messages are written more slowly than they are sent: {waiting:,} bytes wait, and the budget is "
                f"{self._budget:,}. Use a tmpfs, or raise Memory(upstream_bytes=...)"
            )
            return
        try:
            copied, done = self._copied(tensor.detach())
        except RuntimeError as error:  # of torch, for want of memory
            self.give_up(f"{channel} cannot be copied: {error}")
            return
        self._sizes[now] += nbytes
        number = self._sent[channel]
        self._sent[channel] += 1
        self._tasks.put(lambda: self._write(channel, number, copied, done))

    def _copied(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Returns a copy in host memory, and the event at which it is complete."""
        if not tensor.is_cuda:
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            return copied.copy_(tensor), None
        self._stream = self._stream or torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        sent = tensor.clone()  # training may overwrite the tensor while this one is copied to the host
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(self._stream):
            copied.copy_(sent, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        sent.record_stream(self._stream)
        return copied, done

    def _goes_on(self) -> bool:
        """Returns whether messages are logged. Gives up if the thread could not write."""
        if self._failure:
            self.give_up(self._failure)
        return not self.problem

    def _has_room(self, nbytes: int) -> bool:
        """Deletes the oldest logs if there is no room. Returns False if there is still none."""
        while self.nbytes + nbytes > self._budget:
            oldest = next(iter(self._sizes))
            if oldest == self._now:
                return False
            self._remove(oldest)
        return True

    def _remove(self, log_of_step: _Log) -> None:
        del self._sizes[log_of_step]
        self._tasks.put(functools.partial(remove_log, log_of_step.path))

    def leave_out(self) -> None:
        """Drops the log of the step under way, because its messages would not be sent again in a replay."""
        now, self._now = self._now, None
        if now is not None:
            self._sizes.pop(now, None)
            self._tasks.put(self._abandon)

    def step_ends(self) -> threading.Event:
        """Ends the step under way. Returns an event that is set when its log is sealed."""
        sealed = threading.Event()
        self._tasks.put(self._seal)
        self._tasks.put(sealed.set)
        return sealed

    def drop(self, step: int) -> None:
        """Drops the logs up to ``step``, which no recovery needs any more, those of earlier lives too."""
        for superseded in [one for one in self._sizes if one.step <= step]:
            self._remove(superseded)

    def give_up(self, problem: str) -> None:
        """Ends logging, and drops all logs. Warns once."""
        if self.problem:
            return
        self.problem = problem
        message = "rank %d keeps no upstream log, so all ranks go back after a failure: %s"
        log.warning(message, self._header.rank, problem)
        self.drop(sys.maxsize)
        self._tasks.put(self._abandon)

    def close(self) -> None:
        """Waits until all messages are written, but not for a device whose peers died and that may never finish. Sealed
        logs stay. May be called twice."""
        if self._tasks.close(_CLOSE_SECS):
            self._abandon()
        else:
            log.warning("upstream messages are still not in memory; nobody waits for them any longer")

    # --- on the thread ---

    def _failed(self, error: Exception) -> None:
        """Ends the log, not training. The training thread warns."""
        self._abandon()
        self._failure = str(error)

    def _begin(self, step: int) -> None:
        self._abandon()
        self._writer = LogWriter(self._directory, step)

    def _write(self, channel: Channel, number: int, tensor: torch.Tensor, done: torch.cuda.Event | None) -> None:
        with self._lock:
            self._waiting -= tensor.numel() * tensor.element_size()
        if done is not None:
            done.synchronize()
        if self._writer is not None:
            self._writer.write(channel, number, tensor)

    def _seal(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.seal(self._header)

    def _abandon(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.remove()
