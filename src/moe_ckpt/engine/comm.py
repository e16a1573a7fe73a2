"""Communicators: none for one process, gloo groups of our own for several.

The groups are separate from training's, so that a checkpoint message can never be taken for a gradient;
they are gloo because the messages are a few bytes of host memory. Messages are bytes and integers: no
object collective, hence no pickle.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.core.tokens import Counts


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

    Must be created on every rank at the same point, after ``init_process_group``.
    """

    def __init__(self, timeout_secs: float) -> None:
        timeout = timedelta(seconds=timeout_secs)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._training = dist.new_group(backend="gloo", timeout=timeout)
        self._persist = dist.new_group(backend="gloo", timeout=timeout)

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        sums = torch.from_numpy(np.ascontiguousarray(summed).copy())
        maxima = torch.from_numpy(np.ascontiguousarray(largest).copy())
        if sums.numel():
            dist.all_reduce(sums, dist.ReduceOp.SUM, self._training)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, self._training)
        return sums.numpy(), maxima.numpy()

    def broadcast(self, payload: bytes) -> bytes:
        return self.share(payload, 0)

    def share(self, payload: bytes, source: int) -> bytes:
        return _broadcast(payload, self.rank, source, self._training)

    def announce(self, payload: bytes) -> bytes:
        return _broadcast(payload, self.rank, 0, self._persist)

    def gather(self, payload: bytes) -> list[bytes] | None:
        if self.rank:
            dist.send(torch.tensor([len(payload)]), dst=0, group=self._persist)
            dist.send(_tensor(payload), dst=0, group=self._persist)
            return None
        received = [payload]
        for source in range(1, self.world_size):
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, src=source, group=self._persist)
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(body, src=source, group=self._persist)
            received.append(body.numpy().tobytes())
        return received

    def close(self) -> None:
        """The groups end with the default group; destroying them one by one would be one more
        collective, at a time when peers may be gone."""


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
    """The communicator for the process group that is set up now, if any."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooCommunicator(timeout_secs)
    return SoloCommunicator()
