"""Rank 0 keeps the store in order: what a manifest names is there, the store is still this run's, rubbish goes.

Rules of this file:

1. A manifest is written only after every file that it names was seen in a listing, and ``store.json`` was read.
2. Nothing is collected in a store that is not, or no longer, this run's: retention would judge another run's
   checkpoints. What this run has written there by itself is removed by name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.engine.collect import clean_start, collect
from moe_ckpt.engine.commit import Abandoned
from moe_ckpt.engine.documents import read_sealed
from moe_ckpt.engine.writing import write_named
from moe_ckpt.errors import DamagedError, FilesGoneError, ForeignStoreError, FormatVersionError, MoECheckpointError
from moe_ckpt.format.identity import Identity
from moe_ckpt.format.manifest import MANIFEST_NAME, STORE_NAME, Manifest
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.lock import StoreLock

log = logging.getLogger("moe_ckpt")

NOTHING = Abandoned()


class StoreKeeper:
    """For rank 0: ``clean_start`` before training, everything else on its persist thread.

    Args:
        identity: What ``store.json`` says, and will say again if it is lost.
        lock: The one that this run holds on the store.
    """

    def __init__(self, storage: Storage, identity: Identity, retention: RetentionPolicy, lock: StoreLock) -> None:
        self._storage = storage
        self._identity = identity
        self._retention = retention
        self._lock = lock
        self._manifests: dict[str, Manifest] = {}
        self._listed: dict[str, list[str]] = {}
        self._abandoned: set[str] = set()

    def clean_start(self) -> None:
        """Remove what dead writers left. It is no reason not to train if that fails: names are never used again."""
        try:
            clean_start(self._storage, self._manifests)
        except (OSError, MoECheckpointError) as error:
            log.warning("what dead writers left in %s could not be removed: %s", self._storage.root, error)

    def dense_step(self, manifest: Manifest) -> int:
        """Returns the step of the newest dense checkpoint up to ``manifest``; 0 if none is known."""
        bound = manifest.generation, manifest.step
        known = {**self._manifests, manifest.directory: manifest}.values()
        return max((m.step for m in known if not m.window and (m.generation, m.step) <= bound), default=0)

    def require_whole(self, manifest: Manifest) -> None:
        """Prove, just before ``manifest`` is written, that every file it names is there, and that the store is ours.

        Costs one listing of the root, one of each directory that the manifest names (which the collection after the
        commit then need not make), and the reading of ``store.json``, which is written anew if it is gone.

        Raises:
            FilesGoneError: Somebody deleted or replaced files; names them.
            ForeignStoreError: Another run's store stands in this one's place.
            OSError: The storage does not answer.
        """
        self._listed = {}
        names = set(self._storage.list())
        self._require_own(names)
        by_directory: dict[str, list[str]] = {}
        for path in manifest.paths:
            by_directory.setdefault(path.partition("/")[0], []).append(path)
        listed = {each: self._storage.list(each) if each in names else [] for each in sorted(by_directory)}
        gone = []
        for directory, paths in by_directory.items():
            there = {f"{directory}/{name}" for name in listed[directory]}
            gone += [path for path in paths if path not in there]
        if gone:
            raise FilesGoneError(self._storage.root, manifest.step, tuple(sorted(gone)))
        listed.setdefault(manifest.directory, []).append(MANIFEST_NAME)
        self._listed = listed

    def collect(self, superseded: Abandoned = NOTHING) -> None:
        """After a commit: drop what retention no longer needs, and what windows that were given up have left.

        Raises:
            OSError: It is tried again after the next commit.
        """
        self._abandoned |= superseded.directories
        listed, self._listed = self._listed, {}
        collect(
            self._storage,
            self._retention,
            time.time(),
            abandoned=self._abandoned,
            cache=self._manifests,
            listed=listed,
        )
        self._abandoned.clear()

    def clear_away(self, abandoned: Abandoned) -> None:
        """After a failed step, when no rank writes any more: its files go at once, for the next step needs the room.

        Raises:
            OSError: It is tried again after the next step.
        """
        self._listed = {}
        if self._is_own():
            self.collect(abandoned)
        else:
            self._abandoned.clear()
            self._remove(abandoned)

    def _remove(self, abandoned: Abandoned) -> None:
        """In a store that is not ours: only the files that our ranks are known to have written, unless committed."""
        committed = {name for name in abandoned.directories if MANIFEST_NAME in self._storage.list(name)}
        for path in sorted(path for path in abandoned.paths if path.partition("/")[0] not in committed):
            self._storage.delete(path)
        for directory in sorted(abandoned.directories - committed):
            self._storage.delete_dir(directory)

    def _is_own(self) -> bool:
        try:
            return self._read_identity().run_id == self._identity.run_id
        except (FileNotFoundError, DamagedError, FormatVersionError):
            return False

    def _read_identity(self) -> Identity:
        return Identity.decode(read_sealed(self._storage, STORE_NAME), f"{self._storage.root}/{STORE_NAME}")

    def _require_own(self, names: Collection[str]) -> None:
        root = self._storage.root
        trouble = f"{STORE_NAME} is gone from {root}: something deleted or replaced the store during training"
        if STORE_NAME in names:
            try:
                found = self._read_identity()
            except DamagedError as damage:
                trouble = str(damage)
            except FileNotFoundError:
                pass
            else:
                if found.run_id != self._identity.run_id:
                    raise ForeignStoreError(
                        f"the store {root} was this run's ({self._identity.run_id}), but holds another run "
                        f"({found.run_id}) now: something replaced it during training, and nothing is written into it. "
                        "Put this run's store back, or start the run again with another dirpath."
                    )
                return
        self._lock.retake()
        log.warning("%s; it is written anew", trouble)
        self._storage.delete(STORE_NAME)
        write_named(self._storage, STORE_NAME, [self._identity.encode()])
