"""All damage of a store, as ``moe-ckpt verify`` finds it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.verify import Damage, verify_steps
from moe_ckpt.storage import Storage


def verify_store(
    storage: Storage, directories: Collection[str] | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Damage]:
    """Returns the damage of these committed steps, or of all."""
    reader = StoreReader(storage)
    reader.identity()
    wanted = [each for each in reader.directories() if directories is None or each in directories]
    return list(verify_steps(reader, wanted, progress).damages)
