"""Opens a store for a run: rank 0 checks, locks and cleans it, and tells the other ranks."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.engine.documents import read_commit, read_header, read_manifest, read_sealed
from moe_ckpt.engine.keeping import StoreKeeper
from moe_ckpt.errors import DamagedError, FormatVersionError, MoECheckpointError, StoreError, StoreUnwritableError
from moe_ckpt.format.manifest import STORE_NAME, parse_step_dir
from moe_ckpt.format.run_records import Identity
from moe_ckpt.ports import Communicator
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.lock import StoreLock
from moe_ckpt.storage.patience import PATIENCE_SECS, PatientStorage

log = logging.getLogger("moe_ckpt")

Shapes = Mapping[str, Sequence[int]]
"""Name of a parameter -> its shape as a whole."""
_MODEL = "model/"
_SHOWN = 3


@dataclass(frozen=True)
class OpenedStore:
    """The identity in ``store.json``, and the generation that this life of the run writes under.

    Attributes:
        keeper: On rank 0.
    """

    identity: Identity
    generation: int
    keeper: StoreKeeper | None = None

    @property
    def run_id(self) -> str:
        """The run id of the store."""
        return self.identity.run_id


def open_store(
    storage: Storage,
    catalog: Catalog,
    comm: Communicator,
    lock: StoreLock,
    retention: RetentionPolicy,
    patience_secs: float = PATIENCE_SECS,
) -> OpenedStore:
    """Called once by all ranks before training; rank 0 takes the ``lock``.

    Args:
        catalog: Of the model.
        patience_secs: For how long, in all, reads that fail are tried again.

    Raises:
        StoreError: the directory belongs to another model.
        StoreInUseError: another run holds the lock.
        StoreUnwritableError: the directory cannot be created or written.
        StoreError: on the other ranks, with rank 0's message.
    """
    if comm.rank == 0:
        try:
            opened = _open(storage, catalog, lock, retention, patience_secs, comm.world_size)
        except Exception as error:  # whatever it is, the other ranks are waiting for an answer
            comm.broadcast(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            if isinstance(error, MoECheckpointError) or not isinstance(error, OSError):
                raise
            raise StoreUnwritableError(f"the store {storage.root} cannot be opened: {error}") from error
        try:
            comm.broadcast(json.dumps({"identity": asdict(opened.identity), "generation": opened.generation}).encode())
        except BaseException:
            lock.release()
            raise
        return opened
    answer = json.loads(comm.broadcast(b""))
    if "error" in answer:
        raise StoreError(f"rank 0 could not open the store: {answer['error']}")
    return OpenedStore(Identity(**answer["identity"]), answer["generation"])


def _open(
    storage: Storage,
    catalog: Catalog,
    lock: StoreLock,
    retention: RetentionPolicy,
    patience_secs: float,
    ranks: int,
) -> OpenedStore:
    fingerprint = catalog.fingerprint()
    storage.probe()
    lock.acquire()
    try:
        lock.renew_meanwhile()
        patient = PatientStorage(storage, patience_secs)
        names = patient.list()
        steps = {name: parsed for name in names if (parsed := parse_step_dir(name)) is not None}
        identity = _identity(patient, names, sorted(steps))
        if identity is None:
            identity = Identity(secrets.token_hex(16), fingerprint, time.time())
            storage.write(STORE_NAME, [identity.encode()])
        if identity.fingerprint != fingerprint:
            differences = describe_differences(patient, sorted(steps), catalog.parameters)
            identity.require_model(fingerprint, storage.root, differences)
        keeper = StoreKeeper(storage, identity, retention, lock, ranks)
        keeper.clean_start()
    except BaseException:
        lock.release()
        raise
    generation = 1 + max((generation for _, generation in steps.values()), default=-1)
    return OpenedStore(identity, generation, keeper)


def _identity(storage: Storage, names: list[str], directories: list[str]) -> Identity | None:
    """Whose store this is; None for a new one.

    A damaged or lost store.json is written again from the manifests, which repeat what it said.
    """
    where = f"{storage.root}/{STORE_NAME}"
    trouble = f"{where} is missing"
    if STORE_NAME in names:
        try:
            return Identity.decode(read_sealed(storage, STORE_NAME), where)
        except DamagedError as damage:
            trouble = str(damage)
    elif not directories:
        return None
    identities = [identity for name in directories if (identity := _identity_of(storage, name)) is not None]
    runs = {(identity.run_id, identity.fingerprint) for identity in identities}
    if len(runs) > 1 or (directories and not runs):
        raise StoreError(
            f"{trouble}, and the step directories beside it do not show which run they belong to. Choose another "
            "dirpath, or restore the file."
        )
    log.warning("%s; it is written again", trouble)
    storage.delete(STORE_NAME)
    if not identities:
        return None
    storage.write(STORE_NAME, [identities[0].encode()])
    return identities[0]


def _identity_of(storage: Storage, directory: str) -> Identity | None:
    """Identity according to one step's manifest; None if it has none that can be read."""
    try:
        manifest = read_commit(storage, directory)
    except (FileNotFoundError, DamagedError):
        return None
    return Identity(manifest.run_id, manifest.model.fingerprint, manifest.created_unix_secs)


def describe_differences(storage: Storage, directories: Sequence[str], here: Shapes) -> str:
    """Describes how the newest readable checkpoint's parameters differ from ``here``; "" where that cannot be told.

    Args:
        directories: Step directories, oldest first. For a message only: no tensor is read.
    """
    for directory in reversed(directories):
        try:
            stored = _stored(storage, directory)
        except (OSError, DamagedError, FormatVersionError):
            continue
        return "; ".join(_differences(stored, here))
    return ""


def _stored(storage: Storage, directory: str) -> Shapes:
    shapes: dict[str, Sequence[int]] = {}
    for record in read_manifest(storage, directory, {}).files:
        for entry in read_header(storage, record).slices:
            if entry.key.startswith(_MODEL):
                shapes[entry.key.removeprefix(_MODEL)] = entry.global_shape
    return shapes


def _differences(stored: Shapes, here: Shapes) -> list[str]:
    shapes = [
        f"{name} has shape {list(here[name])} in the model, {list(stored[name])} in the checkpoint"
        for name in sorted(here.keys() & stored.keys())
        if tuple(here[name]) != tuple(stored[name])
    ]
    lacking = [f"{name} of the model is not in the checkpoint" for name in sorted(here.keys() - stored.keys())]
    surplus = [f"{name} of the checkpoint is not in the model" for name in sorted(stored.keys() - here.keys())]
    return [text for kind in (shapes, lacking, surplus) for text in _some(kind)]


def _some(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _SHOWN
    return [*texts[:_SHOWN], f"and {more} more like that"] if more > 0 else list(texts)
