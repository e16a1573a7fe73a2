"""Damage done to checkpoints on storage, so that a test sees who reads them."""

from __future__ import annotations

from pathlib import Path


def spoil_experts(step: Path) -> None:
    """Flip a bit in the last byte of every shard of experts in a step directory."""
    for path in step.glob("*_expert.safetensors"):
        if "non_expert" not in path.name:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
