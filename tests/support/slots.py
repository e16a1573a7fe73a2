"""A slot for a test that needs one without a rank's files."""

from __future__ import annotations

from pathlib import Path

from moe_ckpt.memory.arena import COPIES, Arena
from moe_ckpt.memory.slot import COPY_PREFIX, Slot


def create_slot(path: Path, nbytes: int) -> Slot:
    """A new slot in the second arena of a directory. path: Names it there."""
    data = path.with_name(COPIES)
    begin = data.stat().st_size if data.exists() else 0
    arena = Arena(begin + nbytes, path=data)
    arena.grow(begin + nbytes)
    return Slot.of(path.with_name(f"{COPY_PREFIX}_{path.name}"), arena.adopt(begin, nbytes), frees=True)
