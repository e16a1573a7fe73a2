"""Makes a dense checkpoint of a step of a gradient log.

Either one process does, when all ranks of the run have ended. Or the ranks of a run do it together, and go on from it,
if their number or layout differs from that of the ranks that wrote the log. They divide the ranks of the log among
themselves: each makes the shares of some of these by optimizers without a model (``gradient_log.shares``), and writes
them to storage. Rank 0 commits when all shares are written.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
import xxhash

from moe_ckpt.comm.communicator import answers_of
from moe_ckpt.commit.keeping import StoreContents
from moe_ckpt.core.step import Tier
from moe_ckpt.errors import CoverageError, NoCheckpointError, NotFiniteError, StoreInUseError, UnsupportedError
from moe_ckpt.format.manifest import (
    KINDS,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    PartRecord,
    StateRecord,
    encode_part,
    file_row,
    group_of,
    kind_of,
    shard_path,
    state_path,
    state_row,
)
from moe_ckpt.format.sealed import Fragment, digest, unseal
from moe_ckpt.format.shard import ShardHeader, SliceEntry, encode_header, lay_out
from moe_ckpt.gradient_log.shares import Densifier
from moe_ckpt.gradient_log.units import Device
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.collective import on_all_ranks, on_rank_zero
from moe_ckpt.reading.memory.memory_outside import MemoryOutside
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.recovery.executing import plain_spans
from moe_ckpt.slices.checksums import all_finite, judged_in
from moe_ckpt.slices.snapshot import write_named
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.lock import StoreLock

_Made = TypeVar("_Made")
Tell = Callable[[float, float, str], None]
"""Gets (bytes done, bytes in all, what is being done)."""

_AT_WORK = "What a run has in memory is made dense when the run has ended: stop it first, or wait until it has."


class WrittenShare(NamedTuple):
    """One rank's share of a checkpoint, on storage.

    Attributes:
        files: Rows of its files, as they will be in the part document.
        state: Row of its state, as it will be in the part document.
        nbytes: Bytes of files and state.
    """

    files: str
    state: str
    nbytes: int


@dataclass(frozen=True)
class Densified:
    """A dense checkpoint that was made.

    Attributes:
        manifest: Manifest of the checkpoint.
        updates: Number of steps whose updates were repeated.
        nbytes: Bytes written.
        device: Device on which updates were repeated.
        trained_on: Devices on which the run made them; empty if nothing was logged.
    """

    manifest: Manifest
    updates: int
    nbytes: int
    device: Device
    trained_on: tuple[Device, ...]

    @property
    def inexact(self) -> str:
        """The reason why last bits may differ from the run's; empty if they do not."""
        difference = f"the run made its updates on {' and '.join(map(str, self.trained_on))}, and this is {self.device}"
        if self.updates and {device.type for device in self.trained_on} - {self.device.type}:
            return difference
        return f"{difference}: another model" if self.updates and self.device not in self.trained_on else ""


def densify(
    storage: Storage,
    roots: Sequence[str],
    step: int | None = None,
    device: str | None = None,
    tell: Tell = lambda done, total, what: None,
) -> Densified:
    """Makes a dense checkpoint from the memory of a run that has ended. On one process, with no rank alive.

    Args:
        storage: Storage of the run's store.
        roots: Memory directories, as in ``Memory(directory=...)``, of all nodes that are left.
        step: Step of the checkpoint; None for the newest that can be made.
        device: Device to step on, as torch names it; None for the kind that trained, or the CPU if there is none.
        tell: Gets progress.

    Returns:
        The checkpoint. After an error the store has no part of it.

    Raises:
        NoCheckpointError: The step cannot be made, and the message names operators and steps; or the store has it.
        StoreInUseError, StoreError: A process of the run is alive.
        StoreUnwritableError: The store is full, or cannot be written.
        CoverageError, UnsupportedError, ReplayDivergedError: As ``Densifier.made``.
    """
    # The name is unique, because a process with the same owner name may take over a lease at once.
    lock = StoreLock(storage, f"moe-ckpt densify {secrets.token_hex(4)}")
    with _locked(lock), MemoryOutside(StoreReader(storage), roots) as memory:
        lock.renew_meanwhile()
        made: list[Densifier] = []

        def verify(opened: OpenedMemory) -> None:
            made[:] = [Densifier(opened)]
            made[0].verify(range(opened.manifest.world_size))

        opened = memory.opened(step, verify)
        manifest = opened.manifest
        StoreContents(storage).clean_start()
        try:
            done = _write(storage, lock, made[0], torch.device(device) if device else made[0].device(), tell)
            check_checkpoint(StoreReader(storage), StoreReader(storage).manifest(manifest.directory))
        except BaseException:
            _remove(storage, manifest.directory)
            raise
        return done


