"""Shard files: plain safetensors, with a checksum per slice in the header's metadata.

A shard holds the slices that one rank wrote at one step. Its header names run, step, generation and
rank, so that a file in another's place is recognised; the manifest holds the header's own checksum, so
that what the header says can be trusted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.coverage import Box
from moe_ckpt.errors import CoverageError, DamagedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.dtypes import TORCH_DTYPES, itemsize
from moe_ckpt.format.manifest import RANK
from moe_ckpt.format.schema import (
    listing,
    matching,
    named_records,
    named_rows,
    one_of,
    record,
    require,
    row,
    shown,
    text,
    whole,
)
from moe_ckpt.format.sealed import parse_json

METADATA_KEY = "moe_ckpt"
REPLAY = "replay/"
"""Before the keys of slices that are no part of a checkpoint's view, but bring it about (sparse windows)."""
GRADIENT = "grad/"
"""Before ``<optimizer>/<fqn>``: the key of what the step's update consumed (gradient logs, in memory only)."""
MAX_HEADER_BYTES = 1 << 28
_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class SliceEntry:
    """One slice of one tensor inside a shard.

    Attributes:
        key: ``model/<fqn>`` | ``optim/<optimizer>/<fqn>/<state>`` | ``side/<rank>/<name>``, the first two also with
            ``replay/`` before them | ``grad/<optimizer>/<fqn>``.
        operator: Owner, or "" for side tensors (per-rank trainer state, outside the coverage proof).
        offsets, shape, global_shape: The block of the whole tensor, in elements.
        begin, end: Byte range in the shard's data section.
        checksum: XXH3-64 of those bytes, 16 hex digits.
        on_param_device: False for state that lives on the CPU though its parameter does not (Adam's step).
    """

    key: str
    operator: str
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    begin: int = 0
    end: int = 0
    checksum: str = ""
    on_param_device: bool = True

    @cached_property
    def name(self) -> str:
        """Key of the slice in the safetensors header; unique within a store's step."""
        return f"{self.key}@{','.join(map(str, self.offsets))}"

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * itemsize(self.dtype)

    @cached_property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)


@dataclass(frozen=True)
class ShardHeader:
    run_id: str
    step: int
    generation: int
    rank: int
    slices: tuple[SliceEntry, ...]

    @property
    def data_nbytes(self) -> int:
        return max((entry.end for entry in self.slices), default=0)


def lay_out(entries: Sequence[SliceEntry]) -> tuple[SliceEntry, ...]:
    """Assign byte ranges: widest dtypes first (so that every slice is aligned), then by key and offsets.

    Neighbouring rows of one tensor become neighbours in the file, so that they can be copied as one.
    """
    return in_a_row(sorted(entries, key=lambda e: (-itemsize(e.dtype), e.dtype, e.key, e.offsets)))


def in_a_row(entries: Iterable[SliceEntry]) -> tuple[SliceEntry, ...]:
    """The entries in the given order, one behind the other."""
    placed: list[SliceEntry] = []
    at = 0
    for entry in entries:
        placed.append(moved(entry, at))
        at += entry.nbytes
    return tuple(placed)


def moved(entry: SliceEntry, begin: int) -> SliceEntry:
    """``entry`` at another place. ``replace`` takes 4 times as long."""
    moved = object.__new__(SliceEntry)
    moved.__dict__.update(entry.__dict__, begin=begin, end=begin + entry.nbytes)
    return moved


def _with_checksum(entry: SliceEntry, checksum: str) -> SliceEntry:
    marked = object.__new__(SliceEntry)
    marked.__dict__.update(entry.__dict__, checksum=checksum)
    return marked


def with_checksums(entries: Sequence[SliceEntry], checksums: Checksums) -> tuple[SliceEntry, ...]:
    """The entries, each with its checksum."""
    pairs = zip(entries, checksums.tolist(), strict=True)
    return tuple(_with_checksum(entry, f"{number:016x}") for entry, number in pairs)


