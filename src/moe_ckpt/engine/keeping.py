"""Rank 0's checks of the store: named files exist, the store is still this run's, and leftovers are deleted.

Rules of this file:

1. A manifest is written only after every file that it names was seen in a listing, and ``store.json`` was read.
2. Nothing is committed or collected in a store that is not, or no longer, this run's, or whose lock it has lost:
   retention would judge another run's checkpoints. What this run has written there by itself is removed by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from functools import cached_property

from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.engine.collect import CollectMemo, clean_start, collect, grouped, record_of
from moe_ckpt.engine.commit import Abandoned
from moe_ckpt.engine.documents import read_sealed
from moe_ckpt.engine.persisting import Superseded
from moe_ckpt.engine.view import Names, Needed
from moe_ckpt.engine.writing import write_named
from moe_ckpt.errors import DamagedError, FilesGoneError, FormatVersionError, MoECheckpointError, StoreError
from moe_ckpt.format.manifest import GROUPS, MANIFEST_NAME, STORE_NAME, Manifest, group_path
from moe_ckpt.format.run_records import Identity
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.listings import Listings
from moe_ckpt.storage.lock import StoreLock

log = logging.getLogger("moe_ckpt")

NOTHING = Abandoned()


class StoreKeeper:
    """Keeps the store in order, on rank 0: ``clean_start`` before training, everything else on its persist thread.

    Args:
        identity: What ``store.json`` says, and will say again if it is lost.
        lock: The one that this run holds on the store.
        ranks: Of this run. Each except rank 0 deletes its own files (see ``collect``).
    """

    def __init__(
        self, storage: Storage, identity: Identity, retention: RetentionPolicy, lock: StoreLock, ranks: int
    ) -> None:
        self._storage = storage
        self._identity = identity
        self._retention = retention
        self._lock = lock
        self._ranks = ranks
        self._known = CollectMemo()
        self._listings = Listings(storage)
        self._proven: dict[str, tuple[frozenset[str], Names]] = {}
        self._abandoned: set[str] = set()

    @cached_property
    def _others(self) -> frozenset[str]:
        """Names of the files that other ranks write at any step."""
        paths = (group_path("", rank, group) for group in GROUPS for rank in range(1, self._ranks))
        return frozenset(path.rpartition("/")[2] for path in paths)

    def clean_start(self) -> None:
        """Remove files that dead writers left. A failure is not fatal: names are never used again."""
        try:
            clean_start(self._storage, self._known)
        except (OSError, MoECheckpointError) as error:
            log.warning("files that dead writers left in %s could not be removed: %s", self._storage.root, error)

    def dense_step(self, manifest: Manifest) -> int:
        """Returns the step of the newest dense checkpoint up to ``manifest``; 0 if none is known."""
        bound = manifest.generation, manifest.step
        steps = [record.step for record in self._known.records.values() if record.dense and record.order <= bound]
        return max(steps if manifest.window else [*steps, manifest.step], default=0)

    def require_whole(self, manifest: Manifest, needed: Needed) -> None:
        """Prove, just before ``manifest`` is written, that what it needs is there, and that the store is ours.

        Costs one listing of the root, one of each directory that the manifest needs something of and that may have
        changed (``Listings``; the collection after the commit then need not make any), and the reading of
        ``store.json``, which is written again if it is gone.

        Raises:
            FilesGoneError: Somebody deleted or replaced files; names them.
            StoreError: Another run's store stands in this one's place.
            StoreInUseError: The lock was lost, and another run has, or had, the store.
            OSError: The storage does not answer.
        """
        names = set(self._storage.list())
        self._require_own(names)
        self._lock.confirm()
        gone: list[str] = []
        listed = self._listings.names([directory for directory in sorted(needed) if directory in names])
        proven, self._proven = self._proven, {}
        for directory, groups in needed.items():
            present = listed.get(directory, frozenset())
            before, had = proven.get(directory, (None, {}))
            if before is not present or not groups.items() <= had.items():
                missing = [name for group in groups.values() if not group <= present for name in group - present]
                gone += [f"{directory}/{name}" for name in missing]
                self._note(directory, present, groups, whole=not missing)
            self._proven[directory] = present, groups
        for directory in self._known.records.keys() - needed.keys():
            if directory not in names or not self._storage.exists(f"{directory}/{MANIFEST_NAME}"):
                self._known.names.pop(directory, None)  # somebody removed it
        if gone:
            self._proven = {}
            raise FilesGoneError(self._storage.root, manifest.step, tuple(sorted(gone)))
        groups_of_step = self._known.names.get(manifest.directory)
        if groups_of_step is not None:
            self._known.names[manifest.directory] = {**groups_of_step, MANIFEST_NAME: frozenset({MANIFEST_NAME})}
        self._known.records[manifest.directory] = record_of(manifest, needed)
        self._listings.expect_change(manifest.directory)

    def _note(self, directory: str, present: frozenset[str], needed: Names, *, whole: bool) -> None:
        """What a directory holds: looked at name by name only if that is not what is needed, or known already.

        whole: all that is needed is there.
        """
        noted = self._known.names.get(directory, {})
        if whole and len(present) == sum(map(len, needed.values())):
            self._known.names[directory] = needed
        elif len(present) != sum(map(len, noted.values())) or not all(map(present.issuperset, noted.values())):
            groups = grouped(present)
            self._known.names[directory] = groups
            if sum(map(len, groups.values())) < len(present):
                del self._known.names[directory]

    def look_ahead(self, begun: Sequence[str]) -> None:
        """List what the steps of a window have written so far, except the newest: its last step then has less to list.

        Raises:
            OSError: The storage does not answer.
        """
        if len(begun) > 1:
            self._listings.names(begun[:-1], begun[-1])

    def looks_gone(self, directory: str) -> bool:
        """Returns whether the commit record of the newest checkpoint, which memory follows, was deleted."""
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
        """Drops, after a commit, what retention no longer needs, and what windows that were given up have left.

        Args:
            failed: No rank will be told what to delete, so the files of all go here.

        Returns:
            Files of its own that every other rank must delete.

        Raises:
            OSError: It is tried again after the next commit.
        """
        self._abandoned.update(superseded.names)
        report = collect(
            self._storage,
            self._retention,
            time.time(),
            abandoned=self._abandoned,
            memo=self._known,
            others=frozenset() if failed else self._others,
        )
        self._abandoned.clear()
        for directory in report.delegated:  # other ranks may fail to delete it, which no stamp tells
            self._proven.pop(directory, None)
        return report.delegated

    def clear_away(self, abandoned: Abandoned) -> None:
        """After a failed step, when no rank writes any more: delete its files at once, because the next step needs the
        room.

        Raises:
            OSError: It is tried again after the next step.
        """
        for directory in abandoned.names:
            self._known.names.pop(directory, None)
        if self._is_own():
            self.collect(abandoned, failed=True)
        else:
            self._abandoned.clear()
            self._remove(abandoned)

    def _remove(self, abandoned: Abandoned) -> None:
        """In a store that is not ours: only the files that our ranks are known to have written, unless committed."""
        for directory, names in sorted(abandoned.names.items()):
            if MANIFEST_NAME not in self._storage.list(directory):
                for name in sorted(names):
                    self._storage.delete(f"{directory}/{name}")
                self._storage.delete_dir(directory)

    def _is_own(self) -> bool:
        try:
            return not self._lock.is_lost and self._read_identity().run_id == self._identity.run_id
        except (FileNotFoundError, DamagedError, FormatVersionError):
            return False

    def _read_identity(self) -> Identity:
        return Identity.decode(read_sealed(self._storage, STORE_NAME), f"{self._storage.root}/{STORE_NAME}")

    def _require_own(self, names: Collection[str]) -> None:
        root = self._storage.root
        trouble = f"{STORE_NAME} is gone from {root}: something deleted or replaced the store during training"
        if STORE_NAME in names:
            try:
                identity = self._read_identity()
            except DamagedError as damage:
                trouble = str(damage)
            except FileNotFoundError:
                pass
            else:
                if identity.run_id != self._identity.run_id:
                    raise StoreError(
                        f"the store {root} was this run's ({self._identity.run_id}), but holds another run "
                        f"({identity.run_id}) now: something replaced it during training. Nothing is committed there, "
                        "and shards of this run are removed again. Put this run's store back, or start the run again "
                        "with another dirpath."
                    )
                return
        self._lock.retake()
        log.warning("%s; it is written again", trouble)
        self._storage.delete(STORE_NAME)
        write_named(self._storage, STORE_NAME, [self._identity.encode()])
