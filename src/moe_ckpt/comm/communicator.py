"""Communicators: one for a single process, and one for several, with a gloo group of its own.

The group is not that of training, so that no message about checkpoints is taken for a gradient. It is a gloo group
since messages are a few bytes of host memory. Messages are bytes and integers: there is no collective for objects, and
so no pickle.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.comm.lane import MessageLane
from moe_ckpt.comm.links import take_links
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import PeerLostError, StoreError
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.threads import ThreadName, named_pool

T = TypeVar("T")
_SHARED_STORE = (
    "torchrun shares one rendezvous store among all restarts of this job, so ranks that are started again may wait for "
    "the addresses of dead processes: use --standalone or --rdzv-backend=c10d, and set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which has no effect on --master-port (docs/torchrun.md)"
)

_WRITE_TIMEOUT = timedelta(days=30)
"""Between persist threads. They wait for other ranks' storage, which may hang for long, while training continues
without checkpoints. A lost peer is noticed by its connection, and by training itself."""


_AGREED, _PERSISTED = 1, 2
"""Tags of the two lanes' messages."""


class SoloCommunicator:
    """The communicator of a single process, which returns what it is given.

    Args:
        late: Token counts come from a device, for which another thread waits.
    """

    rank = 0
    world_size = 1
    agrees_late = False
    _waiting: ThreadPoolExecutor | None = None

    def __init__(self, *, late: bool = False) -> None:
        if late:
            self.agrees_late = True
            self._waiting = named_pool(ThreadName.AGREE)

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        return summed, largest

    def start_agreement(self, summed: Callable[[], Counts], largest: Counts) -> Future[tuple[Counts, Counts]]:
        if self._waiting is not None:
            return self._waiting.submit(lambda: (summed(), largest))
        agreed: Future[tuple[Counts, Counts]] = Future()
        agreed.set_result((summed(), largest))
        return agreed

    def broadcast(self, payload: bytes, source: int = 0) -> bytes:
        return payload

    def combine(self, columns: Sequence[bytes]) -> list[bytes] | None:
        return list(columns)

    def announce(self, payload: bytes) -> bytes:
        return payload

    def everyone(self, payload: bytes) -> list[bytes]:
        return [payload]

    def swap(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        if any(expected.values()):
            raise ValueError("one process has no peer to receive from")

    def enter(self, generation: int) -> None:
        pass

    def abort(self, cause: str) -> None:
        pass

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.shutdown(wait=False)


class GlooCommunicator:
    """The communicator of the ranks of the default process group: two lanes of one gloo group, each with a thread.

    One lane is for the training thread and for agreements, the other for the persist threads. Messages are combined
    along a tree (``comm.lane``), so that each of R ranks sends and receives O(log R) messages.

    Must be created on all ranks at the same point, after ``init_process_group``. No call of the training thread
    waits longer for a peer than ``timeout_secs`` and, while the group is made, the ten seconds by which torch looks
    again. ``combine`` and ``announce``, which are for the persist threads, wait for other ranks' storage
    (``_WRITE_TIMEOUT``).

    Args:
        timeout_secs: See above.

    Raises:
        PeerLostError: Here and in every call, when a peer did not come or answer in time, or after ``abort``.
        StoreError: A process of an earlier life of the run takes part.
    """

    agrees_late = True

    def __init__(self, timeout_secs: float) -> None:
        timeout = timedelta(seconds=timeout_secs)
        self._timeout_secs = timeout_secs
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        with self._waiting_for("all ranks to start checkpointing", _SHARED_STORE if shares_store() else ""):
            self._links = links = take_links(timeout)
        self._agreeing = MessageLane(ThreadName.AGREE, links, _AGREED, timeout)  # this one broadcasts
        self._persisting = MessageLane(ThreadName.MESSAGES, links, _PERSISTED, _WRITE_TIMEOUT)
        self._node = self._agreeing.node

    def enter(self, generation: int) -> None:
        self._agreeing.generation = self._persisting.generation = generation

    @contextmanager
    def _waiting_for(self, whom: str, hint: str = "") -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise PeerLostError(self.rank, whom, self._timeout_secs, cause, hint) from error

    @contextmanager
    def _agreement(self, whom: str) -> Iterator[None]:
        """Aborts the persist threads' lane, too, if a peer is lost: they would wait for it for very long."""
        try:
            with self._waiting_for(whom):
                yield
        except PeerLostError as error:
            self._persisting.abort(error)
            raise

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        return self.start_agreement(lambda: summed, largest).result()

    def start_agreement(self, summed: Callable[[], Counts], largest: Counts) -> Future[tuple[Counts, Counts]]:
        maxima = largest.copy()

        def reduce() -> tuple[Counts, Counts]:
            counts = summed()  # may wait for a device
            mine = torch.from_numpy(np.concatenate([counts.reshape(-1), maxima.reshape(-1)]))
            with self._agreement("all ranks to come to the same step"):
                reduced = self._agreeing.reduce(mine, counts.size).numpy()
            return reduced[: counts.size].reshape(counts.shape), reduced[counts.size :].reshape(maxima.shape)

        return self._agreeing.submit(reduce)

    def broadcast(self, payload: bytes, source: int = 0) -> bytes:
        whom = "the other ranks to take an answer" if source == self.rank else f"an answer of rank {source}"

        def send() -> bytes:
            with self._agreement(whom):
                return self._agreeing.broadcast(payload, source)

        return self._agreeing.submit(send).result()

    def swap(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        def exchange() -> None:
            with self._agreement("the other ranks to send what they hold"):
                self._agreeing.swap(outgoing, expected)

        self._agreeing.submit(exchange).result()

    def everyone(self, payload: bytes) -> list[bytes]:
        def gather() -> list[bytes]:
            with self._agreement("all ranks to tell what they have"):
                columns = self._combine(self._agreeing, [struct.pack("<Q", len(payload)), payload], "found")
                message = b"" if columns is None else b"".join(columns)
                whole = self._announce(self._agreeing, message, "what all ranks found")
            sizes = struct.unpack_from(f"<{self.world_size}Q", whole)
            ends = (np.cumsum(sizes) + 8 * self.world_size).tolist()
            return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]

        return self._agreeing.submit(gather).result()

    def _persist(self, job: Callable[[], T]) -> T:
        """Runs ``job`` on the lane of the persist threads, and returns its result."""

        def done() -> T:
            try:
                return job()
            except PeerLostError as error:
                self._persisting.await_cause(error)  # then ``submit`` raises that, which names the lost peer
                raise

        return self._persisting.submit(done).result()

    def announce(self, payload: bytes) -> bytes:
        return self._persist(lambda: self._announce(self._persisting, payload))

    def _announce(self, lane: MessageLane, payload: bytes, what: str = "whether a checkpoint is committed") -> bytes:
        if self._node.parent is not None:
            with self._waiting_for(f"rank 0 to say {what}"):
                payload = lane.receive(self._node.parent)
        with self._waiting_for(f"the other ranks to hear {what}"):
            for child in reversed(self._node.children):
                lane.send(payload, child)
        return payload

    def combine(self, columns: Sequence[bytes]) -> list[bytes] | None:
        return self._persist(lambda: self._combine(self._persisting, columns))

    def _combine(self, lane: MessageLane, columns: Sequence[bytes], what: str = "written") -> list[bytes] | None:
        collected = [columns]
        for child in self._node.children:
            with self._waiting_for(f"rank {child} to say what it has {what}"):
                collected.append(_unpacked(lane.receive(child)))
        joined = [b"".join(parts) for parts in zip(*collected, strict=True)]
        if self._node.parent is None:
            return joined
        with self._waiting_for(f"rank 0 to collect what was {what}"):
            lane.send(_packed(joined), self._node.parent)
        return None

    def abort(self, cause: str) -> None:
        error = PeerLostError(self.rank, "the other ranks", self._timeout_secs, cause)
        for lane in (self._agreeing, self._persisting):
            lane.abort(error)

    def close(self) -> None:
        closed = PeerLostError(self.rank, "the other ranks", self._timeout_secs, "this rank's session has ended")
        agreeing, persisting = (lane.close(closed) for lane in (self._agreeing, self._persisting))
        if agreeing and persisting:
            self._links.give_back()
        elif not persisting:
            # The thread waits without end. If its wait ended while Python exits, that would abort the process.
            self._persisting.abort(closed)
            self._links.cut()
            self._persisting.close(closed)


def _packed(payloads: Sequence[bytes]) -> bytes:
    """Joins several payloads into one, for ``_unpacked``."""
    return struct.pack(f"<Q{len(payloads)}Q", len(payloads), *map(len, payloads)) + b"".join(payloads)


def _unpacked(packed: bytes) -> list[bytes]:
    [count] = struct.unpack_from("<Q", packed)
    sizes = struct.unpack_from(f"<{count}Q", packed, 8)
    columns, at = [], 8 * (count + 1)
    for size in sizes:
        columns.append(packed[at : at + size])
        at += size
    return columns


def largest(comm: Communicator, numbers: Sequence[int]) -> list[int]:
    """Returns the maximum over ranks of each number. A collective of the training thread."""
    _, maxima = comm.agree(np.zeros(0, dtype=np.int64), np.asarray(numbers, dtype=np.int64))
    return [int(number) for number in maxima]


def answers_of(comm: Communicator, answer: Any) -> list[Any]:
    """Returns what each rank answered, in the order of the ranks. A collective of the training thread.

    Args:
        comm: The ranks.
        answer: This rank's: plain data, or a record, which arrives as a dict.
    """
    return [json.loads(raw) for raw in comm.everyone(json.dumps(answer, default=vars).encode())]


def make_communicator(timeout_secs: float, *, late: bool = False) -> SoloCommunicator | GlooCommunicator:
    """Returns the communicator for the present default process group, if there is one.

    Args:
        timeout_secs: Longest wait for a peer.
        late: One process agrees late, too; see ``SoloCommunicator``.

    Raises:
        PeerLostError: not all ranks of the process group came here in time.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return SoloCommunicator(late=late)
    if shares_store() and dist.get_rank() == 0 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        announce(_SHARED_STORE, level=logging.WARNING)
    return GlooCommunicator(timeout_secs)


def shares_store() -> bool:
    """Returns True under a torchrun whose restarts all use one rendezvous store, with the addresses of dead
    processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
