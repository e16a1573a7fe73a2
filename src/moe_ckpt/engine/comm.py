"""Communicators: none for one process, gloo groups of our own for several.

The groups are separate from training's, so that a checkpoint message can never be taken for a gradient;
they are gloo because the messages are a few bytes of host memory. Messages are bytes and integers: no
object collective, hence no pickle.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import PeerLostError
from moe_ckpt.notices import announce

_SHARED_STORE = (
    "torchrun shares one rendezvous store among all restarts of this job, so ranks that are started again may wait for "
    "the addresses of dead processes: use --standalone or --rdzv-backend=c10d, and set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which has no effect on --master-port (docs/torchrun.md)"
)

_WRITE_TIMEOUT = timedelta(days=30)
"""Between persist threads. A rank that waits there waits for another's storage, which may hang for long: training
goes on without checkpoints meanwhile. A peer that is gone is noticed by its connection, and by training itself."""


class SoloCommunicator:
    """One process: nothing to agree on."""

    rank = 0
    world_size = 1

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        return summed, largest

    def broadcast(self, payload: bytes) -> bytes:
        return payload

    def share(self, payload: bytes, source: int) -> bytes:
        return payload

    def gather(self, payload: bytes) -> list[bytes] | None:
        return [payload]

    def announce(self, payload: bytes) -> bytes:
        return payload

    def close(self) -> None:
        pass


class GlooCommunicator:
    """All ranks of the default process group, on two gloo groups: one per calling thread.

    Must be created on every rank at the same point, after ``init_process_group``. No call of the training thread waits
    longer for a peer than ``timeout_secs`` and, while the groups are made, the ten seconds by which torch looks again.
    ``gather`` and ``announce``, which are for the persist threads, wait for other ranks' storage (``_WRITE_TIMEOUT``).

    Raises:
        PeerLostError: here and in every call, when a peer did not come or answer in time.
    """

    def __init__(self, timeout_secs: float) -> None:
        timeout = timedelta(seconds=timeout_secs)
        self._timeout_secs = timeout_secs
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        with self._waiting_for("all ranks to start checkpointing", _SHARED_STORE if shares_store() else ""):
            self._training = dist.new_group(backend="gloo", timeout=timeout)
            self._persist = dist.new_group(backend="gloo", timeout=timeout)

    @contextmanager
    def _waiting_for(self, whom: str, hint: str = "") -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise PeerLostError(self.rank, whom, self._timeout_secs, cause, hint) from error

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        sums = torch.from_numpy(np.ascontiguousarray(summed).copy())
        maxima = torch.from_numpy(np.ascontiguousarray(largest).copy())
        with self._waiting_for("all ranks to come to the same step"):
            if sums.numel():
                dist.all_reduce(sums, dist.ReduceOp.SUM, self._training)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, self._training)
        return sums.numpy(), maxima.numpy()

    def broadcast(self, payload: bytes) -> bytes:
        return self.share(payload, 0)

    def share(self, payload: bytes, source: int) -> bytes:
        whom = "the other ranks to take an answer" if source == self.rank else f"an answer of rank {source}"
        with self._waiting_for(whom):
            return _broadcast(payload, self.rank, source, self._training)

    def announce(self, payload: bytes) -> bytes:
        if self.rank:
            with self._waiting_for("rank 0 to say whether a checkpoint is committed"):
                return self._receive(0)
        with self._waiting_for("the other ranks to hear whether a checkpoint is committed"):
            for rank in range(1, self.world_size):
                self._send(payload, rank)
        return payload

    def gather(self, payload: bytes) -> list[bytes] | None:
        if self.rank:
            with self._waiting_for("rank 0 to collect what was written"):
                self._send(payload, 0)
            return None
        received = [payload]
        for source in range(1, self.world_size):
            with self._waiting_for(f"rank {source} to say that it has written its part"):
                received.append(self._receive(source))
        return received

    def _send(self, payload: bytes, target: int) -> None:
        """On the persist threads' group. By point-to-point calls, because only they take a timeout of their own."""
        for part in (torch.tensor([len(payload)]), _tensor(payload)):
            _wait(dist.isend(part, dst=target, group=self._persist))

    def _receive(self, source: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        _wait(dist.irecv(size, src=source, group=self._persist))
        body = torch.empty(int(size), dtype=torch.uint8)
        _wait(dist.irecv(body, src=source, group=self._persist))
        return body.numpy().tobytes()

    def close(self) -> None:
        """The groups end with the default group; destroying them one by one would be one more
        collective, at a time when peers may be gone."""


def _wait(work: dist.Work | None) -> None:
    if work is not None:  # None: this rank is not of the group
        work.wait(_WRITE_TIMEOUT)


def _broadcast(payload: bytes, rank: int, source: int, group: dist.ProcessGroup | None) -> bytes:
    size = torch.tensor([len(payload)])
    dist.broadcast(size, src=source, group=group)
    body = _tensor(payload) if rank == source else torch.empty(int(size), dtype=torch.uint8)
    if int(size):
        dist.broadcast(body, src=source, group=group)
    return body.numpy().tobytes()


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def make_communicator(timeout_secs: float) -> SoloCommunicator | GlooCommunicator:
    """The communicator for the process group that is set up now, if any.

    Raises:
        PeerLostError: not all ranks of the process group came here in time.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return SoloCommunicator()
    if shares_store() and dist.get_rank() == 0 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        announce(_SHARED_STORE, level=logging.WARNING)
    return GlooCommunicator(timeout_secs)


def shares_store() -> bool:
    """True under a torchrun whose workers meet, in every restart, in a store that keeps what dead ones wrote."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
