"""The newest checkpoint of a store, and the newest dense one."""

from __future__ import annotations

import os
from collections.abc import Callable

from moe_ckpt.errors import NoCheckpointError, StoreError, sparse_window
from moe_ckpt.format.manifest import Manifest, parse_step_dir
from moe_ckpt.reading.reader import StoreReader, check_checkpoint, usable
from moe_ckpt.reading.step_storage import listed_again
from moe_ckpt.storage import open_storage


def newest_step(dirpath: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that a store has a checkpoint of, or None if it has none.

    Reads names and one manifest (the next older one where that is damaged), no tensors; creates, locks and changes
    nothing. For a launcher that must decide, before model and processes exist, whether there is anything to go on from.

    Args:
        dirpath: A store, or a directory or fsspec URL that may become one; it need not exist.

    Returns:
        The step, counted as training counts (iterations in Megatron). A sparse window counts as its last step, though
        training goes on at its first one, and computes the others again.

    Raises:
        NoCheckpointError: There are checkpoints, but no manifest of them can be read: a run would not start either.
        StoreError: The directory cannot be read, or belongs to something else.
    """
    reader = StoreReader(open_storage(os.fspath(dirpath)))
    problems: list[str] = []

    def newest() -> Manifest | None:
        problems.clear()
        has_steps = any(parse_step_dir(name) is not None for name in reader.storage.list())
        return next(usable(reader, problems), None) if has_steps else None

    try:
        manifest = listed_again(newest)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"the store {reader.storage.root} cannot be read: {error}") from error
    if manifest is not None:
        return manifest.step
    if problems:
        raise NoCheckpointError(
            f"no manifest in {reader.storage.root} can be read: {'; '.join(problems[:4])}. To start over, move the "
            "directory away or choose another dirpath."
        )
    return None


def require_dense(manifest: Manifest) -> None:
    """Raises ``UnsupportedError`` for a checkpoint that is a sparse window."""
    if manifest.window:
        raise sparse_window(manifest.directory, manifest.window[0].step, manifest.step)


def dense_checkpoints(
    reader: StoreReader, most: int, check: Callable[[Manifest], object] = lambda manifest: None
) -> list[tuple[Manifest, tuple[str, ...]]]:
    """Returns dense checkpoints, each with the directories of the sparse windows newer than it, all newest first.

    Args:
        reader: Of the store. Only manifests are read; damaged ones are skipped with a warning.
        most: How many.
        check: Raises for a dense checkpoint that is to be skipped, as for ``usable``.

    Raises:
        UnsupportedError: There are only sparse windows.
        NoCheckpointError: There are no checkpoints, or all dense ones are damaged.
        StepRemovedError: Of ``MOST_LISTINGS`` listings, in each a step was removed while it was read.
    """
    problems: list[str] = []
    windows: list[Manifest] = []

    def listed() -> list[tuple[Manifest, tuple[str, ...]]]:
        problems.clear()
        windows.clear()
        dense: list[tuple[Manifest, tuple[str, ...]]] = []
        for manifest in usable(reader, problems, lambda candidate: candidate.window or check(candidate)):
            if manifest.window:
                windows.append(manifest)
                continue
            dense.append((manifest, tuple(window.directory for window in windows)))
            if len(dense) == most:
                break
        return dense

    dense = listed_again(listed)
    if not dense and windows and not problems:
        require_dense(windows[0])
    if not dense:
        raise NoCheckpointError(
            f"no dense checkpoint in {reader.storage.root} can be used: "
            f"{'; '.join(problems[:4]) or 'there is none yet'}"
        )
    return dense


def newest_dense(reader: StoreReader) -> tuple[Manifest, tuple[str, ...]]:
    """Returns the newest good dense checkpoint, and the directories of newer sparse windows. Raises as above."""
    [newest] = dense_checkpoints(reader, 1, lambda manifest: check_checkpoint(reader, manifest, slices=False))
    return newest
