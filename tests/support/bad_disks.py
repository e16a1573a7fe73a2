"""Real directories behind a disk that is small, that stops answering, or whose clock is fast."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.base import Chunk, Stamp

PATIENCE_SECS = 60.0
"""A hang that no test ends is over after that."""


def files_below(root: str | Path) -> Iterator[Path]:
    """Files, where directories may be deleted meanwhile: ``Path.rglob`` stops with an error when one is."""
    for directory, _, names in os.walk(root):
        yield from (Path(directory, name) for name in names)


def size_of(path: Path) -> int:
    """0 when it is gone by now."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class SlowDisk(LocalStorage):
    """Takes ``secs`` longer for each file."""

    def __init__(self, root: str | Path, secs: float) -> None:
        super().__init__(root)
        self._secs = secs

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        time.sleep(self._secs)
        return super().write(path, chunks)


class SmallDisk(LocalStorage):
    """Full when the files below its root have ``capacity_bytes`` together; ENOSPC comes in the middle of a file."""

    def __init__(self, root: str | Path, capacity_bytes: float, on_phase: Callable[[str], None] | None = None) -> None:
        super().__init__(root, on_phase)
        self.capacity_bytes = capacity_bytes
        self.full = 0

    @property
    def used_bytes(self) -> int:
        return sum(map(size_of, files_below(self.root)))

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        return super().write(path, self._as_fits(chunks))

    def _as_fits(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        left = self.capacity_bytes - self.used_bytes
        for chunk in chunks:
            size = memoryview(chunk).nbytes
            if size > left:
                yield memoryview(chunk).cast("B")[: max(0, int(left))]
                self.full += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            left -= size
            yield chunk


class FastClock(LocalStorage):
    """A day passes on it in a few seconds, so that what changed a moment ago changed long ago.

    listed: directories, since the list was cleared.
    """

    def __init__(self, root: str | Path, on_phase: Callable[[str], None] | None = None) -> None:
        super().__init__(root, on_phase)
        self.listed: list[str] = []

    def stamp(self, path: str) -> Stamp | None:
        found = super().stamp(path)
        return found and Stamp(found.changed_unix_ns * 10_000, found.rest)

    def list(self, path: str = "") -> list[str]:
        self.listed.append(path)
        return super().list(path)


class HangingDisk(LocalStorage):
    """Writes below a step directory do not return while ``answers`` is cleared.

    before_write: called with each such path first, and may clear it.
    """

    def __init__(
        self,
        root: str | Path,
        on_phase: Callable[[str], None] | None = None,
        before_write: Callable[[str], None] = lambda path: None,
    ) -> None:
        super().__init__(root, on_phase)
        self.answers = threading.Event()
        self.answers.set()
        self.before_write = before_write

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        if path.startswith("step_"):
            self.before_write(path)
            if not self.answers.wait(PATIENCE_SECS):
                raise TimeoutError("nobody ended the hang")
        return super().write(path, chunks)
