"""What one rank's units are as of a logged step: optimizers without a model, filled from anchors and stepped again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Span
from moe_ckpt.errors import CoverageError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.gradients.detached import OptimizerKind, detached
from moe_ckpt.gradients.layout import UpdateLayout
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.returning import LogReplayer
from moe_ckpt.gradients.units import Unit, UnitBlock
from moe_ckpt.gradients.updates import WEIGHT, TensorBlock
from moe_ckpt.ports import LoggedSteps
from moe_ckpt.recovery.index import StateKey, StoredSlice, split_key
from moe_ckpt.recovery.slices import block

Tell = Callable[[int, str], None]
"""(bytes read or made, what is being done) -> None."""


def untold(nbytes: int, what: str) -> None:
    """Ignores progress, for callers that do not ask for it."""


class Content(Protocol):
    """The content of a log, as far as it leads to its last step.

    Attributes:
        anchors: Operator -> step of the anchor that its last step is made from.
        homes: As ``ports.LoggedSteps.homes``.
    """

    anchors: Mapping[str, int]
    homes: Mapping[str, str]

    @property
    def spans(self) -> Mapping[str, Sequence[Span]]:
        """The rows of parameters of each operator."""
        ...

    def is_shaped(self, key: str) -> bool:
        """Returns whether a tensor has the elements of its parameter."""
        ...

    def stored_of(self, parameters: Mapping[str, Sequence[Box]]) -> Iterable[StoredSlice]:
        """Returns all anchors of these blocks: weights, and optimizer state of them."""
        ...

    def gradients_of(self, parameters: Mapping[str, Sequence[Box]]) -> Mapping[int, Sequence[StoredSlice]]:
        """Returns step -> the gradients that these blocks consumed since their operators' anchors."""
        ...

    def plain(self, rank: int) -> Mapping[int, Mapping[str, Any]]:
        """Returns step -> what a rank recorded of its updates."""
        ...

    def read(self, slices: Iterable[StoredSlice]) -> Iterable[tuple[StoredSlice, torch.Tensor]]:
        """Yields slices with their values, which must not be changed."""
        ...


class RankShare:
    """The units of one rank that hold some parameters, with all that they follow from.

    Args:
        of: The log.
        rank: That has the units.
        layout: Of its updates; None where nothing was logged.
        parameters: Which; of all units that have a block of one of them.
    """

    def __init__(self, of: Content, rank: int, layout: UpdateLayout | None, parameters: Collection[str]) -> None:
        self._of, self._rank, self._layout = of, rank, layout
        self.units: tuple[Unit, ...] = tuple(
            unit for unit in (layout.units if layout else ()) if any(p.parameter in parameters for p in unit.pieces)
        )
        boxes: dict[str, list[Box]] = defaultdict(list)
        for unit in self.units:
            for piece in unit.pieces:
                boxes[piece.parameter].append(piece.box)
        self.boxes: Mapping[str, Sequence[Box]] = boxes
        self.anchors = list(of.stored_of(boxes))
        self.gradients = of.gradients_of(boxes)

    @property
    def inputs(self) -> Iterator[StoredSlice]:
        """Yields all slices that are read."""
        yield from self.anchors
        for group in self.gradients.values():
            yield from group

    def replayed(self, device: torch.device | str, tell: Tell = untold) -> OptimizerReplay:
        """Returns optimizers that hold the units as of the last step.

        Args:
            device: To step on.
            tell: Told of progress.

        Raises:
            CoverageError: A gradient lacks elements.
            UnsupportedError: A class of optimizers is not known here.
            ReplayDivergedError: Step counts become others than were recorded.
        """
        plain = self._of.plain(self._rank)
        replay = detached(_kinds(self._layout, plain, torch.device(device)), self.units, device)
        if self._layout is not None:
            log = _RankLog(self._of, self, replay, self._layout, plain, tell)
            replayer = _DetachedReplayer(replay, self._of.spans)
            replayer.check(log)
            replayer.replay(log)
        return replay

    def read(self, replay: OptimizerReplay, entry: SliceEntry) -> torch.Tensor:
        """Returns a slice as the optimizers have it.

        Raises:
            CoverageError: Another rank updates a part of it.
        """
        key = split_key(entry.key)
        whole = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        shaped = self._of.is_shaped(entry.key)
        missing = entry.box.volume
        for number, unit, piece in () if self._layout is None else _pieces_of(replay, self._layout, key):
            if not missing:
                break
            source = replay.tensors[number, unit.name]
            if key.state is not None and key.state != unit.stored:
                source = replay.state_of(number, unit.name)[key.state]
            if not shaped:
                return block(source.detach(), (0,) * source.dim(), entry.box) if entry.shape else source.detach()
            part = piece.part(entry.box)
            if part is not None:
                block(whole, entry.offsets, part.box).copy_(part.view(source.detach()))
                missing -= part.box.volume
        if missing:
            reason = f"{entry.name} of {entry.operator} is updated on another rank: {missing:,} are not of this rank"
            raise CoverageError(f"the share of rank {self._rank}", (reason,))
        return whole


