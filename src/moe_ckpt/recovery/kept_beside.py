"""What ranks that lived on sealed of the very step that a gradient log leads to: they make no update once more.

Each rank holds its own share (FSDP2, Megatron), so what survivors sealed is not the whole model. Operator by operator a
rank takes what was sealed, if all that it holds of the operator is there, and the log otherwise. So a rank that lived
on reads neither anchors nor gradients.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from moe_ckpt.core.coverage import Box, prove_cover
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery
from moe_ckpt.errors import CoverageError
from moe_ckpt.ports import Communicator, StateTensor, TrainingState, UpdateReplayer
from moe_ckpt.recovery.gradient_log import NOTHING, Kept
from moe_ckpt.recovery.index import StoredSlice, TensorIndex, homes_of, overlapping, split_key
from moe_ckpt.recovery.opened_memory import OpenedMemory
from moe_ckpt.recovery.restore import held_parameters, parameters_of
from moe_ckpt.recovery.sources import opened_inventories

_MODEL = "model/"
_KEPT = "ranks that lived on"


def kept_here(opened: OpenedMemory, state: TrainingState, replayer: UpdateReplayer | None) -> Kept:
    """Returns what this rank takes from survivors. Reads no slice.

    Args:
        opened: A step of a gradient log.
        state: Of this run.
        replayer: Knows which operators' rows an optimizer couples, which are taken together.
    """
    if not opened.kept or replayer is None:
        return NOTHING
    index = opened.reader.index(opened.manifest)
    wanted = _wanted(index, parameters_of(state))
    sealed: dict[str, list[StoredSlice]] = defaultdict(list)
    for stored in opened.kept:
        sealed[stored.entry.key].append(stored)
    found = {op: taken for op, boxes in wanted.items() if (taken := _covering(op, boxes, sealed)) is not None}
    lacking = replayer.joined(wanted.keys() - found.keys(), homes_of(index.tensors)) & wanted.keys()
    slices: dict[str, dict[StoredSlice, None]] = defaultdict(dict)
    for op in found.keys() - lacking:
        for stored in found[op]:
            slices[stored.entry.key][stored] = None
    read = {key: tuple(group) for key, group in slices.items()}
    return Kept(frozenset(wanted.keys() - lacking), frozenset(lacking), read, is_offered=True)


def _wanted(index: TensorIndex, parameters: Sequence[StateTensor]) -> dict[str, dict[str, list[Box]]]:
    """Operator -> key -> the blocks that this rank loads, of each operator that it holds something of.

    As ``restore.needed_slices`` has them, but without what follows: state of no dimension (step counts), which is in
    the plain state of each logged step, and weights that another rank's masters give (``UpdateReplayer.finish``).
    """
    held = held_parameters(parameters)
    found: dict[str, dict[str, list[Box]]] = {}
    for key, group in index.tensors.items():
        parameter, shape = held.get(split_key(key).fqn), group[0].entry.global_shape
        if parameter is None:
            continue
        if key.startswith(_MODEL):
            for stored in (stored for box in parameter.boxes for stored, _ in overlapping(group, box)):
                found.setdefault(stored.entry.operator, defaultdict(list))
        elif not shape:
            continue
        boxes = parameter.updated if shape == parameter.shape else [Box((0,) * len(shape), shape)]
        for box in dict.fromkeys(boxes):  # of tied embeddings there are two alike
            for stored, common in overlapping(group, box):
                found.setdefault(stored.entry.operator, defaultdict(list))[key].append(common)
    return found


def _covering(
    operator: str, wanted: Mapping[str, Sequence[Box]], sealed: Mapping[str, Sequence[StoredSlice]]
) -> list[StoredSlice] | None:
    """The slices that have every element of ``wanted`` once; None if some are missing."""
    slices: dict[StoredSlice, None] = {}
    parts: list[tuple[str, Box]] = []
    for key, boxes in wanted.items():
        for box in boxes:
            for stored, common in overlapping(sealed.get(key, ()), box):
                slices[stored] = None
                parts.append((key, common))
    try:
        prove_cover(operator, wanted, parts)
    except CoverageError:
        return None
    return list(slices)


def plan_along_log(comm: Communicator, opened: OpenedMemory, kept: Kept, first: int) -> RecoveryPlan:
    """Returns where each operator comes from, and which ranks make updates once more. A collective.

    Args:
        comm: The ranks.
        opened: A step of a gradient log.
        kept: What this rank takes from survivors.
        first: The step whose anchors this rank loads first.
    """
    manifest = opened.manifest
    operators, inventories = tuple(manifest.operators), opened_inventories(opened)
    if not kept.is_offered:
        plan = plan_recovery(manifest.directory, manifest.step, operators, inventories)
        return replace(plan, updates=(first, manifest.step))
    mine = [first, [at for at, op in enumerate(operators) if op in kept.lacking]]
    answers = [json.loads(raw) for raw in comm.everyone(json.dumps(mine).encode())]
    from_log = {at for _, places in answers for at in places}
    survivors = _inventory(operators, opened.kept, from_log, manifest.step)
    plan = plan_recovery(manifest.directory, manifest.step, operators, (survivors, *inventories))
    remaking = tuple(rank for rank, (_, places) in enumerate(answers) if places)
    oldest = min(step for step, _ in answers)
    updates = (oldest, manifest.step) if oldest < manifest.step else None
    return replace(plan, updates=updates, remaking=remaking, ranks=len(answers))


def _inventory(
    operators: Sequence[str], kept: Iterable[StoredSlice], from_log: Collection[int], step: int
) -> Inventory:
    """What survivors give to all ranks that hold something of it."""
    places = {op: at for at, op in enumerate(operators)}
    nbytes = np.zeros(len(operators), dtype=np.int64)
    for stored in kept:
        nbytes[places[stored.entry.operator]] += stored.nbytes
    steps = np.array([ABSENT if at in from_log else step for at in range(len(operators))], dtype=np.int64)
    return Inventory(Tier.HOST, _KEPT, steps, nbytes)
