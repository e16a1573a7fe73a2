"""Message lanes on a gloo group of our own: messages in order, and no caller stuck because of a lost peer.

A lane has one thread, which alone sends and receives on it. Lanes of the same ranks share one group, since making a
group takes as long as hundreds of messages, and tell their messages apart by gloo's tags.

A caller submits a job and waits for its future, so that ``abort`` ends all waits of callers at once. Gloo's own wait
continues on a daemon thread until its timeout: torch can end it only by closing the connections of the whole group
(``Links.cut``).

Small messages are combined over a binomial tree with rank 0 as its root, which each rank computes alone. The parent of
a rank is the number without its lowest set bit. So the subtree of a rank has the ranks that follow it, up to that bit,
and its messages arrive in the order of ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_ckpt.comm.links import Links
from moe_ckpt.errors import PeerLostError, stale_generation
from moe_ckpt.threads import TaskThread, ThreadName


@dataclass(frozen=True)
class TreeNode:
    """One rank's node in the tree over which ranks combine small messages.

    Attributes:
        rank: Of the node.
        ranks: Number of ranks, R.
    """

    rank: int
    ranks: int

    @property
    def parent(self) -> int | None:
        """The rank above; None for rank 0."""
        return self.rank & (self.rank - 1) if self.rank else None

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks below, in ascending order: smallest subtree first."""
        children = []
        bit = 1
        while self.rank + bit < self.ranks and not self.rank & bit:
            children.append(self.rank + bit)
            bit <<= 1
        return tuple(children)


_CHUNK_NBYTES = 64 << 20
_IDLE_SECS = 1.0
"""Longest wait at the end for a thread, which has nothing to do unless a peer is lost."""

_CLOSED_BY_A_TIMEOUT = "Application timeout caused pair closure"
"""Part of the error that gloo raises in all waits of a group when one of them times out."""

T = TypeVar("T")


