"""Reading slices: never a byte is handed out before its checksum has been compared.

Neighbouring slices of a file are read in one call (a stack of experts is usually one run of bytes), so
that object stores see few large requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import xxhash

from moe_ckpt.errors import DamagedError, StoreError, StoreForbiddenError, StoreUnreadableError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.recovery.index import StoredSlice
from moe_ckpt.storage.base import Storage

BadSlice = DamagedError | StoreUnreadableError
RUN_NBYTES = 64 << 20
"""Neighbours are joined up to this size; it bounds the memory that a read needs beside the largest slice."""


def read_slices(storage: Storage, wanted: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
    """Each slice with its verified values, in file order. Duplicates are read once.

    The tensors share memory with the other slices of their run: copy what is to be kept.

    Raises:
        DamagedError: at the first slice whose bytes are missing or differ from what was written.
    """
    for run in _runs(wanted):
        first = run[0]
        raw = _read(storage, first, first.offset, sum(stored.nbytes for stored in run))
        for stored in run:
            begin = stored.offset - first.offset
            with memoryview(raw) as view, view[begin : begin + stored.nbytes] as part:
                if len(part) < stored.nbytes:
                    raise stored.damaged(f"truncated: {len(part):,} of {stored.nbytes:,} bytes are there")
                _compare(stored, xxhash.xxh3_64_hexdigest(part))
            yield stored, _as_tensor(stored, raw, begin)


def find_damage(storage: Storage, wanted: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, BadSlice | None]]:
    """Check every slice, going on after a bad one, in bounded memory; values are not kept.

    Yields each slice with its error, or None for a good one. Raises ``StoreForbiddenError``.
    """
    for stored in sorted(set(wanted), key=_place):
        try:
            _check(storage, stored)
        except StoreForbiddenError:
            raise
        except (DamagedError, StoreUnreadableError) as error:
            yield stored, error
        else:
            yield stored, None


def _check(storage: Storage, stored: StoredSlice) -> None:
    hasher = xxhash.xxh3_64()
    done = 0
    while done < stored.nbytes:
        piece = _read(storage, stored, stored.offset + done, min(RUN_NBYTES, stored.nbytes - done))
        if not piece:
            raise stored.damaged(f"truncated: {done:,} of {stored.nbytes:,} bytes are there")
        hasher.update(piece)
        done += len(piece)
    _compare(stored, hasher.hexdigest())


def _compare(stored: StoredSlice, found: str) -> None:
    if found != stored.entry.checksum:
        raise stored.damaged(f"checksum mismatch: {found}, written was {stored.entry.checksum}")


def _read(storage: Storage, stored: StoredSlice, offset: int, nbytes: int) -> bytearray:
    with reported(stored.path, stored.file.step, stored.file.rank):
        raw = storage.read(stored.path, offset, nbytes)
    return raw if isinstance(raw, bytearray) else bytearray(raw)


@contextlib.contextmanager
def reported(path: str, step: int | None = None, rank: int | None = None) -> Iterator[None]:
    """Turn what storage raises into what a reader is told: ``path``, its step and rank, and what it means.

    A refused permission or a dead network is no damage: falling back to an older checkpoint because of
    it would throw work away.

    Raises:
        DamagedError: the file is missing, or is not what was written.
        StoreForbiddenError: this user may not read it.
        StoreUnreadableError: the storage does not give it.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise DamagedError(path, "is missing", step=step, rank=rank) from error
    except DamagedError as error:
        if error.step is not None or step is None:
            raise
        raise DamagedError(error.path, error.reason, step=step, rank=rank) from error
    except StoreError:
        raise
    except PermissionError as error:
        raise StoreForbiddenError(path, _cause(error), step=step, rank=rank) from error
    except OSError as error:
        raise StoreUnreadableError(path, _cause(error), step=step, rank=rank) from error


def _cause(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _place(stored: StoredSlice) -> tuple[str, int, int]:
    return stored.path, stored.offset, stored.nbytes


def _runs(wanted: Iterable[StoredSlice]) -> Iterator[list[StoredSlice]]:
    """Slices that follow each other in one file, in file order, as lists of bounded size."""
    run: list[StoredSlice] = []
    nbytes = 0
    for stored in sorted(set(wanted), key=_place):
        joins = run and run[-1].path == stored.path and run[-1].offset + run[-1].nbytes == stored.offset
        if run and not (joins and nbytes + stored.nbytes <= RUN_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(stored)
        nbytes += stored.nbytes
    if run:
        yield run


def _as_tensor(stored: StoredSlice, raw: bytearray, begin: int) -> torch.Tensor:
    """A tensor over bytes of ``raw``, which it keeps alive."""
    entry = stored.entry
    dtype = TORCH_DTYPES[entry.dtype]
    if not stored.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8, offset=begin, count=stored.nbytes)
    return flat.view(dtype).reshape(entry.shape)
