"""Opens what a session needs: the store and its lock, rank 0's committer, host memory, the threads.

Rank 0 checks, locks and cleans the store, and tells the other ranks.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence

from moe_ckpt.commit.commit import Committer
from moe_ckpt.commit.keeping import StoreKeeper
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.errors import (
    DamagedError,
    FormatVersionError,
    MoECheckpointError,
    StoreError,
    StoreUnwritableError,
)
from moe_ckpt.format.manifest import MANIFEST_NAME, PART_NAME, STORE_NAME, parse_step_dir
from moe_ckpt.format.run_records import Identity
from moe_ckpt.reading.collective import on_rank_zero
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.documents import read_header, read_manifest
from moe_ckpt.slices.snapshot import write_named
from moe_ckpt.storage.base import ReadableStorage, Storage
from moe_ckpt.tiers.host_memory import keep_for_next_session, open_memory

log = logging.getLogger("moe_ckpt")

Shapes = Mapping[str, Sequence[int]]
"""Name of a parameter -> its shape as a whole."""
_MODEL = "model/"
_NOTE = re.compile(r"\.generation_(\d{1,18})", re.ASCII)
"""Name of an empty file that says which generation a start has taken."""
_SHOWN = 3


def open_store(run: RunContext) -> tuple[str, int, StoreKeeper | None]:
    """Called once by all ranks before training; rank 0 takes the lock, and holds it on after an error.

    Returns:
        The store's run, the generation that this life of it writes under, and rank 0's keeper.

    Raises:
        StoreError: the directory belongs to another model, or is a step directory.
        StoreInUseError: another run holds the lock.
        StoreUnwritableError: the directory cannot be created or written.
        StoreError: on the other ranks, with rank 0's message.
    """
    keeper: StoreKeeper | None = None

    def opened() -> tuple[str, int]:
        nonlocal keeper
        try:
            run_id, generation, keeper = _open(run)
        except MoECheckpointError:
            raise
        except OSError as error:
            raise StoreUnwritableError(f"the store {run.storage.root} cannot be opened: {error}") from error
        return run_id, generation

    run_id, generation = on_rank_zero(run.comm, opened, "open the store")
    return run_id, generation, keeper


def _open(run: RunContext) -> tuple[str, int, StoreKeeper]:
    storage, fingerprint = run.storage, run.catalog.fingerprint
    if {MANIFEST_NAME, PART_NAME} & set(storage.list()):
        store, _, step = str(storage.root).rpartition("/")
        raise StoreError(f"{storage.root} is one checkpoint, {step}, of the store {store}: name {store} as dirpath")
    storage.probe()
    run.lock.acquire()
    run.lock.renew_meanwhile()
    reader = StoreReader(storage)
    names = reader.storage.list()
    steps = {name: parsed for name in names if (parsed := parse_step_dir(name)) is not None}
    identity = _identity(storage, reader, names, has_steps=bool(steps))
    if identity is None:
        identity = Identity(secrets.token_hex(16), fingerprint, time.time())
        storage.write(STORE_NAME, [identity.encode()])
    if identity.fingerprint != fingerprint:
        differences = describe_differences(reader.storage, sorted(steps), run.catalog.parameters)
        identity.require_model(fingerprint, storage.root, differences)
    keeper = StoreKeeper(storage, identity, run.settings.retention, run.lock, run.comm.world_size)
    keeper.clean_start()
    generation = 1 + max((*_noted(names).values(), *(generation for _, generation in steps.values())), default=-1)
    return identity.run_id, generation, keeper


def _identity(storage: Storage, reader: StoreReader, names: Sequence[str], *, has_steps: bool) -> Identity | None:
    """Returns whose store this is; None for a new one.

    A damaged or lost store.json is written again from the manifests, which repeat what it said.

    Args:
        storage: Of the store.
        reader: Of the same.
        names: What is in it.
        has_steps: There are step directories among them.
    """
    if STORE_NAME not in names and not has_steps:
        return None
    identity: Identity | None = None
    try:
        identity = reader.identity()
        damage = reader.identity_damage
    except DamagedError as error:
        damage = error
        if has_steps:
            raise StoreError(
                f"{storage.root}/{error}, and the step directories beside it do not show which run they belong to. "
                "Choose another dirpath, or restore the file."
            ) from error
    if damage is not None:
        log.warning("%s/%s; it is written again", storage.root, damage)
        storage.delete(STORE_NAME)
        if identity is not None:
            storage.write(STORE_NAME, [identity.encode()])
    return identity


def describe_differences(storage: ReadableStorage, directories: Sequence[str], here: Shapes) -> str:
    """Describes how the newest readable checkpoint's parameters differ from ``here``; "" where that cannot be told.

    Args:
        directories: Step directories, oldest first. For a message only: no tensor is read.
    """
    for directory in reversed(directories):
        try:
            headers = [read_header(storage, record) for record in read_manifest(storage, directory, {}).files]
        except (OSError, DamagedError, FormatVersionError):
            continue
        entries = (entry for header in headers for entry in header.slices if entry.key.startswith(_MODEL))
        return "; ".join(_differences({entry.key.removeprefix(_MODEL): entry.global_shape for entry in entries}, here))
    return ""


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


def _noted(names: Sequence[str]) -> dict[str, int]:
    """Returns the files among ``names`` that say which generation a start has taken, each with that."""
    return {match[0]: int(match[1]) for match in map(_NOTE.fullmatch, names) if match}


def _note(storage: Storage, generation: int) -> None:
    """Notes in the store which generation this start has taken, as all that it saves may come to be in memory alone.

    If a node is lost with that, the next start must not take the generation again: the node may come back. Rank 0 does
    this before any checkpoint can be complete. An error is a warning.
    """
    try:
        write_named(storage, f".generation_{generation}", [b""])
        for name, earlier in _noted(storage.list()).items():
            if earlier < generation:
                storage.delete(name)
    except (OSError, MoECheckpointError) as error:
        log.warning("cannot note in %s that generation %d is in use: %s", storage.root, generation, error)


def open_pipeline(run: RunContext) -> Pipeline:
    """Takes possession of the store, opens host memory and starts the threads. A collective, before training.

    Where that fails, the lock is held on: ``StoreLock.release`` must follow.
    """
    run_id, generation, keeper = open_store(run)
    tier = open_memory(run, run_id, generation)
    try:
        run.comm.enter(tier.generation)
        if keeper is not None and tier.outlives_process:
            _note(run.storage, tier.generation)
        return Pipeline(run, tier, None if keeper is None else Committer(run, keeper))
    except BaseException:
        keep_for_next_session(tier, run.storage.root, keep=True)  # no pipeline will
        raise
