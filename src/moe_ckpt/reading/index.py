"""The index of one checkpoint: which bytes of which shard hold which block of which tensor.

Built from a manifest and the headers of its shards, without reading slices. A slice is live only if the manifest's
record of its operator names its shard: a shard may also hold operators that a later checkpoint superseded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from moe_ckpt.core.operators import expert_id
from moe_ckpt.errors import CoverageError, DamagedError
from moe_ckpt.format.manifest import FileRecord, Manifest
from moe_ckpt.format.shard import REPLAY, ShardHeader, SliceEntry
from moe_ckpt.ledger.coverage import Box, prove_cover
from moe_ckpt.ports import TensorMeta

_SHOWN = 4


@dataclass(frozen=True)
class StoredSlice:
    """One slice and its shard."""

    entry: SliceEntry
    file: FileRecord

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hashes a few fields, and once, since a recovery looks each slice up in several sets."""
        return hash((self.file.path, self.entry.key, self.entry.offsets, self.entry.begin))

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def offset(self) -> int:
        """First byte of the slice in the file."""
        return self.file.header_nbytes + self.entry.begin

    @property
    def nbytes(self) -> int:
        return self.entry.end - self.entry.begin

    @property
    def span(self) -> tuple[str, int, int]:
        """(file, first byte of the slice in it, first byte behind it)."""
        return self.path, self.offset, self.offset + self.nbytes

    def damaged(self, reason: str) -> DamagedError:
        """Returns an error that names the file, its step and rank, and this slice."""
        what = f"slice {self.entry.name}" + (f" of {self.entry.operator}" if self.entry.operator else "")
        return DamagedError(self.path, f"{what}: {reason}", step=self.file.step, rank=self.file.rank)


@dataclass(frozen=True)
class StateKey:
    """A parsed tensor key: ``model/<fqn>``, without ``optimizer`` and ``state``, or ``optim/<index>/<fqn>/<state>``."""

    fqn: str
    optimizer: int | None = None
    state: str | None = None


def split_key(key: str) -> StateKey:
    """Returns a tensor key's parts. Raises ``ValueError`` for a key of another form."""
    kind, _, rest = key.partition("/")
    if kind == "model" and rest:
        return StateKey(rest)
    index, _, rest = rest.partition("/")
    fqn, _, state = rest.rpartition("/")
    if kind != "optim" or not index.isdigit() or not fqn or not state:
        raise ValueError(f"{key!r} is no tensor key")
    return StateKey(fqn, int(index), state)


@dataclass(frozen=True)
class TensorIndex:
    """The slices of one checkpoint.

    Attributes:
        tensors: Key -> its live slices, sorted by offsets.
        side: Key -> side tensor of one rank.
        replay: Step of a sparse window -> compute weights for its replay, by key without ``replay/``.
    """

    tensors: Mapping[str, tuple[StoredSlice, ...]]
    side: Mapping[str, StoredSlice]
    replay: Mapping[int, Mapping[str, tuple[StoredSlice, ...]]] = field(default_factory=dict)

    def meta(self, key: str) -> TensorMeta:
        """Returns dtype (as in headers, see ``format.shard``) and global shape of a tensor."""
        entry = self.tensors[key][0].entry
        return TensorMeta(entry.dtype, entry.global_shape, entry.on_param_device)

    @property
    def live(self) -> Iterator[StoredSlice]:
        """Yields every slice of model and optimizers that a restore of all ranks reads."""
        for groups in (self.tensors, *self.replay.values()):
            for group in groups.values():
                yield from group


def overlapping(slices: Iterable[StoredSlice], box: Box) -> Iterator[tuple[StoredSlice, Box]]:
    """Yields the slices that share elements with ``box``, each with the common block."""
    for stored in slices:
        common = stored.entry.box.overlap(box)
        if common is not None:
            yield stored, common


def blocks_of(index: TensorIndex, operators: Collection[str]) -> dict[str, dict[str, list[Box]]]:
    """Returns operator -> key -> blocks of that tensor that the operator has, for these operators."""
    blocks: dict[str, dict[str, list[Box]]] = {op: {} for op in operators}
    for key, group in index.tensors.items():
        for stored in group:
            if stored.entry.operator in blocks and stored.entry.box.volume:
                blocks[stored.entry.operator].setdefault(key, []).append(stored.entry.box)
    return blocks


def homes_of(tensors: Mapping[str, Iterable[StoredSlice]]) -> Mapping[str, str]:
    """Returns parameter -> the operator that has optimizer state of it but none of its rows.

    Args:
        tensors: Key -> slices. Step counts, which have no dimension, are ignored.
    """
    operators = {key: {stored.entry.operator for stored in group} for key, group in tensors.items()}
    homes: dict[str, str] = {}
    for key, group in tensors.items():
        fqn = split_key(key).fqn
        if any(stored.entry.global_shape for stored in group):
            for operator in operators[key] - operators.get(f"model/{fqn}", operators[key]):
                homes[fqn] = operator
    return homes


