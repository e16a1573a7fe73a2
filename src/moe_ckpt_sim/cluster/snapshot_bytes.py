"""The sizes of snapshots on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import OperatorBytes, Window
from moe_ckpt.policies.base import Sends
from moe_ckpt_sim.cluster.cluster import ClusterLayout


@dataclass(frozen=True)
class SnapshotSize:
    """Bytes of one snapshot.

    Attributes:
        rank: Bytes on the rank that has most.
        total: Bytes of all ranks.
        sent: Bytes to each peer with a copy, from the rank that sends most.
    """

    rank: int
    total: int
    sent: int


class SnapshotBytes:
    """Bytes of the snapshots of one model on one layout, by the shares that each rank saves.

    Args:
        sizes: Bytes of each operator, all ranks together.
        sends: The parts that go to peers.
    """

    def __init__(self, layout: ClusterLayout, sizes: Mapping[str, OperatorBytes], sends: Sends) -> None:
        self._layout, self._sizes, self._sends = layout, sizes, sends
        self._catalog = layout.model.catalog
        self._slots = lru_cache(maxsize=256)(self._window_slots)
        self._partial = lru_cache(maxsize=4096)(self._heaviest)
        self._logged = lru_cache(maxsize=256)(self._logged_step)

    @cached_property
    def dense(self) -> SnapshotSize:
        return self._heaviest(self._catalog.everything)

    def plan(self, plan: SnapshotPlan) -> SnapshotSize:
        """Size of a plan without a window as it is copied, with what only host memory gets."""
        host_only = plan.memory_only
        if plan.gradients:
            return self._logged(plan.full + host_only, plan.gradients)
        return self._partial(plan.full + host_only) if host_only else self.stored(plan)

    def stored(self, plan: SnapshotPlan) -> SnapshotSize:
        """Size of a plan without a window as it is sent to storage or peers."""
        if plan.gradients:
            return self._logged(plan.full, plan.gradients)
        return self.dense if plan.full is self._catalog.everything else self._partial(plan.full)

    def window(self, window: Window) -> tuple[SnapshotSize, ...]:
        """Sizes of the slots of a window."""
        return self._slots(window.slots)

    def held(self, window: Window | None) -> SnapshotSize:
        """Size of a complete checkpoint: all state or, of a window, all its slots with their compute weights."""
        if window is None:
            return self.dense
        slots = self.window(window)
        return SnapshotSize(*(sum(getattr(slot, name) for slot in slots) for name in ("rank", "total", "sent")))

    def _window_slots(self, slots: tuple[tuple[str, ...], ...]) -> tuple[SnapshotSize, ...]:
        """Compute what ``core.window.share_bytes`` and ``slot_bytes`` do, for all operators at once."""
        table, size = self._table, len(slots)
        slot = np.empty(len(table.full), dtype=np.int64)
        for number, operators in enumerate(slots):
            slot[self._catalog.places_of(operators)] = number
        places = size * table.stage + slot, size * table.owner + slot
        placement, sizes = self._layout.placement, []
        for full in (table.full, table.sent):
            even, owned = (
                _in_window(full, table.compute, here, mine, (count, size))
                for here, mine, count in zip(
                    places, (table.even, ~table.even), (table.stages, table.owners), strict=True
                )
            )
            most = np.zeros_like(even)
            np.maximum.at(most, table.stage_of_owner, owned)
            ranks = -(-even // np.asarray(placement.stages)[:, None]) - (-most // (placement.expert_ranks or 1))
            sizes.append((ranks.max(axis=0), even.sum(axis=0) + owned.sum(axis=0)))
        (ranks, total), (sent, _) = sizes
        return tuple(map(SnapshotSize, ranks.tolist(), total.tolist(), (sent * (not self._sends.nothing)).tolist()))

    def _heaviest(self, operators: tuple[str, ...]) -> SnapshotSize:
        """Size of a snapshot with these operators in full."""
        at, table = self._catalog.places_of(operators), self._table
        return self._dealt(_only(table.full, at), _only(table.sent, at))

    def _logged_step(self, anchored: tuple[str, ...], gradients: tuple[str, ...]) -> SnapshotSize:
        table, places = self._table, self._catalog.places_of
        consumed = _only(table.gradient, places(gradients))
        full, sent = (_only(nbytes, places(anchored)) + consumed for nbytes in (table.full, table.sent))
        return self._dealt(full, sent)

    def log(self, steps: Counts) -> SnapshotSize:
        """Size of what a recovery loads from a log of gradients.

        Args:
            steps: ``[operators]`` steps from each anchor to the newest step.
        """
        table = self._table
        return self._dealt(table.full + table.gradient * steps, table.sent + table.gradient * steps)

    def _dealt(self, saved: Counts, sent: Counts) -> SnapshotSize:
        """Size of a snapshot, from the ``[operators]`` bytes that are saved and sent."""
        return SnapshotSize(self._busiest(saved), int(saved.sum()), 0 if self._sends.nothing else self._busiest(sent))

    def _busiest(self, weights: Counts) -> int:
        """Bytes on the busiest rank: experts on their owners, the rest spread evenly over the ranks of its stage."""
        table = self._table
        even = np.bincount(table.stage, weights=weights * table.even, minlength=table.stages)
        owned = np.bincount(table.owner, weights=weights * ~table.even, minlength=table.owners)
        per_stage = np.zeros(table.stages)
        np.maximum.at(per_stage, table.stage_of_owner, owned)
        placement = self._layout.placement
        shares = even / np.asarray(placement.stages) + per_stage / (placement.expert_ranks or 1)
        return int(np.ceil(shares.max()))

    @cached_property
    def _table(self) -> _Table:
        return _table(self._layout, self._sizes, self._sends)


@dataclass(frozen=True)
class _Table:
    """Bytes, stage and owner of each operator, in the order of the catalog.

    sent: bytes of ``full`` that peers are sent. even: the ranks of a stage share the operator evenly.
    """

    full: npt.NDArray[np.int64]
    sent: npt.NDArray[np.int64]
    compute: npt.NDArray[np.int64]
    gradient: npt.NDArray[np.int64]
    stage: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]
    even: npt.NDArray[np.bool_]
    stage_of_owner: npt.NDArray[np.int64]
    stages: int
    owners: int


def _only(weights: Counts, places: Counts) -> Counts:
    """``weights`` at ``places``, 0 elsewhere."""
    chosen = np.zeros_like(weights)
    chosen[places] = weights[places]
    return chosen


def _table(layout: ClusterLayout, sizes: Mapping[str, OperatorBytes], sends: Sends) -> _Table:
    catalog, placement = layout.model.catalog, layout.placement
    full = np.array([sizes[op].full for op in catalog.everything], dtype=np.int64)
    experts = catalog.expert_at
    sent = np.array([sends.nbytes(sizes[op], expert=op in experts) for op in catalog.everything], dtype=np.int64)
    compute = np.array([sizes[op].compute for op in catalog.everything], dtype=np.int64)
    gradient = np.array([sizes[op].consumed for op in catalog.everything], dtype=np.int64)
    stage = np.array([placement.stage_of.get(op, 0) for op in catalog.everything], dtype=np.int64)
    even = np.ones(len(full), dtype=bool)
    owner = np.zeros(len(full), dtype=np.int64)
    if placement.expert_ranks is not None:
        for op, (layer, expert) in catalog.expert_at.items():
            even[catalog.index_of[op]] = False
            owner[catalog.index_of[op]] = placement.owners[layer][expert]
    ranks, owner = np.unique(owner, return_inverse=True)
    of_owner = np.zeros(len(ranks), dtype=np.int64)
    of_owner[owner[~even]] = stage[~even]
    return _Table(full, sent, compute, gradient, stage, owner, even, of_owner, len(placement.stages), len(ranks))


def _in_window(
    full_bytes: Counts, compute_bytes: Counts, places: Counts, mine: npt.NDArray[np.bool_], shape: tuple[int, int]
) -> Counts:
    """``[rank or stage, slot]`` bytes: operators in full in their slot, and the compute weights of later slots.

    full_bytes, compute_bytes: ``[operators]``. places: flat index of each operator in the result. mine:
    operators that count.
    """

    def added(weights: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # Sums in float64 are exact up to 2**53 bytes.
        return np.bincount(places, weights * mine, shape[0] * shape[1]).reshape(shape).astype(np.int64)

    full, compute = added(full_bytes), added(compute_bytes)
    later: npt.NDArray[np.int64] = compute[:, ::-1].cumsum(axis=1)[:, ::-1] - compute
    return full + later
