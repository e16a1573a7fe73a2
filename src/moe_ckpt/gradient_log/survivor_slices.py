"""What ranks that lived on sealed of the very step that a gradient log leads to: they make no update once more.

Each rank holds its own share (FSDP2, Megatron), so what survivors sealed is not the whole model. Operator by operator a
rank takes what was sealed, if all that it holds of the operator is there, and the log otherwise. So a rank that lived
on reads neither anchors nor gradients.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moe_ckpt.core.step import Tier
from moe_ckpt.errors import CoverageError
from moe_ckpt.ledger.coverage import Box, prove_cover
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.reading.index import StoredSlice, TensorIndex, homes_of, overlapping, split_key
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.restore import held_parameters, parameters_of
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery
from moe_ckpt.recovery.sources import inventories_of

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

    @property
    def spares_log(self) -> bool:
        """True if this rank takes nothing from the log but what its plain state tells."""
        return self.is_offered and not self.lacking


NOTHING = SurvivorSlices()


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
