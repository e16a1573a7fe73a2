"""A dense checkpoint of one step of a gradient log, by optimizers without a model: one rank's share after the other.

What a rank wrote of the log's anchors it writes again here, as of the step, from optimizers that hold the units in
which that lies. So the host memory needed is that of the rank with most, and ranks can be dealt out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_ckpt.core.coverage import Box
from moe_ckpt.core.operators import Span
from moe_ckpt.engine.made_dense import WrittenShare, state_without, write_made_share
from moe_ckpt.errors import CoverageError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.manifest import state_path
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.gradients.detached import OptimizerKind, detached
from moe_ckpt.gradients.layout import Device, UpdateLayout
from moe_ckpt.gradients.log_content import LogContent
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.returning import LogReplayer
from moe_ckpt.gradients.units import Unit, UnitBlock
from moe_ckpt.gradients.updates import WEIGHT, Block
from moe_ckpt.ports import LoggedSteps
from moe_ckpt.recovery.gradient_log import PLAIN
from moe_ckpt.recovery.index import StateKey, StoredSlice, split_key
from moe_ckpt.recovery.opened_memory import OpenedMemory
from moe_ckpt.recovery.slices import block, find_damage
from moe_ckpt.storage.base import Storage

Tell = Callable[[int, str], None]
"""(bytes read or made, what is being done) -> None."""


@dataclass(frozen=True, eq=False)
class Made:
    """One slice as of the step.

    Attributes:
        entry: Without place and checksum.
        data: ``[nbytes]`` uint8 on the host.
    """

    entry: SliceEntry
    data: torch.Tensor


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
        self._shares: dict[int, _RankShare] = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices on which updates were made, each once."""
        return tuple(dict.fromkeys(layout.device for layout in self._log.layouts))

    @property
    def updates(self) -> int:
        """Steps whose updates are replayed."""
        return max(0, len(self._opened.logged) - 1)

    def nbytes(self, ranks: Iterable[int]) -> int:
        """Returns how many bytes ``share`` of these ranks will yield."""
        return sum(self._rank(rank).nbytes for rank in ranks)

    def verify(self, ranks: Iterable[int]) -> None:
        """Raises ``DamagedError`` if a slice that the share of one of these ranks needs is damaged."""
        wanted = {stored for rank in ranks for stored in self._rank(rank).wanted}
        for stored, error in find_damage(self._reader.storage, wanted):
            if error is not None:
                raise error
            self._reader.note_verified(stored)

    def wanted(self, ranks: Iterable[int]) -> Iterator[StoredSlice]:
        """Yields the slices that the shares of these ranks need."""
        for rank in ranks:
            yield from self._rank(rank).wanted

    def share(self, rank: int, device: torch.device | str, tell: Tell = lambda nbytes, what: None) -> list[Made]:
        """Returns what a rank writes of the checkpoint.

        Args:
            rank: Of those that wrote the log.
            device: To step on.
            tell: Told of progress.

        Raises:
            CoverageError: A gradient lacks elements.
            UnsupportedError: A class of optimizers is not known here.
            ReplayDivergedError: Step counts become others than were recorded.
        """
        return self._rank(rank).made(device, tell)

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
            rank, device, tell: As of ``share``.

        Raises:
            OSError: It cannot be written.
            CoverageError, UnsupportedError, ReplayDivergedError: As ``share``.
        """
        slices = [(made.entry, made.data) for made in self.share(rank, device, tell)]
        prefix = f"side/{rank}/"
        side = {key: stored for key, stored in self._log.side.items() if key.startswith(prefix)}
        kept = [stored for key, stored in side.items() if not key.startswith(f"{prefix}{PLAIN}/")]
        slices += [(_unplaced(stored.entry), _bytes_of(values)) for stored, values in self._log.read(kept)]
        path = state_path(self.manifest.directory, rank)
        state = state_without(self._reader.storage.read(path), PLAIN, path)
        return write_made_share(storage, self.manifest, rank, slices, state)

    @property
    def parent(self) -> str | None:
        """As ``Manifest.parent``: what the life that wrote the log came from."""
        beneath = self._opened.beneath
        if beneath is None or beneath.generation != self.manifest.generation:
            return None if beneath is None else beneath.directory
        return beneath.parent

    def device(self) -> torch.device:
        """Returns what updates are made on here: the kind that trained, if there is one."""
        on_gpu = any(each.type == "cuda" for each in self.devices) and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    def threads(self, device: torch.device) -> int | None:
        """Returns of how many threads torch is to divide updates between, to come to the same bits; None for any."""
        found = {each.threads for each in self.devices if each.type == "cpu"}
        return found.pop() if device.type == "cpu" and len(found) == 1 else None

    def _rank(self, rank: int) -> _RankShare:
        if rank not in self._shares:
            self._shares[rank] = _RankShare(self._log, rank, self._log.written.get(rank, ()))
        return self._shares[rank]


class _RankShare:
    """The share of one rank, with all that it follows from."""

    def __init__(self, of: LogContent, rank: int, slices: Sequence[StoredSlice]) -> None:
        self._of, self._rank, self._slices = of, rank, slices
        needed = {split_key(stored.entry.key).fqn for stored in slices}
        layout = of.layouts[rank] if of.layouts else None
        self._layout = layout
        self.units = tuple(
            unit for unit in (layout.units if layout else ()) if any(p.parameter in needed for p in unit.pieces)
        )
        boxes: dict[str, list[Box]] = defaultdict(list)
        for unit in self.units:
            for piece in unit.pieces:
                boxes[piece.parameter].append(piece.box)
        self._boxes = boxes
        self.anchors = list(of.stored_of(boxes))
        self.gradients = of.gradients_of(boxes)

    @property
    def wanted(self) -> Iterator[StoredSlice]:
        yield from self.anchors
        yield from self._slices
        for those in self.gradients.values():
            yield from those

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.wanted)

    def made(self, device: torch.device | str, tell: Tell) -> list[Made]:
        plain = self._of.plain(self._rank)
        replay = detached(_kinds(self._layout, plain, torch.device(device)), self.units, device)
        if self._layout is not None:
            log = _RankLog(self._of, self, replay, self._layout, plain, tell)
            replayer = _DetachedReplayer(replay, self._of.spans)
            replayer.check(log)
            replayer.replay(log)
        found = []
        for stored, values in self._of.read(self._slices):
            fqn = split_key(stored.entry.key).fqn
            if self._layout is not None and self._of.is_updated(fqn):
                values = self._read(replay, self._layout, stored.entry)
            found.append(Made(_unplaced(stored.entry), _bytes_of(values)))
            tell(stored.nbytes, f"writing the share of rank {self._rank}")
        return found

    def _read(self, replay: OptimizerReplay, layout: UpdateLayout, entry: SliceEntry) -> torch.Tensor:
        """Returns a slice as the optimizers have it."""
        key = split_key(entry.key)
        whole = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        shaped = self._of.is_shaped(entry.key)
        missing = entry.box.volume
        for number, unit, piece in _pieces_of(replay, layout, key):
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
            found = f"{entry.name} of {entry.operator} is updated on another rank: {missing:,} are not of this rank"
            raise CoverageError(f"the share of rank {self._rank}", (found,))
        return whole


def _unplaced(entry: SliceEntry) -> SliceEntry:
    return replace(entry, begin=0, end=0, checksum="")


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host."""
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
    found = []
    for number, name in enumerate(layout.classes):
        count = 1 + max((unit.group for unit in layout.units if unit.optimizer == number), default=-1)
        settings = groups.get(number, [{}] * count)
        found.append(OptimizerKind(name, tuple(_on(device, each) for each in settings)))
    return found


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
        of: LogContent,
        share: _RankShare,
        replay: OptimizerReplay,
        layout: UpdateLayout,
        plain: Mapping[int, Mapping[str, Any]],
        tell: Tell,
    ) -> None:
        self.steps, self.anchors = sorted(plain), of.anchors
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
        for each in recorded["counts"]:
            here = [at for at, name in enumerate(each["units"]) if (each["optimizer"], name) in self._replay.tensors]
            counts.append({**each, "units": [each["units"][at] for at in here], "values": each["values"][here]})
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

    def _blocks(self, entry: SliceEntry, values: torch.Tensor) -> Iterator[Block]:
        key = split_key(entry.key)
        kinds: dict[int, str] = {}
        for number, unit, _ in _pieces_of(self._replay, self._layout, key):
            if key.state is None and unit.stored:
                continue  # the weights follow from their masters
            kinds[number] = WEIGHT if key.state in (None, unit.stored) else str(key.state)
        for number, kind in kinds.items():
            yield Block(number, key.fqn, kind, entry.box, values, entry.on_param_device)

    def _load_factors(self, entry: SliceEntry, values: torch.Tensor) -> None:
        """State of another shape than its parameter's, of which each operator has rows or the home has all."""
        key = split_key(entry.key)
        for number, unit, _ in _pieces_of(self._replay, self._layout, key):
            whole = self._replay.state_of(number, unit.name)[str(key.state)]
            block(whole, (0,) * whole.dim(), entry.box).copy_(values)
