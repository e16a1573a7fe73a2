"""Makes the shares of a dense checkpoint of one step of a gradient log, without a model, one rank's at a time.

The share of a rank has the tensors that this rank wrote of the log's anchors, as of the step. Optimizers without a
model are filled from the anchors of the units that these tensors belong to, and stepped again. So the host memory
needed is that of the rank with most, and several processes can divide the ranks among themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from moe_ckpt.errors import CoverageError, NoCheckpointError
from moe_ckpt.format.manifest import state_path
from moe_ckpt.format.sealed import seal, unseal
from moe_ckpt.format.shard import TORCH_DTYPES, SliceEntry
from moe_ckpt.gradient_log.optimizers import GradientBlock, OptimizerKind, OptimizerReplay, detached_optimizers
from moe_ckpt.gradient_log.replaying import PLAIN, LoggedSteps, plain_of
from moe_ckpt.gradient_log.units import Device, Unit, UpdateLayout
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.ports import StateTensor, TensorMeta
from moe_ckpt.reading.index import StoredSlice, overlapping, split_key
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.restore import MODEL, box_of
from moe_ckpt.reading.slices import block

Tell = Callable[[int, str], None]
"""Gets (bytes read or made, what is being done)."""


class RankShare(LoggedSteps):
    """The share that one rank wrote of a log, as of the log's last step, made by optimizers without a model.

    Args:
        log: The log.
        rank: The rank that wrote the share, and whose units are stepped again.
    """

    _replay: OptimizerReplay

    def __init__(self, log: Densifier, rank: int) -> None:
        self._log, self._slices = log, log.written.get(rank, ())
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
        super().__init__(log.opened, rank, boxes)
        self._anchors = list(log.stored_of(boxes))

    @property
    def inputs(self) -> Iterator[StoredSlice]:
        """Yields all slices that are read."""
        yield from chain(self._slices, self._anchors, *self.needed.values())

    def made(self, device: torch.device, tell: Tell) -> list[tuple[SliceEntry, torch.Tensor]]:
        """Returns the slices that the rank writes: entries without place and checksum, with their bytes.

        Raises:
            CoverageError: A gradient lacks elements, or another rank updates a part of a slice.
            UnsupportedError: The class of an optimizer is not known here.
            ReplayDivergedError: A step count differs from what was recorded.
        """
        self._tell = tell
        live: dict[str, list[StateTensor]] = defaultdict(list)
        if self._layout is not None:
            self._replay = detached_optimizers(self._kinds(self._layout, device), self._units, device)
            self.check(self._replay)
            self.repeat(self._replay)
            for tensor in self._tensors(self._layout, weights=True):
                live[tensor.key].append(tensor)
            del self._replay  # the next rank's share needs the memory
        slices = []
        for stored, values in self._reader.read_many(self._slices):
            if split_key(stored.entry.key).fqn in self._log.updated:
                values = self._joined(stored.entry, live[stored.entry.key])
            slices.append((without_place(stored.entry), bytes_of(values)))
            tell(stored.nbytes, f"writing the share of rank {self._rank}")
        return slices

    def _tensors(self, layout: UpdateLayout, *, weights: bool) -> Iterator[StateTensor]:
        """Yields what the optimizers update, and their state, as it is now. Creates the state that the anchors have.

        Args:
            layout: Layout of the rank.
            weights: Also yield the weights that follow from master weights, with the values of those.
        """
        for name in dict.fromkeys(stored.entry.key for stored in self._anchors):
            key, meta, is_shaped = split_key(name), self._index.meta(name), self._log.is_shaped(name)
            for number, prefix in enumerate(layout.keys):
                pieces = self._replay.pieces.of(number, key.fqn) if key.optimizer in (None, prefix) else ()
                for unit, piece in pieces:
                    if key.state is None and unit.stored and not weights:
                        continue
                    value = self._replay.tensors[number, unit.name].detach()
                    if key.state not in (None, unit.stored):
                        state = self._replay.state_of(number, unit.name)
                        if key.state not in state:
                            state[key.state] = _zeros(meta, value, is_shaped=is_shaped)
                        value = state[key.state].detach()
                    box = piece.box if is_shaped else Box((0,) * value.dim(), tuple(value.shape))
                    local = piece.view(value) if is_shaped else value
                    yield StateTensor(name, key.fqn, local, box.offsets, meta.global_shape)

    def _joined(self, entry: SliceEntry, live: Iterable[StateTensor]) -> torch.Tensor:
        """Returns a slice of the tensor of which ``live`` are blocks.

        Raises:
            CoverageError: Another rank updates a part of it.
        """
        whole, missing = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="cpu"), entry.box.volume
        for tensor in live:
            common = entry.box.overlap(box_of(tensor))
            if common is not None and missing:
                block(whole, entry.offsets, common).copy_(block(tensor.local, tensor.offsets, common))
                missing -= common.volume
        if missing:
            reason = f"{entry.name} of {entry.operator} is updated on another rank: {missing:,} are not of this rank"
            raise CoverageError(f"the share of rank {self._rank}", (reason,))
        return whole

    def _kinds(self, layout: UpdateLayout, device: torch.device) -> list[OptimizerKind]:
        """Returns class and hyperparameters of the optimizers at the first update that is made again."""
        groups: dict[int, Sequence[Mapping[str, Any]]] = {}
        for step in self.steps[1:]:
            for update in self.plain(step)["updates"]:
                groups.setdefault(int(update["optimizer"]), update["groups"])
        kinds: list[OptimizerKind] = []
        for number, name in enumerate(layout.classes):
            # At least one, even if none of these units is the optimizer's: torch makes no optimizer without a group.
            count = 1 + max((unit.group for unit in layout.units if unit.optimizer == number), default=0)
            settings = groups.get(number, [{}] * count)
            kinds.append((name, [_on(device, group) for group in settings]))
        return kinds

    # --- LoggedSteps ---

    def _recorded(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        names, counts = {(unit.optimizer, unit.name) for unit in self._units}, []
        for entry in plain["counts"]:
            here = [at for at, name in enumerate(entry["units"]) if (entry["optimizer"], name) in names]
            counts.append({**entry, "units": [entry["units"][at] for at in here], "values": entry["values"][here]})
        return {**plain, "counts": counts}

    def gradients(self, step: int) -> Iterator[GradientBlock]:
        for gradient in super().gradients(step):
            self._tell(gradient.values.nbytes, f"repeating the updates of step {step}")
            yield gradient

    def tensors(self) -> Sequence[StateTensor]:
        return [] if self._layout is None else list(self._tensors(self._layout, weights=False))

    def load(self, step: int) -> None:
        super().load(step)
        due = (stored.nbytes for stored in self._anchors if self.anchors[stored.entry.operator] == step)
        self._tell(sum(due), f"loading the anchors of step {step}")


def _zeros(meta: TensorMeta, updated: torch.Tensor, *, is_shaped: bool) -> torch.Tensor:
    """Returns zeros for optimizer state. State of its parameter's shape gets the strides of the updated tensor."""
    dtype = TORCH_DTYPES[meta.dtype]
    if is_shaped:
        return torch.zeros_like(updated, dtype=dtype)
    return torch.zeros(meta.global_shape, dtype=dtype, device=updated.device if meta.on_param_device else "cpu")


