"""Counts the bytes of tensors that a process reads of a store: of shards, but for their headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_ckpt.format.shard import SEAL
from moe_ckpt.storage import LocalStorage


@contextmanager
def tensor_bytes_read() -> Iterator[list[tuple[str, int]]]:
    """Inside, each read of a local store notes (shard, bytes of tensors), on any thread."""
    noted: list[tuple[str, int]] = []
    read = LocalStorage.read

    def noting(self, path, offset=0, nbytes=None):
        raw = read(self, path, offset, nbytes)
        if path.endswith(".safetensors"):
            with Path(self.root, path).open("rb") as file:
                head = file.read(struct.unpack("<Q", file.read(8))[0])
            header = 8 + len(head) + json.loads(head)[SEAL]["data_offsets"][1]
            tensors = max(0, offset + len(raw) - max(offset, header))
            if tensors:
                noted.append((path, tensors))
        return raw

    LocalStorage.read = noting
    try:
        yield noted
    finally:
        LocalStorage.read = read
