"""Damage done to checkpoints on storage, so that a test sees who reads them."""

from __future__ import annotations

import os
from pathlib import Path

from moe_ckpt.format.slot import decode_slot
from moe_ckpt.memory.arena import ARENA, COPIES
from moe_ckpt.memory.slot import data_of


def spoil_experts(step: Path) -> None:
    """Flip a bit in the last byte of every shard of experts in a step directory."""
    for path in step.glob("*_expert.safetensors"):
        if "non_expert" not in path.name:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)


def bytes_of(slot: Path) -> tuple[Path, int, int]:
    """The file that has a sealed slot's bytes, the first of them, and how many. slot: With any suffix."""
    file, begin = data_of(slot.with_suffix(""))
    nbytes = decode_slot(slot.with_suffix(".head").read_bytes(), str(slot)).nbytes
    return file, begin, nbytes


def flip(slot: Path, bit: int = 4) -> None:
    """Flip a bit, a third into a sealed slot."""
    file, begin, nbytes = bytes_of(slot)
    with file.open("r+b") as opened:
        opened.seek(begin + nbytes // 3)
        byte = opened.read(1)[0]
        opened.seek(-1, 1)
        opened.write(bytes([byte ^ bit]))


def blank(slot: Path) -> None:
    """Write zeros over a sealed slot."""
    file, begin, nbytes = bytes_of(slot)
    with file.open("r+b") as opened:
        opened.seek(begin)
        opened.write(bytes(nbytes))


def files_of_slots(root: Path) -> list[Path]:
    """The files that have slots' bytes, below a directory."""
    return sorted(path for path in root.rglob("*") if path.name in (ARENA, COPIES))


def spoil_slot(path: Path, how: str) -> None:
    """Damage a sealed slot. path: Of its bytes. how: "flip", "truncate", "header" or "header cut"."""
    if how == "flip":
        flip(path, 16)
        return
    if how == "truncate":
        file, begin, nbytes = bytes_of(path)
        os.truncate(file, begin + nbytes // 2)
        return
    path = path.with_suffix(".head")
    raw = bytearray(path.read_bytes())
    if how == "header cut":
        del raw[len(raw) // 2 :]
    else:
        raw[len(raw) // 3] ^= 16
    path.write_bytes(raw)


def slots_of(node: Path, rank: int) -> list[Path]:
    """Sealed slots on a node that hold what a rank saved, its own or copies."""
    heads = [(path, decode_slot(path.read_bytes(), str(path))) for path in node.rglob("*.head")]
    return [path for path, header in heads if header.rank == rank]
