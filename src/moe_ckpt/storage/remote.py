"""Object stores (S3, GCS, ...) and anything else that fsspec reaches by URL.

An upload appears under its final name when it is complete, or not at all: object stores promise that
per object. So there are no temporaries and no renames here (a rename is a copy there), and the commit
record, written last, does the rest.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from moe_ckpt.errors import ConfigError, MissingPackageError, StoreError, StoreUnwritableError
from moe_ckpt.format.manifest import MANIFEST_NAME
from moe_ckpt.storage.base import Chunk, split_path


class RemoteStorage:
    """Implements ``storage.base.Storage`` below one fsspec URL.

    Each file is handed to the file system in one piece, so an upload needs the file's size in host memory once more. (A
    streamed upload would be completed, truncated, by fsspec when the writer fails half way.)

    Args:
        url: Such as ``s3://bucket/runs/1``.
        on_phase: As for ``LocalStorage``, with "manifest", "write" and "gc" only.
        **storage_options: Passed to the fsspec file system as they are.
    """

    def __init__(self, url: str, on_phase: Callable[[str], None] | None = None, **storage_options: Any) -> None:
        self.root = url.rstrip("/")
        self._on_phase = on_phase or (lambda phase: None)
        self._fs, self._base = _open_file_system(self.root, storage_options)

    def __repr__(self) -> str:
        return f"RemoteStorage({self.root!r})"

    def probe(self) -> None:
        """Write and delete a small object.

        Raises:
            StoreUnwritableError: Names the URL and the reason. Call before training starts.
        """
        name = "probe.tmp"
        try:
            with self._failures_as_os_errors(name):
                self._fs.pipe_file(self._locate(name), b"moe_ckpt")
                self._fs.rm_file(self._locate(name))
        except OSError as error:
            raise StoreUnwritableError(
                f"the store {self.root} cannot be written: {error}. Check the URL, the credentials and the "
                "storage options, or choose another dirpath."
            ) from error

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        target = self._locate(path)
        if path.rpartition("/")[2] == MANIFEST_NAME:
            self._on_phase("manifest")
        with self._failures_as_os_errors(path):
            if self._fs.exists(target):
                raise FileExistsError(errno.EEXIST, "a checkpoint file is never overwritten", path)
        payload = b"".join(chunks)
        self._on_phase("write")
        with self._failures_as_os_errors(path):
            self._fs.pipe_file(target, payload)
        return len(payload)

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        target = self._locate(path)
        if offset == 0 and nbytes is None:
            with self._failures_as_os_errors(path):
                return bytes(self._fs.cat_file(target))
        available = self.size(path)  # stores answer a range beyond the end with an error
        end = available if nbytes is None else min(offset + nbytes, available)
        if offset >= end:
            return b""
        with self._failures_as_os_errors(path):
            return bytes(self._fs.cat_file(target, start=offset, end=end))

    def size(self, path: str) -> int:
        with self._failures_as_os_errors(path):
            return int(self._fs.info(self._locate(path))["size"])

    def list(self, path: str = "") -> list[str]:
        with self._failures_as_os_errors(path):
            try:
                entries = self._fs.ls(self._locate(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        # Object stores may list the directory's own marker; splitting it off leaves an empty name.
        base = self._locate(path).strip("/")
        names = {str(entry).strip("/").removeprefix(base).strip("/").partition("/")[0] for entry in entries}
        return sorted(names - {""})

    def exists(self, path: str) -> bool:
        with self._failures_as_os_errors(path):
            return bool(self._fs.exists(self._locate(path)))

    def delete(self, path: str) -> None:
        target = self._locate(path)
        self._on_phase("gc")
        with self._failures_as_os_errors(path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(target)

    def delete_dir(self, path: str) -> None:
        """Object stores have no directories to remove, so only those that pretend to are asked."""
        if not split_path(path, self.root) or self.list(path):
            return
        with contextlib.suppress(OSError, NotImplementedError):
            self._fs.rmdir(self._locate(path))

    def clean_temporaries(self, path: str) -> int:
        """None exist: an upload that was cut off has no name. (Let the bucket expire unfinished multipart ones.)"""
        return 0

    def _locate(self, path: str) -> str:
        return "/".join((self._base, *split_path(path, self.root)))

    @contextlib.contextmanager
    def _failures_as_os_errors(self, path: str) -> Iterator[None]:
        """Asks the server anew, and raises ``OSError`` where the client library has errors of its own."""
        self._fs.invalidate_cache()
        try:
            yield
        except (OSError, StoreError):
            raise
        except Exception as error:  # the boundary to code that we do not know
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", f"{self.root}/{path}") from error


def _open_file_system(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    """(file system, path of the root in it)."""
    protocol = url.partition("://")[0]
    try:
        file_system, base = fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as error:
        implementation = known_implementations.get(protocol, {}).get("class", protocol)
        raise MissingPackageError(implementation.partition(".")[0], f"the store {url}", "remote") from error
    except ValueError as error:
        raise ConfigError(
            f"the store {url!r} cannot be opened: {error}. Give a directory, or a URL whose protocol fsspec knows."
        ) from error
    return file_system, str(base).rstrip("/")
