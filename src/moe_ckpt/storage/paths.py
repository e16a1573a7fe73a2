"""The one rule for paths inside a store."""

from __future__ import annotations

from moe_ckpt.errors import DamagedError


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
