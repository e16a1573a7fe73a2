"""The snapshot pipeline of one rank: live tensors -> host buffer -> shards -> commit.

Knows nothing of policies or tokens. ``begin`` and ``join`` are called on the training thread; everything
else happens on the copy thread and the persist thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.engine.buffers import HostBuffer, HostBufferPool, default_budget_bytes
from moe_ckpt.engine.commit import Committer
from moe_ckpt.engine.copying import Copier, Copy, place
from moe_ckpt.engine.persisting import Persister, Resolution
from moe_ckpt.engine.pieces import Piece, cut, wanted_boxes
from moe_ckpt.engine.settings import Settings
from moe_ckpt.engine.shares import Sharder
from moe_ckpt.engine.snapshot import Snapshot, buffer_bytes, side_pieces, split_shards
from moe_ckpt.errors import SaveFailedError
from moe_ckpt.ports import Communicator, StateTensor
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True)
class Order:
    """What to save and under which name; frozen facts of one step."""

    step: int
    generation: int
    index: int
    operators: tuple[str, ...]
    applied: Counts
    faults: tuple[FaultRecord, ...]
    policy: Mapping[str, Any]


class Pipeline:
    """Owns the buffers and both threads. Not safe for use from several threads."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog,
        comm: Communicator,
        settings: Settings,
        run_id: str,
        committer: Committer | None,
        after_commit: Callable[[], None],
        keep_alive: Callable[[], None],
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        self._catalog = catalog
        self._rank = comm.rank
        self._sharder = Sharder(catalog, comm.world_size, settings.sharding)
        self._settings = settings
        budget = settings.host_memory_bytes or default_budget_bytes(settings.local_ranks)
        self._pool = HostBufferPool(budget, pinned=settings.pinned)
        self._copier = Copier(on_phase)
        self._persister = Persister(
            storage,
            comm,
            run_id,
            committer,
            release=lambda snapshot: self._pool.give_back(snapshot.buffer),
            after_commit=after_commit,
            keep_alive=keep_alive,
        )
        self._copy: Copy | None = None
        self._restless: set[str] = set()
        self._sequence = 0
        self._last_nbytes = 0

    @property
    def busy(self) -> bool:
        """True if another snapshot would have to wait for one under way."""
        return self._persister.in_flight >= self._settings.max_in_flight or not self._pool.fits(self._last_nbytes)

    @property
    def in_flight(self) -> int:
        return self._persister.in_flight

    def begin(
        self, order: Order, tensors: Sequence[StateTensor], capture: Callable[[], Mapping[str, Any]]
    ) -> Snapshot:
        """Start a snapshot; returns at once unless the pipeline is full.

        The plain state is copied here and now. Parameters and optimizer state must not change before
        ``join`` returns.

        Raises:
            HostMemoryError: the snapshot can never fit the budget.
            UnencodableStateError: the plain state holds what only pickle could write.
            SaveFailedError: nothing became free within ``timeout_secs``.
        """
        self.join()  # an earlier one of this step: on a GPU its writing waits for the join
        chosen = frozenset(order.operators)
        encoded, side = side_pieces(capture(), self._rank)
        dealt = self._sharder.deal(chosen, tensors)
        pieces = [self._steady(p) for p in cut(self._catalog, chosen, tensors, dealt, self._rank)] + side
        parts = split_shards(self._catalog, pieces)
        buffer = self._buffer(order.step, buffer_bytes(parts))
        placed = [item for part in parts for item in place(pieces, part.entries, part.base)]
        self._copy = self._copier.start(placed, buffer.memory)
        snapshot = Snapshot(
            sequence=self._sequence,
            step=order.step,
            generation=order.generation,
            index=order.index,
            operators=order.operators,
            parts=parts,
            buffer=buffer,
            copy=self._copy,
            state=encoded,
            wanted=wanted_boxes(self._catalog, chosen, tensors) if self._rank == 0 else {},
            applied=order.applied,
            faults=order.faults,
            policy=order.policy,
            began_at=time.perf_counter(),
        )
        self._sequence += 1
        self._last_nbytes = buffer.nbytes
        self._persister.submit(snapshot)
        return snapshot

    def _buffer(self, step: int, nbytes: int) -> HostBuffer:
        """A buffer, waiting for snapshots under way where needed: peers may have begun already."""
        left = self._settings.max_in_flight - 1
        while True:
            self.wait(step, left)
            buffer = self._pool.acquire(max(nbytes, 1))
            if buffer is not None:
                return buffer
            left = max(0, min(left, self.in_flight) - 1)

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

    def wait(self, step: int, in_flight: int = 0) -> None:
        """Wait until at most ``in_flight`` snapshots are unresolved.

        Raises:
            SaveFailedError: that took longer than ``timeout_secs``.
            RuntimeError: a peer is gone.
        """
        if not self._persister.wait(in_flight, self._settings.timeout_secs):
            raise SaveFailedError(step, (f"writing took longer than {self._settings.timeout_secs} s",))

    def resolutions(self, after: int) -> Sequence[Resolution]:
        """Recent snapshots that ended, with a sequence greater than ``after``."""
        return self._persister.resolutions(after)

    def raise_fatal(self) -> None:
        """Raise, once, the error that ended the persist thread."""
        self._persister.raise_fatal()

    def close(self, timeout_secs: float) -> bool:
        """Stop the threads once what is queued is done; False if writing was still going on."""
        try:
            self.join()
        finally:
            ended = self._persister.close(timeout_secs)
            self._copier.close()
        return ended
