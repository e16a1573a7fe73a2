"""Shard files: plain safetensors, whose first tensor has the step and a checksum per slice.

A shard has the slices that one rank wrote at one step. Its header has two pieces. The *head* lists the slices, and
names run and rank; it is the same text at every step that saves the same slices, so that it is rendered once. The
*seal*, the tensor ``moe_ckpt.seal``, has the step, the generation and the checksum of each slice. So a file under
another's name is recognised. The manifest has the checksum of both pieces, so that they can be trusted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.errors import CoverageError, DamagedError, UnsupportedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import RANK
from moe_ckpt.format.schema import (
    MOST_WHOLE,
    Schema,
    anything,
    mapping,
    one_of,
    require,
    shown,
    text,
)
from moe_ckpt.format.sealed import parse_json
from moe_ckpt.ledger.coverage import Box

METADATA_KEY = "moe_ckpt"
SEAL = "moe_ckpt.seal"
"""Name of the first tensor: ``[2 + slices]`` uint64, the step, the generation, then the XXH3-64 of each slice."""
ALIGNMENT = 64
"""Bytes; the first slice of a shard begins at a multiple, in files and in memory."""
REPLAY = "replay/"
"""Prefix of the keys of slices for a replay, which are not in a checkpoint's view (sparse windows)."""
GRADIENT = "grad/"
"""Prefix of ``<optimizer>/<fqn>`` in the keys of consumed gradients (gradient logs, in memory only)."""
MAX_HEADER_BYTES = 1 << 28
_json = json.JSONEncoder(separators=(",", ":")).encode
TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in headers -> torch's."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype, of: str | None = None) -> str:
    """Returns the header name of a torch dtype.

    Args:
        dtype: Of a tensor.
        of: What the tensor is, for the message.

    Raises:
        UnsupportedError: The format cannot hold it.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        named = "" if of is None else f"{of}: "
        raise UnsupportedError(
            f"{named}tensors of {dtype} cannot be stored; supported are {', '.join(map(str, _NAMES))}. Keep it in one "
            "of these; a buffer that each start computes again may be registered with persistent=False"
        ) from None


def itemsize(name: str) -> int:
    """Returns the bytes per element of a header dtype name. Raises ``KeyError`` for an unknown name."""
    return TORCH_DTYPES[name].itemsize


@dataclass(frozen=True)
class SliceEntry:
    """One slice of one tensor inside a shard.

    Attributes:
        key: ``model/<fqn>`` | ``optim/<optimizer>/<fqn>/<state>`` | ``side/<rank>/<name>``, the first two also with
            ``replay/`` before them | ``grad/<optimizer>/<fqn>``.
        operator: Owner, or "" for side tensors (per-rank trainer state, outside the coverage proof).
        offsets, shape, global_shape: The block of the whole tensor, in elements.
        begin, end: Byte range in the shard, counted from the end of its header.
        checksum: XXH3-64 of those bytes.
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
    checksum: int = 0
    on_param_device: bool = True

    @cached_property
    def name(self) -> str:
        """Key of the slice in the safetensors header; unique within a store's step."""
        return f"{self.key}@{','.join(map(str, self.offsets))}"

    @cached_property
    def texts(self) -> tuple[str, str]:
        """The slice's texts in a head: in the metadata, and in the table of tensors up to the byte range."""
        name = _json(self.name)
        fields = _json([self.operator, self.global_shape, *([] if self.on_param_device else ["cpu"])])
        return (
            _escaped(f"{name}:{fields}"),
            f',{name}:{{"dtype":"{self.dtype}","shape":{_json(self.shape)},"data_offsets":[',
        )

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
    """Assigns byte ranges: widest dtypes first, so that every slice is aligned, then by key and offsets.

    Neighbouring rows of one tensor become neighbours in the file, so that they can be copied as one.
    """
    return lay_out_in_order(sorted(entries, key=lambda e: (-itemsize(e.dtype), e.dtype, e.key, e.offsets)))


def lay_out_in_order(entries: Iterable[SliceEntry]) -> tuple[SliceEntry, ...]:
    """Returns the entries with byte ranges one after the other, in the given order."""
    placed: list[SliceEntry] = []
    at = 0
    for entry in entries:
        placed.append(with_byte_range(entry, at))
        at += entry.nbytes
    return tuple(placed)


