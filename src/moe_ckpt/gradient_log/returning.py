"""Returns to a step of a gradient log in memory: anchors and repeated updates, or what survivors kept.

Updates are made once more inside the recovery, before training begins: which operators come from anchors, from
survivors or from neither is decided per operator in the recovery plan, all of it is verified before anything is
written, and if the log turns out to be damaged, an older step is chosen.

Ranks that lived on sealed their state of the very step that the log leads to. Each rank holds its own share (FSDP2,
Megatron), so that is not the whole model. Operator by operator a rank takes what was sealed, if all that it holds of
the operator is there, and the log otherwise. So a rank that lived on reads neither anchors nor gradients.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.step import Tier
from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.errors import CoverageError, OtherLayoutError
from moe_ckpt.gradient_log.densify import densify_together
from moe_ckpt.gradient_log.replaying import LoggedSteps, LogReplayer, anchors_of, needed_gradients
from moe_ckpt.ledger.coverage import Box, prove_cover
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.reading.index import StoredSlice, TensorIndex, homes_of, overlapping, split_key
from moe_ckpt.reading.memory.slot_storage import LoggedSnapshot, OpenedMemory, Span
from moe_ckpt.reading.restore import box_of, copy_slices, held_parameters, parameters_of, require_fitting
from moe_ckpt.reading.slices import find_damage
from moe_ckpt.reading.together import together
from moe_ckpt.recovery.executing import Recovery, Restored, opening, rank_of_state, say_plan
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery
from moe_ckpt.recovery.sources import StorageSource, inventories_of

log = logging.getLogger("moe_ckpt")

TELL_SECS = 10.0
"""So often a replay says how far it is."""
_MODEL = "model/"
_SURVIVORS = "ranks that lived on"

Joined = Callable[[Collection[str], Mapping[str, str]], frozenset[str]]
"""(operators, parameter -> its home) -> these operators, and all that must be loaded as of the same step as one of
them."""


@dataclass(frozen=True, eq=False)
class SurvivorSlices:
    """The slices that one rank takes from survivors.

    Attributes:
        operators: Which it takes from them, as of the log's last step.
        lacking: Which it takes from the log instead. Of all others it holds nothing.
        slices: What it reads of ``operators``, by key.
        is_offered: Survivors sealed something of the step; alike on every rank.
    """

    operators: frozenset[str] = frozenset()
    lacking: frozenset[str] = frozenset()
    slices: Mapping[str, tuple[StoredSlice, ...]] = field(default_factory=dict)
    is_offered: bool = False

    @property
    def read(self) -> Iterator[StoredSlice]:
        """Yields ``slices``, one after the other."""
        for group in self.slices.values():
            yield from group

    def anchors(self, opened: OpenedMemory) -> Mapping[str, int]:
        """Returns operator -> the step at which it is loaded; what is taken from survivors counts as anchored last."""
        last = opened.manifest.step
        return anchors_of(opened.manifest, opened.chained) | dict.fromkeys(self.operators, last)

    @property
    def spares_log(self) -> bool:
        """True if this rank takes nothing from the log but what its plain state tells."""
        return self.is_offered and not self.lacking


NOTHING = SurvivorSlices()


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
        anchors = survivors.anchors(opened)
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
        anchors = survivors.anchors(opened)
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


def kept_here(opened: OpenedMemory, state: TrainingState, joined: Joined) -> SurvivorSlices:
    """Returns what this rank takes from survivors. Reads no slice.

    Args:
        opened: A step of a gradient log.
        state: Of this run.
        joined: Returns what is taken together.
    """
    if not opened.survivor_slices:
        return NOTHING
    index = opened.reader.index(opened.manifest)
    boxes_of = _needed_boxes(index, parameters_of(state))
    sealed: dict[str, list[StoredSlice]] = defaultdict(list)
    for stored in opened.survivor_slices:
        sealed[stored.entry.key].append(stored)
    slices_of = {op: taken for op, boxes in boxes_of.items() if (taken := _covering(op, boxes, sealed)) is not None}
    lacking = joined(boxes_of.keys() - slices_of.keys(), homes_of(index.tensors)) & boxes_of.keys()
    slices: dict[str, dict[StoredSlice, None]] = defaultdict(dict)
    for op in slices_of.keys() - lacking:
        for stored in slices_of[op]:
            slices[stored.entry.key][stored] = None
    read = {key: tuple(group) for key, group in slices.items()}
    return SurvivorSlices(frozenset(boxes_of.keys() - lacking), frozenset(lacking), read, is_offered=True)


def _needed_boxes(index: TensorIndex, parameters: Sequence[StateTensor]) -> dict[str, dict[str, list[Box]]]:
    """Operator -> key -> the blocks that this rank loads, of each operator that it holds something of.

    As ``restore.needed_slices`` has them, but without what follows: state of no dimension (step counts), which is in
    the plain state of each logged step, and weights that another rank's masters give (``LogReplayer.finish``).
    """
    held = held_parameters(parameters)
    needed: dict[str, dict[str, list[Box]]] = {}
    for key, group in index.tensors.items():
        parameter, shape = held.get(split_key(key).fqn), group[0].entry.global_shape
        if parameter is None:
            continue
        if key.startswith(_MODEL):
            for stored in (stored for box in parameter.boxes for stored, _ in overlapping(group, box)):
                needed.setdefault(stored.entry.operator, defaultdict(list))
        elif not shape:
            continue
        boxes = parameter.updated if shape == parameter.shape else [Box((0,) * len(shape), shape)]
        for box in dict.fromkeys(boxes):  # of tied embeddings there are two alike
            for stored, common in overlapping(group, box):
                needed.setdefault(stored.entry.operator, defaultdict(list))[key].append(common)
    return needed


def _covering(
    operator: str, boxes_by_key: Mapping[str, Sequence[Box]], sealed: Mapping[str, Sequence[StoredSlice]]
) -> list[StoredSlice] | None:
    """The slices that have every element of ``boxes_by_key`` once; None if some are missing."""
    slices: dict[StoredSlice, None] = {}
    parts: list[tuple[str, Box]] = []
    for key, boxes in boxes_by_key.items():
        for box in boxes:
            for stored, common in overlapping(sealed.get(key, ()), box):
                slices[stored] = None
                parts.append((key, common))
    try:
        prove_cover(operator, boxes_by_key, parts)
    except CoverageError:
        return None
    return list(slices)


def plan_along_log(
    comm: Communicator, opened: OpenedMemory, from_survivors: SurvivorSlices, first: int
) -> RecoveryPlan:
    """Returns where each operator comes from, and which ranks make updates once more. A collective.

    Args:
        comm: The ranks.
        opened: A step of a gradient log.
        from_survivors: What this rank takes from survivors.
        first: The step whose anchors this rank loads first.
    """
    manifest = opened.manifest
    operators = tuple(manifest.operators)
    inventories = inventories_of(opened.reader, manifest, opened.slots, opened.beneath)
    if not from_survivors.is_offered:
        plan = plan_recovery(manifest.directory, manifest.step, operators, inventories)
        return replace(plan, updates=(first, manifest.step))
    mine = [first, [at for at, op in enumerate(operators) if op in from_survivors.lacking]]
    answers = [json.loads(raw) for raw in comm.everyone(json.dumps(mine).encode())]
    from_log = {at for _, places in answers for at in places}
    survivors = _inventory(operators, opened.survivor_slices, from_log, manifest.step)
    plan = plan_recovery(manifest.directory, manifest.step, operators, (survivors, *inventories))
    remaking = tuple(rank for rank, (_, places) in enumerate(answers) if places)
    oldest = min(step for step, _ in answers)
    updates = (oldest, manifest.step) if oldest < manifest.step else None
    return replace(plan, updates=updates, remaking=remaking, ranks=len(answers))


def _inventory(
    operators: Sequence[str], slices: Iterable[StoredSlice], from_log: Collection[int], step: int
) -> Inventory:
    """What survivors give to all ranks that hold something of it."""
    places = {op: at for at, op in enumerate(operators)}
    nbytes = np.zeros(len(operators), dtype=np.int64)
    for stored in slices:
        nbytes[places[stored.entry.operator]] += stored.nbytes
    steps = np.array([ABSENT if at in from_log else step for at in range(len(operators))], dtype=np.int64)
    return Inventory(Tier.HOST, _SURVIVORS, steps, nbytes)
