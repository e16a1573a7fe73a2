"""Damage done to checkpoints on storage, so that a test sees who reads them."""

from __future__ import annotations

from pathlib import Path

from moe_ckpt.format.slot import decode_slot


def spoil_experts(step: Path) -> None:
    """Flip a bit in the last byte of every shard of experts in a step directory."""
    for path in step.glob("*_expert.safetensors"):
        if "non_expert" not in path.name:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)


def spoil_slot(path: Path, how: str) -> None:
    """Damage a sealed slot. path: Of its bytes. how: "flip", "truncate", "header" or "header cut"."""
    if how.startswith("header"):
        path = path.with_suffix(".head")
    raw = bytearray(path.read_bytes())
    if how in ("truncate", "header cut"):
        del raw[len(raw) // 2 :]
    else:
        raw[len(raw) // 3] ^= 16
    path.write_bytes(raw)


def slots_of(node: Path, rank: int) -> list[Path]:
    """The bytes of sealed slots on a node that hold what a rank saved, its own or copies."""
    heads = [(path, decode_slot(path.read_bytes(), str(path))) for path in node.rglob("*.head")]
    return [path.with_suffix(".data") for path, header in heads if header.rank == rank]
