"""What this rank's own slots of a gradient log lead to, made while training continues: a few units at a time.

Units that share a parameter are replayed together, small ones with others, and let go of before the next ones. So the
memory needed is that of the largest such group, or of 16 MiB of weights: weights, state and gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import xxhash

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Span
from moe_ckpt.engine.from_log import OwnSlot
from moe_ckpt.engine.made_dense import state_without
from moe_ckpt.errors import CoverageError, DamagedError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.fragment import Fragment
from moe_ckpt.format.manifest import FileRecord
from moe_ckpt.format.sealed import unseal
from moe_ckpt.format.shard import GRADIENT, SliceEntry
from moe_ckpt.format.tree import decode_tree
from moe_ckpt.gradients.layout import UpdateLayout
from moe_ckpt.gradients.log_content import merged_spans
from moe_ckpt.gradients.replayed_share import RankShare, bytes_of
from moe_ckpt.gradients.units import Unit
from moe_ckpt.recovery.gradient_log import PLAIN, parameter_of
from moe_ckpt.recovery.index import StoredSlice, homes_of, overlapping, split_key
from moe_ckpt.recovery.slices import block

_MODEL = "model/"
_AT_ONCE = 16 << 20
"""Bytes of weights: groups of fewer are replayed together, because each replay costs time of the interpreter."""
_Keys = dict[str, list[StoredSlice]]


class OwnLog:
    """See ``engine.from_log.OwnLog``. On any thread, one at a time.

    Args:
        slots: From the oldest anchor to the step that is made, in the order of steps; a step's gradients that lie in
            slots of their own come before its other one.

    Raises:
        DamagedError: What they tell is damaged.
        CoverageError: A slot describes no updates.
    """

    def __init__(self, slots: Sequence[OwnSlot]) -> None:
        last = slots[-1]
        self._last, self._rank = last, last.header.rank
        self._memory = {slot.path: slot.memory for slot in slots}
        self._anchors = {op: slot.header.step for slot in slots for op in _in_full(slot)}
        self._stored: dict[str, _Keys] = defaultdict(dict)  # by parameter, of the anchors
        self._gradients: dict[str, dict[int, list[StoredSlice]]] = defaultdict(dict)
        self._side: dict[int, dict[str, StoredSlice]] = defaultdict(dict)
        for slot in slots:
            self._sort(slot)
        self._steps = {slot.header.step: self._recorded(slot) for slot in slots if not slot.header.only}
        told = self._steps[last.header.step].plain
        self._layout = UpdateLayout.decoded(told["layout"], last.path)
        self._groups = _groups(self._layout.units)

    # --- engine.from_log.OwnLog ---

    @property
    def state(self) -> bytes:
        return state_without(self._last.header.state, PLAIN, self._last.path)

    def side(self) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        prefix = f"side/{self._rank}/{PLAIN}/"
        kept = [each for key, each in self._side[self._last.header.step].items() if not key.startswith(prefix)]
        for stored, values in self.read(kept):
            yield stored.entry, bytes_of(values)

    def slices(self, wanted: Sequence[SliceEntry]) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        by_group: dict[int, list[SliceEntry]] = defaultdict(list)
        for entry in wanted:
            by_group[self._groups.get(split_key(entry.key).fqn, -1)].append(entry)
        for entry in by_group.pop(-1, ()):  # of what no optimizer updates
            yield entry, self._as_anchored(entry)
        units: dict[int, list[Unit]] = defaultdict(list)
        for unit in self._layout.units:
            units[self._groups[unit.pieces[0].parameter] if unit.pieces else -1].append(unit)
        threads = self._layout.device.threads
        if torch.get_num_threads() != threads:  # of this thread; they divide an update, and so decide its last bits
            torch.set_num_threads(threads)
        due: list[tuple[list[Unit], list[SliceEntry]]] = []
        nbytes = 0
        for group, entries in by_group.items():
            nbytes += (more := sum(map(_nbytes, units[group])))
            if due and nbytes > _AT_ONCE:
                yield from self._made(due)
                due, nbytes = [], more
            due.append((units[group], entries))
        if due:
            yield from self._made(due)

    # --- parts ---

    def read(self, wanted: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
        """Yields slices with their values, views of the slots. Raises ``DamagedError`` at the first damaged one."""
        for stored in wanted:
            data = self._memory[stored.path][stored.offset : stored.offset + stored.nbytes]
            found = xxhash.xxh3_64_hexdigest(data.numpy().data)
            if found != stored.entry.checksum:
                raise stored.damaged(f"checksum mismatch: {found}, written was {stored.entry.checksum}")
            yield stored, data.view(TORCH_DTYPES[stored.entry.dtype]).view(stored.entry.shape)

    def _made(
        self, groups: Sequence[tuple[Sequence[Unit], Sequence[SliceEntry]]]
    ) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        units = tuple(unit for those, _ in groups for unit in those)
        entries = [entry for _, those in groups for entry in those]
        layout = replace(self._layout, units=units)
        content = _Group(self, layout)
        share = RankShare(content, self._rank, layout, content.parameters)
        content.require_whole(share.boxes, entries)
        replay = share.replayed("cpu")
        for entry in entries:
            yield entry, bytes_of(share.read(replay, entry))

    def _as_anchored(self, entry: SliceEntry) -> torch.Tensor:
        """Returns the bytes of a slice that has not changed since its operator's anchor."""
        whole = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        missing = entry.box.volume
        found = self._stored[split_key(entry.key).fqn].get(entry.key, ())
        for stored, values in self.read(each for each, _ in overlapping(found, entry.box)):
            common = stored.entry.box.overlap(entry.box)
            if common is not None:
                part = block(values, stored.entry.offsets, common)
                block(whole, entry.offsets, common).copy_(part)
                missing -= common.volume
        if missing:
            raise CoverageError(self._last.path, (f"{missing:,} elements of {entry.name} are not in this rank's log",))
        return bytes_of(whole)

    def _sort(self, slot: OwnSlot) -> None:
        header, step = slot.header, slot.header.step
        for part in header.parts:
            file = FileRecord(slot.path, header.nbytes, part.begin, "", step, header.rank)
            for entry in header.slices(part, slot.path):
                stored = StoredSlice(entry, file)
                if entry.key.startswith(GRADIENT):
                    if self._anchors.get(entry.operator, step) < step:
                        self._gradients[parameter_of(entry.key)].setdefault(step, []).append(stored)
                elif not entry.operator:
                    self._side[step][entry.key] = stored
                elif self._anchors.get(entry.operator) == step:
                    self._stored[split_key(entry.key).fqn].setdefault(entry.key, []).append(stored)

    def _recorded(self, slot: OwnSlot) -> _Recorded:
        prefix, side = f"side/{self._rank}/", self._side[slot.header.step]

        def tensor(name: str) -> torch.Tensor:
            [(_, values)] = self.read([side[prefix + name]])
            return values.clone()

        told = unseal(slot.header.state, slot.path)["state"].get(PLAIN)
        if told is None:
            raise CoverageError(slot.path, ("it describes no updates",))
        try:
            return _Recorded(decode_tree(told, tensor))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(slot.path, f"what it tells of updates cannot be decoded ({error!r})") from error


