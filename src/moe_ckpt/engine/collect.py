"""Garbage collection: carry out what ``core.retention`` decides.

Rules of this file:

1. Only files whose name and directory are of this format are ever deleted.
2. Commit records go first. A crash anywhere in between leaves files that nobody names, and the next
   collection finds them; it never leaves a checkpoint that misses files.
3. What cannot be read is not judged: a damaged checkpoint is left as it is, an error of the storage or
   a manifest of another format version stops the collection before anything is deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field

from moe_ckpt.core.retention import CheckpointRecord, RetentionPolicy, files_to_delete, retained
from moe_ckpt.engine.documents import read_manifest
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest, is_own_file, parse_step_dir
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.steps import each_step


@dataclass(frozen=True)
class CollectReport:
    """What a collection did. All but ``deleted`` (file paths) are step directories, oldest first.

    damaged: their manifest exists but is not what was written; left untouched. When one is of another
    format version, nothing at all was deleted.
    """

    retained: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()


def collect(
    storage: Storage,
    retention: RetentionPolicy,
    now_unix_secs: float,
    keep_directories: Collection[str] = (),
    *,
    abandoned: Collection[str] = (),
    cache: MutableMapping[str, Manifest] | None = None,
    listed: Mapping[str, list[str]] | None = None,
) -> CollectReport:
    """Delete the checkpoints that ``retention`` lets go, and every file that no other one names.

    Called by rank 0 on its persist thread, after a commit and after a save that failed.

    keep_directories: step directories being written now.
    abandoned: directories of saves that failed and that no rank writes to any more. Other directories
        newer than the newest commit are left alone, for a faster rank may have begun the next step.
    cache: directory -> decoded manifest; read instead of the files, and kept up to date.
    listed: directory -> names in it, of directories that were listed a moment ago and need not be listed again.

    Raises:
        OSError: while reading: nothing was deleted. While deleting: what was deleted was rightly so.
    """
    contents = _read_store(storage, {} if cache is None else cache, listed or {})
    if contents.is_foreign:
        return CollectReport(damaged=contents.damaged)
    stay = retained(tuple(contents.records.values()), retention, now_unix_secs)
    kept = [contents.records[directory] for directory in contents.records if directory in stay]
    dropped = tuple(directory for directory in contents.records if directory not in stay)
    dropped = tuple(directory for directory in dropped if directory not in keep_directories)
    untouchable = {*keep_directories, *contents.damaged, *(contents.begun_after_newest() - set(abandoned))}
    deleted = _delete(storage, contents, files_to_delete(contents.own_files(), kept, untouchable))
    for directory, names in contents.names.items():
        if directory not in untouchable:
            _tidy(storage, directory, names, deleted)
    if cache is not None:
        for directory in dropped:
            cache.pop(directory, None)
    return CollectReport(tuple(record.directory for record in kept), dropped, contents.damaged, deleted)


def clean_start(storage: Storage, cache: MutableMapping[str, Manifest] | None = None) -> CollectReport:
    """Remove what dead writers left: the files of uncommitted steps (except files that a commit names) and temporaries.

    Called by rank 0 at the start of a run, with the store's lock held and before any rank writes.

    Raises:
        OSError: while reading: nothing was deleted.
    """
    contents = _read_store(storage, {} if cache is None else cache)
    if contents.is_foreign:
        return CollectReport(damaged=contents.damaged)
    committed = {*contents.records, *contents.damaged}
    deleted = _delete(storage, contents, files_to_delete(contents.own_files(), contents.records.values(), committed))
    storage.clean_temporaries("")
    for directory, names in contents.names.items():
        if directory in committed:
            storage.clean_temporaries(directory)
        else:
            _tidy(storage, directory, names, deleted)
    return CollectReport(tuple(contents.records), (), contents.damaged, deleted)


@dataclass
class _Contents:
    """names: step directory -> names in it; records: the committed ones; both oldest first."""

    names: dict[str, list[str]] = field(default_factory=dict)
    records: dict[str, CheckpointRecord] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    is_foreign: bool = False

    def own_files(self) -> list[str]:
        return [f"{directory}/{name}" for directory, names in self.names.items() for name in names if is_own_file(name)]

    def begun_after_newest(self) -> set[str]:
        newest = max((record.order for record in self.records.values()), default=(-1, -1))
        return {directory for directory in self.names if _order(directory) > newest}


def _read_store(
    storage: Storage, cache: MutableMapping[str, Manifest], listed: Mapping[str, list[str]] | None = None
) -> _Contents:
    """List every step directory that is not ``listed``, and decode every manifest that is not in the cache."""
    known = listed or {}
    contents = _Contents()
    contents.names = each_step(storage, lambda name: known[name] if name in known else storage.list(name))
    for directory, names in contents.names.items():
        if MANIFEST_NAME not in names:
            cache.pop(directory, None)
            continue
        try:
            manifest = cache.get(directory) or read_manifest(storage, directory)
        except (DamagedError, FormatVersionError) as error:
            contents.damaged += (directory,)
            contents.is_foreign |= isinstance(error, FormatVersionError)
            continue
        cache[directory] = manifest
        contents.records[directory] = _record(manifest)
    return contents


def _record(manifest: Manifest) -> CheckpointRecord:
    return CheckpointRecord(
        directory=manifest.directory,
        generation=manifest.generation,
        step=manifest.step,
        created_unix_secs=manifest.created_unix_secs,
        paths=manifest.paths | {f"{manifest.directory}/{MANIFEST_NAME}"},
        parent=_parent(manifest),
        passed_over=manifest.passed_over,
        dense=not manifest.window,
    )


def _parent(manifest: Manifest) -> tuple[int, int] | None:
    """(generation, step) of the checkpoint that the manifest's generation started from; None if it names none."""
    parsed = parse_step_dir(manifest.parent or "")
    return None if parsed is None else (parsed[1], parsed[0])


def _delete(storage: Storage, contents: _Contents, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Delete the files, commit records first and older checkpoints before newer ones."""
    rank = {directory: i for i, directory in enumerate(contents.names)}

    def order(path: str) -> tuple[bool, int, str]:
        directory, _, name = path.rpartition("/")
        return name != MANIFEST_NAME, rank[directory], name

    ordered = tuple(sorted(paths, key=order))
    for path in ordered:
        storage.delete(path)
    return ordered


def _tidy(storage: Storage, directory: str, names: list[str], deleted: tuple[str, ...]) -> None:
    """Remove temporaries, and then the directory, if nothing of this format is left in it."""
    own = {f"{directory}/{name}" for name in names if is_own_file(name)}
    if len(own) < len(names):
        storage.clean_temporaries(directory)
    if own.issubset(deleted):
        storage.delete_dir(directory)  # which leaves it alone if it holds other people's files


def _order(directory: str) -> tuple[int, int]:
    step, generation = parse_step_dir(directory) or (-1, -1)
    return generation, step
