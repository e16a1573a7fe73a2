"""Copies sealed memory slots to peers while training continues.

A rank has one connection to each rank that holds its copies, and one from each rank whose copies it holds, each with a
thread that sleeps in the kernel while bytes move. So a peer that is slow, paused or gone delays only its own copies;
after a timeout it gets no more copies in this life of the run.

At the beginning (``open_replication``) all ranks agree on their nodes, on who holds whose copies, and on addresses.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median
from typing import Any

from moe_ckpt.comm.communicator import answers_of
from moe_ckpt.core.user_text import name_ranks
from moe_ckpt.errors import ConfigError, StoreError
from moe_ckpt.memory.directory import node_of
from moe_ckpt.memory.options import Memory
from moe_ckpt.memory.slot import Slot
from moe_ckpt.notices import announce
from moe_ckpt.peers.messages import Answer, CopyReceiver, SealedSlot, Status, send_copy
from moe_ckpt.peers.replica_placement import ReplicaPlacement, place_replicas
from moe_ckpt.peers.store import ReplicaStore
from moe_ckpt.peers.wire import SECRET_NBYTES, Cutter, Link, Listener, StaleHelloError, Wire, connect
from moe_ckpt.ports import Communicator, GatedTransfer, TransferGate
from moe_ckpt.threads import ThreadName, named_thread

log = logging.getLogger("moe_ckpt")
"""Errors are logged as text: a kept log record would keep the error, its frames, and the mapped bytes they refer to."""

_RECENT_COPIES = 5
_TELLING_NBYTES = 1 << 16
"""Least bytes of a snapshot from which a rate is measured; fewer would measure the latency of messages."""
_TICK_SECS = 1e-6
_PATIENCE = 0.25
"""Portion of the timeout for which a holder may wait for its own snapshot of the step, and for which sends may be held
back."""
_CUT_SECS = 5.0
"""Longest wait for a thread after its connection was cut."""


@dataclass(frozen=True)
class Roster:
    """The ranks that take part in one life of a run; equal on every rank, except ``rank``.

    Attributes:
        rank: Rank of this process.
        run_id: Of the store.
        generation: Of this life.
        placement: The holders of each rank's copies.
        addresses: Address of each rank's ``Listener``.
        secret: Random secret of this life.
    """

    rank: int
    run_id: str
    generation: int
    placement: ReplicaPlacement
    addresses: tuple[tuple[str, int], ...]
    secret: bytes


class _Copies:
    """The copies of this rank's slots of one snapshot, until all peers have answered or are given up."""

    def __init__(self, sequence: int, shares: tuple[SealedSlot, ...], peers: int) -> None:
        self.sequence = sequence
        self.shares = shares
        self.future: Future[int] = Future()
        self._open = peers
        self._accepted = 0
        self._lock = threading.Lock()

    def answered(self, *, accepted: bool) -> None:
        """Takes one peer's answer; one that will never answer has not accepted."""
        with self._lock:
            self._open -= 1
            self._accepted += accepted
            if self._open:
                return
        self.future.set_result(self._accepted)


