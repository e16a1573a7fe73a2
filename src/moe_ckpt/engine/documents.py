"""The one way in which documents are read from a store: checked for size first, so that none costs more memory than a
document may need, and decoded strictly. For the engine, which looks after a store, and for recovery, which opens it.
"""

from __future__ import annotations

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MANIFEST_NAME, FileRecord, Manifest, parse_step_dir, shard_path
from moe_ckpt.format.sealed import FRAME_NBYTES, MAX_SEALED_BYTES, digest, require_frame
from moe_ckpt.format.shard import MAX_HEADER_BYTES, ShardHeader, decode_header
from moe_ckpt.storage.base import Storage

_LOOK_FIRST_NBYTES = 4 << 20
"""Larger files are looked at, at their beginning and end, before they are read."""


def read_sealed(storage: Storage, path: str) -> bytes | bytearray:
    """The bytes of a sealed document (``store.json``, a manifest, a state file), not yet unsealed.

    Raises:
        DamagedError: the file is larger than a document may be, or is large and does not begin and end like one.
        FileNotFoundError: there is none.
        OSError: the storage does not answer.
    """
    nbytes = storage.size(path)
    if nbytes > MAX_SEALED_BYTES:
        raise DamagedError(path, f"{nbytes:,} bytes are more than a sealed file may have")
    if nbytes > _LOOK_FIRST_NBYTES:
        head, tail = storage.read(path, 0, FRAME_NBYTES), storage.read(path, nbytes - FRAME_NBYTES, FRAME_NBYTES)
        require_frame(head, tail, path)
    return storage.read(path, 0, nbytes)


def read_manifest(storage: Storage, directory: str) -> Manifest:
    """The commit record of a step directory.

    Raises:
        DamagedError: it is no manifest of this format, or that of another directory.
        FormatVersionError: of a version that this package does not read.
        FileNotFoundError: the step was not committed.
        OSError: the storage does not answer.
    """
    path = f"{directory}/{MANIFEST_NAME}"
    manifest = Manifest.decode(read_sealed(storage, path), path)
    if manifest.directory != directory:
        raise DamagedError(path, f"is the manifest of {manifest.directory}, in the wrong place")
    return manifest


def read_header(storage: Storage, record: FileRecord) -> ShardHeader:
    """The header of a shard, after its size and checksum were compared with the manifest's.

    Raises:
        DamagedError: they differ, or the header is that of another file.
        FileNotFoundError: there is no such shard.
        OSError: the storage does not answer.
    """
    nbytes = storage.size(record.path)
    if nbytes != record.nbytes:
        raise DamagedError(record.path, f"has {nbytes:,} bytes, the manifest says {record.nbytes:,}")
    if not 8 <= record.header_nbytes <= min(nbytes, MAX_HEADER_BYTES + 8):
        raise DamagedError(record.path, f"cannot have a header of {record.header_nbytes:,} bytes")
    raw = storage.read(record.path, 0, record.header_nbytes)
    if digest(raw) != record.header_digest:
        raise DamagedError(record.path, "checksum mismatch in the header (damaged, or another's file)")
    header = decode_header(raw, record.path)
    directory = record.path.partition("/")[0]
    if (header.step, header.generation) != parse_step_dir(directory) or (header.step, header.rank) != (
        record.step,
        record.rank,
    ):
        raise DamagedError(record.path, f"is the shard of step {header.step}, rank {header.rank}")
    expected = {shard_path(directory, header.rank, kind) for kind in ("expert", "non_expert")}
    if record.path not in expected or record.header_nbytes + header.data_nbytes != nbytes:
        raise DamagedError(record.path, "its header describes another file")
    return header
