"""Collections of a store, with what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_ckpt.commit.keeping import StoreContents
from moe_ckpt.core.step import Superseded
from moe_ckpt.ledger.retention import RetentionPolicy, retained_directories
from moe_ckpt.storage.base import Storage


class Collected(NamedTuple):
    """The checkpoints and damaged directories that are left, paths that are gone, and what other ranks must delete."""

    retained: tuple[str, ...]
    damaged: tuple[str, ...]
    deleted: Sequence[str]
    delegated: Superseded


def collect(
    storage: Storage, retention: RetentionPolicy, *, contents: StoreContents | None = None, **how: Any
) -> Collected:
    contents = StoreContents(storage) if contents is None else contents
    contents.storage = storage
    deleted, delegated = contents.collect(retention, **how)
    stay = retained_directories(tuple(contents.records.values()), retention)  # beside those of which nothing is judged
    return Collected(tuple(filter(stay.__contains__, contents.records)), contents.damaged, deleted, delegated)


def clean_start(storage: Storage) -> Collected:
    contents = StoreContents(storage)
    deleted = contents.clean_start()
    return Collected(tuple(contents.records), contents.damaged, deleted, {})
