"""Message lanes on a gloo group of our own: messages in order, and nobody stuck behind a lost peer.

Every lane has one thread, which alone sends and receives on it. Lanes of the same ranks share one group, since making a
group takes as long as hundreds of messages, and tell their messages apart by gloo's tags.

Whoever wants something of the peers submits a job and waits for its future, so that ``abort`` sets everybody free at
once, though gloo's own wait goes on, on a daemon thread, until its timeout: torch has no way to end it, but by closing
the connections of the whole group (``Links.cut``).

Small messages are combined over a binomial tree, which is rooted at rank 0, and which every rank computes alone. The
parent of a rank is the rank without its lowest bit that is set. So the subtree of a rank is the ranks that follow it,
up to that bit, and what a subtree sends up is in the order of ranks.
"""

from __future__ import annotations

import queue
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
from moe_ckpt.threads import ThreadName, named_thread


@dataclass(frozen=True)
class TreeNode:
    """One rank's place in the tree over which ranks combine small messages.

    Attributes:
        rank: Which.
        ranks: How many there are, R.
    """

    rank: int
    ranks: int

    @property
    def parent(self) -> int | None:
        """None for rank 0."""
        return self.rank & (self.rank - 1) if self.rank else None

    @property
    def children(self) -> tuple[int, ...]:
        """In ascending order, smallest subtree first."""
        children = []
        bit = 1
        while self.rank + bit < self.ranks and not self.rank & bit:
            children.append(self.rank + bit)
            bit <<= 1
        return tuple(children)


_CHUNK_NBYTES = 64 << 20
_IDLE_SECS = 1.0
"""Longest wait, at the end, for a thread that has nothing to do unless a peer is gone."""

_CLOSED_BY_A_TIMEOUT = "Application timeout caused pair closure"
"""What gloo says to every wait but the one that timed out."""

T = TypeVar("T")
_Jobs = queue.SimpleQueue[Callable[[], None] | None]


class MessageLane:
    """Point-to-point messages between ranks, each with the generation that it belongs to.

    Made on all ranks alike. ``submit`` may be called on any thread; everything else only by jobs. On one lane
    of the same links at most may there be broadcasts, which have no tags.

    Args:
        name: Of the thread.
        links: Of all ranks.
        tag: Of the lane's messages; another one than those of the other lanes of the same links.
        timeout: Longest wait for a peer.

    Attributes:
        node: This rank's place in the tree of the ranks.
        generation: Life of the run that messages belong to.
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
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread = named_thread(name, _in_order, self._jobs)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Returns the future result of ``job``, which runs when those before it are done.

        Raises:
            PeerLostError: ``abort`` or ``close`` was called. A job that was submitted before ``abort`` raises it from
                its future.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._aborted is not None:
                raise self._aborted
            self._waited_for.add(future)
            self._jobs.put(lambda: self._carry_out(job, future))  # locked: nothing may lie behind the end
        return future

    def _carry_out(self, job: Callable[[], T], future: Future[T]) -> None:
        if future.done():  # aborted while it waited for its turn
            return
        try:
            result = job()
        except BaseException as error:  # the thread's boundary: raised where the result is waited for
            self._links.is_sound = False  # peers may wait for what it had still to send
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
        """Everybody who waits for this lane gets ``error`` now, and so does every later call. On any thread."""
        self._links.is_sound = False
        with self._lock:
            self._aborted = self._aborted or error
            stuck, self._waited_for = self._waited_for, set()
        for future in stuck:
            future.set_exception(self._aborted)
        self._is_aborted.set()

    def await_cause(self, error: BaseException) -> None:
        """A job failed: if that is because a wait on another lane of these links timed out, waits for its ``abort``."""
        if _CLOSED_BY_A_TIMEOUT in str(error):
            self._is_aborted.wait(_IDLE_SECS)

    def close(self, error: PeerLostError) -> bool:
        """Ends the thread once it has done what was submitted, unless it waits for a peer.

        Args:
            error: What ``submit`` raises from here on: whoever comes late must not wait for a thread that is gone.

        Returns:
            Whether it has ended. The group stays: see ``Links``.
        """
        with self._lock:
            self._aborted = self._aborted or error
            self._jobs.put(None)
        self._thread.join(_IDLE_SECS)
        return not self._thread.is_alive()

    # --- by jobs ---

    def send(self, payload: bytes, target: int) -> None:
        """By point-to-point calls, because only they take a timeout of their own."""
        for part in (self._head(payload), _tensor(payload)):
            self._wait(self._send(part, target))

    def receive(self, source: int) -> bytes:
        """Raises ``StoreError`` for a message of another life of the run."""
        head = torch.zeros(2, dtype=torch.int64)
        self._wait(self._receive(head, source))
        body = torch.empty(int(head[0]), dtype=torch.uint8)
        self._wait(self._receive(body, source))
        self._require_own(int(head[1]), int(head[1]))
        return body.numpy().tobytes()

    def broadcast(self, payload: bytes, source: int) -> bytes:
        """Rank ``source``'s payload, on every rank."""
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

        In as many rounds as there are ranks, in each of which a rank has at most one peer to send to, and one to
        receive from.

        Args:
            outgoing: Rank -> what it gets of this one.
            expected: Rank -> where what it sends goes.
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
        """Element-wise over ranks, along the tree: the sum of the first ``summed`` numbers, the maximum of the rest."""
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


def _in_order(jobs: _Jobs) -> None:
    """Do one job after the other, until None. Holds no process group between two: none must outlive the interpreter."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    for begin in range(0, tensor.numel(), _CHUNK_NBYTES):
        yield tensor[begin : begin + _CHUNK_NBYTES]


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
