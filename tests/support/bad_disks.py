"""Real directories behind a disk that is small, that stops answering, or whose clock is fast."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from moe_ckpt.driver import run as driver_run
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
    """Full when the files below its root have ``capacity_bytes`` together; ENOSPC comes in the middle of a file.

    before_write: called with each path below a step directory first, and may change ``capacity_bytes``.
    """

    def __init__(
        self,
        root: str | Path,
        capacity_bytes: float,
        on_phase: Callable[[str], None] | None = None,
        before_write: Callable[[str], None] = lambda path: None,
    ) -> None:
        super().__init__(root, on_phase)
        self.capacity_bytes = capacity_bytes
        self.before_write = before_write
        self.full = 0

    @property
    def used_bytes(self) -> int:
        return sum(map(size_of, files_below(self.root)))

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        if path.startswith("step_"):
            self.before_write(path)
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

    before_write: called with each such path first, and may clear it. patience_secs: see ``PATIENCE_SECS``.
    """

    def __init__(
        self,
        root: str | Path,
        on_phase: Callable[[str], None] | None = None,
        before_write: Callable[[str], None] = lambda path: None,
        patience_secs: float = PATIENCE_SECS,
    ) -> None:
        super().__init__(root, on_phase)
        self.answers = threading.Event()
        self.answers.set()
        self.before_write = before_write
        self.patience_secs = patience_secs

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        if path.startswith("step_"):
            self.before_write(path)
            if not self.answers.wait(self.patience_secs):
                raise TimeoutError("nobody ended the hang")
        return super().write(path, chunks)


BAD = ("hangs", "full")


def spoil_disk(how: str, from_step: int) -> None:
    """From the checkpoint of a step on, the disk of this process's store hangs, or is full of somebody else's files.

    For good, and in this process only, which is about to die.
    """

    def opened(root: str, on_phase: Callable[[str], None] | None = None, **_: object) -> LocalStorage:
        disk: HangingDisk | SmallDisk

        def spoil(path: str) -> None:
            if int(path.removeprefix("step_")[:8]) < from_step:
                return
            if isinstance(disk, HangingDisk):
                disk.answers.clear()
            else:
                disk.capacity_bytes = 0

        if how == "hangs":
            disk = HangingDisk(root, on_phase, spoil, patience_secs=3600.0)
        else:
            disk = SmallDisk(root, float("inf"), on_phase, spoil)
        return disk

    driver_run.open_storage = opened  # type: ignore[assignment]
