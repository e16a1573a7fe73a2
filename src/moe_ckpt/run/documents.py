"""Reads the documents of a store. The size is checked first, so that none costs more memory than a document may need,
and decoding is strict. For the engine, which maintains a store, and for recovery, which opens it.

Also here: the record of a finished run, written by rank 0 when training ended well, and read when it is started again;
and a thread that reads, while the process builds its model, the files from which the run will most likely resume.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from moe_ckpt.errors import DamagedError, FormatVersionError, StoreError
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    Part,
    PartRecord,
    compose_manifest,
    parse_step_dir,
    shard_path,
    step_of,
)
from moe_ckpt.format.run_records import FINISHED_NAME, Finished
from moe_ckpt.format.sealed import FRAME_NBYTES, MAX_SEALED_BYTES, digest, require_frame
from moe_ckpt.format.shard import MAX_HEADER_BYTES, ShardHeader, decode_header
from moe_ckpt.ports import Communicator
from moe_ckpt.storage.base import Chunk, ReadableStorage, Storage, split_path
from moe_ckpt.storage.local import LocalStorage
from moe_ckpt.threads import ThreadName, map_ahead, named_thread

log = logging.getLogger("moe_ckpt")

_READERS = 16
"""Threads that read parts. A round of MoC has as many parts as a layer has experts, each a few requests to a server."""
_LOOK_FIRST_NBYTES = 4 << 20
"""Of larger files, beginning and end are read before the rest."""
_PIECE_NBYTES = 4 << 20
_under_way = set[threading.Event]()
"""Threads that read ahead end when theirs is set."""
Description = TypeVar("Description")
_warned_of: set[tuple[str, str]] = set()
"""(root, name) of the links for which this process has logged a warning."""


def map_steps(storage: ReadableStorage, look: Callable[[str], Description]) -> dict[str, Description]:
    """Returns step directory -> result of ``look``, ordered by (generation, step).

    A symbolic link with the name of a step that leads out of the store is skipped, with one warning per process.

    Raises:
        OSError: the storage does not answer.
    """
    steps = {name: parsed for name in storage.list() if (parsed := parse_step_dir(name)) is not None}
    described: dict[str, Description] = {}
    for name in sorted(steps, key=lambda name: (steps[name][1], steps[name][0])):
        try:
            described[name] = look(name)
        except DamagedError as error:
            if (storage.root, name) not in _warned_of:
                _warned_of.add((storage.root, name))
                log.warning("%s/%s is skipped: it %s", storage.root, name, error.reason)
    return described


def read_sealed(storage: ReadableStorage, path: str) -> Chunk:
    """Returns the bytes of a sealed document (``store.json``, a manifest, a part, a state file), not yet unsealed.

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


def read_commit(storage: ReadableStorage, directory: str) -> Manifest:
    """Returns the commit record of a step directory, without the contents of its parts.

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


def read_manifest(storage: ReadableStorage, directory: str, cached_parts: MutableMapping[PartRecord, Part]) -> Manifest:
    """Returns the commit record of a step directory, with the contents of its parts.

    Args:
        storage: Of the store.
        directory: Of the step.
        cached_parts: Parts that were read before; parts that are read now are added.

    Raises:
        DamagedError, FormatVersionError, FileNotFoundError, OSError: as ``read_commit`` and ``read_part``.
    """
    manifest = read_commit(storage, directory)
    return compose_manifest(manifest, read_parts(manifest, cached_parts, lambda record: read_part(storage, record)))


def read_parts(
    manifest: Manifest, cached_parts: MutableMapping[PartRecord, Part], read: Callable[[PartRecord], Chunk]
) -> Sequence[Part]:
    """Returns the parts that a manifest names, in its order. Parts that are not cached are read, several at a time.

    The calling thread decodes them: several threads would take twice the processor time, since they wait for the
    interpreter's lock.

    Args:
        manifest: Names the parts.
        cached_parts: Parts that were read before; parts that are read now are added.
        read: Returns a part's bytes (``read_part``).

    Raises:
        DamagedError, OSError: Of the first such part in the manifest's order; no further part is read then.
    """
    todo = [record for record in manifest.parts if record not in cached_parts]
    for record, raw in zip(todo, map_ahead(ThreadName.PARTS, _READERS, read, todo), strict=True):
        try:
            cached_parts[record] = Part.decode(raw, record.path)
        except DamagedError as error:
            raise DamagedError(error.path, error.reason, step=step_of(record.directory)) from error
    return [cached_parts[record] for record in manifest.parts]


def read_part(storage: ReadableStorage, record: PartRecord) -> Chunk:
    """Returns the bytes of a part that a manifest names, not yet decoded.

    Raises:
        DamagedError: it is missing, or not what was written.
        OSError: the storage does not answer.
    """
    step = step_of(record.directory)
    try:
        raw = read_sealed(storage, record.path)
    except FileNotFoundError as error:
        raise DamagedError(record.path, "is missing", step=step) from error
    if (len(raw), digest(raw)) != (record.nbytes, record.digest):
        raise DamagedError(record.path, "checksum mismatch (damaged, or another's file)", step=step)
    return raw


def read_header(storage: ReadableStorage, record: FileRecord) -> ShardHeader:
    """Returns the header of a shard, after comparing its size and checksum with the manifest's.

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