class _Sender:
    """Sends the copies of ``owner`` to one peer, one after the other, on a separate thread."""

    def __init__(self, owner: Replicator, peer: int) -> None:
        self.peer, self.lost = peer, ""
        self.sent_bytes = self.saved_bytes = 0
        self.rates: deque[float] = deque(maxlen=_RECENT_COPIES)
        self._owner, self._roster = owner, owner.roster
        self._said: set[Status] = set()
        self._queue: queue.SimpleQueue[_Copies | None] = queue.SimpleQueue()
        self.thread = named_thread(ThreadName.REPLICATE, self._run, suffix=f"-to-{peer}")
        self.thread.start()

    def put(self, copies: _Copies | None) -> None:
        """Queues copies; None ends the thread."""
        self._queue.put(copies)

    def _run(self) -> None:
        roster, wire = self._roster, None
        link = Link(roster.generation, roster.rank, self.peer)
        address = roster.addresses[self.peer]
        try:
            cutter = self._owner.cutter
            wire = cutter.add(connect(address, roster.secret, link, self._owner.timeout_secs, lambda: cutter.is_over))
        except OSError as error:
            self._give_up(error)
        while (copies := self._queue.get()) is not None:
            if wire is not None and not self.lost:
                self._send(wire, copies)
            else:
                copies.answered(accepted=False)
            del copies  # a removed slot takes room for as long as anything refers to its bytes
        if wire is not None:
            wire.close()

    def _send(self, wire: Wire, copies: _Copies) -> None:
        sent, took, held = 0, 0.0, True
        for more, share in zip(range(len(copies.shares) - 1, -1, -1), copies.shares, strict=True):
            try:
                answer, nbytes, secs = send_copy(wire, copies.sequence, share, self._held_back, more)
            except OSError as error:
                wire.cut()
                self._give_up(error, share.step)
                copies.answered(accepted=False)
                return
            held = answer.status is Status.HELD
            if not held:
                self._say_refused(answer, share.step)
                break
            self.sent_bytes += nbytes + len(share.header)
            self.saved_bytes += share.memory.numel() - nbytes
            sent, took = sent + nbytes, took + secs
        if held and sent >= _TELLING_NBYTES:
            self.rates.append(sent / max(took, _TICK_SECS))
        copies.answered(accepted=held)

    def _held_back(self, nbytes: int) -> GatedTransfer | None:
        gate = self._owner.gate
        rate = median(tuple(self.rates)) if self.rates else None
        return None if gate is None else gate.send(nbytes, rate, _PATIENCE * self._owner.timeout_secs)

    def _give_up(self, error: OSError, step: int | None = None) -> None:
        what = "it did not connect" if step is None else f"it did not take the copy of step {step}"
        self.lost = f"{what}: {type(error).__name__}: {error}"
        if not self._owner.cutter.is_over:
            log.warning(
                "rank %d gets no more copies of rank %d until the run is restarted: %s (%d steps behind)",
                *(self.peer, self._roster.rank, str(error), self._owner.lag_steps),
            )

    def _say_refused(self, answer: Answer, step: int) -> None:
        """Warns once for each reason."""
        if answer.status in self._said:
            return
        self._said.add(answer.status)
        if answer.status is Status.FULL:
            log.warning(
                "rank %d has no room for the copy of step %d of rank %d: %s bytes are needed in its memory directory, "
                "%s are free there, or left by the memory limit of its job. It gets no copy until there is room",
                *(self.peer, step, self._roster.rank, f"{answer.needed:,}", f"{answer.free:,}"),
            )
        else:
            log.warning("rank %d did not accept the copy of step %d; see its log", self.peer, step)


