"""Opening a store: identity, committed steps, manifests, headers, tensors and state, all checked on the way.

Trust goes downwards: a manifest is sealed, it holds the checksum of every shard's header and of every
state file, and a header holds the checksum of every slice. Nothing is used before its checksum matched,
nothing is unpickled, and no size is believed before it was compared with the file's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch

from moe_ckpt.engine.documents import read_header, read_manifest, read_sealed
from moe_ckpt.errors import CoverageError, DamagedError, ForeignStoreError, NoCheckpointError
from moe_ckpt.format.contents import STATE_FILE, state_contents
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.identity import Identity
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    STORE_NAME,
    FileRecord,
    Manifest,
    StateRecord,
    check_version,
    parse_step_dir,
    state_path,
)
from moe_ckpt.format.schema import require, shown
from moe_ckpt.format.sealed import digest, unseal
from moe_ckpt.format.shard import ShardHeader
from moe_ckpt.format.tree import decode_tree
from moe_ckpt.recovery import index as indexing
from moe_ckpt.recovery.index import StoredSlice, TensorIndex
from moe_ckpt.recovery.slices import BadSlice, find_damage, read_slices, reported
from moe_ckpt.storage import Storage, open_storage
from moe_ckpt.storage.patience import PATIENCE_SECS, PatientStorage
from moe_ckpt.storage.steps import each_step

STORE_KIND = "moe_ckpt.store"
STATE_KIND = "moe_ckpt.state"
_READERS = 4
_log = logging.getLogger("moe_ckpt")

OnDamage = Callable[[str, Exception], None]
"""(directory that is passed over, what is wrong with it)."""


class StoreReader:
    """Reads one store. Not for use by two threads at once; keeps what it has checked.

    Methods raise ``DamagedError`` when bytes are missing or are not those that were written. When storage fails, it is
    asked again for up to ``patience_secs`` in all; then they raise ``StoreUnreadableError``, or at once
    ``StoreForbiddenError``.

    identity_damage: what is wrong with ``store.json``, once ``identity`` had to do without it.
    """

    def __init__(self, storage: Storage, patience_secs: float = PATIENCE_SECS) -> None:
        self.storage: Storage = PatientStorage(storage, patience_secs)
        self.identity_damage: DamagedError | None = None
        self._identity: Identity | None = None
        self._manifests: dict[str, Manifest] = {}
        self._headers: dict[FileRecord, ShardHeader] = {}
        self._index: tuple[Manifest, TensorIndex] | None = None

    def identity(self) -> Identity:
        """Whose store this is.

        A damaged or lost ``store.json`` does not make the checkpoints unusable: every manifest repeats
        what it says, so the identity is taken from them where they agree, with a warning.

        Raises:
            ForeignStoreError: there is neither a ``store.json`` of this package nor a readable manifest.
            FormatVersionError: the store is in a version that this package does not read.
            DamagedError: ``store.json`` is damaged and the manifests do not agree.
        """
        if self._identity is None:
            try:
                self._identity = self._stored_identity()
            except DamagedError as error:
                self._identity = self._inferred_identity(error)
        return self._identity

    def _stored_identity(self) -> Identity:
        with reported(STORE_NAME):
            raw = read_sealed(self.storage, STORE_NAME)
        kind = unseal(raw, STORE_NAME).get("kind")
        if kind != STORE_KIND:
            where = f"{self.storage.root}/{STORE_NAME}"
            raise ForeignStoreError(f"{where} is of a {shown(kind)}, not of a store of moe_ckpt")
        return Identity.decode(raw, STORE_NAME)

    def _inferred_identity(self, damage: DamagedError) -> Identity:
        found: dict[tuple[str, str], Manifest] = {}
        for directory in self.directories():
            try:
                manifest = self._decode_manifest(directory)
            except DamagedError:
                continue
            found[manifest.run_id, manifest.model.fingerprint] = manifest
        if not found:
            if self.storage.exists(STORE_NAME):
                raise damage
            raise ForeignStoreError(f"{self.storage.root} is no moe_ckpt store: it has no {STORE_NAME}")
        if len(found) > 1:
            others = ", ".join(manifest.directory for manifest in found.values())
            raise DamagedError(STORE_NAME, f"{damage.reason}, and these are of different runs: {others}")
        _log.warning("%s/%s: %s; its content is taken from the manifests", self.storage.root, STORE_NAME, damage.reason)
        self.identity_damage = damage
        [((run_id, fingerprint), oldest)] = found.items()
        return Identity(run_id, fingerprint, oldest.created_unix_secs)

    def directories(self) -> list[str]:
        """Committed step directories, newest first by (generation, step)."""
        with reported(self.storage.root):
            committed = each_step(self.storage, lambda name: self.storage.exists(f"{name}/{MANIFEST_NAME}"))
        return [name for name in reversed(committed) if committed[name]]

    def manifest(self, directory: str) -> Manifest:
        """The commit record of one step directory.

        Raises:
            DamagedError: its bytes are damaged, or it belongs to another directory or run.
        """
        if directory not in self._manifests:
            manifest = self._decode_manifest(directory)
            identity = self.identity()
            path = f"{directory}/{MANIFEST_NAME}"
            if manifest.run_id != identity.run_id:
                raise DamagedError(
                    path, f"belongs to run {manifest.run_id}, but the store to {identity.run_id}", step=manifest.step
                )
            if manifest.model.fingerprint != identity.fingerprint:
                raise DamagedError(path, "is of another model than the store", step=manifest.step)
            self._manifests[directory] = manifest
        return self._manifests[directory]

    def _decode_manifest(self, directory: str) -> Manifest:
        place = parse_step_dir(directory)
        with reported(f"{directory}/{MANIFEST_NAME}", place[0] if place else None):
            return read_manifest(self.storage, directory)

    def headers(self, manifest: Manifest) -> dict[str, ShardHeader]:
        """Path -> checked header, of every shard that the manifest names."""
        todo = [record for record in manifest.files if record not in self._headers]
        if todo:
            with ThreadPoolExecutor(min(_READERS, len(todo)), thread_name_prefix="moe_ckpt-headers") as pool:
                for record, header in zip(todo, pool.map(self.header, todo), strict=True):
                    self._headers[record] = header
        headers = {record.path: self._headers[record] for record in manifest.files}
        for record in manifest.files:
            run_id = headers[record.path].run_id
            if run_id != manifest.run_id:
                raise DamagedError(record.path, f"belongs to run {run_id}", step=record.step, rank=record.rank)
        return headers

    def header(self, record: FileRecord) -> ShardHeader:
        """One shard's header, after its size and checksum were compared with the manifest's."""
        with reported(record.path, record.step, record.rank):
            return read_header(self.storage, record)

    def index(self, manifest: Manifest) -> TensorIndex:
        """Which slices make up this checkpoint. Kept for the manifest asked for last."""
        if self._index is None or self._index[0] is not manifest:
            self._index = (manifest, indexing.build_index(manifest, self.headers(manifest)))
        return self._index[1]

    def prove(self, manifest: Manifest) -> None:
        """Raise ``CoverageError`` unless the checkpoint holds every element of every tensor exactly once."""
        indexing.prove(manifest, self.index(manifest))

    def read(self, stored: StoredSlice) -> torch.Tensor:
        """The verified values of one slice."""
        return next(iter(read_slices(self.storage, [stored])))[1]

    def read_many(self, wanted: Iterable[StoredSlice]) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
        """The verified values of many slices, in the order in which they lie on disk."""
        return read_slices(self.storage, wanted)

    def tensor(self, manifest: Manifest, key: str) -> torch.Tensor:
        """One whole tensor, put together from its slices. Prove the checkpoint first."""
        index = self.index(manifest)
        meta = index.meta(key)
        whole = torch.empty(meta.global_shape, dtype=TORCH_DTYPES[meta.dtype])
        for stored, values in self.read_many(index.tensors[key]):
            block = whole
            for dim, (start, length) in enumerate(zip(stored.entry.offsets, stored.entry.shape, strict=True)):
                block = block.narrow(dim, start, length)
            block.copy_(values)
        return whole

    def state(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """One rank's plain training state (loops, schedulers, buffers, RNG), with its tensors verified.

        Raises:
            CoverageError: the checkpoint was written by fewer ranks.
        """
        record = next((r for r in manifest.states if r.rank == rank), None)
        if record is None:
            have = f"{len(manifest.states)} ranks wrote it, there is no state of rank {rank}"
            raise CoverageError(f"checkpoint {manifest.directory}", (have,))
        body = self._state_body(manifest, record)
        prefix = f"side/{rank}/"
        side = {key: stored for key, stored in self.index(manifest).side.items() if key.startswith(prefix)}
        tensors = {stored.entry.key: values.clone() for stored, values in self.read_many(side.values())}
        try:
            state = decode_tree(body["state"], lambda name: tensors[prefix + name])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"its content cannot be decoded ({error!r})"
            raise DamagedError(record.path, reason, step=manifest.step, rank=rank) from error
        require(state_contents, state, record.path, "its content is none of a rank: ", step=manifest.step, rank=rank)
        return dict(state)

    def _state_body(self, manifest: Manifest, record: StateRecord) -> dict[str, Any]:
        where = {"step": manifest.step, "rank": record.rank}
        if record.path != state_path(manifest.directory, record.rank):
            raise DamagedError(record.path, f"is not where {manifest.directory} keeps the state", **where)
        with reported(record.path, **where):
            raw = read_sealed(self.storage, record.path)
            if len(raw) != record.nbytes:
                raise DamagedError(record.path, f"has {len(raw):,} bytes, the manifest says {record.nbytes:,}")
            if digest(raw) != record.digest:
                raise DamagedError(record.path, "checksum mismatch (damaged, or another rank's file)")
            body = unseal(raw, record.path)
            check_version(body, record.path, STATE_KIND)
            require(STATE_FILE, body, record.path, "no state file of this format: ")
        facts = tuple(body[name] for name in ("run_id", "step", "generation", "rank"))
        if facts != (manifest.run_id, manifest.step, manifest.generation, record.rank):
            raise DamagedError(record.path, f"is the state of (run, step, generation, rank) {facts}", **where)
        return body


def check_checkpoint(reader: StoreReader, manifest: Manifest, *, slices: bool = True) -> None:
    """Raise unless everything that this checkpoint needs is there and undamaged.

    With ``slices=False`` model and optimizer slices are not read (a restore checks them anyway); sizes,
    headers, coverage and every rank's state are.

    Raises:
        DamagedError: names the file, its step and rank, and the slice.
        CoverageError: parts are missing.
    """
    reader.prove(manifest)
    for slot in manifest.slots:
        if sorted(record.rank for record in slot.states) != list(range(manifest.world_size)):
            raise CoverageError(f"checkpoint {manifest.directory}", (f"step {slot.step} lacks a rank's state",))
        for record in slot.states:
            reader.state(slot, record.rank)
    if not slices:
        return
    live = sorted(reader.index(manifest).live, key=lambda s: s.path)
    by_file = [list(group) for _, group in groupby(live, key=lambda s: s.path)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="moe_ckpt-verify") as pool:
        for error in pool.map(lambda group: _first_damage(reader.storage, group), by_file):
            if error is not None:
                pool.shutdown(cancel_futures=True)
                raise error


def _first_damage(storage: Storage, slices: list[StoredSlice]) -> BadSlice | None:
    return next((error for _, error in find_damage(storage, slices) if error is not None), None)


def newest_good(
    reader: StoreReader, on_damage: OnDamage | None = None, *, deep: bool = True, skip: Collection[str] = ()
) -> Manifest | None:
    """The newest checkpoint that verifies, or None when the store has none at all.

    Each one passed over is logged and told to ``on_damage``. With ``deep=False`` slices are left to the
    restore that follows; if that finds damage, ask again with the directory added to ``skip``.

    Raises:
        NoCheckpointError: there are checkpoints, but every one is damaged. (None would make the caller
            start from nothing and, by retention, delete what a person might still save.)
    """
    problems: list[str] = []
    for directory in reader.directories():
        if directory in skip:
            problems.append(f"{directory} (skipped)")
            continue
        try:
            manifest = reader.manifest(directory)
            check_checkpoint(reader, manifest, slices=deep)
        except (DamagedError, CoverageError) as error:
            _log.warning("checkpoint %s is passed over: %s", directory, error)
            problems.append(f"{directory} ({error})")
            if on_damage is not None:
                on_damage(directory, error)
        else:
            return manifest
    if problems:
        raise NoCheckpointError(
            f"no checkpoint in {reader.storage.root} is usable: {'; '.join(problems[:8])}. To start over, move the "
            "directory away or give another dirpath."
        )
    return None


def open_step(path: str | os.PathLike[str]) -> tuple[StoreReader, Manifest]:
    """The checkpoint at a path or URL: a step directory, a link to one, or a whole store (its newest good step).

    Only manifest, headers and state are checked here; slices are when they are read.

    Raises:
        NoCheckpointError: nothing of this package, or nothing committed, is there; says what is.
        DamagedError: the named step is damaged. For a whole store the newest usable step is taken instead.
    """
    storage, directory = locate(path)
    reader = StoreReader(storage)
    if directory is not None:
        committed = reader.directories()
        if directory not in committed:
            fate = "was not committed" if storage.exists(directory) else "does not exist"
            have = f"committed there: {', '.join(committed[:6])}" if committed else "no step is committed there"
            raise NoCheckpointError(f"checkpoint {path} {fate} (no {MANIFEST_NAME}); {have}")
        return reader, reader.manifest(directory)
    require_store(reader, path)
    manifest = newest_good(reader, deep=False)
    if manifest is None:
        raise NoCheckpointError(f"the store {path} has no committed step yet")
    return reader, manifest


def locate(path: str | os.PathLike[str]) -> tuple[Storage, str | None]:
    """(the store's storage, name of the step directory) of a path; no name when it is not named like a step.

    Local links are followed first, so that a link named "last" will do; so will the path of a manifest.
    """
    text = os.fspath(path)
    if "://" not in text:
        text = os.path.realpath(os.path.expanduser(text))
    text = text.rstrip("/").removesuffix(f"/{MANIFEST_NAME}")
    parent, _, name = text.rpartition("/")
    if parse_step_dir(name) is not None:
        return open_storage(parent or "/"), name
    return open_storage(text or "/"), None


def require_store(reader: StoreReader, path: str | os.PathLike[str]) -> None:
    """Raise ``NoCheckpointError``, saying what is there instead, unless the place looks like a store."""
    if not reader.storage.exists(STORE_NAME) and not reader.directories():
        raise NoCheckpointError(
            f"{path} is neither a step directory nor a store of moe_ckpt: {_describe(reader.storage)}. "
            "Give a directory such as <dirpath>/step_00000120."
        )


def _describe(storage: Storage) -> str:
    """What a directory holds, in a few words."""
    names = storage.list()
    if not names:
        return "there is nothing, or it is a file"
    return "there is " + ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
