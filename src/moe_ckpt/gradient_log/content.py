"""Contents of a gradient log, on storage and in memory, for a replay without a model.

Nothing is verified here: see ``gradients.densifying``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from moe_ckpt.core.operators import Span
from moe_ckpt.errors import CoverageError, NoCheckpointError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.format.shard import GRADIENT
from moe_ckpt.gradient_log.survivor_slices import NOTHING, SurvivorSlices
from moe_ckpt.gradient_log.units import UpdateLayout
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.reading.index import StoredSlice, TensorIndex, homes_of, overlapping, split_key
from moe_ckpt.reading.memory.opened_memory import OpenedMemory
from moe_ckpt.reading.reader import StoreReader

PLAIN = "gradient_log"
"""Its key in the plain state of a step."""
_MODEL = "model/"


class LogContent:
    """Slices, rows of operators and plain state of a log, as far as they lead to its last step.

    Args:
        opened: The log, or a checkpoint that stands by itself.

    Attributes:
        anchors: Operator -> step of the anchor that its last step is made from.
        homes: As ``ports.LoggedSteps.homes``.
        layouts: Of each rank's updates; none where nothing was logged.

    Raises:
        NoCheckpointError: An operator does not reach the step.
        CoverageError: The log tells nothing of what it was written from.
        DamagedError: What it tells is damaged.
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self._opened, self._reader = opened, opened.reader
        self._index: TensorIndex = opened.reader.index(opened.manifest)
        self.anchors: Mapping[str, int] = anchors_of(opened.manifest, opened.chained)
        self.homes: Mapping[str, str] = homes_of(self._index.tensors)
        _require_reached(opened)
        ranks = range(opened.manifest.world_size)
        self.layouts: list[UpdateLayout] = [self._layout(rank) for rank in ranks] if opened.logged else []
        self._updated = {p.parameter for layout in self.layouts for unit in layout.units for p in unit.pieces}

    def _layout(self, rank: int) -> UpdateLayout:
        snapshot = self._opened.logged[-1].manifest
        path = state_path(snapshot.directory, rank)
        return UpdateLayout.decoded(plain_of(self._reader, snapshot, rank)["layout"], path)

    @property
    def side(self) -> Mapping[str, StoredSlice]:
        """The tensors of the ranks' plain state, by key."""
        return self._index.side

    @cached_property
    def written(self) -> Mapping[int, Sequence[StoredSlice]]:
        """The slices that each rank wrote, each element of each tensor once."""
        slices: dict[int, list[StoredSlice]] = defaultdict(list)
        for stored in self._index.live:
            slices[stored.file.rank].append(stored)
        return slices

    def is_updated(self, parameter: str) -> bool:
        """Returns whether an optimizer of any rank updates a parameter."""
        return parameter in self._updated

    def stored_of(self, parameters: Mapping[str, Sequence[Box]]) -> Iterator[StoredSlice]:
        """Yields all anchors of these blocks: weights, and optimizer state of them."""
        for key, group in self._index.tensors.items():
            fqn = split_key(key).fqn
            if fqn not in parameters:
                continue
            if self.is_shaped(key):
                yield from dict.fromkeys(s for box in parameters[fqn] for s, _ in overlapping(group, box))
            else:
                yield from group

    def is_shaped(self, key: str) -> bool:
        """Returns whether a tensor has the elements of its parameter. (A step count has not, even of a parameter of
        one.)"""
        shape = self._index.meta(f"{_MODEL}{split_key(key).fqn}").global_shape
        return key.startswith(_MODEL) or (bool(shape) and self._index.meta(key).global_shape == shape)

    def gradients_of(self, parameters: Mapping[str, Sequence[Box]]) -> Mapping[int, Sequence[StoredSlice]]:
        """Returns step -> the gradients that these blocks consumed since their operators' anchors."""
        gradients: dict[int, list[StoredSlice]] = {}
        for snapshot in self._opened.logged:
            step = snapshot.manifest.step
            gradients[step] = [
                stored
                for stored in snapshot.gradients
                if self.anchors[stored.entry.operator] < step
                and any(stored.entry.box.overlap(box) for box in parameters.get(parameter_of(stored.entry.key), ()))
            ]
        return gradients

    def plain(self, rank: int) -> Mapping[int, Mapping[str, Any]]:
        """Returns step -> what a rank recorded of its updates."""
        return {
            snapshot.manifest.step: plain_of(self._reader, snapshot.manifest, rank) for snapshot in self._opened.logged
        }

    def read(self, slices: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
        """Yields slices with their values."""
        return self._reader.read_many(slices)

    @cached_property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """The rows of parameters of each operator."""
        return merged_spans(self._index.tensors)


def merged_spans(tensors: Mapping[str, Iterable[StoredSlice]]) -> Mapping[str, Sequence[Span]]:
    """Returns operator -> its rows of parameters, of all slices of weights.

    Args:
        tensors: Key -> slices.
    """
    rows: dict[str, dict[str, set[tuple[int, int] | None]]] = defaultdict(lambda: defaultdict(set))
    for key, group in tensors.items():
        for stored in group if key.startswith(_MODEL) else ():
            box = stored.entry.box
            of = rows[stored.entry.operator][split_key(key).fqn]
            if box.volume:
                of.add((box.offsets[0], box.offsets[0] + box.shape[0]) if box.shape else None)
    return {op: [s for name, these in of.items() for s in _merged(name, these)] for op, of in rows.items()}


def _merged(parameter: str, rows: set[tuple[int, int] | None]) -> Iterator[Span]:
    """Yields ranges of rows that do not touch."""
    if None in rows:
        yield Span(parameter)
        return
    run: tuple[int, int] | None = None
    for first, stop in sorted(span for span in rows if span is not None):
        if run is not None and first <= run[1]:
            run = run[0], max(run[1], stop)
        else:
            if run is not None:
                yield Span(parameter, *run)
            run = first, stop
    if run is not None:
        yield Span(parameter, *run)


def _require_reached(opened: OpenedMemory) -> None:
    manifest = opened.manifest
    behind = {op: rec.step for op, rec in manifest.operators.items() if op not in opened.chained}
    behind = {op: step for op, step in behind.items() if step != manifest.step}
    if behind:
        shown = ", ".join(f"{op} (step {step})" for op, step in list(behind.items())[:4])
        more = f" and {len(behind) - 4} more" if len(behind) > 4 else ""
        raise NoCheckpointError(
            f"step {manifest.step} cannot be made: its policy did not log every operator. {shown}{more} are older, and "
            "no gradients bring them to it"
        )


def plain_of(reader: StoreReader, snapshot: Manifest, rank: int) -> Mapping[str, Any]:
    """Returns what a rank recorded of the updates of a snapshot's step.

    Raises:
        CoverageError: Nothing.
        DamagedError: As ``StoreReader.state``.
    """
    plain = reader.state(snapshot, rank).get(PLAIN)
    if not isinstance(plain, Mapping):
        path = state_path(snapshot.directory, rank)
        raise CoverageError(f"gradient log of {snapshot.directory}", (f"{path} describes no updates",))
    return plain


def anchors_of(manifest: Manifest, chained: Collection[str], survivors: SurvivorSlices = NOTHING) -> dict[str, int]:
    """Returns operator -> the step at which it is loaded: what is not ``chained`` last, whatever step it is as of, and
    so what is taken from survivors."""
    steps = {op: record.step if op in chained else manifest.step for op, record in manifest.operators.items()}
    return steps | dict.fromkeys(survivors.operators, manifest.step)


def parameter_of(key: str) -> str:
    """Returns the parameter that the gradient with ``key`` is of."""
    return key.removeprefix(GRADIENT).partition("/")[2]
