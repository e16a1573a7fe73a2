"""Retries reads that a storage refuses for a moment.

Network file systems and object stores answer some reads with an error and the same reads, a second later, with the
bytes. Whoever opens a checkpoint must not take the first for the truth: going back to an older one costs work, and in
the end the good one itself.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from moe_ckpt.errors import MoECheckpointError
from moe_ckpt.storage.base import Chunk, Storage

log = logging.getLogger("moe_ckpt")

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

Answer = TypeVar("Answer")


def may_pass(error: OSError) -> bool:
    """Returns whether the same read may well succeed in a moment."""
    return not isinstance(error, MoECheckpointError) and error.errno not in _FINAL


class PatientStorage:
    """Another storage's files. Its reads are tried again, with growing pauses, until ``patience_secs`` are used up.

    The time is that of all reads together, pauses only: a disk that is dead costs it once, not once per file. After
    that errors pass at once. What writes or deletes is passed on as it is. May be used by several threads.
    """

    def __init__(
        self, inner: Storage, patience_secs: float = PATIENCE_SECS, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.inner = inner
        self.root = inner.root
        self._left_secs = patience_secs
        self._sleep = sleep
        self._guard = threading.Lock()

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Chunk:
        return self._patiently(path, lambda: self.inner.read(path, offset, nbytes))

    def size(self, path: str) -> int:
        return self._patiently(path, lambda: self.inner.size(path))

    def list(self, path: str = "") -> list[str]:
        return self._patiently(path, lambda: self.inner.list(path))

    def exists(self, path: str) -> bool:
        return self._patiently(path, lambda: self.inner.exists(path))

    def _patiently(self, path: str, ask: Callable[[], Answer]) -> Answer:
        wait_secs, attempts = _FIRST_WAIT_SECS, 1
        while True:
            try:
                answer = ask()
            except OSError as error:
                paused = self._take(wait_secs) if may_pass(error) else 0.0
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

    # --- passed on ---

    def probe(self) -> None:
        self.inner.probe()

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        return self.inner.write(path, chunks)

    def delete(self, path: str) -> None:
        self.inner.delete(path)

    def delete_dir(self, path: str) -> None:
        self.inner.delete_dir(path)

    def clean_temporaries(self, path: str) -> int:
        return self.inner.clean_temporaries(path)
