"""A gradient log in memory, from the oldest anchor to the step that is returned to, as one rank needs it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ckpt.errors import CoverageError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.format.shard import GRADIENT
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.notices import announce
from moe_ckpt.ports import LoggedSteps, StateTensor, TrainingState
from moe_ckpt.reading.index import StoredSlice, homes_of, overlapping
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import box_of, copy_slices, parameters_of
from moe_ckpt.reading.slices import find_damage

PLAIN = "gradient_log"
"""Its key in the plain state of a step."""
TELL_SECS = 10.0
"""So often a replay says how far it is."""


@dataclass(frozen=True, eq=False)
class LoggedSnapshot:
    """One snapshot of a log.

    Attributes:
        manifest: Of what it holds in full, and of the ranks' plain states.
        gradients: What it holds of them, of all ranks.
    """

    manifest: Manifest
    gradients: tuple[StoredSlice, ...]


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


class StoredLog(LoggedSteps):
    """The stored steps of a log (``ports.LoggedSteps``). Made after what other nodes hold was fetched.

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

    # --- ports.LoggedSteps ---

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


def parameter_of(key: str) -> str:
    """Returns the parameter that the gradient with ``key`` is of."""
    return key.removeprefix(GRADIENT).partition("/")[2]