class _Recorded:
    """What a step recorded, to be asked for a few units.

    Attributes:
        plain: All of it.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.plain = plain
        self._had = [frozenset(update["parameters"]) for update in plain["updates"]]
        self._places = [{name: at for at, name in enumerate(each["units"])} for each in plain["counts"]]

    def of(self, units: Iterable[tuple[int, str]], parameters: Iterable[str]) -> dict[str, Any]:
        """Returns ``plain`` as if there were no others."""
        updates = [
            {**update, "parameters": [name for name in parameters if name in had]}
            for update, had in zip(self.plain["updates"], self._had, strict=True)
        ]
        counts = []
        for each, places in zip(self.plain["counts"], self._places, strict=True):
            here = [name for number, name in units if number == each["optimizer"] and name in places]
            values = each["values"][[places[name] for name in here]]
            counts.append({**each, "units": here, "values": values})
        return {"updates": updates, "counts": counts}


class _Group:
    """``replayed_share.Content`` of some units.

    Attributes:
        anchors: Of the operators that have a part of the units.
        homes: As ``ports.LoggedSteps.homes``.
        parameters: That do.
        spans: Of the operators.
    """

    def __init__(self, of: OwnLog, layout: UpdateLayout) -> None:
        self.parameters = tuple(dict.fromkeys(piece.parameter for unit in layout.units for piece in unit.pieces))
        self._of, self._units = of, [(unit.optimizer, unit.name) for unit in layout.units]
        self._keys: _Keys = {key: found for name in self.parameters for key, found in of._stored[name].items()}
        here = {stored.entry.operator for found in self._keys.values() for stored in found}
        self.anchors: Mapping[str, int] = {op: of._anchors[op] for op in here}
        self.homes: Mapping[str, str] = homes_of(self._keys)
        rows = merged_spans(self._keys)
        self.spans: Mapping[str, Sequence[Span]] = {op: rows.get(op, ()) for op in here}

    def is_shaped(self, key: str) -> bool:
        """See ``LogContent.is_shaped``."""
        if key.startswith(_MODEL) or key not in self._keys:
            return key.startswith(_MODEL)
        [weights, *_] = self._keys[f"{_MODEL}{split_key(key).fqn}"]
        shape = weights.entry.global_shape
        return bool(shape) and self._keys[key][0].entry.global_shape == shape

    def stored_of(self, parameters: Mapping[str, Sequence[Box]]) -> Iterator[StoredSlice]:
        """See ``Content.stored_of``: these are all of them."""
        for found in self._keys.values():
            yield from found

    def gradients_of(self, parameters: Mapping[str, Sequence[Box]]) -> Mapping[int, Sequence[StoredSlice]]:
        """See ``Content.gradients_of``."""
        found: dict[int, list[StoredSlice]] = {step: [] for step in self._of._steps}
        for name in self.parameters:
            for step, those in self._of._gradients[name].items():
                found[step] += those
        return found

    def plain(self, rank: int) -> Mapping[int, Mapping[str, Any]]:
        """See ``Content.plain``: of the steps from the oldest anchor on."""
        first = min(self.anchors.values(), default=self._of._last.header.step)
        steps = self._of._steps.items()
        return {step: told.of(self._units, self.parameters) for step, told in steps if step >= first}

    def read(self, wanted: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
        """See ``OwnLog.read``."""
        return self._of.read(wanted)

    def require_whole(self, boxes: Mapping[str, Sequence[Box]], wanted: Sequence[SliceEntry]) -> None:
        """Raises ``CoverageError`` unless the anchors have every element of these blocks, and every key of ``wanted``.

        Step counts need no anchor: each step's plain state has them. Of gradients ``LogReplayer.check`` asks the same.
        """
        missing = [entry.name for entry in wanted if entry.shape and entry.key not in self._keys]
        for key, found in self._keys.items():
            if self.is_shaped(key):
                mine = boxes[split_key(key).fqn]
                have = sum(common.volume for box in mine for _, common in overlapping(found, box))
                lacking = sum(box.volume for box in mine) - have
                missing += [f"{lacking:,} elements of {key}"] if lacking else []
        if missing:
            raise CoverageError(self._of._last.path, tuple(f"{each}: not in this rank's log" for each in missing))


def _nbytes(unit: Unit) -> int:
    return prod(unit.shape) * int(getattr(torch, unit.dtype).itemsize)


def _in_full(slot: OwnSlot) -> Sequence[str]:
    operators = slot.header.facts.operators
    return () if isinstance(operators, Fragment) else operators


def _groups(units: Iterable[Unit]) -> Mapping[str, int]:
    """Parameter -> number of its group: units that share a parameter are in one."""
    group_of: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    for number, unit in enumerate(units):
        names = list(dict.fromkeys(piece.parameter for piece in unit.pieces))
        members[number] = names
        for other in {group_of[name] for name in names if name in group_of}:
            members[number] += members.pop(other)
        group_of.update(dict.fromkeys(members[number], number))
    return group_of
