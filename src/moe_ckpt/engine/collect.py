"""Garbage collection: carry out what ``core.retention`` decides.

Rules of this file:

1. Only files whose name and directory are of this format are ever deleted.
2. Commit records go first. A crash anywhere in between leaves files that no record names, and the next
   collection finds them; it never leaves a checkpoint that misses files.
3. What cannot be read is not judged: an error of the storage or a manifest of another format version stops the
   collection before anything is deleted. A manifest that cannot be decoded may be read at the next start, or put back
   from a backup: while there is one, a start deletes nothing, and no directory goes that it may need, its own or older.
4. Files go, and stay, by groups: the shards of one kind, or the states, that all ranks wrote at one step. So nothing
   here grows with the ranks but what a listing costs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from moe_ckpt.core.retention import CheckpointRecord, RetentionPolicy, groups_to_delete, retained
from moe_ckpt.engine.documents import each_step, read_manifest
from moe_ckpt.engine.view import Names, Needed, needed_of
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import GROUPS, MANIFEST_NAME, Manifest, PartRecord, age_of, group_of, parse_step_dir
from moe_ckpt.format.part import Part
from moe_ckpt.storage.base import Storage


@dataclass(frozen=True)
class CollectReport:
    """The outcome of a collection. All but the last two are step directories, oldest first.

    Attributes:
        damaged: Their manifest exists but is not what was written; left untouched, with all that is older. When one is
            of another format version, nothing at all was deleted.
        deleted: File paths.
        delegated: To the other ranks, of whose files nothing was deleted: step directory -> (True if nothing else is in
            it, groups that go).
    """

    retained: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    delegated: Mapping[str, tuple[bool, Sequence[str]]] = field(default_factory=dict)


@dataclass
class CollectMemo:
    """Listings and records that need not be read from storage again. Every collection updates them.

    Attributes:
        records: Directory -> its committed checkpoint.
        names: Directory -> the files of this format in it, by group; of directories that a record needs something of,
            without those that must be looked at again.
    """

    records: dict[str, CheckpointRecord] = field(default_factory=dict)
    names: dict[str, Names] = field(default_factory=dict)


def collect(
    storage: Storage,
    retention: RetentionPolicy,
    now_unix_secs: float,
    *,
    abandoned: Collection[str] = (),
    memo: CollectMemo | None = None,
    others: frozenset[str] = frozenset(),
) -> CollectReport:
    """Delete the checkpoints that ``retention`` drops, and every file that no remaining checkpoint names.

    Called by rank 0 on its persist thread, after a commit and after a save that failed.

    Args:
        abandoned: Directories of saves that failed and that no rank writes to any more. Other directories newer than
            the newest commit are left alone, for a faster rank may have begun the next step.
        others: Names of files that are not deleted here, because the ranks that wrote them will be told to (see
            ``delegated``).

    Raises:
        OSError: while reading: nothing was deleted. While deleting: what was deleted was rightly so.
    """
    memo = CollectMemo() if memo is None else memo
    contents = _read_store(storage, memo, abandoned)
    if contents.is_foreign:
        return CollectReport(damaged=contents.damaged)
    unjudged = contents.needed_by_damaged()
    stay = retained(tuple(contents.records.values()), retention, now_unix_secs)
    remaining = [contents.records[directory] for directory in contents.records if directory in stay]
    dropped = tuple(directory for directory in contents.records if directory not in stay | unjudged)
    untouchable = unjudged | (contents.begun_after_newest() - set(abandoned))
    gone = groups_to_delete(contents.groups(), remaining, untouchable)
    deleted, delegated = _delete(storage, contents, gone, others, memo)
    for directory in contents.names:
        if directory not in untouchable:
            _tidy(storage, contents, directory, memo)
    for directory in dropped:
        memo.records.pop(directory, None)
    return CollectReport(tuple(record.directory for record in remaining), dropped, contents.damaged, deleted, delegated)


def clean_start(storage: Storage, memo: CollectMemo | None = None) -> CollectReport:
    """Remove what dead writers left: the files of uncommitted steps (except files that a commit names) and temporaries.

    Called by rank 0 at the start of a run, with the store's lock held and before any rank writes.

    Raises:
        OSError: while reading: nothing was deleted.
    """
    memo = CollectMemo() if memo is None else memo
    contents = _read_store(storage, memo)
    if contents.damaged:
        return CollectReport(tuple(contents.records), (), contents.damaged)
    committed = set(contents.records)
    gone = groups_to_delete(contents.groups(), contents.records.values(), committed)
    deleted, _ = _delete(storage, contents, gone, frozenset(), memo)
    storage.clean_temporaries("")
    for directory in contents.names:
        if directory in committed:
            storage.clean_temporaries(directory)
        else:
            _tidy(storage, contents, directory, memo)
    return CollectReport(tuple(contents.records), (), (), deleted)


def grouped(names: Collection[str]) -> dict[str, frozenset[str]]:
    """The files of this format among ``names`` in a step directory, by group."""
    by_group: dict[str, set[str]] = {}
    for name in names:
        group = group_of(name)
        if group is not None:
            by_group.setdefault(group, set()).add(name)
    return {group: frozenset(members) for group, members in by_group.items()}


def record_of(manifest: Manifest, needed: Needed) -> CheckpointRecord:
    """The facts of a checkpoint that retention decides by.

    Args:
        needed: On storage, by the checkpoint.
    """
    parent = parse_step_dir(manifest.parent or "")
    groups = [f"{directory}/{group}" for directory, names in needed.items() for group in names]
    return CheckpointRecord(
        directory=manifest.directory,
        generation=manifest.generation,
        step=manifest.step,
        created_unix_secs=manifest.created_unix_secs,
        groups=frozenset([*groups, f"{manifest.directory}/{MANIFEST_NAME}"]),
        parent=None if parent is None else (parent[1], parent[0]),
        passed_over=manifest.passed_over,
        dense=not manifest.window,
        finite=not manifest.not_finite,
    )


@dataclass
class _Contents:
    """names: step directory -> its files by group; records: the committed ones; both oldest first.

    strewn: directories in which there is something else besides.
    """

    names: dict[str, Names] = field(default_factory=dict)
    records: dict[str, CheckpointRecord] = field(default_factory=dict)
    strewn: set[str] = field(default_factory=set)
    damaged: tuple[str, ...] = ()
    is_foreign: bool = False

    def groups(self) -> list[str]:
        return [f"{directory}/{group}" for directory, names in self.names.items() for group in names]

    def needed_by_damaged(self) -> set[str]:
        newest = max(map(age_of, self.damaged), default=(-1, -1))
        return {directory for directory in self.names if age_of(directory) <= newest}

    def begun_after_newest(self) -> set[str]:
        newest = max((record.order for record in self.records.values()), default=(-1, -1))
        return {directory for directory in self.names if age_of(directory) > newest}


def _read_store(storage: Storage, memo: CollectMemo, abandoned: Collection[str] = ()) -> _Contents:
    """List every step directory, and decode every manifest, that is not known.

    Directories of steps after the newest that is known are not looked into unless they were ``abandoned``, or have a
    manifest that is not known: what is being written must not be touched.
    """
    contents = _Contents()
    newest = max((record.order for record in memo.records.values()), default=None)

    def look(directory: str) -> Names:
        if directory in memo.names:
            return memo.names[directory]
        is_begun = newest is not None and age_of(directory) > newest and directory not in abandoned
        if is_begun and not storage.exists(f"{directory}/{MANIFEST_NAME}"):
            return {}
        names = storage.list(directory)
        groups = grouped(names)
        if sum(map(len, groups.values())) < len(names):
            contents.strewn.add(directory)
        return groups

    contents.names = each_step(storage, look)
    parts: dict[PartRecord, Part] = {}
    for directory, names in contents.names.items():
        if MANIFEST_NAME not in names:
            memo.records.pop(directory, None)
            continue
        try:
            if directory not in memo.records:
                manifest = read_manifest(storage, directory, parts)
                memo.records[directory] = record_of(manifest, needed_of(manifest))
        except (DamagedError, FormatVersionError) as error:
            contents.damaged += (directory,)
            contents.is_foreign |= isinstance(error, FormatVersionError)
            continue
        contents.records[directory] = memo.records[directory]
    for directory in memo.records.keys() - contents.records.keys():
        del memo.records[directory]
    needed = frozenset[str]().union(*(record.directories for record in contents.records.values()))
    memo.names = {name: contents.names[name] for name in contents.names if name in needed - contents.strewn}
    return contents


def _delete(
    storage: Storage, contents: _Contents, gone: Collection[str], others: frozenset[str], memo: CollectMemo
) -> tuple[tuple[str, ...], dict[str, tuple[bool, Sequence[str]]]]:
    """Delete the groups, commit records first and older checkpoints before newer ones."""
    by_directory: dict[str, set[str]] = {}
    for group_path in gone:
        directory, _, group = group_path.partition("/")
        by_directory.setdefault(directory, set()).add(group)
    going = {directory: by_directory[directory] for directory in contents.names if directory in by_directory}
    records = [f"{directory}/{MANIFEST_NAME}" for directory, groups in going.items() if MANIFEST_NAME in groups]
    without_others = cache(lambda names: names - others)  # often the same names in all directories
    rest = [
        f"{directory}/{name}"
        for directory, groups in going.items()
        for name in sorted(chain(*(without_others(contents.names[directory][g]) for g in groups if g != MANIFEST_NAME)))
    ]
    for directory in going:
        memo.names.pop(directory, None)  # looked at again, unless all went well
    for path in (*records, *rest):
        storage.delete(path)
    delegated: dict[str, tuple[bool, Sequence[str]]] = {}
    for directory, groups in going.items():
        names = contents.names[directory]
        stay = {group: names[group] for group in names if group not in groups}
        contents.names[directory] = stay
        if stay and directory not in contents.strewn:
            memo.names[directory] = stay
        theirs = [group for group in GROUPS if group in groups and not others.isdisjoint(names[group])]
        if theirs:
            delegated[directory] = (not stay, theirs)
    return (*records, *rest), delegated


def _tidy(storage: Storage, contents: _Contents, directory: str, memo: CollectMemo) -> None:
    """Remove temporaries, and then the directory, if nothing of this format is left in it."""
    if directory in contents.strewn:
        storage.clean_temporaries(directory)
    if not contents.names[directory]:
        storage.delete_dir(directory)  # which leaves it alone if it holds other files
        memo.names.pop(directory, None)
