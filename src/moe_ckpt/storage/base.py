"""The storage operations that checkpointing needs.

Paths are POSIX-style and relative to the store's root ("step_00000012/MANIFEST.json"). Implementations:
``storage.local.LocalStorage`` (plain os calls, fsync everywhere) and ``storage.remote.RemoteStorage``
(fsspec: S3, GCS, ...). ``moe_ckpt.testing.FaultyStorage`` wraps either and fails the N-th call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from moe_ckpt.errors import DamagedError

Chunk = bytes | bytearray | memoryview


class Stamp(NamedTuple):
    """A directory's stamp: it changes whenever a name in the directory is added or removed.

    Attributes:
        changed_unix_ns: By the storage's clock.
    """

    changed_unix_ns: int
    rest: tuple[int, ...] = ()


@runtime_checkable
class Stamped(Protocol):
    """A storage that can tell more cheaply than by a listing that a directory has not changed. Optional."""

    def stamp(self, path: str) -> Stamp | None:
        """Returns that of the directory as it is now, not as some cache has it; None if there is none to go by."""
        ...


class ReadableStorage(Protocol):
    """The bytes under one root, for whoever only reads them. Methods raise ``OSError`` when storage fails.

    Several threads may read the same file at once.

    Attributes:
        root: Directory or URL.
    """

    root: str

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Chunk:
        """Returns bytes ``[offset, offset + nbytes)``, fewer when the file ends early.

        Args:
            path: Of the file.
            offset: In bytes.
            nbytes: None: all from ``offset`` on.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def size(self, path: str) -> int:
        """Returns a file's size in bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        ...

    def list(self, path: str = "") -> list[str]:
        """Returns the names (not paths) directly under the directory ``path``, sorted; [] if there is none."""
        ...

    def exists(self, path: str) -> bool:
        """Returns whether there is a file or directory of that name."""
        ...


@runtime_checkable
class Storage(ReadableStorage, Protocol):
    """Durable bytes under one root, which can also be written.

    Called from the persist thread of each rank and, before training, from the main thread; no path is written or
    deleted while another thread uses it.
    """

    def probe(self) -> None:
        """Create the root if need be and prove that it can be written. Called before training starts.

        Raises:
            StoreUnwritableError: Names the root and the reason.
        """
        ...

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        """Durably create a file, all or nothing.

        When it returns, the bytes survive a power loss and the name is visible. Until it returns, no reader sees the
        name. Parent directories are made as needed. After an error nothing is left behind.

        Args:
            path: POSIX-style, relative to the root.
            chunks: The bytes, one after the other.

        Returns:
            The file's size in bytes.

        Raises:
            FileExistsError: ``path`` exists: files are never overwritten.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove the file; a missing one is no error."""
        ...

    def delete_dir(self, path: str) -> None:
        """Remove the directory if it is empty; a missing or non-empty one is left alone."""
        ...

    def clean_temporaries(self, path: str) -> int:
        """Removes half-written files of this format that a dead writer left in the directory; returns how many."""
        ...


def split_path(path: str, root: str) -> tuple[str, ...]:
    """Components of a path relative to the store's root; () for the root itself.

    Raises:
        DamagedError: the path is absolute, has empty, "." or ".." components, a NUL or a backslash. Paths
            come from manifests, which are data from elsewhere; ``root`` is for the message only.
    """
    if not path:
        return ()
    parts = tuple(path.split("/"))
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise DamagedError(path, f"is not a path inside the store {root}")
    return parts