def encode_header(header: ShardHeader) -> bytes:
    """The file's first bytes: 8-byte little-endian length, then the JSON header padded to 8 bytes.

    Raises:
        CoverageError: two slices are the same one. A header has room for one, so they could not be told apart later.
    """
    meta = {
        "format_version": FORMAT_VERSION,
        "run_id": header.run_id,
        "step": header.step,
        "generation": header.generation,
        "rank": header.rank,
        "slices": {
            entry.name: [entry.key, entry.operator, entry.offsets, entry.global_shape, entry.checksum]
            + ([] if entry.on_param_device else ["cpu"])
            for entry in header.slices
        },
    }
    table: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(meta, separators=(",", ":"))}}
    for entry in header.slices:
        table[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
    require_distinct(header.rank, header.step, header.slices)
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def require_distinct(rank: int, step: int, entries: Sequence[SliceEntry]) -> None:
    """Raises ``CoverageError`` if two are the same one: a header has one place for each."""
    if len({entry.name for entry in entries}) == len(entries):
        return
    times = Counter(entry.name for entry in entries)
    twice = tuple(f"{name} is written twice" for name, count in times.items() if count > 1)
    raise CoverageError(f"what rank {rank} writes at step {step}", twice)


Checksums = npt.NDArray[np.uint64]
"""XXH3-64 of slices, in the order of their entries."""


def decode_header(raw: bytes | bytearray | memoryview, path: str) -> ShardHeader:
    """Parse what ``encode_header`` wrote. Check the header's checksum against the manifest first.

    Raises:
        DamagedError: not a header of this format. (A checksum that matched makes this a writer's bug
        or a foreign file, not damage; it is refused all the same.)
    """
    data = bytes(raw)
    length = int.from_bytes(data[:8], "little")
    if length != len(data) - 8 or length > MAX_HEADER_BYTES:
        raise DamagedError(path, f"{_NOT_OURS}header length {length:,} does not fit")
    table = parse_json(data[8:], path, f"{_NOT_OURS}it")
    require(_TABLE, table, path, _NOT_OURS)
    meta = parse_json(table.pop("__metadata__")[METADATA_KEY].encode(), path, f"{_NOT_OURS}its metadata")
    require(_META, meta, path, f"{_NOT_OURS}{METADATA_KEY}: ")
    require(_TENSORS, table, path, _NOT_OURS)
    if meta["slices"].keys() != table.keys():
        raise DamagedError(path, f"{_NOT_OURS}its tensors are not those that its metadata describes")
    slices = tuple(_decode_slice(name, table[name], fields) for name, fields in meta["slices"].items())
    for entry in slices:
        fault = _contradiction(entry)
        if fault:
            raise DamagedError(path, f"{_NOT_OURS}slice {shown(entry.name)} {fault}")
    if tuple(meta["slices"]) != tuple(entry.name for entry in slices):
        raise DamagedError(path, f"{_NOT_OURS}a slice contradicts its name")
    return ShardHeader(meta["run_id"], meta["step"], meta["generation"], meta["rank"], slices)


def _decode_slice(name: str, tensor: dict[str, Any], fields: list[Any]) -> SliceEntry:
    key, operator, offsets, global_shape, checksum, *device = fields
    begin, end = tensor["data_offsets"]
    decoded = object.__new__(SliceEntry)  # the constructor takes 3 times as long
    decoded.__dict__.update(
        key=key,
        operator=operator,
        dtype=tensor["dtype"],
        offsets=tuple(offsets),
        shape=tuple(tensor["shape"]),
        global_shape=tuple(global_shape),
        begin=begin,
        end=end,
        checksum=checksum,
        on_param_device=not device,
    )
    return decoded


# --- what a header must look like ---

_NOT_OURS = "not a shard header of this format: "
_KEY = re.compile(r"(replay/)?(model/.+|optim/\d{1,4}/.+/[^/]+)|side/\d{1,9}/.*|grad/\d{1,4}/.+", re.ASCII | re.DOTALL)
_DIMS = listing(whole(), most=32)
_SLICES = named_rows(
    {
        "key": matching(_KEY, "the key of a tensor"),
        "operator": text,
        "offsets": _DIMS,
        "global_shape": _DIMS,
        "checksum": text,
    },
    optional={"device": one_of("cpu")},
)
_META = record(
    {
        "format_version": one_of(FORMAT_VERSION),
        "run_id": text,
        "step": whole(),
        "generation": whole(),
        "rank": RANK,
        "slices": _SLICES,
    }
)
_TENSORS = named_records(
    {"dtype": one_of(*TORCH_DTYPES), "shape": _DIMS, "data_offsets": row({"begin": whole(), "end": whole()})}
)
_TABLE = record({"__metadata__": record({METADATA_KEY: text})})


def _contradiction(entry: SliceEntry) -> str:
    """What is wrong between a slice's fields, each of which is right by itself."""
    if not len(entry.offsets) == len(entry.shape) == len(entry.global_shape):
        return "has offsets and shapes of different dimensions"
    if any(at + n > whole for at, n, whole in zip(entry.offsets, entry.shape, entry.global_shape, strict=True)):
        return f"goes beyond its tensor of shape {list(entry.global_shape)}"
    if entry.end - entry.begin != entry.nbytes:
        return f"has {entry.end - entry.begin:,} bytes, but {list(entry.shape)} of {entry.dtype} are {entry.nbytes:,}"
    side = entry.key.startswith("side/")
    if side if entry.operator else not side:
        return f"has the operator {entry.operator!r}"
    return ""
