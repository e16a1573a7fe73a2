"""Shares of a dense checkpoint of one step of a gradient log, made by optimizers without a model, one rank's at a time.

What a rank wrote of the log's anchors is made again here, as of the step, from optimizers that hold the units in which
that lies, filled from anchors and stepped again. So the host memory needed is that of the rank with most, and ranks can
be dealt out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_ckpt.errors import CoverageError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.manifest import state_path
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.gradient_log.content import PLAIN, LogContent
from moe_ckpt.gradient_log.made_dense import WrittenShare, state_without, write_made_share
from moe_ckpt.gradient_log.optimizers import WEIGHT, OptimizerKind, OptimizerReplay, TensorBlock, detached
from moe_ckpt.gradient_log.replaying import LoggedSteps, LogReplayer
from moe_ckpt.gradient_log.units import Device, Unit, UnitBlock, UpdateLayout
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.reading.index import StateKey, StoredSlice, split_key
from moe_ckpt.reading.memory.opened_memory import OpenedMemory
from moe_ckpt.reading.slices import block, find_damage
from moe_ckpt.storage.base import Storage

Tell = Callable[[int, str], None]
"""(bytes read or made, what is being done) -> None."""


class RankShare:
    """The anchors that one rank wrote of a log, as of its last step, with all that they follow from.

    Args:
        log: The log.
        rank: That wrote the share, and has the units.
    """

    def __init__(self, log: LogContent, rank: int) -> None:
        self._log, self._rank = log, rank
        self._slices = log.written.get(rank, ())
        self._layout = log.layouts[rank] if log.layouts else None
        written = {split_key(stored.entry.key).fqn for stored in self._slices}
        self._units: tuple[Unit, ...] = tuple(
            unit
            for unit in (self._layout.units if self._layout else ())
            if any(piece.parameter in written for piece in unit.pieces)
        )
        boxes: dict[str, list[Box]] = defaultdict(list)
        for unit in self._units:
            for piece in unit.pieces:
                boxes[piece.parameter].append(piece.box)
        self.anchors = list(log.stored_of(boxes))
        self.gradients = log.gradients_of(boxes)

    @property
    def inputs(self) -> Iterator[StoredSlice]:
        """Yields all slices that are read."""
        yield from self._slices
        yield from self.anchors
        for group in self.gradients.values():
            yield from group

    def made(self, device: torch.device | str, tell: Tell) -> list[tuple[SliceEntry, torch.Tensor]]:
        """Returns what the rank writes of the checkpoint: entries without place and checksum, with their bytes.

        Raises:
            CoverageError: A gradient lacks elements, or another rank updates a part of a slice.
            UnsupportedError: A class of optimizers is not known here.
            ReplayDivergedError: Step counts become others than were recorded.
        """
        replay = self._replayed(device, tell)
        slices = []
        for stored, values in self._log.read(self._slices):
            if self._layout is not None and self._log.is_updated(split_key(stored.entry.key).fqn):
                values = self.read(replay, stored.entry)
            slices.append((unplaced(stored.entry), bytes_of(values)))
            tell(stored.nbytes, f"writing the share of rank {self._rank}")
        return slices

    def _replayed(self, device: torch.device | str, tell: Tell) -> OptimizerReplay:
        """Returns optimizers that hold the units as of the last step."""
        plain = self._log.plain(self._rank)
        replay = detached(_kinds(self._layout, plain, torch.device(device)), self._units, device)
        if self._layout is not None:
            steps = _RankLog(self._log, self, replay, self._layout, plain, tell)
            replayer = LogReplayer(self._log.spans, lambda: replay)
            replayer.check(steps)
            replayer.replay(steps)
        return replay

    def read(self, replay: OptimizerReplay, entry: SliceEntry) -> torch.Tensor:
        """Returns a slice as the optimizers have it.

        Raises:
            CoverageError: Another rank updates a part of it.
        """
        key = split_key(entry.key)
        whole = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        shaped = self._log.is_shaped(entry.key)
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
    kinds: list[OptimizerKind] = []
    for number, name in enumerate(layout.classes):
        # One at least, though none of these units is the optimizer's: torch makes none without a group.
        count = 1 + max((unit.group for unit in layout.units if unit.optimizer == number), default=0)
        settings = groups.get(number, [{}] * count)
        kinds.append((name, [_on(device, group) for group in settings]))
    return kinds


def _on(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of what only a GPU can do nothing is asked of a CPU: results are as exact as they can be on another device."""
    return {**settings, "capturable": False} if settings.get("capturable") and device.type == "cpu" else {**settings}


