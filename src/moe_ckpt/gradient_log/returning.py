"""Returns to a step of a gradient log in memory: anchors and repeated updates, or what survivors kept.

Updates are made once more inside the recovery, before training begins: which operators come from anchors, from
survivors or from neither is decided per operator in the recovery plan, all of it is verified before anything is
written, and if the log turns out to be damaged, an older step is chosen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.quantities import human_bytes
from moe_ckpt.errors import OtherLayoutError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.gradient_log.content import anchors_of, parameter_of, plain_of
from moe_ckpt.gradient_log.densify import densify_together
from moe_ckpt.gradient_log.replaying import LoggedSteps, LogReplayer
from moe_ckpt.gradient_log.survivor_slices import NOTHING, SurvivorSlices, kept_here, plan_along_log
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.notices import announce
from moe_ckpt.ports import StateTensor, TrainingState
from moe_ckpt.reading.index import StoredSlice, homes_of, overlapping
from moe_ckpt.reading.memory.opened_memory import LoggedSnapshot, OpenedMemory
from moe_ckpt.reading.memory.slot_storage import Span
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import box_of, copy_slices, parameters_of, require_fitting
from moe_ckpt.reading.slices import find_damage
from moe_ckpt.reading.together import together
from moe_ckpt.recovery.executing import Recovery, Restored, opening, rank_of_state, say_plan
from moe_ckpt.recovery.sources import StorageSource

log = logging.getLogger("moe_ckpt")

TELL_SECS = 10.0
"""So often a replay says how far it is."""


class LogReturn:
    """The return of one rank to a step of a gradient log (``recovery.executing.AlongLog``). Made before anything is
    read, on each rank by itself.

    Args:
        recovery: What returns.
        opened: The step.
        replayer: Makes updates once more.
    """

    def __init__(self, recovery: Recovery, opened: OpenedMemory, replayer: LogReplayer) -> None:
        self._recovery, self._opened, self._replayer = recovery, opened, replayer
        self._is_foreign = opened.manifest.world_size != recovery.comm.world_size
        self._survivors = NOTHING if self._is_foreign else kept_here(opened, recovery.state, replayer.joined)

    def spans(self) -> Iterator[Span]:
        """See ``recovery.executing.AlongLog``. Shares of others are asked for when they are made dense."""
        if self._is_foreign:
            return
        opened, survivors = self._opened, self._survivors
        anchors = anchors_of(opened.manifest, opened.chained, survivors)
        logged, parameters = since(opened.logged, anchors, survivors), parameters_of(self._recovery.state)
        gradients = [stored for snapshot in logged for stored in needed_gradients(snapshot, anchors, parameters)]
        slots = [snapshot.manifest for snapshot in logged]
        besides = [*gradients, *survivors.read]
        yield from self._recovery.spans(opened, slots, without=survivors.operators, besides=besides)

    def go(self, received: int) -> Restored:
        """See ``recovery.executing.AlongLog``."""
        comm, opened = self._recovery.comm, self._opened
        if self._is_foreign:
            return self._by_dense()
        here = together(comm, self._source)
        if any(largest(comm, [here is None])) or here is None:
            return self._by_dense()
        restored, source = here
        log_here = together(comm, self._stored_log)
        if any(largest(comm, [not self._replayer.fits(log_here)])):
            return self._by_dense()
        plan = plan_along_log(comm, opened, self._survivors, log_here.steps[0])
        log.info("rank %d received %s of what memory elsewhere holds", comm.rank, human_bytes(received))
        if comm.rank == 0:
            say_plan(plan)
        planned_at = time.time()
        self._replay(source, log_here)
        manifest = opened.manifest
        records = dict(manifest.operators)
        records |= {op: replace(records[op], step=manifest.step) for op in opened.chained}
        return replace(
            restored,
            manifest=replace(manifest, operators=records),
            tokens_from_host=opened.tokens_from_memory(records),
            from_memory=True,
            beneath=opened.beneath,
            plan=plan,
            planned_unix_secs=planned_at,
        )

    def _replay(self, source: StorageSource, log_here: StoredLog) -> None:
        comm, state, opened, survivors = self._recovery.comm, self._recovery.state, self._opened, self._survivors
        if survivors.spares_log:
            opened.slots.check_only(stored.path for stored in survivors.read)
        from_log = [op for op in opened.manifest.operators if op not in survivors.operators]
        together(comm, lambda: source.verify(from_log, state))
        together(comm, log_here.verify)
        together(comm, lambda: self._replayer.check(log_here))
        together(comm, lambda: source.prepare(state))
        made = together(comm, lambda: self._replayer.replay(log_here))
        log.info("rank %d repeated %d updates", comm.rank, made)
        self._replayer.finish()

    def _stored_log(self) -> StoredLog:
        opened, recovery = self._opened, self._recovery
        return StoredLog(
            opened.reader,
            opened.manifest,
            opened.logged,
            recovery.state,
            recovery.comm.rank,
            chained=opened.chained,
            survivors=self._survivors,
        )

    def _source(self) -> tuple[Restored, StorageSource] | None:
        """Opens the step; None if parallel degrees differ, with which only a dense one goes on."""
        try:
            return opening(self._recovery, self._opened.reader, self._opened.manifest)
        except OtherLayoutError:
            return None

    def _by_dense(self) -> Restored:
        """Makes the step dense on storage, and returns to that: the log was written in another layout."""
        recovery, opened = self._recovery, self._opened
        reader, manifest = opened.reader, opened.manifest

        def fits() -> None:
            plain = reader.state(manifest, rank_of_state(manifest, recovery.comm.rank))
            require_fitting(reader, manifest, recovery.state, plain.get("plain"))

        return recovery.return_to(densify_together(recovery.comm, recovery.reader.storage, opened, fits))


class StoredLog(LoggedSteps):
    """The stored steps of a log (``LoggedSteps``). Made after what other nodes hold was fetched.

    Args:
        reader: Of the slots.
        manifest: With the anchors' steps.
        snapshots: From the oldest anchor on.
        state: Of this run.
        rank: This one.
        chained: Operators whose anchors gradients bring to the last step.
        kept: What is taken from survivors instead, as if it were anchored at the last step.
    """

    def __init__(
        self,
        reader: StoreReader,
        manifest: Manifest,
        snapshots: Sequence[LoggedSnapshot],
        state: TrainingState,
        rank: int,
        *,
        chained: Collection[str],
        survivors: SurvivorSlices = NOTHING,
    ) -> None:
        self.anchors = anchors_of(manifest, chained, survivors)
        snapshots = since(snapshots, self.anchors, survivors)
        self.steps = [snapshot.manifest.step for snapshot in snapshots]
        self._survivors = survivors
        self._reader, self._index, self._state = reader, reader.index(manifest), state
        self.homes = homes_of(self._index.tensors)
        parameters = parameters_of(state)
        numbered = zip(self.steps, snapshots, strict=True)
        self._needed = {step: list(needed_gradients(snapshot, self.anchors, parameters)) for step, snapshot in numbered}
        self._rank, self._told_at = rank, time.monotonic()
        self._plain = {
            snapshot.manifest.step: dict(plain_of(reader, snapshot.manifest, rank)) for snapshot in snapshots
        }

    def verify(self) -> None:
        """Raises ``DamagedError`` if a gradient is damaged that this rank reads, or what it takes from survivors."""
        gradients = (stored_gradient for group in self._needed.values() for stored_gradient in group)
        for stored, error in find_damage(
            self._reader.storage, [*gradients, *self._reader.unverified(self._survivors.read)]
        ):
            if error is not None:
                raise error
            if stored.entry.key in self._survivors.slices:
                self._reader.note_verified(stored)

    # --- LoggedSteps ---

    def plain(self, step: int) -> Mapping[str, Any]:
        return self._plain[step]

    def blocks(self, step: int) -> Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        return [(needed.entry.key, needed.entry.offsets, needed.entry.shape) for needed in self._needed[step]]

    def gradients(self, step: int) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        for stored, values in self._reader.read_many(self._needed[step]):
            yield stored.entry.key, stored.entry.offsets, values

    def load(self, step: int) -> None:
        self._tell(step)
        anchors, survivors = self.anchors, self._survivors
        slices = {
            key: chosen
            for key, group in self._index.tensors.items()
            if (
                chosen := tuple(
                    stored
                    for stored in group
                    if anchors[stored.entry.operator] == step and stored.entry.operator not in survivors.operators
                )
            )
        }
        if step == self.steps[-1]:
            slices |= {key: (*slices.get(key, ()), *group) for key, group in survivors.slices.items()}
        copy_slices(self._reader, slices, self._state.tensors())

    def _tell(self, step: int) -> None:
        """Says how far a long replay is."""
        if time.monotonic() - self._told_at >= TELL_SECS and len(self.steps) > 1:
            self._told_at = time.monotonic()
            made = self.steps.index(step), len(self.steps) - 1
            announce("rank %d has repeated %d of %d updates of the gradient log", self._rank, *made)


def since(
    snapshots: Sequence[LoggedSnapshot], anchors: Mapping[str, int], survivors: SurvivorSlices
) -> Sequence[LoggedSnapshot]:
    """Returns the snapshots of a log that a rank needs which takes something from survivors: from its own oldest anchor
    on."""
    if not survivors.is_offered:
        return snapshots
    first = min((anchors[op] for op in survivors.lacking), default=snapshots[-1].manifest.step)
    return [snapshot for snapshot in snapshots if snapshot.manifest.step >= first]


def needed_gradients(
    snapshot: LoggedSnapshot, anchors: Mapping[str, int], parameters: Sequence[StateTensor]
) -> Iterator[StoredSlice]:
    """Yields what a rank with these parameters reads of a snapshot's gradients: of operators with older anchors."""
    boxes: dict[str, list[Box]] = {}
    for tensor in parameters:
        if tensor.updated_here:
            boxes.setdefault(tensor.parameter, []).append(box_of(tensor))
    for stored in snapshot.gradients:
        mine = boxes.get(parameter_of(stored.entry.key), ())
        if anchors[stored.entry.operator] < snapshot.manifest.step and any(
            True for box in mine for _ in overlapping((stored,), box)
        ):
            yield stored
