"""Reads a store patiently, and tells a step that the run has removed meanwhile from one that is damaged.

A network file system or an object store may answer a read with an error, and the same read with the bytes a second
later. If a reader took the error for damage, the run would go back to an older checkpoint, and retention would delete
the good one in the end. So such reads are tried again.

Retention removes steps while they are read. It deletes the manifest of a step, and syncs that, before it deletes any
file that the step needs. So if a file is missing, and the manifests of all steps that name it are gone too, the steps
were removed. If one manifest is still there, the store is damaged.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from moe_ckpt.errors import MoECheckpointError, StepRemovedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.storage.base import Chunk, ReadableStorage

log = logging.getLogger("moe_ckpt")

T = TypeVar("T")
MOST_LISTINGS = 8
"""How often the store is listed for the newest step, if each time the step is removed while it is read."""
PATIENCE_SECS = 60.0
_FIRST_WAIT_SECS = 0.2
_LONGEST_WAIT_SECS = 8.0
_FINAL = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOENT", "ENOTDIR", "EISDIR", "EACCES", "EPERM", "EROFS", "ELOOP", "ENAMETOOLONG", "EINVAL", "ENXIO"),
        *("ENODEV", "ENOSYS", "EOPNOTSUPP", "EFBIG", "EOVERFLOW", "ESPIPE", "EBADF", "EEXIST", "ENOTEMPTY"),
    )
)
"""Errors that another attempt would meet again. All others may pass: EIO, ETIMEDOUT, ESTALE, EAGAIN, ECONNRESET, what
fsspec's file systems raise (without a number, or as EIO), and numbers that are not listed here."""


class StepStorage:
    """Reads another storage. It tries reads that fail again, and tells a removed step from a damaged one.

    Reads are tried again with growing pauses until ``patience_secs`` are used up. All reads share that time, of which
    only pauses count: a dead disk costs it once, not once per file. After that, errors are raised at once. Several
    threads may use one object.

    ``read`` and ``size`` raise ``StepRemovedError`` in place of ``FileNotFoundError`` if every step that needs the file
    was there before, and is gone now.

    Args:
        inner: The storage that is read.
        patience_secs: The sum of all pauses, in seconds.
        sleep: Pauses for so many seconds.
    """

    def __init__(
        self, inner: ReadableStorage, patience_secs: float = PATIENCE_SECS, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.inner = inner
        self.root = inner.root
        self._left_secs = patience_secs
        self._sleep = sleep
        self._guard = threading.Lock()
        self._listed = set[str]()
        self._opened: dict[str, Manifest] = {}

    def note_listed(self, directories: Collection[str]) -> None:
        """Notes step directories that have a manifest."""
        self._listed |= set(directories)

    def note_opened(self, manifest: Manifest) -> None:
        """Notes a manifest that was read from this storage."""
        self._opened[manifest.directory] = manifest

    def is_committed(self, directory: str) -> bool:
        """Returns whether a step's manifest exists now; True also if storage does not say."""
        path = f"{directory}/{MANIFEST_NAME}"
        try:
            # A read, since network file systems ask their server only when a file is opened.
            self._retried(path, lambda: self.inner.read(path, 0, 1))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, MoECheckpointError):
            return True
        return True

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Chunk:
        return self._of_step(path, lambda: self.inner.read(path, offset, nbytes))

    def size(self, path: str) -> int:
        return self._of_step(path, lambda: self.inner.size(path))

    def list(self, path: str = "") -> list[str]:
        return self._retried(path, lambda: self.inner.list(path))

    def exists(self, path: str) -> bool:
        return self._retried(path, lambda: self.inner.exists(path))

    def _of_step(self, path: str, ask: Callable[[], T]) -> T:
        """Does ``_retried``. Raises ``StepRemovedError`` if the file is missing because its steps were removed."""
        try:
            return self._retried(path, ask)
        except (FileNotFoundError, NotADirectoryError) as error:
            users = self._users(path)
            if not users or any(map(self.is_committed, users)):
                raise
            raise StepRemovedError(self.root, users, path) from error

    def _users(self, path: str) -> tuple[str, ...]:
        """Returns the step directories that need a file, the newest first, of those that were listed or opened."""
        directory, _, name = path.rpartition("/")
        if name == MANIFEST_NAME:
            return (directory,) if directory in self._listed else ()
        users = [manifest for manifest in self._opened.values() if path in manifest.paths]
        users.sort(key=lambda manifest: (manifest.generation, manifest.step), reverse=True)
        return tuple(manifest.directory for manifest in users)

    def _retried(self, path: str, ask: Callable[[], T]) -> T:
        """Returns what ``ask`` reads, after as many attempts as patience allows."""
        wait_secs, attempts = _FIRST_WAIT_SECS, 1
        while True:
            try:
                answer = ask()
            except OSError as error:
                final = isinstance(error, MoECheckpointError) or error.errno in _FINAL
                paused = 0.0 if final else self._take(wait_secs)
                if not paused:
                    raise
                log.warning(
                    "%s/%s cannot be read (%s); retrying in %.1f s, attempt %d",
                    self.root,
                    path,
                    error,
                    paused,
                    attempts + 1,
                )
                self._sleep(paused)
                wait_secs, attempts = min(2 * wait_secs, _LONGEST_WAIT_SECS), attempts + 1
            else:
                if attempts > 1:
                    log.warning("%s/%s could be read at attempt %d", self.root, path, attempts)
                return answer

    def _take(self, wanted_secs: float) -> float:
        """Returns for how many seconds a read may pause now; 0 when all patience is used up."""
        with self._guard:
            granted = min(wanted_secs, self._left_secs)
            self._left_secs -= granted
            return granted


def listed_again(attempt: Callable[[], T]) -> T:
    """Calls ``attempt``, which lists a store and reads a step, again as long as that step is removed meanwhile.

    Raises:
        StepRemovedError: The step was removed in each of ``MOST_LISTINGS`` attempts.
    """
    for _ in range(MOST_LISTINGS - 1):
        try:
            return attempt()
        except StepRemovedError as error:
            log.info("%s of %s was removed while it was read; it is listed again", error.directories[0], error.root)
    return attempt()