class Replicator:
    """One rank's part in the copies of one life of a run. Made by ``peers.replication``.

    ``submit`` is called on the persist thread, ``release`` and ``release_except`` on any, ``close`` last.

    Args:
        roster: The ranks that take part.
        listener: Listener of this rank, whose address is in the roster.
        make: Makes a slot in this rank's memory directory.
        timeout_secs: Longest time in which a peer takes or gives no byte.
        gate: Holds sends back; None: they go at once.

    Attributes:
        cutter: Ends all connections at the end.
        in_flight: Number of submitted snapshots for which some peer has not answered.
        store: Keeps the copies of other ranks.
    """

    def __init__(
        self,
        roster: Roster,
        listener: Listener,
        make: Callable[[int], Slot],
        timeout_secs: float,
        gate: TransferGate | None = None,
    ) -> None:
        self.roster, self.timeout_secs, self.gate = roster, timeout_secs, gate
        self.cutter = Cutter()
        self._newest_step: int | None = None
        self._copied_step: int | None = None
        self.in_flight = 0
        self._lock = threading.Lock()
        sources = roster.placement.sources_of[roster.rank]
        self.store = ReplicaStore(make)
        self._receivers: list[threading.Thread] = []
        self._accepting = named_thread(ThreadName.REPLICATE, self._accept, listener, sources)
        self._accepting.start()
        self._senders = [_Sender(self, peer) for peer in roster.placement.peers_of[roster.rank]]

    # --- as a source ---

    def submit(self, sequence: int, *shares: SealedSlot) -> Future[int]:
        """Sends a snapshot's sealed slots to this rank's peers.

        Args:
            sequence: Of the snapshot; greater than all before, equal on every rank.
            shares: Slots to send, one after the other; none if this rank has nothing to send.

        Returns:
            A future: the number of peers that hold verified, sealed copies of all slots, once each of them has answered
            or is given up. The slots must not change until it is done.
        """
        if not shares or not self._senders:
            nothing: Future[int] = Future()
            nothing.set_result(0)
            return nothing
        copies, step = _Copies(sequence, shares, len(self._senders)), shares[-1].step
        with self._lock:
            self._newest_step = step
            self._copied_step = step - 1 if self._copied_step is None else self._copied_step
            self.in_flight += 1
        copies.future.add_done_callback(lambda done: self._note(done, step))
        for sender in self._senders:
            sender.put(copies)
        return copies.future

    def left_out(self, step: int) -> None:
        """Notes that the snapshot of ``step`` is not sent, because peers have not taken earlier ones."""
        with self._lock:
            self._newest_step = step

    def all_hold(self, done: Future[int]) -> bool:
        """Returns whether all peers that are not given up hold the copies of ``submit``."""
        return done.result() >= max(1, len(self._senders) - len(self.lost))

    def _note(self, done: Future[int], step: int) -> None:
        complete = self.all_hold(done)
        with self._lock:
            self.in_flight -= 1
            if complete:
                self._copied_step = max(step, self._copied_step or 0)

    @property
    def lag_steps(self) -> int:
        """Steps between the newest snapshot and the newest one that all peers hold, without peers that were given
        up."""
        with self._lock:
            return (self._newest_step or 0) - (self._copied_step or 0)

    @property
    def lost(self) -> Mapping[int, str]:
        """Peers that were given up, each with the reason."""
        return {sender.peer: sender.lost for sender in self._senders if sender.lost}

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in copies that peers hold or held."""
        return sum(sender.sent_bytes for sender in self._senders)

    @property
    def send_bytes_per_sec(self) -> float | None:
        """Recent rate of the slowest peer while all peers receive; None until one was measured."""
        rates = [median(tuple(sender.rates)) for sender in self._senders if sender.rates]
        return min(rates, default=None)

    @property
    def saved_bytes(self) -> int:
        """Bytes of these copies that were not sent, because peers had them (``slices.local_state``)."""
        return sum(sender.saved_bytes for sender in self._senders)

    # --- as a holder ---

    def _accept(self, listener: Listener, sources: Collection[int]) -> None:
        """Accepts connections until all sources are connected."""
        roster = self.roster
        awaited = {source: Link(roster.generation, source, roster.rank) for source in sources}
        try:
            while awaited:
                try:
                    connection = listener.accept(roster.secret, roster.generation, awaited, lambda: self.cutter.is_over)
                except StaleHelloError as error:
                    log.warning("copies of %s were refused", str(error))
                except OSError as error:
                    log.info("a connection for copies was refused: %s", str(error))
                else:
                    if connection is None:
                        return
                    wire, link = connection
                    del awaited[link.source]
                    source = self.cutter.add(wire), link
                    thread = named_thread(ThreadName.REPLICATE, self._receive, *source, suffix=f"-from-{link.source}")
                    with self._lock:
                        self._receivers.append(thread)
                    thread.start()
        finally:
            listener.close()

    def _receive(self, wire: Wire, link: Link) -> None:
        try:
            CopyReceiver(wire, link, self.roster.run_id, self.store, _PATIENCE * self.timeout_secs).run()
        except OSError as error:
            if not self.cutter.is_over:
                log.warning("rank %d accepts no more copies of rank %d: %s", link.holder, link.source, str(error))
        finally:
            wire.cut()
            wire.close()

    # --- the end ---

    def close(self, timeout_secs: float = 0.0) -> bool:
        """Ends all threads. Copies on this rank stay, and no file is touched afterwards.

        Args:
            timeout_secs: Longest wait for submitted copies, and for sources, which end when they have closed, too. 0:
                no wait, as after a failure.

        Returns:
            False if a thread could not be ended. It is a daemon, and can do no harm.
        """
        for sender in self._senders:
            sender.put(None)
        if timeout_secs > 0:
            self._join(timeout_secs)
        self.cutter.cut_all()
        self.store.close()
        return self._join(_CUT_SECS)

    def _join(self, timeout_secs: float) -> bool:
        deadline = time.monotonic() + timeout_secs
        with self._lock:
            threads = [self._accepting, *(sender.thread for sender in self._senders), *self._receivers]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


CANNOT_OPEN = "rank {} could not open its memory directory; see its log"


def open_replication(
    comm: Communicator,
    memory: Memory,
    run_id: str,
    generation: int,
    make: Callable[[int], Slot],
    timeout_secs: float,
    *,
    groups: Sequence[Sequence[int]] = (),
    gate: TransferGate | None = None,
    problem: Exception | None = None,
) -> Replicator | None:
    """Returns this rank's replicator; None without replicas. A collective of the training thread.

    It is the last collective of a start, and also reports what went wrong on a rank before.

    Args:
        comm: The ranks, all of which use memory.
        memory: Settings of this rank's user.
        run_id: Of the store.
        generation: Of this life, which ``comm`` has entered.
        make: Makes a slot in this rank's memory directory. Raises ``MemoryFullError``.
        timeout_secs: Longest time in which a peer takes or gives no byte.
        groups: Per kind of data parallelism, from the one whose ranks share most state, the ranks of this rank's group.
        gate: Holds sends back; None: they go at once.
        problem: Why this rank cannot use its memory directory. Raised here, after the other ranks know.

    Raises:
        ConfigError: On every rank alike: settings differ, or there are too few nodes for so many copies.
        StoreError: A rank cannot listen, or cannot use its memory directory.
        PeerLostError: A peer did not take part.
    """
    listener, trouble = None, "" if problem is None else CANNOT_OPEN.format(comm.rank)
    announced: dict[str, Any] = {"settings": memory.shared, "domain": memory.failure_domain}
    announced["groups"] = [min(group) for group in groups]  # the lowest rank names the group
    announced["secret"] = secrets.token_hex(SECRET_NBYTES)  # that of rank 0 is used
    try:
        announced["node"] = node_of(memory.root)
        if memory.replicas and comm.world_size > 1 and problem is None:
            listener = Listener(timeout_secs)
            announced["address"] = list(listener.address)
    except OSError as error:
        trouble = trouble or f"rank {comm.rank} cannot take copies of peers: {error}"
    try:
        ranks = answers_of(comm, {**announced, "trouble": trouble})
        if problem is not None:
            raise problem
        placement = _placement(ranks, memory.replicas)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    if listener is None:
        return None
    if comm.rank == 0 and placement.short:
        _say_short(placement, memory.replicas)
    addresses = tuple((str(answer["address"][0]), int(answer["address"][1])) for answer in ranks)
    secret = bytes.fromhex(ranks[0]["secret"])
    roster = Roster(comm.rank, run_id, generation, placement, addresses, secret)
    return Replicator(roster, listener, make, timeout_secs, gate)


def _placement(ranks: list[dict[str, Any]], replicas: int) -> ReplicaPlacement:
    """Returns the placement; raises the same error on every rank."""
    trouble = next((answer["trouble"] for answer in ranks if answer["trouble"]), "")
    if trouble:
        raise StoreError(trouble)
    for rank, answer in enumerate(ranks):
        pairs = zip(ranks[0]["settings"], answer["settings"], strict=True)
        differing = [(first, other) for first, other in pairs if first != other]
        if differing:
            firsts, others = (", ".join(texts) for texts in zip(*differing, strict=True))
            raise ConfigError(
                f"ranks disagree on Memory(...): {firsts} on rank 0, {others} on rank {rank}. Set the same on all ranks"
            )
    named = [(answer["node"],) if answer["domain"] is None else (answer["node"], answer["domain"]) for answer in ranks]
    kinds = [list(kind) for kind in zip(*(answer["groups"] for answer in ranks), strict=True)]
    return place_replicas(named, replicas, [_groups(kind) for kind in kinds])


def _groups(first: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns per rank the ranks of its group. first: Per rank, the lowest rank of its group."""
    members: dict[int, list[int]] = {}
    for rank, lowest in enumerate(first):
        members.setdefault(lowest, []).append(rank)
    return [tuple(members[lowest]) for lowest in first]


def _say_short(placement: ReplicaPlacement, replicas: int) -> None:
    fewest = min(len(placement.peers_of[rank]) for rank in placement.short)
    announce(
        "Memory(replicas=%d): %d of %d ranks (%s) have fewer copies, at least %d: there are no more nodes outside "
        "their failure domain",
        *(replicas, len(placement.short), len(placement.peers_of), name_ranks(placement.short), fewest),
        level=logging.WARNING,
    )