def write_finished(
    storage: Storage, newest: str, reason: str, limits: Mapping[str, int], callbacks: Mapping[str, Any]
) -> None:
    """Records the end of the run. Called on rank 0, after the last checkpoint was committed.

    An error is a warning, since it costs little: the next start repeats the end of the last epoch.

    Args:
        storage: Of the run.
        newest: Directory of the last checkpoint.
        reason, limits, callbacks: See ``Finished``.
    """
    try:
        last = read_commit(storage, newest)
        finished = Finished(last.run_id, last.step, last.generation, reason, limits, callbacks)
        storage.delete(FINISHED_NAME)
        storage.write(FINISHED_NAME, [finished.encode()])
    except (OSError, StoreError) as error:
        log.warning(
            "cannot record in %s that this run is finished: %s. Its checkpoints are complete; if started again, it "
            "will repeat the end of its last epoch",
            storage.root,
            error,
        )


def read_finished(storage: ReadableStorage, comm: Communicator, manifest: Manifest) -> Finished | None:
    """Returns the record of the run's end after the checkpoint ``manifest``; None if the run did not end there.

    A collective, called by all ranks before training.
    """
    raw = b""
    if comm.rank == 0:
        try:
            document = bytes(read_sealed(storage, FINISHED_NAME))
            Finished.decode(document, FINISHED_NAME)
            raw = document
        except FileNotFoundError:
            pass
        except (OSError, DamagedError, FormatVersionError) as error:
            unfinished = "The run is treated as unfinished"
            log.warning("%s of %s cannot be used: %s. %s", FINISHED_NAME, storage.root, error, unfinished)
    raw = comm.broadcast(raw)
    if not raw:
        return None
    finished = Finished.decode(raw, FINISHED_NAME)
    end = (finished.run_id, finished.step, finished.generation)
    return finished if end == (manifest.run_id, manifest.step, manifest.generation) else None


# --- reading ahead ---
#
# The files come into the page cache. It has no other effect: the resume reads and verifies all files, which takes less
# time then.


def read_ahead(dirpath: str | os.PathLike[str]) -> None:
    """Begins to read, on a thread, the files of the newest checkpoint in a directory that this rank has written.

    A rank that resumes needs mostly files that the same rank wrote. Its number comes from the launcher, since there is
    no process group yet.

    Args:
        dirpath: Of the store; nothing is read of a URL.
    """
    if "://" not in os.fspath(dirpath) and os.path.isdir(dirpath):
        stop = threading.Event()
        _under_way.add(stop)
        named_thread(ThreadName.READ, _read_ahead, os.fspath(dirpath), stop, suffix="-ahead").start()


def end_reading_ahead() -> None:
    """Stops reading ahead: from here on the run itself reads."""
    while _under_way:
        _under_way.pop().set()


def _read_ahead(dirpath: str, stop: threading.Event) -> None:
    try:
        storage, rank = LocalStorage(dirpath), int(os.environ.get("RANK", "0"))
        steps = map_steps(storage, lambda name: storage.exists(f"{name}/{MANIFEST_NAME}"))
        newest = next((name for name in reversed(steps) if steps[name]), None)
        if newest is None or stop.is_set():
            return
        for path in [record.path for record in read_manifest(storage, newest, {}).files if record.rank == rank]:
            _read_file(os.path.join(storage.root, *split_path(path, storage.root)), stop)
    except Exception as error:  # the resume meets the same error, and reports it
        log.info("%s is not read ahead: %s", dirpath, error)


def _read_file(path: str, stop: threading.Event) -> None:
    buffer = bytearray(_PIECE_NBYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while not stop.is_set() and os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)