def without_place(entry: SliceEntry) -> SliceEntry:
    """Returns an entry without place and checksum."""
    return replace(entry, begin=0, end=0, checksum=0)


def bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's bytes on the host."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def _on(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``settings`` without those that only a GPU supports, if ``device`` is a CPU."""
    return {**settings, "capturable": False} if settings.get("capturable") and device.type == "cpu" else {**settings}


class Densifier:
    """Makes the shares of all ranks of a log, as of the log's last step. Reads no slice before ``verify``.

    Args:
        opened: The log, or a checkpoint without gradients.

    Attributes:
        opened: As the argument.
        manifest: Manifest of the last step.
        layouts: Per rank, what it updates; empty if nothing was logged.
        updated: Parameters that an optimizer of any rank updates.

    Raises:
        NoCheckpointError: An operator does not reach the step.
        CoverageError: A rank recorded nothing about its updates.
        DamagedError: The record of a rank is damaged.
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self.opened, self.manifest = opened, opened.manifest
        self._reader, self._index = opened.reader, opened.reader.index(opened.manifest)
        _require_reached(opened)
        ranks = range(opened.manifest.world_size)
        self.layouts: list[UpdateLayout] = [self._layout(rank) for rank in ranks] if opened.logged else []
        self.updated = {p.parameter for layout in self.layouts for unit in layout.units for p in unit.pieces}
        self._shares: dict[int, RankShare] = {}

    def _layout(self, rank: int) -> UpdateLayout:
        snapshot = self.opened.logged[-1].manifest
        path = state_path(snapshot.directory, rank)
        return UpdateLayout.decoded(plain_of(self._reader, snapshot, rank)["layout"], path)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices on which the run made updates."""
        return tuple(dict.fromkeys(layout.device for layout in self.layouts))

    @property
    def updates(self) -> int:
        """Number of steps whose updates are repeated."""
        return max(0, len(self.opened.logged) - 1)

    def nbytes(self, ranks: Iterable[int]) -> int:
        """Returns the number of bytes that are read or written for the shares of these ranks."""
        return sum(stored.nbytes for stored in self.inputs(ranks))

    def verify(self, ranks: Iterable[int]) -> None:
        """Raises ``DamagedError`` if a slice that the share of one of these ranks needs is damaged."""
        self._reader.verify(self.inputs(ranks))

    def inputs(self, ranks: Iterable[int]) -> Iterator[StoredSlice]:
        """Yields the slices that the shares of these ranks need."""
        for rank in ranks:
            yield from self._rank(rank).inputs

    def made(self, rank: int, device: torch.device, tell: Tell) -> tuple[list[tuple[SliceEntry, torch.Tensor]], bytes]:
        """Makes a rank's share of the checkpoint. Returns its slices, without place and checksum, and its state file.

        Args:
            rank: A rank that wrote the log.
            device: Device to step on.
            tell: Gets progress.

        Raises:
            CoverageError, UnsupportedError, ReplayDivergedError: As ``RankShare.made``.
        """
        slices = self._rank(rank).made(device, tell)
        prefix = f"side/{rank}/"
        side = {key: stored for key, stored in self._index.side.items() if key.startswith(prefix)}
        plain = [stored for key, stored in side.items() if not key.startswith(f"{prefix}{PLAIN}/")]
        slices += [(without_place(stored.entry), bytes_of(values)) for stored, values in self._reader.read_many(plain)]
        path = state_path(self.manifest.directory, rank)
        body: dict[str, Any] = unseal(self._reader.storage.read(path), path)
        state = {name: value for name, value in body["state"].items() if name != PLAIN}
        return slices, seal({**body, "state": state})

    @property
    def parent(self) -> str | None:
        """``Manifest.parent`` of the checkpoint: the checkpoint from which the life went on that wrote the log."""
        beneath = self.opened.beneath
        if beneath is None or beneath.generation != self.manifest.generation:
            return None if beneath is None else beneath.directory
        return beneath.parent

    def device(self) -> torch.device:
        """Returns the device to step on: one of the kind that trained, if this machine has one."""
        on_gpu = any(trainer.type == "cuda" for trainer in self.devices) and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    def threads(self, device: torch.device) -> int | None:
        """Returns the number of torch's threads with which updates come to the same bits; None for any number."""
        counts = {trainer.threads for trainer in self.devices if trainer.type == "cpu"}
        return counts.pop() if device.type == "cpu" and len(counts) == 1 else None

    def _rank(self, rank: int) -> RankShare:
        if rank not in self._shares:
            self._shares[rank] = RankShare(self, rank)
        return self._shares[rank]

    # --- contents of the log, for shares ---

    @cached_property
    def written(self) -> Mapping[int, Sequence[StoredSlice]]:
        """Rank -> the slices that it wrote; together they have each element of each tensor once."""
        slices: dict[int, list[StoredSlice]] = defaultdict(list)
        for stored in self._index.live:
            slices[stored.file.rank].append(stored)
        return slices

    def stored_of(self, parameters: Mapping[str, Sequence[Box]]) -> Iterator[StoredSlice]:
        """Yields the slices of weights and optimizer state in these blocks, as of their anchors."""
        for key, group in self._index.tensors.items():
            fqn = split_key(key).fqn
            if fqn not in parameters:
                continue
            if self.is_shaped(key):
                yield from dict.fromkeys(s for box in parameters[fqn] for s, _ in overlapping(group, box))
            else:
                yield from group

    def is_shaped(self, key: str) -> bool:
        """Returns whether a tensor has its parameter's shape. (A step count has not, even if its parameter has one
        element.)"""
        shape = self._index.meta(f"{MODEL}{split_key(key).fqn}").global_shape
        return key.startswith(MODEL) or (bool(shape) and self._index.meta(key).global_shape == shape)


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
