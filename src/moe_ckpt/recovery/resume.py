"""Come back to the newest checkpoint that every rank can load.

Rank 0 says which checkpoint is tried, each rank loads what it needs and verifies every slice first, and
one failing rank sends all of them to the next older one. So the ranks never disagree, and a damaged file
costs the steps between two checkpoints, not the run. Experts that storage has in older versions only are
then taken from host memory where the fault left it alive (``recovery.overlay``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.host_tier import HostTier
from moe_ckpt.errors import CoverageError, DamagedError, NoCheckpointError, StoreError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import Communicator, TrainingState
from moe_ckpt.recovery.overlay import overlay
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.replay import Admits, Replay, begin_replay, require_dense
from moe_ckpt.recovery.restore import restore
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True)
class Restored:
    """What came back: the manifest, and this rank's plain state (not yet loaded into anything).

    held: ``[L, E]`` tokens seen by the experts that came from host memory instead of from storage, 0 elsewhere;
        None if there are none.
    replay: the checkpoint is a sparse window of which only the first step is loaded, and ``plain`` is of that step. The
        adapter lets training compute the others again before it calls ``CheckpointSession.adopt``.
    """

    manifest: Manifest
    plain: Mapping[str, Any]
    held: Counts | None = None
    replay: Replay | None = None


def resume_newest(
    storage: Storage,
    comm: Communicator,
    state: TrainingState,
    tier: HostTier | None = None,
    admits: Admits | None = None,
) -> Restored | None:
    """Load tensors of the newest good checkpoint into ``state``; None when the store has none.

    A collective, called by all ranks before training.

    tier: host memory of an earlier life in this process (``CheckpointSession.host_tier``), None if there is none;
        ranks may differ in that. Only this function looks there: a step that is named (``load_step``) comes from
        storage alone.
    admits: asked about a sparse window before it is begun.

    Raises:
        NoCheckpointError: there are checkpoints, but none that every rank can load. Training must not
            start then: the state in memory may be half of one.
        ConfigError, UnsupportedError: the checkpoint and this run's configuration contradict each other.
    """
    reader = StoreReader(storage)
    directories = json.loads(comm.broadcast(json.dumps(_listed(reader) if comm.rank == 0 else []).encode()))
    problems: list[str] = []
    for directory in directories:
        restored, problem = _try(reader, directory, comm, state, admits)
        if problem is not None:
            log.warning("rank %d cannot use checkpoint %s: %s", comm.rank, directory, problem)
            problems.append(f"{directory}: {problem}")
        if _any_failed(comm, problem is not None):
            if comm.rank == 0:
                log.warning("checkpoint %s is passed over; the next older one is tried", directory)
            continue
        if restored is None:
            return None
        manifest = restored.manifest
        if restored.replay is not None:
            return restored
        return replace(restored, held=overlay(manifest, reader.index(manifest), comm, state, tier))
    if not directories:
        return None
    raise NoCheckpointError(
        f"no checkpoint in {storage.root} can be used: {'; '.join(problems[:4]) or 'see the other ranks'}. "
        "To start over, move the directory away or choose another dirpath."
    )


def _listed(reader: StoreReader) -> list[str]:
    try:
        return reader.directories()
    except OSError as error:
        raise StoreError(
            f"the store {reader.storage.root} cannot be read: {error}. Training does not start, for it would "
            "start from nothing."
        ) from error


def load_step(
    reader: StoreReader, manifest: Manifest, rank: int, state: TrainingState, *, model_only: bool = False
) -> Restored:
    """Load one given checkpoint into ``state``. Raises ``DamagedError`` or ``CoverageError``; no fallback.

    Raises ``SparseWindowError`` for one that is not a state of the run: only ``resume_newest`` goes on from it.
    """
    require_dense(manifest)
    plain = reader.state(manifest, rank_of_state(manifest, rank))
    restore(reader, manifest, state, model_only=model_only, plain=None if model_only else plain.get("plain"))
    return Restored(manifest, plain)


def rank_of_state(manifest: Manifest, rank: int) -> int:
    """Whose plain state ``rank`` takes when the world has another size than the one that saved."""
    return rank % manifest.world_size


def other_ranks(manifest: Manifest, world_size: int) -> str | None:
    """What is not exact because ``world_size`` ranks go on from a checkpoint of another number; None if as many do.

    For adapters whose ranks each take the plain state of ``rank_of_state``. To be said once per job.
    """
    saved = manifest.world_size
    if saved == world_size:
        return None
    if world_size < saved:
        taken = f"the random numbers and data positions of {_ranks(world_size, saved)} are dropped"
    else:
        taken = f"random numbers and data positions of {_ranks(saved, world_size)} are those of others, too"
    return (
        f"checkpoint {manifest.directory} was written by {saved} ranks, and {world_size} go on from it. Parameters and "
        f"optimizer state are exact; what follows is not: {taken}, and a step trains on {world_size} batches instead "
        f"of {saved}. Samples are dealt anew, none twice and none left out, by "
        "moe_ckpt.data.RecoverableDistributedSampler only"
    )


def _ranks(begin: int, end: int) -> str:
    return f"rank {begin}" if begin + 1 == end else f"ranks {begin} to {end - 1}"


def _try(
    reader: StoreReader, directory: str, comm: Communicator, state: TrainingState, admits: Admits | None
) -> tuple[Restored | None, str | None]:
    try:
        manifest = reader.manifest(directory)
        if manifest.window:
            plain, replay = begin_replay(reader, manifest, state, comm.rank, comm.world_size, admits)
            return Restored(manifest, plain, replay=replay), None
        return load_step(reader, manifest, comm.rank, state), None
    except PermissionError:
        raise  # not damage: an older checkpoint would only hide a mistake in the set-up
    except (DamagedError, CoverageError, OSError) as error:
        return None, str(error)


def _any_failed(comm: Communicator, failed: bool) -> bool:
    _, largest = comm.agree(np.zeros(0, dtype=np.int64), np.asarray([failed], dtype=np.int64))
    return bool(largest[0])