@contextmanager
def _locked(lock: StoreLock) -> Iterator[None]:
    """Holds the lock. The message of ``StoreInUseError`` is one for users who do not start a run."""
    try:
        lock.acquire()
    except StoreInUseError as error:
        raise StoreInUseError(error.path, error.holder, _AT_WORK) from None
    try:
        yield
    finally:
        lock.release()


def _remove(storage: Storage, directory: str) -> None:
    """Deletes the files of a checkpoint that was not committed."""
    for name in storage.list(directory):
        if group_of(name) is not None:
            storage.delete(f"{directory}/{name}")
    storage.delete_dir(directory)


def _write(storage: Storage, lock: StoreLock, densifier: Densifier, device: torch.device, tell: Tell) -> Densified:
    manifest, before = densifier.manifest, torch.get_num_threads()
    torch.set_num_threads(densifier.threads(device) or before)
    ranks = range(manifest.world_size)
    total, done = densifier.nbytes(ranks), 0

    def report(nbytes: int, what: str) -> None:
        nonlocal done
        done += nbytes
        tell(done, total, what)

    try:
        here = Device.of(device)
        shares = [write_made_share(storage, densifier, rank, device, report) for rank in ranks]
    finally:
        torch.set_num_threads(before)
    lock.confirm()
    made = commit_made(storage, manifest, shares, densifier.parent)
    return Densified(made, densifier.updates, sum(share.nbytes for share in shares), here, densifier.devices)


def steps_in_memory(storage: Storage, roots: Sequence[str]) -> list[int]:
    """Returns the steps that ``densify`` can make, newest first. Arguments and errors: see there."""
    with MemoryOutside(StoreReader(storage), roots) as memory:
        return memory.steps()


def densify_together(
    comm: Communicator, storage: Storage, opened: OpenedMemory, require_fitting: Callable[[], None]
) -> str:
    """Makes a dense checkpoint of a log. A collective.

    Args:
        comm: The ranks.
        storage: Storage of the store, which this run has locked.
        opened: The log. Its bytes on other nodes need not have been fetched.
        require_fitting: Raises if this run cannot go on from the checkpoint. Called when the plain states of the last
            step were fetched.

    Returns:
        Directory of the checkpoint on storage.

    Raises:
        NotUsableError: Some rank cannot.
        PeerLostError: A peer is gone.
    """
    slots, manifest = opened.slots, opened.manifest
    mine = range(comm.rank, manifest.world_size, comm.world_size)
    everyone, logged = range(manifest.world_size), [snapshot.manifest for snapshot in opened.logged]
    slots.fetch(on_all_ranks(comm, lambda: list(plain_spans(opened.reader, logged[-1:], everyone))))
    maker = on_all_ranks(comm, lambda: _usable(manifest, lambda: Densifier(opened)))
    on_all_ranks(comm, require_fitting)
    inputs = (stored.span for stored in maker.inputs(mine))
    slots.fetch(on_all_ranks(comm, lambda: [*plain_spans(opened.reader, logged, mine), *inputs]))
    on_all_ranks(comm, lambda: maker.verify(mine))
    if comm.rank == 0:
        announce(
            "step %d in memory belongs to a gradient log that %d ranks wrote in another layout. It is first made "
            "dense, and written to %s/%s",
            manifest.step,
            manifest.world_size,
            storage.root,
            manifest.directory,
        )

    def write() -> dict[int, WrittenShare]:
        device = maker.device()
        return {rank: write_made_share(storage, maker, rank, device, lambda nbytes, what: None) for rank in mine}

    written = on_all_ranks(comm, lambda: _usable(manifest, write))
    of_ranks = {int(rank): columns for answer in answers_of(comm, written) for rank, columns in answer.items()}
    shares = [WrittenShare(*of_ranks[rank]) for rank in everyone]

    def commit() -> str:
        return commit_made(storage, manifest, shares, maker.parent).directory

    return on_rank_zero(comm, commit, f"commit {storage.root}/{manifest.directory}")


