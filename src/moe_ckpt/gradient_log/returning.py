"""Returns to a step of a gradient log in memory, by anchors and repeated updates.

Updates are repeated inside the recovery, before training begins. Everything that they need is verified before anything
is written, and if the log is damaged, an older step is chosen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.errors import OtherLayoutError
from moe_ckpt.gradient_log.densify import densify_together
from moe_ckpt.gradient_log.optimizers import OptimizerReplay
from moe_ckpt.gradient_log.replaying import LoggedSteps, anchors_of, needed_gradients
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.notices import announce
from moe_ckpt.ports import StateTensor, TrainingState
from moe_ckpt.reading.collective import on_all_ranks
from moe_ckpt.reading.memory.slot_storage import OpenedMemory, Span
from moe_ckpt.reading.restore import box_of, parameters_of, require_fitting
from moe_ckpt.recovery.executing import (
    Recovery,
    Restored,
    StorageSource,
    announce_plan,
    opening_checkpoint,
    plan_sources,
    rank_of_state,
)

log = logging.getLogger("moe_ckpt")

TELL_SECS = 10.0
"""Time between two messages about the progress of a replay."""


class LogReturn:
    """Returns one rank to a step of a gradient log (``recovery.executing.AlongLog``).

    Each rank makes one by itself, before anything is read.

    Args:
        recovery: The recovery.
        opened: The step.
        optimizers: Returns the optimizers to step, as they are at the time of the call.
        finish: Computes what follows from the updated tensors (weights from masters). A collective.
    """

    def __init__(
        self,
        recovery: Recovery,
        opened: OpenedMemory,
        optimizers: Callable[[], OptimizerReplay],
        finish: Callable[[], None],
    ) -> None:
        self._recovery, self._opened = recovery, opened
        self._optimizers, self._finish = optimizers, finish
        self._is_foreign = opened.manifest.world_size != recovery.comm.world_size

    def spans(self) -> Iterator[Span]:
        """See ``recovery.executing.AlongLog``. Shares of other ranks are requested when they are made dense."""
        if self._is_foreign:
            return
        opened, boxes = self._opened, updated_boxes(self._recovery.state)
        anchors = anchors_of(opened)
        gradients = [stored for snapshot in opened.logged for stored in needed_gradients(snapshot, anchors, boxes)]
        slots = [snapshot.manifest for snapshot in opened.logged]
        yield from self._recovery.spans(opened, slots, besides=gradients)

    def go(self, received: int) -> Restored:
        """See ``recovery.executing.AlongLog``."""
        comm, opened = self._recovery.comm, self._opened
        if self._is_foreign:
            return self._by_dense()
        here = on_all_ranks(comm, self._source)
        if any(largest(comm, [here is None])) or here is None:
            return self._by_dense()
        restored, source = here
        state, manifest = self._recovery.state, opened.manifest
        log_here = on_all_ranks(comm, lambda: StoredLog(opened, state, comm.rank))
        if any(largest(comm, [not log_here.fits(self._optimizers())])):
            return self._by_dense()
        plan = plan_sources(opened.reader, manifest, opened)
        plan = replace(plan, updates=(log_here.steps[0], manifest.step))
        log.info("rank %d received %s of what memory elsewhere holds", comm.rank, human_bytes(received))
        announce_plan(comm, plan)
        restored = restored.out_of(opened, plan)
        on_all_ranks(comm, source.verify)
        on_all_ranks(comm, log_here.verify)
        on_all_ranks(comm, lambda: log_here.check(self._optimizers()))
        on_all_ranks(comm, source.prepare)
        made = on_all_ranks(comm, lambda: log_here.repeat(self._optimizers()))
        log.info("rank %d repeated %d updates", comm.rank, made)
        self._finish()
        records = dict(manifest.operators)
        records |= {op: replace(records[op], step=manifest.step) for op in opened.chained}
        return replace(restored, manifest=replace(manifest, operators=records))

    def _source(self) -> tuple[Restored, StorageSource] | None:
        """Opens the step; returns None if parallel degrees differ, for which a dense checkpoint is needed."""
        try:
            return opening_checkpoint(self._recovery, self._opened.reader, self._opened.manifest)
        except OtherLayoutError:
            return None

    def _by_dense(self) -> Restored:
        """Makes a dense checkpoint of the step on storage, and returns to it: the log has another layout."""
        recovery, opened = self._recovery, self._opened
        reader, manifest = opened.reader, opened.manifest

        def fits() -> None:
            plain = reader.state(manifest, rank_of_state(manifest, recovery.comm.rank))
            require_fitting(reader, manifest, recovery.state, plain.get("plain"))

        return recovery.return_to(densify_together(recovery.comm, recovery.storage, opened, fits))


class StoredLog(LoggedSteps):
    """The steps of a log, loaded into a run's training state. Made after bytes of other nodes were fetched.

    Args:
        opened: The log's last step.
        state: Training state of this run.
        rank: This rank.
    """

    def __init__(self, opened: OpenedMemory, state: TrainingState, rank: int) -> None:
        super().__init__(opened, rank, updated_boxes(state))
        self._state, self._told_at = state, time.monotonic()
        for step in self.steps:
            self.plain(step)  # read now, so that all ranks learn of an error together

    def verify(self) -> None:
        """Raises ``DamagedError`` if a gradient that this rank reads is damaged."""
        self._reader.verify(chain.from_iterable(self.needed.values()))

    def tensors(self) -> Sequence[StateTensor]:
        return self._state.tensors()

    def load(self, step: int) -> None:
        """Also announces the progress of a long replay."""
        super().load(step)
        if time.monotonic() - self._told_at >= TELL_SECS and len(self.steps) > 1:
            self._told_at = time.monotonic()
            made = self.steps.index(step), len(self.steps) - 1
            announce("rank %d has repeated %d of %d updates of the gradient log", self._rank, *made)


def updated_boxes(state: TrainingState) -> Mapping[str, Sequence[Box]]:
    """Returns the blocks of each parameter that this rank's optimizers update."""
    boxes: dict[str, list[Box]] = {}
    for tensor in parameters_of(state):
        if tensor.updated_here:
            boxes.setdefault(tensor.parameter, []).append(box_of(tensor))
    return boxes
