"""Keeps a store in order, on rank 0: proves that what a checkpoint needs is there, and deletes what none needs.

Rules of this file:

1. A manifest is written only after every file that it names was seen in a listing, and ``store.json`` was read.
2. Nothing is committed or collected in a store that is not, or no longer, this run's, or whose lock it has lost:
   retention would judge another run's checkpoints. What this run has written there by itself is removed by name.
3. Only files whose name and directory are of this format are ever deleted, and those that ``ledger.retention`` names.
4. Commit records are deleted first. A crash in between leaves files that no record names, and the next collection
   finds them; it never leaves a checkpoint that misses files.
5. Nothing is deleted on the strength of what could not be read: an error of the storage, or a manifest of another
   format version, stops the collection before anything is deleted. A manifest that cannot be decoded may be readable at
   the next start, or be put back from a backup: while there is one, a start deletes nothing, and neither its directory
   nor an older one is deleted, since it may need them.
6. A checkpoint with a file KEEP in its directory stays, whatever retention says. A start writes it that passes a
   checkpoint over since storage does not give it.
7. Files are kept and deleted by groups: the shards of one kind, or the states, that all ranks wrote at one step. So
   only the cost of listings grows with the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import chain

from moe_ckpt.core.step import Superseded
from moe_ckpt.errors import DamagedError, FilesGoneError, FormatVersionError, MoECheckpointError, StoreError
from moe_ckpt.format.manifest import (
    GROUPS,
    KEEP_NAME,
    MANIFEST_NAME,
    PART_NAME,
    STORE_NAME,
    Manifest,
    Part,
    PartRecord,
    age_of,
    group_of,
    group_path,
    parse_step_dir,
)
from moe_ckpt.format.run_records import Identity
from moe_ckpt.ledger.retention import CheckpointRecord, RetentionPolicy, groups_to_delete, retained_directories
from moe_ckpt.run.documents import map_steps, read_manifest, read_sealed
from moe_ckpt.slices.snapshot import write_named
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.listings import Listings
from moe_ckpt.storage.lock import StoreLock

log = logging.getLogger("moe_ckpt")

Names = Mapping[str, frozenset[str]]
"""Group of files of one step (``format.manifest.group_of``) -> their names."""
Needed = dict[str, dict[str, frozenset[str]]]
"""Step directory -> the ``Names`` of what a checkpoint needs of it."""
Abandoned = Mapping[str, frozenset[str]]
"""Files of steps that can no longer be committed: step directory -> names of those that are written there."""
_REMEMBERED = 256
"""Results that are remembered for sets of names, because directories mostly have the same names."""
PART = {PART_NAME: frozenset({PART_NAME})}
NOTHING: Abandoned = {}


@dataclass
class StoreContents:
    """Remembers the step directories of a store. Every collection brings it up to date.

    Attributes:
        storage: The store's storage.
        records: Directory -> its committed checkpoint.
        names: Directory -> the names of all its files; the oldest directory first.
        listed: The same of directories that some record needs files of, and that need not be listed again.
        damaged: Directories whose manifest exists but is not what was written.
        is_foreign: A manifest is of another format version.
    """

    storage: Storage
    records: dict[str, CheckpointRecord] = field(default_factory=dict)
    names: dict[str, frozenset[str]] = field(default_factory=dict)
    listed: dict[str, frozenset[str]] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    is_foreign: bool = False

    def read(self, abandoned: Collection[str] = ()) -> None:
        """Lists every step directory, and decodes every manifest, that is not known.

        Directories of steps after the newest known one are left alone unless they were ``abandoned`` or have a
        manifest: what is being written must not be touched.
        """
        self.damaged, self.is_foreign = (), False
        newest = max((record.order for record in self.records.values()), default=None)

        def look(directory: str) -> frozenset[str]:
            if directory in self.listed:
                return self.listed[directory]
            is_begun = newest is not None and age_of(directory) > newest and directory not in abandoned
            if is_begun and not self.storage.exists(f"{directory}/{MANIFEST_NAME}"):
                return frozenset()
            return frozenset(self.storage.list(directory))

        self.names = map_steps(self.storage, look)
        parts: dict[PartRecord, Part] = {}
        records: dict[str, CheckpointRecord] = {}
        for directory, names in self.names.items():
            if MANIFEST_NAME in names:
                try:
                    if directory in self.records:
                        records[directory] = self.records[directory]
                    else:
                        manifest = read_manifest(self.storage, directory, parts)
                        records[directory] = record_of(manifest, needed_of(manifest))
                except (DamagedError, FormatVersionError) as error:
                    self.damaged += (directory,)
                    self.is_foreign |= isinstance(error, FormatVersionError)
        self.records = records
        needed = frozenset[str]().union(*(record.directories for record in records.values()))
        self.listed = {directory: names for directory, names in self.names.items() if directory in needed}

    def collect(
        self, retention: RetentionPolicy, abandoned: Collection[str] = (), others: frozenset[str] = frozenset()
    ) -> tuple[Sequence[str], Superseded]:
        """Deletes the checkpoints that ``retention`` drops, and every file that no remaining checkpoint names.

        Called by rank 0 on its persist thread, after a commit and after a save that failed.

        Args:
            retention: Decides which checkpoints stay.
            abandoned: Directories of saves that failed and that no rank writes to any more. Other directories newer
                than the newest commit are left alone, for a faster rank may have begun the next step.
            others: Names of files that the ranks delete that wrote them.

        Returns:
            Paths that are deleted, and what the ranks that wrote ``others`` must delete.

        Raises:
            OSError: While reading: nothing was deleted. While deleting: no file that a checkpoint needs was deleted.
        """
        self.read(abandoned)
        if self.is_foreign:
            return (), {}
        newest_damaged = max(map(age_of, self.damaged), default=(-1, -1))
        newest = max((record.order for record in self.records.values()), default=(-1, -1))
        unjudged = {directory for directory in self.names if age_of(directory) <= newest_damaged}
        begun = {directory for directory in self.names if age_of(directory) > newest}
        stay = retained_directories(tuple(self.records.values()), retention)
        stay |= {directory for directory in self.records.keys() - stay if self._is_kept(directory)}
        remaining = [record for directory, record in self.records.items() if directory in stay]
        deleted = self._remove(remaining, unjudged | (begun - set(abandoned)), others)
        for directory in self.records.keys() - stay - unjudged:
            del self.records[directory]
        return deleted

    def _is_kept(self, directory: str) -> bool:
        """Returns whether a person, or a start that could not read the checkpoint, asked for it to stay."""
        return KEEP_NAME in self.names[directory] or self.storage.exists(f"{directory}/{KEEP_NAME}")

    def clean_start(self) -> Sequence[str]:
        """Removes what dead writers left: files of uncommitted steps that no commit names, and temporaries.

        It removes nothing if a manifest is damaged. Returns the paths.

        Called by rank 0 at the start of a run, with the store's lock held and before any rank writes.

        Raises:
            OSError: While reading: nothing was deleted.
        """
        self.read()
        if self.damaged:
            return ()
        deleted, _ = self._remove(self.records.values(), self.records.keys())
        for directory in ("", *self.records):
            self.storage.clean_temporaries(directory)
        return deleted

    def _remove(
        self,
        retained_records: Collection[CheckpointRecord],
        untouchable: Collection[str],
        others: frozenset[str] = frozenset(),
    ) -> tuple[Sequence[str], Superseded]:
        """Deletes what no retained checkpoint names, commit records first and older checkpoints before newer ones.

        Then it deletes temporaries, and each directory in which no file of this format is left.

        Args:
            retained_records: The checkpoints that stay.
            untouchable: Directories in which nothing is superseded yet.
            others: Names of files that other ranks delete.

        Returns:
            What ``collect`` returns.
        """
        files = {directory: files_by_group(names) for directory, names in self.names.items()}
        going = groups_to_delete(files, retained_records, untouchable)
        records = [f"{directory}/{MANIFEST_NAME}" for directory, groups in going.items() if MANIFEST_NAME in groups]
        without_others = cache(lambda names: names - others)  # often the same names in all directories
        rest = [
            f"{directory}/{name}"
            for directory, groups in going.items()
            for name in sorted(chain(*(without_others(files[directory][g]) for g in groups if g != MANIFEST_NAME)))
        ]
        for directory in going:
            self.listed.pop(directory, None)  # so that it is listed again, unless all goes well
        for path in (*records, *rest):
            self.storage.delete(path)
        delegated: dict[str, tuple[bool, Sequence[str]]] = {}
        for directory, groups in going.items():
            names = files[directory]
            self.listed[directory] = self.names[directory] = self.names[directory].difference(
                *(names[group] for group in groups)
            )
            theirs = [group for group in GROUPS if group in groups and not others.isdisjoint(names[group])]
            if theirs:
                delegated[directory] = (len(groups) == len(names), theirs)
        for directory in [directory for directory in self.names if directory not in untouchable]:
            stay = files_by_group(self.names[directory])
            if sum(map(len, stay.values())) < len(self.names[directory] - {KEEP_NAME}):
                self.storage.clean_temporaries(directory)
                self.listed.pop(directory, None)
            if not stay:
                self.storage.delete_dir(directory)  # which leaves it alone if it holds other files
                self.listed.pop(directory, None)
        return (*records, *rest), delegated


@lru_cache(maxsize=_REMEMBERED)
def files_by_group(names: frozenset[str]) -> Names:
    """Returns the files of this format among the ``names`` in a step directory, by group."""
    by_group: dict[str, set[str]] = {}
    for name in names:
        group = group_of(name)
        if group is not None:
            by_group.setdefault(group, set()).add(name)
    return {group: frozenset(members) for group, members in by_group.items()}


@lru_cache(maxsize=_REMEMBERED)
def _absent(needed: frozenset[str], present: frozenset[str]) -> frozenset[str]:
    return needed - present


def needed_of(manifest: Manifest) -> Needed:
    """Returns what a committed checkpoint needs on storage, its own record aside."""
    by_directory: dict[str, dict[str, set[str]]] = {}
    for path in manifest.paths:
        directory, _, name = path.partition("/")
        by_directory.setdefault(directory, {}).setdefault(group_of(name) or "", set()).add(name)
    return {
        directory: {group: frozenset(names) for group, names in groups.items()}
        for directory, groups in by_directory.items()
    }


def record_of(manifest: Manifest, needed: Needed) -> CheckpointRecord:
    """Returns the facts of a checkpoint that retention decides by.

    Args:
        manifest: Of the checkpoint.
        needed: The files that it needs.
    """
    parent = parse_step_dir(manifest.parent or "")
    groups = [f"{directory}/{group}" for directory, names in needed.items() for group in names]
    return CheckpointRecord(
        directory=manifest.directory,
        generation=manifest.generation,
        step=manifest.step,
        groups=frozenset([*groups, f"{manifest.directory}/{MANIFEST_NAME}"]),
        parent=None if parent is None else (parent[1], parent[0]),
        dense=not manifest.window,
        finite=not manifest.not_finite,
    )


class StoreKeeper:
    """Keeps the store in order, on rank 0: ``clean_start`` before training, everything else on its persist thread.

    Args:
        identity: What ``store.json`` says, and will say again if it is lost.
        lock: The one that this run holds on the store.
        ranks: Of this run. Each except rank 0 deletes its own files (see ``StoreContents``).
    """

    def __init__(
        self, storage: Storage, identity: Identity, retention: RetentionPolicy, lock: StoreLock, ranks: int
    ) -> None:
        self._storage = storage
        self._identity = identity
        self._store_file = identity.encode()
        self._retention = retention
        self._lock = lock
        self._ranks = ranks
        self._contents = StoreContents(storage)
        self._listings = Listings(storage)
        self._abandoned: set[str] = set()

    @cached_property
    def _others(self) -> frozenset[str]:
        """Names of the files that other ranks write at any step."""
        paths = (group_path("", rank, group) for group in GROUPS for rank in range(1, self._ranks))
        return frozenset(path.rpartition("/")[2] for path in paths)

    def clean_start(self) -> None:
        """Removes files that dead writers left. A failure is only warned of, since no name is used twice."""
        try:
            self._contents.clean_start()
        except (OSError, MoECheckpointError) as error:
            log.warning("files that dead writers left in %s could not be removed: %s", self._storage.root, error)

    def dense_step(self, manifest: Manifest) -> int:
        """Returns the step of the newest dense checkpoint up to ``manifest``; 0 if none is known."""
        bound = manifest.generation, manifest.step
        steps = [record.step for record in self._contents.records.values() if record.dense and record.order <= bound]
        return max(steps if manifest.window else [*steps, manifest.step], default=0)

    def require_whole(self, manifest: Manifest, needed: Needed) -> None:
        """Proves, just before ``manifest`` is written, that all files it needs exist, and that the store is this run's.

        It lists the root, and each directory that the manifest needs files of and that may have changed (``Listings``);
        the collection after the commit then lists none. It reads ``store.json``, and writes it again if it is gone.

        Raises:
            FilesGoneError: Somebody deleted or replaced files; names them.
            StoreError: Another run's store stands in this one's place.
            StoreInUseError: The lock was lost, and another run has, or had, the store.
            OSError: The storage does not answer.
        """
        names, contents = set(self._storage.list()), self._contents
        self._require_own(names)
        self._lock.confirm()
        listed = self._listings.names([directory for directory in sorted(needed) if directory in names])
        gone = [
            f"{directory}/{name}"
            for directory, groups in needed.items()
            for group in groups.values()
            for name in _absent(group, listed.get(directory, frozenset()))
        ]
        removed = [
            directory
            for directory in contents.records.keys() - needed.keys()
            if directory not in names or not self._storage.exists(f"{directory}/{MANIFEST_NAME}")
        ]
        for directory in (*needed, *removed):
            contents.listed.pop(directory, None)
        contents.listed |= listed
        if gone:
            raise FilesGoneError(self._storage.root, manifest.step, tuple(sorted(gone)))
        newest = manifest.directory
        contents.listed[newest] |= {MANIFEST_NAME}
        contents.records[newest] = record_of(manifest, needed)
        self._listings.expect_change(newest)

    def look_ahead(self, begun: Sequence[str]) -> None:
        """Lists what the steps of a window have written so far, except the newest, so that less is left to list when
        the window ends.

        Raises:
            OSError: The storage does not answer.
        """
        if len(begun) > 1:
            self._listings.names(begun[:-1], begun[-1])

    def looks_gone(self, directory: str) -> bool:
        """Returns whether somebody deleted the commit record of the newest checkpoint, which memory follows."""
        if directory not in self._contents.records:
            return False  # a newer one is committed, on which ranks agree after the next step
        path = f"{directory}/{MANIFEST_NAME}"
        try:
            self._storage.size(path)
        except FileNotFoundError:
            message = "%s/%s is gone: something deleted it during training. The next checkpoint saves everything anew"
            log.warning(message, self._storage.root, path)
            return True
        except (OSError, MoECheckpointError) as error:
            log.info("%s/%s cannot be looked for: %s", self._storage.root, path, error)
        return False

    def collect(self, superseded: Abandoned = NOTHING, *, failed: bool = False) -> Superseded:
        """Deletes, after a commit, what retention does not keep, and the files of windows that were given up.

        Args:
            superseded: The files of windows that were given up.
            failed: Other ranks delete nothing, so that the files of all ranks are deleted here.

        Returns:
            The files that every other rank must delete of those that it wrote.

        Raises:
            OSError: What is left is deleted after the next commit.
        """
        self._abandoned.update(superseded)
        others = frozenset[str]() if failed else self._others
        _, delegated = self._contents.collect(self._retention, self._abandoned, others)
        self._abandoned.clear()
        return delegated

    def clear_away(self, abandoned: Abandoned) -> None:
        """Deletes the files of a failed step at once, because the next step needs the room. No rank writes any more.

        If the store is no longer this run's, only files are deleted that this run has written and not committed.

        Raises:
            OSError: What is left is deleted after the next step.
        """
        for directory in abandoned:
            self._contents.listed.pop(directory, None)
        if self._is_own():
            self.collect(abandoned, failed=True)
            return
        self._abandoned.clear()
        for directory, names in sorted(abandoned.items()):
            if MANIFEST_NAME not in self._storage.list(directory):
                for name in sorted(names):
                    self._storage.delete(f"{directory}/{name}")
                self._storage.delete_dir(directory)

    def _is_own(self) -> bool:
        try:
            return not self._lock.is_lost and self._owner() == self._identity.run_id
        except (FileNotFoundError, DamagedError, FormatVersionError):
            return False

    def _owner(self) -> str:
        """The run that ``store.json`` names: this one, if it is byte for byte what this run would write there."""
        if self._storage.read(STORE_NAME, 0, len(self._store_file) + 1) == self._store_file:
            return self._identity.run_id
        return Identity.decode(read_sealed(self._storage, STORE_NAME), f"{self._storage.root}/{STORE_NAME}").run_id

    def _require_own(self, names: Collection[str]) -> None:
        root = self._storage.root
        trouble = f"{STORE_NAME} is gone from {root}: something deleted or replaced the store during training"
        if STORE_NAME in names:
            try:
                owner = self._owner()
            except DamagedError as damage:
                trouble = str(damage)
            except FileNotFoundError:
                pass
            else:
                if owner != self._identity.run_id:
                    raise StoreError(
                        f"the store {root} was this run's ({self._identity.run_id}), but holds another run "
                        f"({owner}) now: something replaced it during training. Nothing is committed there, "
                        "and shards of this run are removed again. Put this run's store back, or start the run again "
                        "with another dirpath."
                    )
                return
        self._lock.retake()
        log.warning("%s; it is written again", trouble)
        self._storage.delete(STORE_NAME)
        write_named(self._storage, STORE_NAME, [self._store_file])