def _usable(manifest: Manifest, make: Callable[[], _Made]) -> _Made:
    """Returns the result of ``make``. Its errors become ``CoverageError``, after which an older step is chosen."""
    try:
        return make()
    except (NoCheckpointError, UnsupportedError) as error:
        raise CoverageError(f"making {manifest.directory} dense", (str(error),)) from error


def write_made_share(
    storage: Storage, maker: Densifier, rank: int, device: torch.device, tell: Callable[[int, str], None]
) -> WrittenShare:
    """Makes and writes the shards and the state file of a rank. The checkpoint exists after ``commit_made``.

    Args:
        storage: Storage of the store.
        maker: Makes the share.
        rank: Rank whose share it is.
        device: Device to step on.
        tell: Gets progress.

    Raises:
        OSError: A file cannot be written.
        NotFiniteError: A slice has NaN or infinity.
        CoverageError, UnsupportedError, ReplayDivergedError: As ``Densifier.made``.
    """
    of, (slices, state) = maker.manifest, maker.made(rank, device, tell)
    spoiled = (entry.key for entry, data in slices if entry.operator and not all_finite(data.numpy().data, entry.dtype))
    judged = judged_in(unseal(state, state_path(of.directory, rank))["state"])
    first = next(filter(judged, spoiled), "")
    if first:
        raise NotFiniteError(of.directory, f"{first} on rank {rank}")
    by_kind: dict[str, list[tuple[SliceEntry, torch.Tensor]]] = {kind: [] for kind in KINDS}
    for entry, data in slices:
        by_kind[kind_of(entry.operator)].append((entry, data))
    files = tuple(
        _write_shard(storage, of, rank, kind, shard_slices) for kind, shard_slices in by_kind.items() if shard_slices
    )
    path = state_path(of.directory, rank)
    write_named(storage, path, [state])
    rows, row = b"".join(map(file_row, files)), state_row(StateRecord(path, len(state), digest(state), rank))
    return WrittenShare(rows.decode(), row.decode(), len(state) + sum(file.nbytes for file in files))


def _write_shard(
    storage: Storage, of: Manifest, rank: int, kind: str, slices: Sequence[tuple[SliceEntry, torch.Tensor]]
) -> FileRecord:
    data = {entry.name: values.numpy().data for entry, values in slices}
    placed = lay_out([entry for entry, _ in slices])
    entries = tuple(replace(entry, checksum=xxhash.xxh3_64_intdigest(data[entry.name])) for entry in placed)
    header = encode_header(ShardHeader(of.run_id, of.step, of.generation, rank, entries))
    path = shard_path(of.directory, rank, kind)
    nbytes = write_named(storage, path, [header, *(data[entry.name] for entry in entries)])
    return FileRecord(path, nbytes, len(header), digest(header), of.step, rank)


def commit_made(storage: Storage, of: Manifest, shares: Sequence[WrittenShare], parent: str | None) -> Manifest:
    """Writes part document and manifest. When it returns, the checkpoint exists.

    Args:
        storage: Storage of the store.
        of: Manifest of the checkpoint, in which every operator is as of its step.
        shares: Shares of all its ranks, in their order.
        parent: As ``Manifest.parent``.

    Raises:
        OSError: A file cannot be written.
    """
    record, raw = encode_part(
        *(of.run_id, of.step, of.generation, of.world_size),
        files="".join(share.files for share in shares).encode(),
        states="".join(share.state for share in shares).encode(),
        operators=Fragment(sorted(of.operators)),
    )
    write_named(storage, record.path, [raw])
    manifest = replace(
        of,
        created_unix_secs=time.time(),
        parent=parent,
        files=(),
        operators={},
        states=(),
        window=(),
        # Every expert is stored as it was after the step.
        tokens={**of.tokens, "saved": {Tier.STORAGE.value: of.tokens["applied"]}} if of.tokens else {},
        parts=(PartRecord(record.directory, record.nbytes, record.digest),),
    )
    write_named(storage, f"{manifest.directory}/{MANIFEST_NAME}", [manifest.encode()])
    return manifest