def with_byte_range(entry: SliceEntry, begin: int) -> SliceEntry:
    """Returns ``entry`` with another byte range. ``replace`` takes 4 times as long."""
    moved = object.__new__(SliceEntry)
    moved.__dict__.update(entry.__dict__, begin=begin, end=begin + entry.nbytes)
    return moved


def head_of(run_id: str, rank: int, entries: Sequence[SliceEntry], ends: Sequence[int]) -> bytes:
    """Renders the head of a shard, which no step changes.

    Args:
        run_id: Of the store.
        rank: Whose shard.
        entries: Its slices in the order of their bytes, no two of which are the same one.
        ends: Where each ends, counted from the end of the header; the next begins there.

    Returns:
        8-byte little-endian length, then JSON, padded so that slices begin at a multiple of ``ALIGNMENT``.
    """
    seal_nbytes = 8 * (2 + len(entries))
    texts = [entry.texts for entry in entries]
    start = _escaped(f'{{"format_version":{FORMAT_VERSION},"run_id":{_json(run_id)},"rank":{rank},"slices":{{')
    metadata = f"{start}{','.join([text for text, _ in texts])}}}}}"
    begins = [seal_nbytes, *[seal_nbytes + end for end in ends]]
    rows = [f"{text}{begin},{end}]}}" for (_, text), (begin, end) in zip(texts, pairwise(begins), strict=True)]
    seal = f'"{SEAL}":{{"dtype":"U64","shape":[{2 + len(entries)}],"data_offsets":[0,{seal_nbytes}]}}'
    raw = f'{{"__metadata__":{{"{METADATA_KEY}":"{metadata}"}},{seal}{"".join(rows)}}}'.encode()
    raw += b" " * (-(8 + len(raw) + seal_nbytes) % ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def seal_of(step: int, generation: int, checksums: Checksums) -> bytes:
    """Returns the bytes of the tensor ``moe_ckpt.seal``."""
    return np.concatenate([np.array([step, generation], dtype="<u8"), checksums.astype("<u8")]).tobytes()


def split_header(raw: bytes, path: str) -> tuple[bytes, int, int, Checksums]:
    """Returns the head, the step, the generation and the checksums of a shard's header.

    Raises:
        DamagedError: It is no header of this format.
    """
    nbytes = 8 + int.from_bytes(raw[:8], "little")
    if not 8 < nbytes <= min(len(raw) - 16, MAX_HEADER_BYTES) or (len(raw) - nbytes) % 8:
        raise DamagedError(path, f"{_NOT_OURS}header length {nbytes - 8:,} does not fit")
    seal = np.frombuffer(raw, dtype="<u8", offset=nbytes)
    return raw[:nbytes], int(seal[0]), int(seal[1]), seal[2:]


def encode_header(header: ShardHeader) -> bytes:
    """Returns the file's first bytes: head and seal.

    Raises:
        CoverageError: Two slices are the same one. A head has room for one, so they could not be told apart later.
    """
    require_distinct(header.rank, header.step, header.slices)
    checksums = np.array([entry.checksum for entry in header.slices], dtype=np.uint64)
    head = head_of(header.run_id, header.rank, header.slices, [entry.end for entry in header.slices])
    return head + seal_of(header.step, header.generation, checksums)


def require_distinct(rank: int, step: int, entries: Sequence[SliceEntry]) -> None:
    """Raises ``CoverageError`` if two slices are the same one: a header has room for one."""
    if len({entry.name for entry in entries}) == len(entries):
        return
    times = Counter(entry.name for entry in entries)
    twice = tuple(f"{name} is written twice" for name, count in times.items() if count > 1)
    raise CoverageError(f"what rank {rank} writes at step {step}", twice)


Checksums = npt.NDArray[np.uint64]
"""XXH3-64 of slices, in the order of their entries."""


def decode_header(raw: bytes | bytearray | memoryview, path: str) -> ShardHeader:
    """Parses what ``encode_header`` wrote. Check the header's checksum against the manifest first.

    Raises:
        DamagedError: Not a header of this format. (A checksum that matched makes this a writer's bug
        or a foreign file, not damage; it is refused all the same.)
    """
    head, step, generation, checksums = split_header(bytes(raw), path)
    table = parse_json(head[8:], path, f"{_NOT_OURS}it")
    require(_TABLE, table, path, _NOT_OURS)
    meta = parse_json(table.pop("__metadata__")[METADATA_KEY].encode(), path, f"{_NOT_OURS}its metadata")
    require(_META, meta, path, f"{_NOT_OURS}{METADATA_KEY}: ")
    seal, slices = table.pop(SEAL, None), meta["slices"]
    count = len(slices)
    if slices.keys() != table.keys():
        raise DamagedError(path, f"{_NOT_OURS}its tensors are not those that its metadata describes")
    if seal != {"dtype": "U64", "shape": [2 + count], "data_offsets": [0, 16 + 8 * count]} or len(checksums) != count:
        raise DamagedError(path, f"{_NOT_OURS}it has no {SEAL} of {count} slices")
    decoded = []
    for (name, fields), checksum in zip(slices.items(), checksums.tolist(), strict=True):
        entry = _decode_slice(name, table[name], fields, checksum, 16 + 8 * count)
        fault = "is no slice of this format" if entry is None else _contradiction(entry)
        if entry is None or fault:
            raise DamagedError(path, f"{_NOT_OURS}{shown(name)} {fault}")
        decoded.append(entry)
    return ShardHeader(meta["run_id"], step, generation, meta["rank"], tuple(decoded))


def _decode_slice(name: str, tensor: Any, fields: Any, checksum: int, first: int) -> SliceEntry | None:
    """Returns a slice; None if its name or a field is none of this format.

    Headers have tens of thousands: checks of whole documents (``format.schema``) would take as long again.

    Args:
        name: In the table.
        tensor: Its entry there.
        fields: Its entry in the metadata.
        checksum: In the seal.
        first: Byte of the data section that follows the seal.
    """
    try:
        operator, global_shape, *device = fields
        dtype, shape, (begin, end) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        lists_of_numbers = type(shape) is type(global_shape) is list
        numbers = (*shape, *global_shape, begin, end)
    except (KeyError, TypeError, ValueError):
        return None
    if not lists_of_numbers or set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) > MOST_WHOLE:
        return None
    if device not in ([], ["cpu"]) or type(dtype) is not str or dtype not in TORCH_DTYPES:
        return None
    if text(name) or text(operator) or not _NAME.fullmatch(name):
        return None
    key, _, offsets = name.rpartition("@")
    decoded = object.__new__(SliceEntry)  # the constructor takes 3 times as long
    decoded.__dict__.update(
        name=name,
        key=key,
        operator=operator,
        dtype=dtype,
        offsets=tuple(map(int, offsets.split(","))) if offsets else (),
        shape=tuple(shape),
        global_shape=tuple(global_shape),
        begin=begin - first,
        end=end - first,
        checksum=checksum,
        on_param_device=not device,
    )
    return decoded


def _escaped(text: str) -> str:
    """Returns ``text`` as it is inside a JSON string."""
    return _json(text)[1:-1]


# --- what a header must look like ---

_NOT_OURS = "not a shard header of this format: "
_OFFSET = r"(0|[1-9]\d{0,18})"
_NAME = re.compile(
    rf"((replay/)?(model/.+|optim/\d{{1,4}}/.+/[^/]+)|side/\d{{1,9}}/.*|grad/\d{{1,4}}/.+)@({_OFFSET}(,{_OFFSET}){{0,31}})?",
    re.ASCII | re.DOTALL,
)
_META: Schema = {
    "format_version": one_of(FORMAT_VERSION),
    "run_id": text,
    "rank": RANK,
    "slices": mapping(anything),
}
_TABLE: Schema = {"__metadata__": {METADATA_KEY: text}}


def _contradiction(entry: SliceEntry) -> str:
    """Returns a contradiction between a slice's fields, each of which is right by itself; "" for none."""
    if entry.begin < 0:
        return f"begins before the end of {SEAL}"
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
