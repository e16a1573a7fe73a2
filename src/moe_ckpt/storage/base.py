"""The few verbs that checkpointing asks of storage.

Paths are POSIX-style and relative to the store's root ("step_00000012/MANIFEST.json"). Implementations:
``storage.local.LocalStorage`` (plain os calls, fsync everywhere) and ``storage.remote.RemoteStorage``
(fsspec: S3, GCS, ...). ``moe_ckpt.testing.FaultyStorage`` wraps either and fails the N-th call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

Chunk = bytes | bytearray | memoryview


@runtime_checkable
class Storage(Protocol):
    """Durable bytes under one root. Methods raise ``OSError`` (or a subclass) when storage fails.

    Called from the persist thread of each rank and, before training, from the main thread; never
    from two threads at once for the same path.
    """

    root: str

    def probe(self) -> None:
        """Create the root if need be and prove that it can be written.

        Raises ``StoreUnwritableError`` naming the root and the reason.
        """
        ...

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        """Durably create the file ``path``, all or nothing, and return its size in bytes.

        When it returns, the bytes survive a power loss and the name is visible. Until it returns, no
        reader sees the name. Parent directories are made as needed. After an error nothing is left
        behind. Never overwrites: raises ``FileExistsError`` if ``path`` exists.
        """
        ...

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes | bytearray:
        """Bytes ``[offset, offset + nbytes)``; all from ``offset`` on when ``nbytes`` is None.

        Shorter than asked when the file ends early. Raises ``FileNotFoundError``.
        """
        ...

    def size(self, path: str) -> int:
        """Size in bytes. Raises ``FileNotFoundError``."""
        ...

    def list(self, path: str = "") -> list[str]:
        """Names (not paths) directly under the directory ``path``, sorted; [] if there is none."""
        ...

    def exists(self, path: str) -> bool:
        """True if a file or directory of that name exists."""
        ...

    def delete(self, path: str) -> None:
        """Remove the file; a missing one is no error."""
        ...

    def delete_dir(self, path: str) -> None:
        """Remove the directory if it is empty; a missing or non-empty one is left alone."""
        ...

    def clean_temporaries(self, path: str) -> int:
        """Remove half-written files of this format left in the directory by a dead writer; returns how many."""
        ...
