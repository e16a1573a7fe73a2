"""One rank's share of a checkpoint: checksum the slices, write the shards and the state, acknowledge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from moe_ckpt.engine.snapshot import ShardPart, Snapshot, part_bytes
from moe_ckpt.errors import StoreError, StoreUnwritableError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import FileRecord, StateRecord, shard_path, state_path
from moe_ckpt.format.sealed import digest, seal
from moe_ckpt.format.shard import ShardHeader, decode_header, encode_header
from moe_ckpt.storage.base import Chunk, Storage


@dataclass(frozen=True)
class Acknowledgement:
    """What a rank made durable. Rank 0 commits only on the content of these, never on a mere barrier."""

    rank: int
    error: str | None
    files: tuple[tuple[FileRecord, ShardHeader], ...] = ()
    state: StateRecord | None = None

    def encode(self) -> bytes:
        body: dict[str, Any] = {"rank": self.rank, "error": self.error}
        if self.error is None and self.state is not None:
            body["files"] = [[asdict(record), encode_header(header)[8:].decode()] for record, header in self.files]
            body["state"] = asdict(self.state)
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Acknowledgement:
        """Raises ``StoreError`` when a peer sent something else."""
        try:
            body = json.loads(raw)
            if body["error"] is not None:
                return cls(body["rank"], body["error"])
            files = tuple(_decode_file(fields, header) for fields, header in body["files"])
            return cls(body["rank"], None, files, StateRecord(**body["state"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"a rank's acknowledgement cannot be read ({error!r})") from error


def _decode_file(fields: dict[str, Any], header: str) -> tuple[FileRecord, ShardHeader]:
    record = FileRecord(**fields)
    raw = header.encode()
    return record, decode_header(len(raw).to_bytes(8, "little") + raw, record.path)


def write_share(storage: Storage, snapshot: Snapshot, run_id: str, rank: int, world_size: int) -> Acknowledgement:
    """Write this rank's shards and state durably. Raises ``OSError`` when storage fails."""
    files = tuple(_write_shard(storage, snapshot, part, run_id, rank) for part in snapshot.written)
    state = seal(
        {
            "kind": "moe_ckpt.state",
            "format_version": FORMAT_VERSION,
            "run_id": run_id,
            "step": snapshot.step,
            "generation": snapshot.generation,
            "rank": rank,
            "world_size": world_size,
            "state": snapshot.state,
        }
    )
    path = state_path(snapshot.directory, rank)
    write_named(storage, path, [state])
    return Acknowledgement(rank, None, files, StateRecord(path, len(state), digest(state), rank))


def _write_shard(
    storage: Storage, snapshot: Snapshot, part: ShardPart, run_id: str, rank: int
) -> tuple[FileRecord, ShardHeader]:
    data = part_bytes(snapshot, part).numpy().data
    entries = tuple(
        replace(entry, checksum=xxhash.xxh3_64_hexdigest(data[entry.begin : entry.end])) for entry in part.entries
    )
    header = ShardHeader(run_id, snapshot.step, snapshot.generation, rank, entries)
    raw = encode_header(header)
    path = shard_path(snapshot.directory, rank, part.kind)
    nbytes = write_named(storage, path, [raw, data])
    return FileRecord(path, nbytes, len(raw), digest(raw), snapshot.step, rank), header


def write_named(storage: Storage, path: str, chunks: Sequence[Chunk]) -> int:
    """``Storage.write`` whose error names the file: that of a full disk or of a failed fsync does not.

    Raises:
        StoreUnwritableError: a subclass of ``OSError``.
    """
    try:
        return storage.write(path, chunks)
    except OSError as error:
        raise StoreUnwritableError(f"{path} cannot be written: {error}") from error


def check_acknowledgements(acknowledgements: Sequence[Acknowledgement]) -> tuple[str, ...]:
    """The causes, if any, for which a checkpoint must not be committed."""
    return tuple(f"rank {ack.rank}: {ack.error}" for ack in acknowledgements if ack.error is not None)
