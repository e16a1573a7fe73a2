"""Checks every byte of a store, and names everything in it that is damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moe_ckpt.errors import CoverageError, DamagedError, StepRemovedError, StoreForbiddenError, StoreUnreadableError
from moe_ckpt.format.manifest import MANIFEST_NAME, STORE_NAME, FileRecord, Manifest
from moe_ckpt.format.run_records import FINISHED_NAME, Finished
from moe_ckpt.format.shard import ShardHeader
from moe_ckpt.reading.index import StoredSlice, prove
from moe_ckpt.reading.reader import StoreReader, require_states
from moe_ckpt.reading.slices import BadSlice, find_damage, naming_storage_errors
from moe_ckpt.run.documents import read_sealed
from moe_ckpt.storage.base import ReadableStorage
from moe_ckpt.threads import ThreadName, named_pool

_READERS = 4
Progress = Callable[[int, int], None]
"""(bytes checked, bytes in all)."""


@dataclass(frozen=True)
class Damage:
    """The damage of one file or slice.

    Attributes:
        affects: The committed steps that cannot be loaded because of it; none if it is superseded bytes, or
            ``store.json``, which the manifests replace, or ``finished.json``.
    """

    path: str
    reason: str
    step: int | None = None
    rank: int | None = None
    affects: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(DamagedError(self.path, self.reason, step=self.step, rank=self.rank))


@dataclass(frozen=True)
class Verified:
    """The result of verifying some steps of a store.

    Attributes:
        damages: All damage, but for files that are gone with their steps.
        usable: The steps that were checked and are undamaged, in the order given.
        removed: Those that were removed while they were read: neither damaged nor undamaged.
    """

    damages: tuple[Damage, ...]
    usable: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """True if nothing was found out, because all steps were removed."""
        return bool(self.removed) and not (self.usable or self.damages)


@dataclass
class _Findings:
    """Good headers, errors, the checkpoints that use each slice, and those that were removed meanwhile."""

    headers: dict[FileRecord, ShardHeader] = field(default_factory=dict)
    users: dict[StoredSlice, list[str]] = field(default_factory=dict)
    errors: dict[tuple[str, str, int | None, int | None], list[str]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)

    def add(self, error: BadSlice, directories: Iterable[str]) -> None:
        affects = self.errors.setdefault((error.path, error.reason, error.step, error.rank), [])
        affects.extend(directory for directory in directories if directory not in affects)

    @contextmanager
    def noting(self, directory: str, only: str | None = None) -> Iterator[None]:
        """Adds damage that is raised inside; if ``only`` is given, only that of this path."""
        try:
            yield
        except StoreForbiddenError:
            raise
        except (DamagedError, StoreUnreadableError) as error:
            if only is None or error.path == only:
                self.add(error, [directory])


def verify_steps(reader: StoreReader, directories: Sequence[str], progress: Progress | None = None) -> Verified:
    """Checks steps, and the files of older steps that they need. Each file is read once.

    Args:
        reader: Of the store. It has listed the steps, so that it can tell which are removed meanwhile.
        directories: The steps.
        progress: Called with bytes checked and bytes in all.

    Raises:
        StoreError, FormatVersionError: This is no store that this package reads.
        StoreForbiddenError: This user may not read a file.
        OSError: The storage failed.
    """
    reader.identity()
    findings = _Findings()
    if reader.identity_damage is not None:
        findings.add(reader.identity_damage, ())
    _check_finished(reader.storage, findings)
    for directory in directories:
        try:
            _check_step(reader, directory, findings)
        except StepRemovedError as error:
            findings.removed.update(error.directories)
    _check_slices(reader.storage, findings, progress or (lambda done, total: None))
    damages = [Damage(*key, tuple(sorted(affects))) for key, affects in findings.errors.items()]
    damages.sort(key=lambda damage: (damage.path != STORE_NAME, damage.path, damage.reason))
    damaged = {directory for damage in damages for directory in damage.affects}
    usable = tuple(directory for directory in directories if directory not in damaged | findings.removed)
    removed = tuple(directory for directory in directories if directory in findings.removed - damaged)
    return Verified(tuple(damages), usable, removed)


def _check_finished(storage: ReadableStorage, findings: _Findings) -> None:
    """Checks ``finished.json``, which no step needs, where a run has left one."""
    if storage.exists(FINISHED_NAME):
        try:
            with naming_storage_errors(FINISHED_NAME):
                Finished.decode(read_sealed(storage, FINISHED_NAME), FINISHED_NAME)
        except (DamagedError, StoreUnreadableError) as error:
            findings.add(error, ())


def _check_step(reader: StoreReader, directory: str, findings: _Findings) -> None:
    """Checks manifest, headers, coverage and states of one step. Raises ``StepRemovedError``."""
    with findings.noting(directory):
        manifest = reader.manifest(directory)
        for record in manifest.files:
            with findings.noting(directory):
                findings.headers[record] = reader.header(record)
        if not all(record in findings.headers for record in manifest.files):
            return
        index = reader.index(manifest)
        for stored in index.live:
            findings.users.setdefault(stored, []).append(directory)
        for slot in manifest.slots:
            _check_states(reader, slot, directory, findings)
        try:
            prove(manifest, index)
            require_states(manifest)
        except CoverageError as error:
            raise DamagedError(f"{directory}/{MANIFEST_NAME}", str(error), step=manifest.step) from error


def _check_states(reader: StoreReader, slot: Manifest, directory: str, findings: _Findings) -> None:
    """Checks the ranks' plain states of one step; damage in their side tensors is found with the other slices."""
    for stored in reader.index(slot).side.values():
        findings.users.setdefault(stored, []).append(directory)
    for record in slot.states:
        with findings.noting(directory, only=record.path):
            reader.state(slot, record.rank)


def _check_slices(storage: ReadableStorage, findings: _Findings, progress: Progress) -> None:
    """Checks every slice of every shard with a good header, superseded ones too."""
    groups = [[StoredSlice(entry, record) for entry in header.slices] for record, header in findings.headers.items()]
    total = sum(stored.nbytes for group in groups for stored in group)
    lock = threading.Lock()
    done = 0

    def check(group: list[StoredSlice]) -> None:
        nonlocal done
        remaining = sum(stored.nbytes for stored in group)
        try:
            for stored, error in find_damage(storage, group):
                remaining -= stored.nbytes
                with lock:
                    if error is not None:
                        findings.add(error, findings.users.get(stored, ()))
                    done += stored.nbytes
                    progress(done, total)
        except StepRemovedError as removed:  # and the file with all its users, so that the rest of it counts as done
            with lock:
                findings.removed.update(removed.directories)
                done += remaining
                progress(done, total)

    with named_pool(ThreadName.VERIFY, _READERS) as pool:
        for _ in pool.map(check, groups):
            pass  # raises what a thread raised
