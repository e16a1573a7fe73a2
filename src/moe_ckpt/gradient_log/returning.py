"""Returns to a step of a gradient log in memory: anchors and repeated updates, or what survivors kept.

Updates are made once more inside the recovery, before training begins: which operators come from anchors, from
survivors or from neither is decided per operator in the recovery plan, all of it is verified before anything is
written, and if the log turns out to be damaged, an older step is chosen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.errors import OtherLayoutError
from moe_ckpt.gradient_log.densify import densify_together
from moe_ckpt.gradient_log.replaying import LoggedSteps, LogReplayer, anchors_of, needed_gradients
from moe_ckpt.gradient_log.survivor_slices import NOTHING, SurvivorSlices, kept_here, plan_along_log
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.notices import announce
from moe_ckpt.ports import TrainingState
from moe_ckpt.reading.index import StoredSlice, homes_of
from moe_ckpt.reading.memory.slot_storage import LoggedSnapshot, OpenedMemory, Span
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
        logged, boxes = since(opened.logged, anchors, survivors), updated_boxes(self._recovery.state)
        gradients = [stored for snapshot in logged for stored in needed_gradients(snapshot, anchors, boxes)]
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
        log_here = together(comm, lambda: StoredLog(opened, self._recovery.state, comm.rank, self._survivors))
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
        restored = restored.out_of(opened, plan, planned_at)
        return replace(restored, manifest=replace(manifest, operators=records))

    def _replay(self, source: StorageSource, log_here: StoredLog) -> None:
        comm, state, opened, survivors = self._recovery.comm, self._recovery.state, self._opened, self._survivors
        if survivors.spares_log:
            opened.slots.check_only(stored.path for stored in survivors.read)
        from_log = frozenset(opened.manifest.operators) - survivors.operators
        together(comm, lambda: source.verify(state, from_log))
        together(comm, log_here.verify)
        together(comm, lambda: self._replayer.check(log_here))
        together(comm, lambda: source.prepare(state))
        made = together(comm, lambda: self._replayer.replay(log_here))
        log.info("rank %d repeated %d updates", comm.rank, made)
        self._replayer.finish()

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
    """The stored steps of a log, loaded into a run's training state. Made after what other nodes hold was fetched.

    Args:
        opened: The log's last step.
        state: Of this run.
        rank: This one.
        survivors: What is taken from survivors instead, as if it were anchored at the last step.
    """

    def __init__(
        self, opened: OpenedMemory, state: TrainingState, rank: int, survivors: SurvivorSlices = NOTHING
    ) -> None:
        anchors = anchors_of(opened.manifest, opened.chained, survivors)
        snapshots = since(opened.logged, anchors, survivors)
        homes = homes_of(opened.reader.index(opened.manifest).tensors)
        super().__init__(opened, snapshots, anchors, homes, rank, updated_boxes(state))
        self._state, self._survivors, self._told_at = state, survivors, time.monotonic()
        for step in self.steps:
            self.plain(step)  # so that whatever is wrong with it is known on all ranks now

    def verify(self) -> None:
        """Raises ``DamagedError`` if a gradient is damaged that this rank reads, or what it takes from survivors."""
        gradients = chain.from_iterable(self.needed.values())
        unread = self._reader.unverified(self._survivors.read)
        for stored, error in find_damage(self._reader.storage, [*gradients, *unread]):
            if error is not None:
                raise error
            if stored.entry.key in self._survivors.slices:
                self._reader.note_verified(stored)

    def load(self, step: int) -> None:
        self._tell(step)
        survivors = self._survivors

        def is_due(stored: StoredSlice) -> bool:
            operator = stored.entry.operator
            return self.anchors[operator] == step and operator not in survivors.operators

        slices = {key: due for key, group in self._index.tensors.items() if (due := tuple(filter(is_due, group)))}
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


def updated_boxes(state: TrainingState) -> Mapping[str, Sequence[Box]]:
    """Returns the blocks of each parameter that this rank's optimizers update."""
    boxes: dict[str, list[Box]] = {}
    for tensor in parameters_of(state):
        if tensor.updated_here:
            boxes.setdefault(tensor.parameter, []).append(box_of(tensor))
    return boxes
