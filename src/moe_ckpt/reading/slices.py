"""Reads and verifies slices. Neighbouring slices of a file, such as a stack of experts, are read in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import torch
import xxhash

from moe_ckpt.errors import DamagedError, StoreError, StoreForbiddenError, StoreUnreadableError
from moe_ckpt.format.shard import TORCH_DTYPES, SliceEntry
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.memory.left_slots import READERS
from moe_ckpt.memory.mapping import page_locked
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.storage.base import ReadableStorage
from moe_ckpt.threads import ThreadName, map_ahead

BadSlice = DamagedError | StoreUnreadableError
Use = Callable[[StoredSlice, torch.Tensor], None]
"""Takes a slice with its values, which share memory with other slices."""
RUN_NBYTES = 4 << 20
"""Neighbouring slices are read in one call up to this size, which bounds a thread's memory unless one slice is larger.
It is large enough for a storage that answers slowly, and so small that the allocator uses the memory of the last read
again, which the kernel need not clear: reads of 64 MiB take four times as long."""


def read_run(
    storage: ReadableStorage, run: list[StoredSlice], verified: Collection[StoredSlice] = (), *, locked: bool = False
) -> list[tuple[StoredSlice, torch.Tensor]]:
    """Returns each slice of a run with its verified values, which share memory. On any thread.

    Args:
        storage: Of the store.
        run: Of ``runs_of``.
        verified: Slices that need not be compared with their checksums again.
        locked: The values go to a GPU: they are in page-locked memory, except slices larger than ``RUN_NBYTES``.

    Raises:
        DamagedError: A slice's bytes are missing or differ from what was written.
        StepRemovedError: The step was removed meanwhile, if ``storage`` can tell.
    """
    first = run[0]
    raw = _read(storage, first, first.offset, sum(stored.nbytes for stored in run))
    begins = [stored.offset - first.offset for stored in run]
    for stored, begin in zip(run, begins, strict=True):
        with memoryview(raw) as view, view[begin : begin + stored.nbytes] as part:
            if len(part) < stored.nbytes:
                raise stored.damaged(f"truncated: {len(part):,} of {stored.nbytes:,} bytes are there")
            if stored not in verified:
                _compare(stored, xxhash.xxh3_64_intdigest(part))
    data = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else torch.empty(0, dtype=torch.uint8, device="cpu")
    if locked and 0 < len(raw) <= RUN_NBYTES:
        data = page_locked(data)  # a tensor, which torch must know to lend its memory again
    blocks = (data[begin : begin + stored.nbytes] for stored, begin in zip(run, begins, strict=True))
    return [(stored, as_values(stored.entry, values)) for stored, values in zip(run, blocks, strict=True)]


def find_damage(
    storage: ReadableStorage, slices: Iterable[StoredSlice]
) -> Iterator[tuple[StoredSlice, BadSlice | None]]:
    """Yields each slice with its error, or None for a good one, in file order and in bounded memory.

    Raises:
        StoreForbiddenError: This user may not read a file.
        StepRemovedError: The step was removed meanwhile, if ``storage`` can tell.
    """
    for run, errors in map_ahead(ThreadName.READ, READERS, partial(_check_run, storage), runs_of(slices)):
        yield from zip(run, errors, strict=True)


def _check_run(storage: ReadableStorage, run: list[StoredSlice]) -> tuple[list[StoredSlice], list[BadSlice | None]]:
    """Returns a run, and the error of each of its slices. On any thread."""
    if len(run) > 1 and _error_of(partial(read_run, storage, run)) is None:
        return run, [None] * len(run)
    return run, [_error_of(partial(_check, storage, stored)) for stored in run]  # which is damaged, and why


def _error_of(read: Callable[[], object]) -> BadSlice | None:
    """Returns the error that reading raises for damage, or where storage gives no bytes. Raises others."""
    try:
        read()
    except StoreForbiddenError:
        raise
    except (DamagedError, StoreUnreadableError) as error:
        return error
    return None


def _check(storage: ReadableStorage, stored: StoredSlice) -> None:
    hasher = xxhash.xxh3_64()
    done = 0
    while done < stored.nbytes:
        piece = _read(storage, stored, stored.offset + done, min(RUN_NBYTES, stored.nbytes - done))
        if not piece:
            raise stored.damaged(f"truncated: {done:,} of {stored.nbytes:,} bytes are there")
        hasher.update(piece)
        done += len(piece)
    _compare(stored, hasher.intdigest())


def _compare(stored: StoredSlice, actual: int) -> None:
    if actual != stored.entry.checksum:
        raise stored.damaged(f"checksum mismatch: {actual:016x}, written was {stored.entry.checksum:016x}")


def _read(storage: ReadableStorage, stored: StoredSlice, offset: int, nbytes: int) -> bytearray | memoryview:
    with naming_storage_errors(stored.path, stored.file.step, stored.file.rank):
        raw = storage.read(stored.path, offset, nbytes)
    return bytearray(raw) if isinstance(raw, bytes) else raw


@contextlib.contextmanager
def naming_storage_errors(path: str, step: int | None = None, rank: int | None = None) -> Iterator[None]:
    """Turns errors of storage into errors that name ``path``, its step and rank.

    It keeps damage, for which an older checkpoint is taken, apart from a refused permission or a dead network.

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


def in_file_order(slices: Iterable[StoredSlice]) -> list[StoredSlice]:
    """Returns slices, each once, in the order of the files: the same on every rank."""
    return sorted(set(slices), key=lambda stored: (stored.path, stored.offset, stored.nbytes))


def runs_of(slices: Iterable[StoredSlice]) -> Iterator[list[StoredSlice]]:
    """Yields slices that follow each other in one file, in file order, as lists of ``RUN_NBYTES`` or one slice."""
    run: list[StoredSlice] = []
    nbytes = 0
    for stored in in_file_order(slices):
        joins = run and run[-1].path == stored.path and run[-1].offset + run[-1].nbytes == stored.offset
        if run and not (joins and nbytes + stored.nbytes <= RUN_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(stored)
        nbytes += stored.nbytes
    if run:
        yield run


def as_values(entry: SliceEntry, data: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a slice as a tensor of its type and shape: a view, or a copy if they are not aligned."""
    dtype = TORCH_DTYPES[entry.dtype]
    if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(entry.shape)


def block(tensor: torch.Tensor, offsets: tuple[int, ...], box: Box) -> torch.Tensor:
    """Returns the view of ``tensor``, which lies at ``offsets`` of a whole, that is block ``box`` of the whole."""
    for dim, (start, length, offset) in enumerate(zip(box.offsets, box.shape, offsets, strict=True)):
        tensor = tensor.narrow(dim, start - offset, length)
    return tensor