class MessageLane:
    """Messages between ranks, each with the generation of its sender.

    All ranks make the same lanes. ``submit`` may be called on any thread, all other methods only by jobs. At most one
    lane of the same links may broadcast, since broadcasts have no tags.

    Args:
        name: Of the thread.
        links: Of all ranks.
        tag: Of the lane's messages, different from those of other lanes of the same links.
        timeout: Longest wait for a peer.

    Attributes:
        node: Of this rank in the tree of the ranks.
        generation: Number of this life of the run.
    """

    def __init__(self, name: ThreadName, links: Links, tag: int, timeout: timedelta) -> None:
        self._links, self._group, self._tag = links, links.group, links.first_tag + tag
        self.node = TreeNode(dist.get_rank(), dist.get_world_size())
        self.generation = 0
        self._timeout = timeout
        self._lock = threading.Lock()
        self._waited_for: set[Future[Any]] = set()
        self._aborted: PeerLostError | None = None
        self._is_aborted = threading.Event()
        self._jobs = TaskThread(name)
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Returns the future result of ``job``, which runs after earlier jobs.

        Raises:
            PeerLostError: ``abort`` or ``close`` was called. A job that was submitted before ``abort`` raises it from
                its future.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._aborted is not None:
                raise self._aborted
            self._waited_for.add(future)
            self._jobs.put(partial(self._carry_out, job, future))  # locked: no job may follow the end
        return future

    def _carry_out(self, job: Callable[[], T], future: Future[T]) -> None:
        if future.done():  # aborted while it waited for its turn
            return
        try:
            result = job()
        except BaseException as error:  # the thread's boundary: raised where the result is waited for
            self._links.is_sound = False  # peers may still wait for messages of the job
            self._complete(future, partial(future.set_exception, error))
        else:
            self._complete(future, partial(future.set_result, result))

    def _complete(self, future: Future[Any], complete: Callable[[], None]) -> None:
        with self._lock:
            mine = future in self._waited_for
            self._waited_for.discard(future)
        if mine:
            complete()

    def abort(self, error: PeerLostError) -> None:
        """Raises ``error`` in all callers that wait for this lane, and in every later call. On any thread."""
        self._links.is_sound = False
        with self._lock:
            self._aborted = self._aborted or error
            stuck, self._waited_for = self._waited_for, set()
        for future in stuck:
            future.set_exception(self._aborted)
        self._is_aborted.set()

    def await_cause(self, error: BaseException) -> None:
        """Waits for ``abort`` if a job failed because a wait on another lane of these links timed out."""
        if _CLOSED_BY_A_TIMEOUT in str(error):
            self._is_aborted.wait(_IDLE_SECS)

    def close(self, error: PeerLostError) -> bool:
        """Ends the thread after the jobs that were submitted, unless it waits for a peer.

        Args:
            error: Raised by later calls of ``submit``, which must not wait for a thread that has ended.

        Returns:
            True if the thread has ended. The group stays: see ``Links``.
        """
        with self._lock:
            self._aborted = self._aborted or error
        return self._jobs.close(_IDLE_SECS)

    # --- by jobs ---

    def send(self, payload: bytes, target: int) -> None:
        """Sends a message, by point-to-point calls, since only they take a timeout."""
        for part in (self._head(payload), _tensor(payload)):
            self._wait(self._send(part, target))

    def receive(self, source: int) -> bytes:
        """Returns the next message of a rank. Raises ``StoreError`` if it is of another life of the run."""
        head = torch.zeros(2, dtype=torch.int64)
        self._wait(self._receive(head, source))
        body = torch.empty(int(head[0]), dtype=torch.uint8)
        self._wait(self._receive(body, source))
        self._require_own(int(head[1]), int(head[1]))
        return body.numpy().tobytes()

    def broadcast(self, payload: bytes, source: int) -> bytes:
        """Returns the payload of rank ``source``, on every rank."""
        mine = self.node.rank == source
        head = self._head(payload)
        dist.broadcast(head, src=source, group=self._group)
        body = _tensor(payload) if mine else torch.empty(int(head[0]), dtype=torch.uint8)
        if int(head[0]):
            dist.broadcast(body, src=source, group=self._group)
        self._require_own(int(head[1]), int(head[1]))
        return body.numpy().tobytes()

    def swap(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Sends and receives uint8 tensors, whose sizes both sides know, without copying them.

        There are as many rounds as ranks. In each, a rank sends to one peer at most, and receives from one.

        Args:
            outgoing: Rank -> tensors to send.
            expected: Rank -> tensors to fill.
        """
        me, ranks = self.node.rank, self.node.ranks
        for distance in range(1, ranks):
            target, source = (me + distance) % ranks, (me - distance) % ranks
            works = [self._send(part, target) for tensor in outgoing.get(target, ()) for part in _chunks(tensor)] + [
                self._receive(part, source) for tensor in expected.get(source, ()) for part in _chunks(tensor)
            ]
            for work in works:
                self._wait(work)

    def reduce(self, numbers: torch.Tensor, summed: int) -> torch.Tensor:
        """Returns the sum over ranks of the first ``summed`` numbers, and the maximum of each of the others."""
        mine = torch.cat([numbers, torch.tensor([self.generation, -self.generation])])
        theirs = torch.empty_like(mine)
        for child in self.node.children:
            self._wait(self._receive(theirs, child))
            mine[:summed] += theirs[:summed]
            torch.maximum(mine[summed:], theirs[summed:], out=mine[summed:])
        if self.node.parent is not None:
            self._wait(self._send(mine, self.node.parent))
            self._wait(self._receive(mine, self.node.parent))
        for child in reversed(self.node.children):
            self._wait(self._send(mine, child))
        self._require_own(-int(mine[-1]), int(mine[-2]))
        return mine[:-2]

    def _require_own(self, oldest: int, newest: int) -> None:
        if not oldest == newest == self.generation:
            raise stale_generation(self.node.rank, self.generation, (oldest, newest))

    def _head(self, payload: bytes) -> torch.Tensor:
        return torch.tensor([len(payload), self.generation])

    def _send(self, data: torch.Tensor, target: int) -> dist.Work | None:
        return dist.isend(data, dst=target, group=self._group, tag=self._tag)

    def _receive(self, data: torch.Tensor, source: int) -> dist.Work | None:
        return dist.irecv(data, src=source, group=self._group, tag=self._tag)

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:  # None: this rank is not of the group
            work.wait(self._timeout)


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for begin in range(0, tensor.numel(), _CHUNK_NBYTES):
        yield tensor[begin : begin + _CHUNK_NBYTES]


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
