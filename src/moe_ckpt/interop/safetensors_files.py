"""Tensors in safetensors files that others wrote: one file, or a directory of them as transformers saves models.

Only headers are read when a source is opened. Such files have no checksums: what is compared is that every tensor lies
inside its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from moe_ckpt.errors import DamagedError, NoCheckpointError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.shard import MAX_HEADER_BYTES
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.storage.base import Storage

SUFFIX = ".safetensors"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class FileTensor:
    """Position of one tensor in a file.

    Attributes:
        offset: Of its first byte in the file.
    """

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def model_files(storage: Storage) -> tuple[str, ...]:
    """Returns a directory's files of the model: ``model.safetensors``, those that its index names, or the only one.

    Raises:
        NoCheckpointError: There are none, or several without an index.
        DamagedError: The index is not one.
    """
    names = storage.list()
    if SINGLE_NAME in names:
        return (SINGLE_NAME,)
    if INDEX_NAME in names:
        return _indexed(storage, names)
    candidates = [name for name in names if name.endswith(SUFFIX)]
    if len(candidates) != 1:
        what = f"holds {len(candidates)} of them ({', '.join(candidates[:4])})" if candidates else "holds none"
        raise NoCheckpointError(
            f"{storage.root} {what}: a directory of safetensors files needs {SINGLE_NAME} or {INDEX_NAME}, or name one "
            "file of it"
        )
    return (candidates[0],)


def _indexed(storage: Storage, names: Iterable[str]) -> tuple[str, ...]:
    path = f"{storage.root}/{INDEX_NAME}"
    try:
        files = {str(name) for name in json.loads(bytes(storage.read(INDEX_NAME)))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(path, f"is no index of safetensors files ({error!r})") from error
    absent = sorted(files - set(names))  # also refuses names that lead out of the directory
    if absent or not files:
        raise DamagedError(path, f"names files that are not there: {', '.join(absent[:4]) or 'none at all'}")
    return tuple(sorted(files))


def read_tables(storage: Storage, paths: Iterable[str]) -> dict[str, FileTensor]:
    """Returns every tensor of the files, by name.

    Raises:
        DamagedError: A file is no safetensors file, is cut short, or two of them hold one name.
    """
    tables: dict[str, FileTensor] = {}
    for path in paths:
        where = f"{storage.root}/{path}"
        try:
            tensors = _table(storage, path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise DamagedError(where, f"is no complete safetensors file ({error})") from error
        twice = tables.keys() & tensors.keys()
        if twice:
            raise DamagedError(where, f"holds {min(twice)!r}, which {tables[min(twice)].path} holds too")
        tables |= tensors
    return tables


def _table(storage: Storage, path: str) -> dict[str, FileTensor]:
    size = storage.size(path)
    length = int.from_bytes(storage.read(path, 0, 8), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length:,} bytes does not fit into {size:,}")
    header = json.loads(bytes(storage.read(path, 8, length)))
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}


def _entry(path: str, name: str, fields: dict[str, Any], start: int, size: int) -> FileTensor:
    dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} is of type {dtype!r}, which is not known")
    whole = isinstance(shape, list) and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not whole or end - begin != prod(shape) * TORCH_DTYPES[dtype].itemsize or start + end > size:
        raise ValueError(f"{name} of shape {shape} cannot lie at bytes {begin} to {end} of {size - start:,}")
    return FileTensor(path, name, str(dtype), tuple(shape), start + begin)


def read_block(storage: Storage, tensor: FileTensor, box: Box) -> torch.Tensor:
    """Returns a block of a tensor. Of its first dimension only the rows that are wanted are read.

    Raises:
        DamagedError: The file is shorter than it was.
    """
    dtype = TORCH_DTYPES[tensor.dtype]
    first, rows = (box.offsets[0], box.shape[0]) if tensor.shape else (0, 1)
    shape = (rows, *tensor.shape[1:]) if tensor.shape else ()
    row_nbytes = prod(tensor.shape[1:]) * dtype.itemsize
    nbytes = rows * row_nbytes
    if not nbytes:
        return torch.empty(box.shape, dtype=dtype)
    raw = bytearray(storage.read(tensor.path, tensor.offset + first * row_nbytes, nbytes))
    if len(raw) < nbytes:
        present = f"{len(raw):,} of {nbytes:,} bytes are there"
        raise DamagedError(f"{storage.root}/{tensor.path}", f"{tensor.name}: {present}")
    values = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    for dim, (start, length) in enumerate(zip(box.offsets[1:], box.shape[1:], strict=True), start=1):
        values = values.narrow(dim, start, length)
    return values
