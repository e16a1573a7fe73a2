"""Describes how two models differ, for the error that says that a store belongs to another model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_ckpt.engine.documents import read_header, read_manifest
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.storage.base import Storage

Shapes = Mapping[str, Sequence[int]]
"""Name of a parameter -> its shape as a whole."""
_MODEL = "model/"
_SHOWN = 3


def describe_differences(storage: Storage, directories: Sequence[str], here: Shapes) -> str:
    """Describes how the newest readable checkpoint's parameters differ from ``here``; "" where that cannot be told.

    Args:
        directories: Step directories, oldest first. For a message only: no tensor is read.
    """
    for directory in reversed(directories):
        try:
            stored = _stored(storage, directory)
        except (OSError, DamagedError, FormatVersionError):
            continue
        return "; ".join(_differences(stored, here))
    return ""


def _stored(storage: Storage, directory: str) -> Shapes:
    shapes: dict[str, Sequence[int]] = {}
    for record in read_manifest(storage, directory, {}).files:
        for entry in read_header(storage, record).slices:
            if entry.key.startswith(_MODEL):
                shapes[entry.key.removeprefix(_MODEL)] = entry.global_shape
    return shapes


def _differences(stored: Shapes, here: Shapes) -> list[str]:
    shapes = [
        f"{name} has shape {list(here[name])} in the model, {list(stored[name])} in the checkpoint"
        for name in sorted(here.keys() & stored.keys())
        if tuple(here[name]) != tuple(stored[name])
    ]
    lacking = [f"{name} of the model is not in the checkpoint" for name in sorted(here.keys() - stored.keys())]
    surplus = [f"{name} of the checkpoint is not in the model" for name in sorted(stored.keys() - here.keys())]
    return [text for kind in (shapes, lacking, surplus) for text in _some(kind)]


def _some(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _SHOWN
    return [*texts[:_SHOWN], f"and {more} more like that"] if more > 0 else list(texts)
