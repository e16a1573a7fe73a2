"""Writes a dense checkpoint whose slices were made from a log, not copied from training: shards, states, commit.

Shares of ranks may be written by several processes, on any threads; one of them commits when all have written theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from moe_ckpt.core.step import Tier
from moe_ckpt.errors import NotFiniteError
from moe_ckpt.format.finite import all_finite, judged_in
from moe_ckpt.format.manifest import (
    KINDS,
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    PartRecord,
    StateRecord,
    encode_part,
    file_row,
    kind_of,
    shard_path,
    state_path,
    state_row,
)
from moe_ckpt.format.sealed import Fragment, digest, seal, unseal
from moe_ckpt.format.shard import ShardHeader, SliceEntry, encode_header, lay_out
from moe_ckpt.slices.writing import write_named
from moe_ckpt.storage.base import Chunk, Storage


@dataclass(frozen=True)
class WrittenShare:
    """The files of one rank's share of a checkpoint on storage."""

    files: tuple[FileRecord, ...]
    state: StateRecord

    @property
    def rows(self) -> tuple[bytes, bytes]:
        """Returns the rows of files and of the state, as they will be in the part document."""
        return b"".join(map(file_row, self.files)), state_row(self.state)

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return self.state.nbytes + sum(file.nbytes for file in self.files)


def write_made_share(
    storage: Storage, of: Manifest, rank: int, slices: Sequence[tuple[SliceEntry, torch.Tensor]], state: bytes
) -> WrittenShare:
    """Writes the shards and the state file of a rank.

    Args:
        storage: Of the store.
        of: The checkpoint: its run, step and generation.
        rank: Whose share it is.
        slices: With their bytes, ``[nbytes]`` uint8 on the host; places and checksums are set here.
        state: The bytes of the state file.

    Raises:
        OSError: They cannot be written.
        NotFiniteError: There is NaN or infinity in them.
    """
    spoiled = (entry.key for entry, data in slices if entry.operator and not all_finite(data.numpy().data, entry.dtype))
    judged = judged_in(unseal(state, state_path(of.directory, rank))["state"])
    first = next(filter(judged, spoiled), "")
    if first:
        raise NotFiniteError(of.directory, f"{first} on rank {rank}")
    by_kind: dict[str, list[tuple[SliceEntry, torch.Tensor]]] = {kind: [] for kind in KINDS}
    for entry, data in slices:
        by_kind[kind_of(entry.operator)].append((entry, data))
    files = tuple(
        _write_shard(storage, of, rank, kind, shard_slices) for kind, shard_slices in by_kind.items() if shard_slices
    )
    path = state_path(of.directory, rank)
    write_named(storage, path, [state])
    return WrittenShare(files, StateRecord(path, len(state), digest(state), rank))


def _write_shard(
    storage: Storage, of: Manifest, rank: int, kind: str, slices: Sequence[tuple[SliceEntry, torch.Tensor]]
) -> FileRecord:
    data = {entry.name: values.numpy().data for entry, values in slices}
    placed = lay_out([entry for entry, _ in slices])
    entries = tuple(replace(entry, checksum=xxhash.xxh3_64_intdigest(data[entry.name])) for entry in placed)
    header = encode_header(ShardHeader(of.run_id, of.step, of.generation, rank, entries))
    path = shard_path(of.directory, rank, kind)
    nbytes = write_named(storage, path, [header, *(data[entry.name] for entry in entries)])
    return FileRecord(path, nbytes, len(header), digest(header), of.step, rank)


def state_without(raw: Chunk, key: str, path: str) -> bytes:
    """Returns a state file without one part of the rank's state.

    Args:
        path: For messages.

    Raises:
        DamagedError: It is none.
    """
    body: dict[str, Any] = unseal(raw, path)
    return seal({**body, "state": {name: value for name, value in body["state"].items() if name != key}})


def commit_made(storage: Storage, of: Manifest, shares: Sequence[tuple[bytes, bytes]], parent: str | None) -> Manifest:
    """Writes part and manifest: when it returns, the checkpoint exists.

    Args:
        storage: Of the store.
        of: The checkpoint, in which every operator is as of its step.
        shares: ``WrittenShare.rows`` of all its ranks.
        parent: As ``Manifest.parent``.

    Raises:
        OSError: They cannot be written.
    """
    files, states = (b"".join(rows) for rows in zip(*shares, strict=True))
    operators = Fragment(sorted(of.operators))
    record, raw = encode_part(
        of.run_id, of.step, of.generation, of.world_size, files=files, states=states, operators=operators
    )
    write_named(storage, record.path, [raw])
    manifest = replace(
        of,
        created_unix_secs=time.time(),
        parent=parent,
        files=(),
        operators={},
        states=(),
        window=(),
        tokens=_all_saved(of.tokens),
        parts=(PartRecord(record.directory, record.nbytes, record.digest),),
    )
    write_named(storage, f"{manifest.directory}/{MANIFEST_NAME}", [manifest.encode()])
    return manifest


def _all_saved(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Every expert is stored as it was after the step."""
    return {**tokens, "saved": {Tier.STORAGE.value: tokens["applied"]}} if tokens else {}
