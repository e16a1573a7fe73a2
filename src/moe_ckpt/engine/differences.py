"""What tells two models apart, in words: for the error that says that a store is not of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.format.shard import decode_header
from moe_ckpt.storage.base import Storage

Shapes = Mapping[str, Sequence[int]]
"""Name of a parameter -> its shape as a whole."""
_MODEL = "model/"
_SHOWN = 3


def describe_differences(storage: Storage, directories: Sequence[str], here: Shapes) -> str:
    """How the parameters of the newest readable checkpoint differ from ``here``; "" where that cannot be told.

    directories: step directories, oldest first. For a message only: nothing is verified.
    """
    for directory in reversed(directories):
        try:
            there = _stored(storage, directory)
        except (OSError, DamagedError):
            continue
        return "; ".join(_differences(there, here))
    return ""


def _stored(storage: Storage, directory: str) -> Shapes:
    path = f"{directory}/{MANIFEST_NAME}"
    found: dict[str, Sequence[int]] = {}
    for record in Manifest.decode(storage.read(path), path).files:
        for entry in decode_header(storage.read(record.path, 0, record.header_nbytes), record.path).slices:
            if entry.key.startswith(_MODEL):
                found[entry.key.removeprefix(_MODEL)] = entry.global_shape
    return found


def _differences(there: Shapes, here: Shapes) -> list[str]:
    shapes = [
        f"{name} has shape {list(here[name])} in the model, {list(there[name])} in the checkpoint"
        for name in sorted(here.keys() & there.keys())
        if tuple(here[name]) != tuple(there[name])
    ]
    lacking = [f"{name} of the model is not in the checkpoint" for name in sorted(here.keys() - there.keys())]
    surplus = [f"{name} of the checkpoint is not in the model" for name in sorted(there.keys() - here.keys())]
    return [text for kind in (shapes, lacking, surplus) for text in _some(kind)]


def _some(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _SHOWN
    return [*texts[:_SHOWN], f"and {more} more like that"] if more > 0 else list(texts)