def build_index(manifest: Manifest, headers: Mapping[str, ShardHeader]) -> TensorIndex:
    """Returns the index of a manifest. Raises ``DamagedError`` if the header of a shard contradicts it."""
    versions_in: dict[FileRecord, set[int]] = {}
    for operator_record in manifest.distinct_records:
        for file in operator_record.files:
            versions_in.setdefault(file, set()).add(id(operator_record))
    tensors: dict[str, list[StoredSlice]] = {}
    side: dict[str, StoredSlice] = {}
    replay: dict[int, dict[str, list[StoredSlice]]] = {}
    for record in manifest.files:
        is_of_step = record.path.startswith(f"{manifest.directory}/")
        versions = versions_in.get(record, set())
        for entry in headers[record.path].slices:
            stored = StoredSlice(entry, record)
            if entry.key.startswith(REPLAY):
                replay.setdefault(record.step, {}).setdefault(entry.key.removeprefix(REPLAY), []).append(stored)
            elif entry.operator:
                version = manifest.operators.get(entry.operator)
                if version is None or id(version) not in versions:
                    continue
                if version.step != record.step:
                    raise stored.damaged(f"the manifest has {entry.operator} at step {version.step}")
                tensors.setdefault(entry.key, []).append(stored)
            elif is_of_step and entry.key.startswith(f"side/{record.rank}/"):
                if any(entry.offsets) or entry.shape != entry.global_shape:
                    raise stored.damaged("a side tensor is stored in parts")
                side[entry.key] = stored
    ordered = _ordered(tensors)
    return TensorIndex(ordered, side, {step: _ordered(groups) for step, groups in replay.items()})


def _ordered(tensors: Mapping[str, list[StoredSlice]]) -> dict[str, tuple[StoredSlice, ...]]:
    """Sorts the slices of each tensor. Raises ``DamagedError`` unless they agree on its dtype and shape."""
    ordered = {key: tuple(sorted(group, key=lambda s: s.entry.offsets)) for key, group in tensors.items()}
    for group in ordered.values():
        first = group[0].entry
        for stored in group[1:]:
            entry = stored.entry
            if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
                raise stored.damaged(
                    f"is part of a {entry.dtype} tensor of shape {list(entry.global_shape)}, but {group[0].path} "
                    f"has {first.dtype} of shape {list(first.global_shape)}"
                )
    return ordered


def prove(manifest: Manifest, index: TensorIndex) -> None:
    """Raises ``CoverageError``, which names what is missing or doubled, unless the checkpoint is whole.

    It is whole if it has every element of every tensor exactly once, and every operator. So all rows of a stack of
    experts have the same kinds of optimizer state.
    """
    where = f"checkpoint {manifest.directory}"
    problems = [*_absent_operators(manifest, index), *_orphans(index)]
    if problems:
        raise CoverageError(where, tuple(problems))
    boxes: dict[str, list[Box]] = {}
    for key, group in index.tensors.items():
        shape = group[0].entry.global_shape
        if prod(shape):
            boxes[key] = [Box((0,) * len(shape), shape)]
    prove_cover(where, boxes, ((key, s.entry.box) for key in boxes for s in index.tensors[key]))
    for slot in manifest.window:
        _prove_replay(f"{where}, step {slot.step} of its window", slot.step, index)


def _prove_replay(where: str, step: int, index: TensorIndex) -> None:
    """Raises unless the window has the weights, as of ``step``, of all that is anchored later."""
    for key, group in index.replay.get(step, {}).items():
        if key not in index.tensors:
            raise group[0].damaged("is of a tensor that the checkpoint does not have")
        if group[0].entry.global_shape != index.meta(key).global_shape:
            shapes = [list(group[0].entry.global_shape), list(index.meta(key).global_shape)]
            raise group[0].damaged(f"is of a tensor of shape {shapes[0]}, but the checkpoint's is of {shapes[1]}")
    weights = {key: group for key, group in index.tensors.items() if key.startswith("model/")}
    later = {key: [s.entry.box for s in group if s.file.step > step] for key, group in weights.items()}
    stored_boxes = (
        (key, s.entry.box) for key, group in index.replay.get(step, {}).items() for s in group if key in weights
    )
    prove_cover(where, {key: boxes for key, boxes in later.items() if boxes}, stored_boxes)


def _absent_operators(manifest: Manifest, index: TensorIndex) -> Iterator[str]:
    present = {stored.entry.operator for group in index.tensors.values() for stored in group}
    for op, record in manifest.operators.items():
        if op not in present:
            paths = ", ".join(file.path for file in record.files[:_SHOWN])
            more = f" or {len(record.files) - _SHOWN} more files" if len(record.files) > _SHOWN else ""
            yield f"{op} should be in {paths}{more}, but is not"
    for number, layer in enumerate(manifest.model.layers):
        for expert in range(layer.experts):
            op = expert_id(number, expert)
            if op not in manifest.operators:
                yield f"{op} of layer {layer.name} is not listed"


def _orphans(index: TensorIndex) -> Iterator[str]:
    """Yields optimizer state without its parameter."""
    for key in index.tensors:
        try:
            parts = split_key(key)
        except ValueError as error:
            yield str(error)
            continue
        if f"model/{parts.fqn}" not in index.tensors:
            yield f"{key} belongs to {parts.fqn}, which is not stored"
