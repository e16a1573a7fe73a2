"""Come back to the newest checkpoint that every rank can load.

Rank 0 says which checkpoint is tried, each rank loads what it needs and verifies every slice first, and
one failing rank sends all of them to the next older one. So the ranks never disagree, and a damaged file
costs the steps between two checkpoints, not the run. A file that storage does not give is no damaged one:
it is asked for again, and then the run stops, unless it was told to go back (``on_read_error``). Experts
that storage has in older versions only are then taken from host memory where the fault left it alive
(``recovery.overlay``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.host_tier import HostTier
from moe_ckpt.errors import (
    CoverageError,
    DamagedError,
    MoECheckpointError,
    NoCheckpointError,
    OtherLayoutError,
    StoreError,
    StoreForbiddenError,
)
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator, TrainingState
from moe_ckpt.recovery.overlay import overlay
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.replay import Admits, Replay, begin_replay, require_dense
from moe_ckpt.recovery.restore import restore
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.patience import PATIENCE_SECS

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True)
class Restored:
    """What came back: the manifest, and this rank's plain state (not yet loaded into anything).

    held: ``[L, E]`` tokens seen by the experts that came from host memory instead of from storage, 0 elsewhere;
        None if there are none.
    replay: the checkpoint is a sparse window of which only the first step is loaded, and ``plain`` is of that step. The
        adapter lets training compute the others again before it calls ``CheckpointSession.adopt``.
    path: of the file that ``plain`` is from, for messages.
    """

    manifest: Manifest
    plain: Mapping[str, Any]
    held: Counts | None = None
    replay: Replay | None = None
    path: str = ""


def resume_newest(
    storage: Storage,
    comm: Communicator,
    state: TrainingState,
    tier: HostTier | None = None,
    admits: Admits | None = None,
    *,
    on_read_error: str = "stop",
    read_patience_secs: float = PATIENCE_SECS,
) -> Restored | None:
    """Load tensors of the newest good checkpoint into ``state``; None when the store has none.

    A collective, called by all ranks before training. Whatever one rank raises, all ranks leave together.

    tier: host memory of an earlier life in this process (``CheckpointSession.host_tier``), None if there is none;
        ranks may differ in that. Only this function looks there: a step that is named (``load_step``) comes from
        storage alone.
    admits: asked about a checkpoint before anything of it is loaded.
    on_read_error: when storage does not give a checkpoint's bytes, which may be good: "stop", or "fallback" to the next
        older checkpoint. Then the newer one is named in all manifests from here on, so that retention leaves it alone.
    read_patience_secs: for how long, in all, reads that fail are tried again before.

    Raises:
        OtherLayoutError: there are sparse windows of another layout, and no dense checkpoint to take instead.
        NoCheckpointError: there are checkpoints, but none that every rank can load. Training must not
            start then: the state in memory may be half of one.
        StoreUnreadableError, StoreForbiddenError: storage does not give what this rank needs.
        ConfigError, UnsupportedError: the checkpoint and this run's configuration contradict each other.
        StoreError: one of these on another rank; its message is repeated.
    """
    reader = StoreReader(storage, read_patience_secs)
    directories = _listed(reader, comm)
    problems: list[str] = []
    unread: list[str] = []
    windows: list[OtherLayoutError] = []
    for directory in directories:
        restored, problem = _try(reader, directory, comm, state, admits)
        trouble = _worst(comm, _trouble(problem))
        if trouble is not None:
            if trouble.kind == _STOPS or (trouble.kind == _UNREAD and on_read_error == "stop"):
                _leave_together(comm, trouble, problem, directory)
            if isinstance(problem, OtherLayoutError):
                windows.append(problem)
                continue
            if problem is not None:
                log.warning("rank %d cannot use checkpoint %s: %s", comm.rank, directory, problem)
                problems.append(f"{directory}: {problem}")
            if trouble.kind == _UNREAD:
                unread.append(directory)
            if comm.rank == 0:
                log.warning("checkpoint %s is passed over; the next older one is tried", directory)
            continue
        if restored is None:
            return None
        if windows and comm.rank == 0:
            _say_passed_over(reader.manifest(windows[0].directory), windows[0].reason, restored.manifest)
        return _completed(restored, reader, comm, state, tier, tuple(unread))
    if not directories:
        return None
    if windows:
        raise windows[0]
    raise NoCheckpointError(
        f"no checkpoint in {storage.root} can be used: {'; '.join(problems[:4]) or 'see the other ranks'}. "
        "To start over, move the directory away or choose another dirpath."
    )


def _completed(
    restored: Restored,
    reader: StoreReader,
    comm: Communicator,
    state: TrainingState,
    tier: HostTier | None,
    unread: tuple[str, ...],
) -> Restored:
    """With newer experts from host memory, and the newer checkpoints that could not be read written down."""
    manifest = restored.manifest
    if restored.replay is None:
        restored = replace(restored, held=overlay(manifest, reader.index(manifest), comm, state, tier))
    if not unread:
        return restored
    if comm.rank == 0:
        announce(
            "going on from %s: the newer %s could not be read, and on_read_error='fallback' says to go back. They are "
            "kept; remove them by hand when they are not wanted any more",
            manifest.directory,
            ", ".join(unread),
            level=logging.WARNING,
        )
    manifest = replace(manifest, passed_over=tuple(dict.fromkeys((*manifest.passed_over, *unread))))
    if restored.replay is not None:
        restored.replay.manifest = manifest
    return replace(restored, manifest=manifest)


def _say_passed_over(window: Manifest, reason: str, taken: Manifest) -> None:
    """What falling back from a window of another layout costs."""
    routed = [int(np.asarray(each.tokens["applied"], dtype=np.int64).sum()) for each in (window, taken)]
    announce(
        "checkpoint %s is a sparse window %s. The dense checkpoint %s is taken instead: %d steps, in which %d tokens "
        "were routed, are computed again. The window stays until newer checkpoints replace it; to go on from it, stop "
        "now and start as that run was started",
        window.directory,
        reason,
        taken.directory,
        window.step - taken.step,
        routed[0] - routed[1],
        level=logging.WARNING,
    )


def _listed(reader: StoreReader, comm: Communicator) -> list[str]:
    """The committed step directories, as rank 0 sees them."""
    answer: dict[str, Any] = {}
    trouble: Exception | None = None
    if comm.rank == 0:
        try:
            answer = {"directories": reader.directories()}
        except (OSError, MoECheckpointError) as error:
            answer, trouble = {"error": str(error)}, error
    answer = json.loads(comm.broadcast(json.dumps(answer).encode()))
    if "directories" in answer:
        return list(answer["directories"])
    if trouble is not None:
        raise trouble
    raise StoreError(f"rank 0 cannot list the store {reader.storage.root}: {answer['error']}")


_DAMAGED, _UNREAD, _STOPS = 1, 2, 3
"""What a rank met, by how much it matters: the next older checkpoint is taken; ``on_read_error`` decides; none is."""


@dataclass(frozen=True)
class _Trouble:
    """The worst that any rank met, and the first rank that met it."""

    kind: int
    rank: int


def _trouble(problem: Exception | None) -> int:
    if problem is None:
        return 0
    if isinstance(problem, StoreForbiddenError):
        return _STOPS  # an older checkpoint would only hide a mistake in the set-up
    if isinstance(problem, OSError):
        return _UNREAD
    return _DAMAGED if isinstance(problem, (DamagedError, CoverageError, OtherLayoutError)) else _STOPS


def _worst(comm: Communicator, kind: int) -> _Trouble | None:
    """None if no rank met any trouble. A collective."""
    place = kind * comm.world_size + (comm.world_size - 1 - comm.rank)
    _, [largest] = comm.agree(np.zeros(0, dtype=np.int64), np.asarray([place], dtype=np.int64))
    worst, order = divmod(int(largest), comm.world_size)
    return _Trouble(worst, comm.world_size - 1 - order) if worst else None


def _leave_together(comm: Communicator, trouble: _Trouble, problem: Exception | None, directory: str) -> NoReturn:
    """Raise on every rank: this rank's own problem if it is as bad as any, else the worst one's message."""
    said = comm.share(str(problem).encode() if comm.rank == trouble.rank else b"", trouble.rank).decode()
    if problem is not None and _trouble(problem) == trouble.kind:
        raise problem
    raise StoreError(f"rank {trouble.rank} cannot go on from checkpoint {directory}: {said}")


def load_step(
    reader: StoreReader,
    manifest: Manifest,
    rank: int,
    state: TrainingState,
    admits: Admits | None = None,
    *,
    model_only: bool = False,
) -> Restored:
    """Load one given checkpoint into ``state``. Raises ``DamagedError`` or ``CoverageError``; no fallback.

    Raises ``SparseWindowError`` for one that is not a state of the run: only ``resume_newest`` goes on from it.
    """
    require_dense(manifest)
    taken = rank_of_state(manifest, rank)
    plain = reader.state(manifest, taken)
    if admits is not None:
        admits(manifest, plain)
    restore(reader, manifest, state, model_only=model_only, plain=None if model_only else plain.get("plain"))
    return Restored(manifest, plain, path=state_path(manifest.directory, taken))


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
) -> tuple[Restored | None, Exception | None]:
    try:
        manifest = reader.manifest(directory)
        if manifest.window:
            plain, replay = begin_replay(reader, manifest, state, comm.rank, comm.world_size, admits)
            first = state_path(manifest.slots[0].directory, comm.rank)
            return Restored(manifest, plain, replay=replay, path=first), None
        return load_step(reader, manifest, comm.rank, state, admits), None
    except Exception as error:  # raised again once the other ranks know
        return None, error
