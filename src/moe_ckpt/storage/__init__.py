"""Makes bytes durable, in local directories and object stores, and locks a store."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from moe_ckpt.errors import ConfigError
from moe_ckpt.storage.base import Chunk, Storage
from moe_ckpt.storage.local import LocalStorage
from moe_ckpt.storage.lock import StoreLock
from moe_ckpt.storage.remote import RemoteStorage

__all__ = ["Chunk", "LocalStorage", "RemoteStorage", "Storage", "StoreLock", "open_storage"]

log = logging.getLogger("moe_ckpt")

_LOCAL_PROTOCOLS = ("file", "local")


def open_storage(
    path_or_url: str | os.PathLike[str],
    on_phase: Callable[[str], None] | None = None,
    *,
    access: str = "private",
    **storage_options: Any,
) -> LocalStorage | RemoteStorage:
    """Returns the storage for a directory, a ``file://`` URL, or any other URL that fsspec knows. Touches nothing yet.

    Args:
        path_or_url: Where the store is, or will be.
        on_phase: See ``LocalStorage`` and ``RemoteStorage``.
        access: See ``LocalStorage``. Without effect behind a URL, where who may read is the bucket's business; that is
            said as a warning.
        **storage_options: See ``RemoteStorage``.

    Raises:
        ConfigError: The URL's protocol is unknown, or it names a directory of another host.
        MissingPackageError: fsspec needs another package for it.
    """
    text = os.fspath(path_or_url)
    protocol, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text, on_phase, access=access)
    if protocol in _LOCAL_PROTOCOLS:
        return LocalStorage(_path_of(text, rest), on_phase, access=access)
    if access != "private":
        log.warning("access=%r has no effect on %s: the settings of that storage decide who may read", access, text)
    return RemoteStorage(text, on_phase, **storage_options)


def _path_of(url: str, rest: str) -> str:
    """The directory that a local URL names. Raises ``ConfigError`` if that is another host's, or relative to none."""
    host, separator, path = rest.partition("/")
    if host not in ("", "localhost") or not separator:
        raise ConfigError(
            f"{url} names a host, {host!r}, where this one is meant: write {url.partition(':')[0]}:///..."
        )
    return unquote(f"/{path}")
