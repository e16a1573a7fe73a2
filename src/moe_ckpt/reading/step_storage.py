"""The files of a store whose run may train meanwhile, so that retention removes steps while they are read.

Retention deletes the manifest of a step before any file that the step needs, and syncs that. So if a file is missing,
and the manifests of all steps that name it are gone too, the steps were removed. If one manifest is still there, the
store is damaged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from moe_ckpt.errors import MoECheckpointError, StepRemovedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.storage.base import Chunk, Storage
from moe_ckpt.storage.patience import PatientStorage

log = logging.getLogger("moe_ckpt")

T = TypeVar("T")
MOST_LISTINGS = 8
"""A reader that takes the newest step lists the store so often, if each time its step is removed under it."""


class StepStorage(PatientStorage):
    """A patient storage that tells a step that was removed from one that is damaged. Reads by several threads.

    ``read`` and ``size`` raise ``StepRemovedError`` in place of ``FileNotFoundError`` if each step that needs the file
    was there before, and is gone.
    """

    def __init__(self, inner: Storage, patience_secs: float) -> None:
        super().__init__(inner, patience_secs)
        self._listed = set[str]()
        self._opened: dict[str, Manifest] = {}

    def note_listed(self, directories: Collection[str]) -> None:
        """Notes step directories that have a manifest."""
        self._listed |= set(directories)

    def note_opened(self, manifest: Manifest) -> None:
        """Notes a manifest that was read from this storage."""
        self._opened[manifest.directory] = manifest

    def is_committed(self, directory: str) -> bool:
        """Returns whether a step's manifest exists now. One that cannot be read is."""
        try:
            super().read(f"{directory}/{MANIFEST_NAME}", 0, 1)  # network file systems ask their server at an open only
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, MoECheckpointError):
            return True
        return True

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Chunk:
        with self._judged(path):
            return super().read(path, offset, nbytes)

    def size(self, path: str) -> int:
        with self._judged(path):
            return super().size(path)

    @contextlib.contextmanager
    def _judged(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            users = self._users(path)
            if not users or any(map(self.is_committed, users)):
                raise
            raise StepRemovedError(self.root, users, path) from error

    def _users(self, path: str) -> tuple[str, ...]:
        """Step directories that need a file, the newest first: as far as they were listed or opened."""
        directory, _, name = path.rpartition("/")
        if name == MANIFEST_NAME:
            return (directory,) if directory in self._listed else ()
        users = [manifest for manifest in self._opened.values() if path in manifest.paths]
        users.sort(key=lambda manifest: (manifest.generation, manifest.step), reverse=True)
        return tuple(manifest.directory for manifest in users)


def listed_again(attempt: Callable[[], T]) -> T:
    """Returns what ``attempt`` gives, which lists a store and reads a step. If that is removed, it is made again.

    Raises:
        StepRemovedError: The last one of ``MOST_LISTINGS`` attempts.
    """
    for _ in range(MOST_LISTINGS - 1):
        try:
            return attempt()
        except StepRemovedError as error:
            log.info("%s of %s was removed while it was read; it is listed again", error.directories[0], error.root)
    return attempt()
