"""The snapshot pipeline of one rank: live tensors -> host buffer -> shards -> commit.

Three buffers go round: one is copied into or waits, one is written from, and the newest committed one is
kept for recovery. None of them is written to before it has been given back, so that a snapshot for
which none is free is skipped or waited for, as configured; only the recovery buffer is given up before
training has to do either.

Knows nothing of policies or tokens. ``begin`` and ``join`` are called on the training thread; everything
else happens on the copy thread and the persist thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.core.window import Window
from moe_ckpt.engine import host_tier
from moe_ckpt.engine.arranging import Arrangement, Arranger
from moe_ckpt.engine.buffers import HostBuffer, HostBufferPool, default_budget_bytes
from moe_ckpt.engine.commit import Committer
from moe_ckpt.engine.copying import Copier, Copy
from moe_ckpt.engine.keeping import StoreKeeper
from moe_ckpt.engine.persisting import Persister, Resolution
from moe_ckpt.engine.pieces import LocalState, Piece, cut, cut_replay, wanted_boxes, wanted_replay
from moe_ckpt.engine.settings import Settings
from moe_ckpt.engine.shares import ComputeTypes, Sharder
from moe_ckpt.engine.snapshot import Snapshot, side_pieces
from moe_ckpt.ports import Communicator, StateTensor, TensorSpec
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True)
class Order:
    """What to save and under which name; frozen facts of one step.

    operators: go to storage. held: are copied, but stay in host memory; none of ``operators``.
    frozen: their weights go to storage, in the types ``compute``, as slot ``slot`` of ``window``.
    """

    step: int
    generation: int
    index: int
    operators: tuple[str, ...]
    held: tuple[str, ...]
    frozen: tuple[str, ...]
    compute: ComputeTypes
    window: Window | None
    slot: int
    applied: Counts
    faults: tuple[FaultRecord, ...]
    policy: Mapping[str, Any]
    measured: Mapping[str, float]


class Pipeline:
    """Owns the buffers and both threads. Not safe for use from several threads."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog,
        placement: Placement,
        comm: Communicator,
        settings: Settings,
        run_id: str,
        committer: Committer | None,
        keeper: StoreKeeper | None,
        keep_alive: Callable[[], None],
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._rank = comm.rank
        self._sharder = Sharder(catalog, placement, settings.sharding)
        self._local = LocalState(catalog, ())
        self._arranger = Arranger(catalog)
        self._settings = settings
        budget = settings.host_memory_bytes or default_budget_bytes(settings.local_ranks)
        self._pool = HostBufferPool(budget, pinned=settings.pinned)
        self.host_tier = host_tier.claim(storage.root, run_id, comm.rank, self._pool)
        self._copier = Copier(on_phase)
        try:
            self._persister = Persister(
                storage,
                comm,
                run_id,
                committer,
                keeper,
                self.host_tier,
                settings.max_failures,
                keep_alive=keep_alive,
            )
        except BaseException:  # no thread to be had, for instance
            self._copier.close()
            host_tier.leave(self.host_tier, keep=True)
            raise
        self._copy: Copy | None = None
        self._restless: set[str] = set()
        self._sequence = 0
        self._last_nbytes = self._partial_nbytes = 0
        self._gave_up = False
        self._closing = False

    @property
    def busy(self) -> bool:
        """True if another snapshot, as large as the last one or as any partial one, would wait for one under way."""
        return self._persister.in_flight >= self._settings.max_in_flight or not self._pool.fits(
            max(self._last_nbytes, self._partial_nbytes), self.host_tier.droppable_bytes
        )

    @property
    def snapshot_bytes(self) -> int:
        """The most that one snapshot of this rank may have, where as many as may be under way are of that size."""
        return self._pool.budget_bytes // self._settings.max_in_flight

    @property
    def in_flight(self) -> int:
        return self._persister.in_flight

    def begin(
        self,
        order: Order,
        tensors: Sequence[StateTensor],
        specs: Sequence[TensorSpec],
        capture: Callable[[], Mapping[str, Any]],
        patience_secs: float,
    ) -> Snapshot:
        """Start a snapshot; returns at once unless the pipeline is full.

        tensors: of this rank. specs: of all ranks.
        patience_secs: longest wait for host memory that earlier snapshots use. One that gets none fails on every rank,
            because peers may have begun it already: see ``Snapshot.refused``.

        The plain state is copied here and now. Parameters and optimizer state must not change before
        ``join`` returns.

        Raises:
            HostMemoryError: the snapshot can never fit the budget.
            UnencodableStateError: the plain state holds what only pickle could write.
        """
        self.join()  # an earlier one of this step: on a GPU its writing waits for the join
        encoded, side = side_pieces(capture(), self._rank)
        arranged = self._arranger.arrange(self._cut(order, tensors), frozenset(order.held), side)
        nbytes = arranged.nbytes
        buffer, waited = self._buffer(nbytes, patience_secs)
        refused = None
        if buffer is None:
            refused = f"earlier checkpoints were still being written after a wait of {patience_secs:.1f} s"
            arranged, buffer = Arrangement((), [], 0), self._pool.lend_nothing()
        self._copy = self._copier.start(arranged.placed, buffer.memory)
        # What storage holds completely at this very version, memory could add nothing to.
        partial = len(order.operators) < len(self._catalog.operators) and order.window is None
        snapshot = Snapshot(
            sequence=self._sequence,
            step=order.step,
            generation=order.generation,
            index=order.index,
            operators=order.operators,
            parts=arranged.parts,
            buffer=buffer,
            copy=self._copy,
            state=encoded,
            wanted=lambda: self._wanted(order, specs),
            applied=order.applied,
            faults=order.faults,
            policy=order.policy,
            measured=order.measured,
            began_at=time.perf_counter(),
            window=order.window,
            slot=order.slot,
            keep=partial,
            waited=waited,
            refused=refused,
        )
        self._sequence += 1
        self._last_nbytes = nbytes
        self._partial_nbytes = max(self._partial_nbytes, nbytes if partial else 0)
        self._persister.submit(snapshot)
        if partial and self._pool.expect(nbytes):
            self._copier.later(self._top_up)
        return snapshot

    def _cut(self, order: Order, tensors: Sequence[StateTensor]) -> list[Piece]:
        """This rank's share of what is copied, as views of live tensors."""
        chosen, held, frozen = frozenset(order.operators), frozenset(order.held), frozenset(order.frozen)
        copied = chosen | held if held else chosen
        dealt = self._sharder.deal(copied, tensors, frozen, order.compute)
        local = self._local.of(tensors)
        if local is not self._local:
            self._local = local
            self._arranger.forget()
        live = cut(self._local, copied, dealt, self._rank)
        if order.window is not None:
            live += cut_replay(self._local, chosen, frozen, dealt, self._rank, order.compute)
        return [self._steady(piece) for piece in live] if self._restless else live

    def _wanted(self, order: Order, specs: Sequence[TensorSpec]) -> Mapping[str, list[Box]]:
        """On the persist thread of rank 0: it is of the whole model, and training must not wait for that."""
        chosen = frozenset(order.operators)
        wanted = wanted_boxes(self._catalog, chosen, specs)
        if order.window is not None:
            wanted |= wanted_replay(self._catalog, chosen, frozenset(order.frozen), specs)
        return wanted

    def _buffer(self, nbytes: int, patience_secs: float) -> tuple[HostBuffer | None, bool]:
        """(a buffer, or None if none became free in time; True if snapshots under way had to be waited for).

        It waits where it must even if others are configured to be skipped: peers may have begun already.
        """
        until = time.monotonic() + patience_secs
        left = self._settings.max_in_flight - 1
        waited = False
        while True:
            waited = waited or self.in_flight > left
            if not self._persister.wait(left, max(0.0, until - time.monotonic())):
                return None, waited
            buffer = self._pool.acquire(max(nbytes, 1))
            if buffer is None and self._give_up_recovery(nbytes):
                buffer = self._pool.acquire(max(nbytes, 1))
            if buffer is not None:
                return buffer, waited
            left = max(0, min(left, self.in_flight) - 1)

    def _give_up_recovery(self, nbytes: int) -> bool:
        """Make room by what only a fault would need; True if there was something to give up."""
        dropped = self.host_tier.drop()
        if dropped and not self._gave_up and self._buffers * nbytes > self._pool.budget_bytes:
            self._gave_up = True
            log.warning(
                "host_memory_bytes=%s holds no %d snapshots of %s bytes on rank %d: the newest committed one is not "
                "kept in memory while others are under way, so that a fault may cost more tokens than it had to",
                f"{self._pool.budget_bytes:,}",
                self._buffers,
                f"{nbytes:,}",
                self._rank,
            )
        return dropped

    @property
    def _buffers(self) -> int:
        """Buffers in the steady state: those in flight, and the recovery buffer."""
        return self._settings.max_in_flight + 1

    def _top_up(self) -> None:
        """Copy thread: make the buffers that the next snapshots will need, one at a time, copies in between."""
        try:
            made = not self._closing and self._pool.top_up(self._buffers)
        except RuntimeError as error:
            log.warning("no further host buffer could be made ahead of time, snapshots will try again: %s", error)
        else:
            if made:
                self._copier.later(self._top_up)

    def _steady(self, piece: Piece) -> Piece:
        """The piece itself, or a copy taken now of a tensor that was once seen to change at other times."""
        return Piece(piece.entry, piece.source.clone()) if piece.entry.key in self._restless else piece

    def join(self) -> None:
        """Return when the snapshot under way no longer reads live tensors."""
        if self._copy is None:
            return
        copy, self._copy = self._copy, None
        copy.join()
        found = set(copy.changed) - self._restless
        if found:
            self._restless |= found
            log.warning(
                "%d tensors (%s, ...) changed outside optimizer steps while they were being copied; from now on they "
                "are copied before training goes on, which takes time",
                len(found),
                min(found),
            )

    def wait(self, timeout_secs: float) -> bool:
        """Wait until no snapshot is under way; False if that took longer than ``timeout_secs``.

        Raises:
            RuntimeError: a peer is gone.
        """
        return self._persister.wait(0, timeout_secs)

    def wait_for_room(self, timeout_secs: float) -> bool:
        """Wait until the pipeline is not ``busy``; False if that took longer than ``timeout_secs``.

        Raises:
            RuntimeError: a peer is gone.
        """
        until = time.monotonic() + timeout_secs
        while self.busy and self.in_flight:
            fewer = min(self.in_flight, self._settings.max_in_flight) - 1
            if not self._persister.wait(max(0, fewer), max(0.0, until - time.monotonic())):
                return False
        return True

    @property
    def writing(self) -> tuple[int, float] | None:
        """See ``Persister.writing``."""
        return self._persister.writing

    def resolutions(self, after: int) -> Sequence[Resolution]:
        """Recent snapshots that ended, with a sequence greater than ``after``."""
        return self._persister.resolutions(after)

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended the persist thread."""
        self._persister.raise_fatal()

    def close(self, timeout_secs: float, *, keep: bool, afterwards: Callable[[], None]) -> bool:
        """Stop the threads once what is queued is done; False if writing was still going on.

        keep: training failed, so leave the recovery buffer in memory for whoever starts it again here.
        afterwards: see ``Persister.close``.
        """
        self._closing = True
        try:
            self.join()
        finally:
            try:
                ended = self._persister.close(timeout_secs, afterwards)
            finally:
                self._copier.close()
                host_tier.leave(self.host_tier, keep=keep)
        return ended