class _RankLog(LoggedSteps):
    """``LoggedSteps`` of one rank's units, whose anchors go into optimizers without a model."""

    def __init__(
        self,
        log: LogContent,
        share: RankShare,
        replay: OptimizerReplay,
        layout: UpdateLayout,
        plain: Mapping[int, Mapping[str, Any]],
        tell: Tell,
    ) -> None:
        self.steps, self.anchors, self.homes = sorted(plain), log.anchors, log.homes
        self._log, self._share, self._replay, self._layout, self._tell = log, share, replay, layout, tell
        self._plain = {step: self._ours(recorded) for step, recorded in plain.items()}
        for stored in share.anchors:
            key = split_key(stored.entry.key)
            if key.state is not None and not log.is_shaped(stored.entry.key):
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
        for stored, values in self._log.read(self._share.gradients[step]):
            self._tell(stored.nbytes, f"repeating the updates of step {step}")
            yield stored.entry.key, stored.entry.offsets, values

    def load(self, step: int) -> None:
        due = [stored for stored in self._share.anchors if self.anchors[stored.entry.operator] == step]
        for stored, values in self._log.read(due):
            if self._log.is_shaped(stored.entry.key):
                self._replay.load(self._blocks(stored.entry, values))
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
            yield TensorBlock(number, key.fqn, kind, entry.box, values)

    def _load_factors(self, entry: SliceEntry, values: torch.Tensor) -> None:
        """State of another shape than its parameter's, of which each operator has rows or the home has all."""
        key = split_key(entry.key)
        for number, unit, _ in _pieces_of(self._replay, self._layout, key):
            whole = self._replay.state_of(number, unit.name)[str(key.state)]
            block(whole, (0,) * whole.dim(), entry.box).copy_(values)


class Densifier:
    """Makes what each rank of a log wrote, as of the log's last step. Reads no slice before ``verify``.

    Args:
        opened: The log, or a checkpoint that stands by itself.

    Raises:
        NoCheckpointError: An operator does not reach the step.
        CoverageError: The log tells nothing of what it was written from.
        DamagedError: What it tells is damaged.
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self._opened, self._reader, self.manifest = opened, opened.reader, opened.manifest
        self._log = LogContent(opened)
        self._shares: dict[int, RankShare] = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices on which updates were made, each once."""
        return tuple(dict.fromkeys(layout.device for layout in self._log.layouts))

    @property
    def updates(self) -> int:
        """Steps whose updates are replayed."""
        return max(0, len(self._opened.logged) - 1)

    def nbytes(self, ranks: Iterable[int]) -> int:
        """Returns how many bytes are read or written for the shares of these ranks."""
        return sum(stored.nbytes for stored in self.inputs(ranks))

    def verify(self, ranks: Iterable[int]) -> None:
        """Raises ``DamagedError`` if a slice that the share of one of these ranks needs is damaged."""
        for stored, error in find_damage(self._reader.storage, set(self.inputs(ranks))):
            if error is not None:
                raise error
            self._reader.note_verified(stored)

    def inputs(self, ranks: Iterable[int]) -> Iterator[StoredSlice]:
        """Yields the slices that the shares of these ranks need."""
        for rank in ranks:
            yield from self._rank(rank).inputs

    def write(
        self,
        storage: Storage,
        rank: int,
        device: torch.device | str,
        tell: Tell = lambda nbytes, what: None,
    ) -> WrittenShare:
        """Makes and writes a rank's share of the checkpoint, which exists once ``commit_made`` was called with all.

        Args:
            storage: Of the store.
            rank: Of those that wrote the log.
            device: To step on.
            tell: Told of progress.

        Raises:
            OSError: It cannot be written.
            CoverageError, UnsupportedError, ReplayDivergedError: As ``RankShare.made``.
        """
        slices = self._rank(rank).made(device, tell)
        prefix = f"side/{rank}/"
        side = {key: stored for key, stored in self._log.side.items() if key.startswith(prefix)}
        plain = [stored for key, stored in side.items() if not key.startswith(f"{prefix}{PLAIN}/")]
        slices += [(unplaced(stored.entry), bytes_of(values)) for stored, values in self._log.read(plain)]
        path = state_path(self.manifest.directory, rank)
        state = state_without(self._reader.storage.read(path), PLAIN, path)
        return write_made_share(storage, self.manifest, rank, slices, state)

    @property
    def parent(self) -> str | None:
        """The parent of the checkpoint, as ``Manifest.parent``: what the life that wrote the log came from."""
        beneath = self._opened.beneath
        if beneath is None or beneath.generation != self.manifest.generation:
            return None if beneath is None else beneath.directory
        return beneath.parent

    def device(self) -> torch.device:
        """Returns what updates are made on here: the kind that trained, if there is one."""
        on_gpu = any(trainer.type == "cuda" for trainer in self.devices) and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    def threads(self, device: torch.device) -> int | None:
        """Returns the number of threads that torch must divide updates between, to come to the same bits; None for
        any."""
        counts = {trainer.threads for trainer in self.devices if trainer.type == "cpu"}
        return counts.pop() if device.type == "cpu" and len(counts) == 1 else None

    def _rank(self, rank: int) -> RankShare:
        if rank not in self._shares:
            self._shares[rank] = RankShare(self._log, rank)
        return self._shares[rank]
