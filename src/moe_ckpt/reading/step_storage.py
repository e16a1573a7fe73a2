"""The files of a store as readers meet them: storage may not answer at once, and the run may train meanwhile.

Network file systems and object stores answer some reads with an error and the same reads, a second later, with the
bytes. Whoever opens a checkpoint must not take the first for the truth: going back to an older one costs work, and in
the end the good one itself. So such reads are tried again.

Retention removes steps while they are read. It deletes the manifest of a step before any file that the step needs, and
syncs that. So if a file is missing, and the manifests of all steps that name it are gone too, the steps were removed.
If one manifest is still there, the store is damaged.
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
"""A reader that takes the newest step lists the store so often, if each time its step is removed under it."""
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
"""Answers that stay what they are. All others may pass: EIO, ETIMEDOUT, ESTALE, EAGAIN, ECONNRESET, what fsspec's
file systems raise (without a number, or as EIO), and numbers that this list does not know."""


class StepStorage:
    """Another storage's files. Reads that fail are tried again, and a step that was removed is told from a damaged one.

    Reads are tried again with growing pauses until ``patience_secs`` are used up. The time is that of all reads
    together, pauses only: a disk that is dead costs it once, not once per file. After that errors pass at once. May
    be used by several threads.

    ``read`` and ``size`` raise ``StepRemovedError`` in place of ``FileNotFoundError`` if each step that needs the file
    was there before, and is gone.
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
        """Returns whether a step's manifest exists now. One that cannot be read is."""
        path = f"{directory}/{MANIFEST_NAME}"
        try:
            # Network file systems ask their server at an open only.
            self._patiently(path, lambda: self.inner.read(path, 0, 1))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except (OSError, MoECheckpointError):
            return True
        return True

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Chunk:
        return self._judged(path, lambda: self.inner.read(path, offset, nbytes))

    def size(self, path: str) -> int:
        return self._judged(path, lambda: self.inner.size(path))

    def list(self, path: str = "") -> list[str]:
        return self._patiently(path, lambda: self.inner.list(path))

    def exists(self, path: str) -> bool:
        return self._patiently(path, lambda: self.inner.exists(path))

    def _judged(self, path: str, ask: Callable[[], T]) -> T:
        try:
            return self._patiently(path, ask)
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

    def _patiently(self, path: str, ask: Callable[[], T]) -> T:
        wait_secs, attempts = _FIRST_WAIT_SECS, 1
        while True:
            try:
                answer = ask()
            except OSError as error:
                paused = self._take(wait_secs) if _may_pass(error) else 0.0
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
        """Seconds that may be waited now; 0 when all patience is used up."""
        with self._guard:
            granted = min(wanted_secs, self._left_secs)
            self._left_secs -= granted
            return granted


def _may_pass(error: OSError) -> bool:
    """Returns whether the same read may well succeed in a moment."""
    return not isinstance(error, MoECheckpointError) and error.errno not in _FINAL


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
