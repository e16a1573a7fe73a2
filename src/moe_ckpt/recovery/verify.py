"""Reading a whole store through, and naming everything in it that is damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from moe_ckpt.errors import CoverageError, DamagedError, StoreForbiddenError, StoreUnreadableError
from moe_ckpt.format.manifest import MANIFEST_NAME, STORE_NAME, FileRecord, Manifest
from moe_ckpt.format.shard import ShardHeader
from moe_ckpt.recovery.index import StoredSlice, TensorIndex, build_index, prove
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.slices import BadSlice, find_damage
from moe_ckpt.storage.base import Storage

_READERS = 4
Progress = Callable[[int, int], None]
"""(bytes checked, bytes in all)."""


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    affects: the committed steps that cannot be loaded because of it; none when only superseded bytes are
    hit, or ``store.json``, which the manifests replace.
    """

    path: str
    reason: str
    step: int | None = None
    rank: int | None = None
    affects: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(DamagedError(self.path, self.reason, step=self.step, rank=self.rank))


@dataclass
class _Findings:
    """What was found so far: good headers, errors, and which checkpoints each slice matters to."""

    headers: dict[FileRecord, ShardHeader] = field(default_factory=dict)
    users: dict[StoredSlice, list[str]] = field(default_factory=dict)
    errors: dict[tuple[str, str, int | None, int | None], list[str]] = field(default_factory=dict)

    def add(self, error: BadSlice, directories: Iterable[str]) -> None:
        affects = self.errors.setdefault((error.path, error.reason, error.step, error.rank), [])
        affects.extend(directory for directory in directories if directory not in affects)


def verify_store(
    storage: Storage, directories: Collection[str] | None = None, progress: Progress | None = None
) -> list[Damage]:
    """Check every byte that the committed steps name, going on after damage; each file is read once.

    directories: only these steps, and the files of older steps that they need; by default all.

    Raises:
        ForeignStoreError, FormatVersionError: this is no store that this package reads.
        StoreForbiddenError: this user may not read a file.
        OSError: storage failed, so that nothing can be said.
    """
    reader = StoreReader(storage)
    reader.identity()
    found = _Findings()
    if reader.identity_damage is not None:
        found.add(reader.identity_damage, ())
    for directory in reader.directories():
        if directories is None or directory in directories:
            _check_step(reader, directory, found)
    for directory in set(directories or ()) - set(reader.directories()):
        found.add(DamagedError(f"{directory}/{MANIFEST_NAME}", "is missing"), [directory])
    _check_slices(reader.storage, found, progress or _quiet)
    damages = (Damage(*key, tuple(sorted(affects))) for key, affects in found.errors.items())
    return sorted(damages, key=lambda damage: (damage.path != STORE_NAME, damage.path, damage.reason))


def _quiet(done: int, total: int) -> None:
    """Nobody watches."""


def _check_step(reader: StoreReader, directory: str, found: _Findings) -> None:
    """Manifest, headers, coverage and states of one step."""
    try:
        manifest = reader.manifest(directory)
    except StoreForbiddenError:
        raise
    except (DamagedError, StoreUnreadableError) as error:
        found.add(error, [directory])
        return
    index = _index(reader, manifest, found)
    if index is None:
        return
    for stored in index.live:
        found.users.setdefault(stored, []).append(directory)
    for slot in manifest.slots:
        _check_states(reader, slot, directory, found)
    try:
        prove(manifest, index)
        for slot in manifest.slots:
            ranks = sorted(record.rank for record in slot.states)
            if ranks != list(range(manifest.world_size)):
                said = f"step {slot.step} has the states of ranks {ranks}, of {manifest.world_size}"
                raise CoverageError(directory, (said,))
    except CoverageError as error:
        found.add(DamagedError(f"{directory}/{MANIFEST_NAME}", str(error), step=manifest.step), [directory])
    except DamagedError as error:
        found.add(error, [directory])


def _check_states(reader: StoreReader, slot: Manifest, directory: str, found: _Findings) -> None:
    """The ranks' plain states of one step, and the side tensors that they consist of."""
    for stored in reader.index(slot).side.values():
        found.users.setdefault(stored, []).append(directory)
    for record in slot.states:
        try:
            reader.state(slot, record.rank)
        except StoreForbiddenError:
            raise
        except (DamagedError, StoreUnreadableError) as error:
            if error.path == record.path:  # damage in its side tensors is found with the other slices
                found.add(error, [directory])


def _index(reader: StoreReader, manifest: Manifest, found: _Findings) -> TensorIndex | None:
    """The index of a step, or None after noting which of its shards cannot be used."""
    whole = True
    for record in manifest.files:
        try:
            if record not in found.headers:
                found.headers[record] = reader.header(record)
        except StoreForbiddenError:
            raise
        except (DamagedError, StoreUnreadableError) as error:
            found.add(error, [manifest.directory])
            whole = False
    try:
        return build_index(manifest, reader.headers(manifest)) if whole else None
    except DamagedError as error:
        found.add(error, [manifest.directory])
        return None


def _check_slices(storage: Storage, found: _Findings, progress: Progress) -> None:
    """Every slice of every shard with a good header, superseded ones too."""
    groups = [[StoredSlice(entry, record) for entry in header.slices] for record, header in found.headers.items()]
    total = sum(stored.nbytes for group in groups for stored in group)
    lock = threading.Lock()
    done = 0

    def check(group: list[StoredSlice]) -> list[tuple[StoredSlice, BadSlice]]:
        nonlocal done
        bad = []
        for stored, error in find_damage(storage, group):
            if error is not None:
                bad.append((stored, error))
            with lock:
                done += stored.nbytes
                progress(done, total)
        return bad

    with ThreadPoolExecutor(_READERS, thread_name_prefix="moe_ckpt-verify") as pool:
        for stored, error in _flat(pool.map(check, groups)):
            found.add(error, found.users.get(stored, ()))


def _flat(
    results: Iterable[list[tuple[StoredSlice, BadSlice]]],
) -> Iterator[tuple[StoredSlice, BadSlice]]:
    for result in results:
        yield from result
