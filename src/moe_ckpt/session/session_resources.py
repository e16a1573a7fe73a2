"""Beginning and end of a session: the store and its lock, rank 0's committer, the threads.

Rank 0 checks, locks and cleans the store, and tells the other ranks.
"""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

from moe_ckpt.commit.commit import Committer
from moe_ckpt.commit.keeping import StoreKeeper
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.core.operators import Catalog
from moe_ckpt.errors import (
    ConfigError,
    DamagedError,
    FormatVersionError,
    MoECheckpointError,
    StoreError,
    StoreUnwritableError,
)
from moe_ckpt.format.manifest import STORE_NAME, parse_step_dir
from moe_ckpt.format.run_records import Identity
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.step_storage import PATIENCE_SECS, StepStorage
from moe_ckpt.reading.together import by_rank_zero
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.documents import read_commit, read_header, read_manifest, read_sealed
from moe_ckpt.run.events import Closed, Opened
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.lock import StoreLock
from moe_ckpt.tiers import host_tier
from moe_ckpt.tiers.host_memory import open_memory
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

Shapes = Mapping[str, Sequence[int]]
"""Name of a parameter -> its shape as a whole."""
_MODEL = "model/"
_SHOWN = 3


def open_store(
    storage: Storage,
    catalog: Catalog,
    comm: Communicator,
    lock: StoreLock,
    retention: RetentionPolicy,
    patience_secs: float = PATIENCE_SECS,
) -> tuple[str, int, StoreKeeper | None]:
    """Called once by all ranks before training; rank 0 takes the ``lock``.

    Args:
        catalog: Of the model.
        patience_secs: For how long, in all, reads that fail are tried again.

    Returns:
        The store's run, the generation that this life of it writes under, and rank 0's keeper.

    Raises:
        StoreError: the directory belongs to another model.
        StoreInUseError: another run holds the lock.
        StoreUnwritableError: the directory cannot be created or written.
        StoreError: on the other ranks, with rank 0's message.
    """
    keepers: list[StoreKeeper] = []

    def opened() -> tuple[str, int]:
        try:
            run_id, generation, keeper = _open(storage, catalog, lock, retention, patience_secs, comm.world_size)
        except MoECheckpointError:
            raise
        except OSError as error:
            raise StoreUnwritableError(f"the store {storage.root} cannot be opened: {error}") from error
        keepers.append(keeper)
        return run_id, generation

    try:
        run_id, generation = by_rank_zero(comm, opened, "open the store")
    except BaseException:
        if keepers:  # the others did not hear of it
            lock.release()
        raise
    return run_id, generation, next(iter(keepers), None)


def _open(
    storage: Storage,
    catalog: Catalog,
    lock: StoreLock,
    retention: RetentionPolicy,
    patience_secs: float,
    ranks: int,
) -> tuple[str, int, StoreKeeper]:
    fingerprint = catalog.fingerprint()
    storage.probe()
    lock.acquire()
    try:
        lock.renew_meanwhile()
        patient = StepStorage(storage, patience_secs)
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
    return identity.run_id, generation, keeper


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


class _Phase(enum.Enum):
    MADE = "call open() first"
    OPEN = ""
    CLOSED = "call nothing after finish() or close()"
    """The store is released, or its lock is left to the thread that still writes."""


class SessionResources:
    """Made, then open, then closed, each once; or closed without ever having been open.

    Attributes:
        generation: Life of the run, which names step directories.
        committer: On rank 0.
    """

    def __init__(self, run: RunContext) -> None:
        self.generation = 0
        self.committer: Committer | None = None
        self._run = run
        self._phase = _Phase.MADE
        self._pipeline: Pipeline | None = None

    def open(self) -> Pipeline:
        """Take possession of the store and start the threads. Where that fails, ``close`` must follow."""
        run, settings = self._run, self._run.settings
        run_id, generation, keeper = open_store(run.storage, run.catalog, run.comm, run.lock, settings.retention)
        memory = open_memory(run, run_id, generation)
        try:
            self.generation = memory.generation
            run.comm.enter(memory.generation)
            if keeper is not None:
                self.committer = Committer(run, keeper)
            pipeline = self._pipeline = Pipeline(run, run_id, memory, self.committer)
        except BaseException:
            host_tier.leave(memory.tier, run.storage.root, keep=True)  # no pipeline will
            raise
        self._phase = _Phase.OPEN
        run.tell(
            Opened(
                catalog=run.catalog,
                placement=run.placement,
                policy=run.policy.describe(),
                run_id=run_id,
                generation=memory.generation,
                ranks=run.comm.world_size,
                ranks_per_node=min(settings.local_ranks, run.comm.world_size),
                host_memory_bytes=pipeline.snapshot_bytes * settings.max_in_flight,
                replicas=0 if settings.memory is None else settings.memory.replicas,
            )
        )
        return pipeline

    @property
    def is_open(self) -> bool:
        return self._phase is _Phase.OPEN

    @property
    def pipeline(self) -> Pipeline:
        """Raises ``ConfigError`` unless the session is open."""
        if self._pipeline is None:
            raise ConfigError(f"CheckpointSession: {self._phase.value}")
        return self._pipeline

    @property
    def memory(self) -> MemoryTier | None:
        """Memory that outlives the process, if the session is open and has it."""
        return None if self._pipeline is None else self._pipeline.memory

    def close(self, timeout_secs: float | None, *, keep: bool) -> None:
        """Stop the threads, and release the store. Safe to call twice.

        Args:
            timeout_secs: Longest wait for the thread that writes; None for that of the settings.
            keep: Training failed: leave the recovery buffer in memory.
        """
        try:
            self._run.tell(Closed(finished=not keep))
        finally:
            self._close(self._run.settings.timeout_secs if timeout_secs is None else timeout_secs, keep=keep)

    def _close(self, timeout_secs: float, *, keep: bool) -> None:
        release = self._run.lock.release
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # Its thread may write on: whoever comes next in this process must not share the store with it.
            self._phase = _Phase.CLOSED
            if not pipeline.close(timeout_secs, keep=keep, afterwards=release):
                log.warning(
                    "a checkpoint is still being written; training does not wait for it, but the store stays "
                    "locked until it ends%s",
                    "" if self._run.comm.world_size == 1 else ". Ranks no longer wait for each other to commit it",
                )
        elif self._phase is _Phase.MADE:
            release()
            self._phase = _Phase.CLOSED
        self._run.comm.close()