def unplaced(entry: SliceEntry) -> SliceEntry:
    """Returns an entry without place and checksum."""
    return replace(entry, begin=0, end=0, checksum=0)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's bytes on the host."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def _pieces_of(replay: OptimizerReplay, layout: UpdateLayout, key: StateKey) -> Iterator[tuple[int, Unit, UnitBlock]]:
    """Yields (number of the optimizer, unit, piece) of a tensor of the checkpoint."""
    for number, prefix in enumerate(layout.keys):
        if key.optimizer in (None, prefix):
            for unit, piece in replay.pieces.of(number, key.fqn):
                yield number, unit, piece


def _kinds(
    layout: UpdateLayout | None, plain: Mapping[int, Mapping[str, Any]], device: torch.device
) -> list[OptimizerKind]:
    """Returns what the optimizers were at their first update that is made once more."""
    groups: dict[int, Sequence[Mapping[str, Any]]] = {}
    for step in sorted(plain)[1:]:
        for update in plain[step]["updates"]:
            groups.setdefault(int(update["optimizer"]), update["groups"])
    if layout is None:
        return []
    kinds = []
    for number, name in enumerate(layout.classes):
        # One at least, though none of these units is the optimizer's: torch makes none without a group.
        count = 1 + max((unit.group for unit in layout.units if unit.optimizer == number), default=0)
        settings = groups.get(number, [{}] * count)
        kinds.append(OptimizerKind(name, tuple(_on(device, group) for group in settings)))
    return kinds


def _on(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of what only a GPU can do nothing is asked of a CPU: results are as exact as they can be on another device."""
    return {**settings, "capturable": False} if settings.get("capturable") and device.type == "cpu" else {**settings}


class _DetachedReplayer(LogReplayer):
    """``LogReplayer`` of optimizers without a model."""

    def __init__(self, replay: OptimizerReplay, spans: Mapping[str, Sequence[Span]]) -> None:
        self._optimizers, self._spans, self._replay = replay.optimizers, spans, replay
        self._finish = lambda: None

    def _opened(self) -> OptimizerReplay:
        return self._replay


class _RankLog(LoggedSteps):
    """``ports.LoggedSteps`` of one rank's units, whose anchors go into optimizers without a model."""

    def __init__(
        self,
        of: Content,
        share: RankShare,
        replay: OptimizerReplay,
        layout: UpdateLayout,
        plain: Mapping[int, Mapping[str, Any]],
        tell: Tell,
    ) -> None:
        self.steps, self.anchors, self.homes = sorted(plain), of.anchors, of.homes
        self._of, self._share, self._replay, self._layout, self._tell = of, share, replay, layout, tell
        self._plain = {step: self._ours(recorded) for step, recorded in plain.items()}
        for stored in share.anchors:
            key = split_key(stored.entry.key)
            if key.state is not None and not of.is_shaped(stored.entry.key):
                empty = torch.zeros(stored.entry.global_shape, dtype=TORCH_DTYPES[stored.entry.dtype])
                for number, unit, _ in _pieces_of(replay, layout, key):
                    tensor = replay.tensors[number, unit.name]
                    where = tensor.device if stored.entry.on_param_device else torch.device("cpu")
                    replay.state_of(number, unit.name).setdefault(key.state, empty.to(where))

    def _ours(self, recorded: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the plain state without entries of units that this rank does not hold."""
        counts = []
        for entry in recorded["counts"]:
            here = [at for at, name in enumerate(entry["units"]) if (entry["optimizer"], name) in self._replay.tensors]
            counts.append(
                {
                    **entry,
                    "units": [entry["units"][at] for at in here],
                    "values": entry["values"][here],
                }
            )
        return {**recorded, "counts": counts}

    def plain(self, step: int) -> Mapping[str, Any]:
        return self._plain[step]

    def blocks(self, step: int) -> Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        return [(s.entry.key, s.entry.offsets, s.entry.shape) for s in self._share.gradients[step]]

    def gradients(self, step: int) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        for stored, values in self._of.read(self._share.gradients[step]):
            self._tell(stored.nbytes, f"repeating the updates of step {step}")
            yield stored.entry.key, stored.entry.offsets, values

    def load(self, step: int) -> None:
        due = [stored for stored in self._share.anchors if self.anchors[stored.entry.operator] == step]
        for stored, values in self._of.read(due):
            if self._of.is_shaped(stored.entry.key):
                self._replay.load(step, self._blocks(stored.entry, values))
            elif stored.entry.shape:  # factors; step counts are in the log's plain state
                self._load_factors(stored.entry, values)
            self._tell(stored.nbytes, f"loading the anchors of step {step}")

    def _blocks(self, entry: SliceEntry, values: torch.Tensor) -> Iterator[TensorBlock]:
        key = split_key(entry.key)
        kinds: dict[int, str] = {}
        for number, unit, _ in _pieces_of(self._replay, self._layout, key):
            if key.state is None and unit.stored:
                continue  # the weights follow from their masters
            kinds[number] = WEIGHT if key.state in (None, unit.stored) else str(key.state)
        for number, kind in kinds.items():
            yield TensorBlock(number, key.fqn, kind, entry.box, values, entry.on_param_device)

    def _load_factors(self, entry: SliceEntry, values: torch.Tensor) -> None:
        """State of another shape than its parameter's, of which each operator has rows or the home has all."""
        key = split_key(entry.key)
        for number, unit, _ in _pieces_of(self._replay, self._layout, key):
            whole = self._replay.state_of(number, unit.name)[str(key.state)]
            block(whole, (0,) * whole.dim(), entry.box).copy_(values)
