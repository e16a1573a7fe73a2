"""Reads and verifies slices. Neighbours in a file, such as a stack of experts, are read in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
import xxhash

from moe_ckpt.errors import DamagedError, StoreError, StoreForbiddenError, StoreUnreadableError
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.storage.base import Storage

BadSlice = DamagedError | StoreUnreadableError
_RUN_NBYTES = 16 << 20
"""Neighbours are joined up to this size, which bounds the memory of a read beside the largest slice. It is worth its
wait for a far storage, and the allocator has memory for it from the read before, which the kernel need not clear again:
reads of 64 MiB take four times as long."""


def read_slices(
    storage: Storage, slices: Iterable[StoredSlice], verified: Collection[StoredSlice] = frozenset()
) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
    """Yields each slice with its verified values, in file order, duplicates once.

    The tensors share memory with the other slices of their run: copy what is to be kept.

    Args:
        storage: Of the store.
        slices: What to read.
        verified: What need not be compared once more.

    Raises:
        DamagedError: At the first slice whose bytes are missing or differ from what was written.
        StepRemovedError: The step was removed meanwhile, if ``storage`` can tell.
    """
    for run in _runs(slices):
        first = run[0]
        raw = _read(storage, first, first.offset, sum(stored.nbytes for stored in run))
        for stored in run:
            begin = stored.offset - first.offset
            with memoryview(raw) as view, view[begin : begin + stored.nbytes] as part:
                if len(part) < stored.nbytes:
                    raise stored.damaged(f"truncated: {len(part):,} of {stored.nbytes:,} bytes are there")
                if stored not in verified:
                    _compare(stored, xxhash.xxh3_64_intdigest(part))
            yield stored, _as_tensor(stored, raw, begin)


def find_damage(storage: Storage, slices: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, BadSlice | None]]:
    """Yields each slice with its error, or None for a good one, in bounded memory.

    Raises:
        StoreForbiddenError: This user may not read a file.
        StepRemovedError: The step was removed meanwhile, if ``storage`` can tell.
    """
    for run in _runs(slices):
        alone = len(run) == 1 or not _are_sound(storage, run)  # whose error says which, and why
        for stored in run:
            try:
                if alone:
                    _check(storage, stored)
            except StoreForbiddenError:
                raise
            except (DamagedError, StoreUnreadableError) as error:
                yield stored, error
            else:
                yield stored, None


def _are_sound(storage: Storage, run: list[StoredSlice]) -> bool:
    """Returns whether neighbouring slices are undamaged, by one read. Raises ``StoreForbiddenError``."""
    try:
        for _ in read_slices(storage, run):
            pass
    except StoreForbiddenError:
        raise
    except (DamagedError, StoreUnreadableError):
        return False
    return True


def _check(storage: Storage, stored: StoredSlice) -> None:
    hasher = xxhash.xxh3_64()
    done = 0
    while done < stored.nbytes:
        piece = _read(storage, stored, stored.offset + done, min(_RUN_NBYTES, stored.nbytes - done))
        if not piece:
            raise stored.damaged(f"truncated: {done:,} of {stored.nbytes:,} bytes are there")
        hasher.update(piece)
        done += len(piece)
    _compare(stored, hasher.intdigest())


def _compare(stored: StoredSlice, actual: int) -> None:
    if actual != stored.entry.checksum:
        raise stored.damaged(f"checksum mismatch: {actual:016x}, written was {stored.entry.checksum:016x}")


def _read(storage: Storage, stored: StoredSlice, offset: int, nbytes: int) -> bytearray | memoryview:
    with reported(stored.path, stored.file.step, stored.file.rank):
        raw = storage.read(stored.path, offset, nbytes)
    return bytearray(raw) if isinstance(raw, bytes) else raw


@contextlib.contextmanager
def reported(path: str, step: int | None = None, rank: int | None = None) -> Iterator[None]:
    """Turns errors of storage into errors that name ``path``, its step and rank.

    A refused permission or a dead network is no damage, for which an older checkpoint would be taken.

    Raises:
        DamagedError: The file is missing, or is not what was written.
        StoreForbiddenError: This user may not read it.
        StoreUnreadableError: The storage does not give it.
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


def in_order(slices: Iterable[StoredSlice]) -> list[StoredSlice]:
    """Returns slices, each once, in the order of the files: the same on every rank."""
    return sorted(set(slices), key=lambda stored: (stored.path, stored.offset, stored.nbytes))


def _runs(slices: Iterable[StoredSlice]) -> Iterator[list[StoredSlice]]:
    """Yields slices that follow each other in one file, in file order, as lists of ``_RUN_NBYTES`` or one slice."""
    run: list[StoredSlice] = []
    nbytes = 0
    for stored in in_order(slices):
        joins = run and run[-1].path == stored.path and run[-1].offset + run[-1].nbytes == stored.offset
        if run and not (joins and nbytes + stored.nbytes <= _RUN_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(stored)
        nbytes += stored.nbytes
    if run:
        yield run


def _as_tensor(stored: StoredSlice, raw: bytearray | memoryview, begin: int) -> torch.Tensor:
    """Returns a tensor over bytes of ``raw``, which it keeps alive."""
    entry = stored.entry
    dtype = TORCH_DTYPES[entry.dtype]
    if not stored.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8, offset=begin, count=stored.nbytes)
    return flat.view(dtype).reshape(entry.shape)


def block(tensor: torch.Tensor, offsets: tuple[int, ...], box: Box) -> torch.Tensor:
    """Returns the view of ``tensor``, which lies at ``offsets`` of a whole, that is block ``box`` of the whole."""
    for dim, (start, length, offset) in enumerate(zip(box.offsets, box.shape, offsets, strict=True)):
        tensor = tensor.narrow(dim, start - offset, length)
    return tensor
