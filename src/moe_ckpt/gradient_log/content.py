"""Contents of a gradient log, in memory and on storage: anchors, gradients, what ranks recorded of their updates."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_ckpt.errors import CoverageError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.format.shard import GRADIENT
from moe_ckpt.gradient_log.survivor_slices import NOTHING, SurvivorSlices
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.reading.index import StoredSlice, TensorIndex
from moe_ckpt.reading.memory.opened_memory import LoggedSnapshot, OpenedMemory
from moe_ckpt.reading.reader import StoreReader

PLAIN = "gradient_log"
"""Its key in the plain state of a step."""


class LoggedSteps:
    """A gradient log from its oldest anchor to its last step, as the units of one rank need it.

    Args:
        opened: The last step.
        snapshots: Of the log, from the oldest anchor on.
        anchors: Operator -> the step that it is loaded as of.
        homes: Parameter -> the operator that has optimizer state of it without having rows of it.
        rank: Whose units they are.
        boxes: Parameter -> its blocks in these units.

    Attributes:
        steps: Of the snapshots, ascending.
        anchors, homes: As given.
        needed: Step -> the gradients of these blocks that the step consumed, of operators with older anchors.
    """

    def __init__(
        self,
        opened: OpenedMemory,
        snapshots: Sequence[LoggedSnapshot],
        anchors: Mapping[str, int],
        homes: Mapping[str, str],
        rank: int,
        boxes: Mapping[str, Sequence[Box]],
    ) -> None:
        self.anchors, self.homes = anchors, homes
        self._reader, self._rank = opened.reader, rank
        self._index: TensorIndex = opened.reader.index(opened.manifest)
        self._snapshots = {snapshot.manifest.step: snapshot.manifest for snapshot in snapshots}
        self._plain: dict[int, Mapping[str, Any]] = {}
        self.steps: Sequence[int] = list(self._snapshots)
        self.needed = {one.manifest.step: list(needed_gradients(one, anchors, boxes)) for one in snapshots}

    def plain(self, step: int) -> Mapping[str, Any]:
        """Returns ``StepGradients.plain`` of the rank.

        Raises:
            CoverageError, DamagedError: As ``plain_of``.
        """
        if step not in self._plain:
            self._plain[step] = self._recorded(plain_of(self._reader, self._snapshots[step], self._rank))
        return self._plain[step]

    def _recorded(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns what of a step's plain state is about these units."""
        return plain

    def blocks(self, step: int) -> Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Returns (key, offsets, shape) of the gradients of operators with older anchors."""
        return [(stored.entry.key, stored.entry.offsets, stored.entry.shape) for stored in self.needed[step]]

    def gradients(self, step: int) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Yields (key, offsets, values) of the same."""
        for stored, values in self._reader.read_many(self.needed[step]):
            yield stored.entry.key, stored.entry.offsets, values

    def load(self, step: int) -> None:
        """Writes the anchors of ``step`` into the units."""
        raise NotImplementedError


def needed_gradients(
    snapshot: LoggedSnapshot, anchors: Mapping[str, int], boxes: Mapping[str, Sequence[Box]]
) -> Iterator[StoredSlice]:
    """Yields the gradients of a snapshot that are applied to these blocks: of operators with older anchors."""
    for stored in snapshot.gradients:
        if anchors[stored.entry.operator] < snapshot.manifest.step and any(
            box.overlap(stored.entry.box) for box in boxes.get(_parameter_of(stored.entry.key), ())
        ):
            yield stored


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


def _parameter_of(key: str) -> str:
    return key.removeprefix(GRADIENT).partition("/")[2]
