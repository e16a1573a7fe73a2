"""Resumes from the newest checkpoint that every rank can load, or loads the dense one that a user names.

Rank 0 lists the checkpoints, and each rank verifies what it needs. If one rank fails, all try the next older one, so
that a damaged file costs the steps between two checkpoints, not the run. A file that storage does not give is read
again; if that does not help, the start ends, unless ``on_read_error="fallback"``. ``recovery.executing`` makes each
attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from moe_ckpt.comm.communicator import answers_of, largest
from moe_ckpt.errors import DamagedError, NoCheckpointError, NotFiniteError, OtherLayoutError, StoreUnreadableError
from moe_ckpt.format.manifest import KEEP_NAME, Manifest, age_of
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.reading.collective import (
    DIVERGED,
    STOPS,
    UNREAD,
    NotUsableError,
    on_all_ranks,
    on_rank_zero,
    raise_on_all_ranks,
)
from moe_ckpt.reading.index import split_key
from moe_ckpt.reading.memory.memory_checkpoints import MemoryCheckpoints, say_kept
from moe_ckpt.reading.memory.memory_shares import checkpoints_of, left_behind
from moe_ckpt.reading.reader import StoreReader, require_dense
from moe_ckpt.reading.restore import require_fitting
from moe_ckpt.reading.shared_reading import TensorLoader
from moe_ckpt.reading.step_storage import PATIENCE_SECS
from moe_ckpt.recovery.executing import Admits, Opener, OpenLog, Recovery, Restored, StorageSource, open_dense
from moe_ckpt.recovery.recovery_plan import first_choice
from moe_ckpt.run.documents import end_reading_ahead
from moe_ckpt.slices.snapshot import write_named
from moe_ckpt.storage.base import Storage
from moe_ckpt.tiers.memory_tier import MemoryTier

_DIVERGED = (
    "%s in memory is a step of a gradient log whose updates, repeated, came to another state than the run's: none of "
    "its steps is used, and the newest one that was saved in full is tried"
)
_KEEP_TEXT = b"A start could not read this checkpoint. Retention keeps it as long as this file is here.\n"
log = logging.getLogger("moe_ckpt")

Opens = Callable[[], tuple[StoreReader, Manifest]]
"""Opens the checkpoint on this rank; no collective."""
InPart = Callable[[Recovery, MemoryCheckpoints], Callable[[str, Opener | None], Restored | None]]
"""Returns a function that restores the newest step if only the ranks that lost something need go back. It takes the
newest checkpoint, and what memory has of it, and returns None if all ranks have to go back. A collective."""

_BY_NAME = (
    " To go on from a step whose values are not finite, name it: ckpt_path= (Lightning) or weights_from= takes its "
    "directory"
)
_ONLY_IN_MEMORY = (
    "memory held steps of an earlier start, up to %d, but no whole checkpoint that this run can use, and %s holds "
    "none: all of them are lost. Let storage get one more often: Memory(storage_every=...)"
)


def resume_newest(
    storage: Storage,
    comm: Communicator,
    state: TrainingState,
    tier: MemoryTier | None = None,
    admits: Admits | None = None,
    *,
    on_read_error: str = "stop",
    read_patience_secs: float = PATIENCE_SECS,
    open_log: OpenLog | None = None,
    in_part: InPart | None = None,
) -> Restored | None:
    """Loads the newest good checkpoint into ``state``; returns None if the store has none.

    A collective of all ranks before training. If one rank raises, all do.

    Args:
        storage: Of the store.
        comm: The ranks.
        state: Its tensors are written.
        tier: What memory holds (``CheckpointSession.tier``); of the same kind on every rank.
        admits: See ``Admits``.
        on_read_error: What to do if storage does not give a checkpoint's bytes: "stop", or "fallback" to the next older
            one. Retention then keeps the newer one (``KEEP_NAME``).
        read_patience_secs: How long, in all, failing reads are tried again before that.
        open_log: Begins the return to a step of a gradient log; None: a step of one ends the start.
        in_part: Tries before each checkpoint whether only some ranks need go back; None: all do.

    Raises:
        OtherLayoutError: There are sparse windows of another layout, and no dense checkpoint to take instead.
        NoCheckpointError: None can be loaded by every rank. Training must not start: memory may hold half of one.
        StoreUnreadableError, StoreForbiddenError: Storage does not give what this rank needs.
        ConfigError, UnsupportedError: The checkpoint and this run's configuration contradict each other.
        StoreError: One of these on another rank, with its message.
    """
    end_reading_ahead()
    reader = StoreReader(storage, read_patience_secs)
    recovery = Recovery(storage, reader, comm, state, admits, open_log)
    has_slots = tier is not None and (tier.outlives_process or any(largest(comm, [bool(tier.left_slots.slots)])))
    memory = None if tier is None or not has_slots else MemoryCheckpoints(comm, tier, reader)
    listing = f"list the store {reader.storage.root}"
    directories = memory.stored if memory is not None else on_rank_zero(comm, reader.directories, listing)
    steps = [share.step for share in memory.shares] if memory is not None and tier and tier.outlives_process else []
    passed_over = _PassedOver(comm)
    attempt = None if memory is None or in_part is None else in_part(recovery, memory)
    for directory, opener in _candidates(directories, memory):
        restored: Restored | NotUsableError | None = None if attempt is None else attempt(directory, opener)
        if restored is None:  # all ranks go back
            if memory is not None and opener is not None and comm.rank == 0:
                say_kept(memory.shares, directory)
            restored = recovery.attempt(directory, opener)
        if isinstance(restored, NotUsableError):
            source = None if opener is None else memory
            if restored.kind == STOPS or (on_read_error == "stop" and _storage_fails(restored, source, comm)):
                if tier is not None:
                    tier.left_slots.withdraw_starts()  # else three starts would pass for one that leads nowhere
                raise_on_all_ranks(comm, restored, directory)
            passed_over.add(directory, restored, source)
            continue
        if passed_over.windows and comm.rank == 0:
            window = passed_over.windows[0]
            _say_passed_over(reader.manifest(window.directory), window.reason, restored.manifest)
        if memory is not None:
            same = (one for one in checkpoints_of(memory.shares) if one.directory == directory)
            # Newer ones than one that is whole in memory, of which memory has a part, were still being made then.
            if not (restored.from_memory and any(checkpoint.is_complete for checkpoint in same)):
                age = restored.manifest.generation, restored.manifest.step
                restored = replace(restored, left_behind=left_behind(checkpoints_of(memory.shares), *age))
            memory.keep_only(restored.manifest.step if restored.from_memory else None)
            restored = _rebuilding(restored, comm.rank, memory, passed_over)
        if passed_over.unread:
            _keep_unread(storage, comm, passed_over.unread, restored.manifest.directory)
        return restored
    if directories and tier is not None:
        tier.left_slots.withdraw_starts()  # the store leads nowhere: once it is mended, memory may be used again
    passed_over.require_new(directories, storage.root)
    if steps and comm.rank == 0:
        announce(_ONLY_IN_MEMORY, max(steps), storage.root, level=logging.WARNING)
    return None


class _PassedOver:
    """The checkpoints that some rank cannot use: those on storage, and those in memory.

    Attributes:
        unread: Directories of those that storage does not give.
        windows: Sparse windows of another layout.
    """

    def __init__(self, comm: Communicator) -> None:
        self.unread: list[str] = []
        self.windows: list[OtherLayoutError] = []
        self._comm = comm
        self._problems: list[str] = []  # of those on storage, as this rank says them
        self._not_finite = self._any = False
        self._damaged: set[str] = set()  # files of storage, as far as this rank knows
        self._diverged: tuple[NotUsableError, str] | None = None  # the first step of a log that came to another state

    def add(self, directory: str, failure: NotUsableError, memory: MemoryCheckpoints | None) -> None:
        """Adds a checkpoint, and says so. A collective for one in memory.

        Args:
            directory: Of the checkpoint.
            failure: Why it cannot be used.
            memory: What gave it, or a part of it; None if it was read from storage alone.
        """
        problem, leads = failure.problem, self._comm.rank == 0
        self._any = True
        if failure.kind == UNREAD and memory is None:
            self.unread.append(directory)
        if isinstance(problem, DamagedError) and (memory is None or problem.path not in memory.used):
            self._damaged.add(problem.path)
            if memory is not None:
                memory.note_damage_beneath(problem.path)
        if memory is not None:
            diverged = failure.kind == DIVERGED
            memory.quarantine(memory.set_aside(directory, problem, diverged=diverged) or ())
            if diverged:
                self._diverged = self._diverged or (failure, directory)
                if leads:
                    announce(_DIVERGED, directory, level=logging.WARNING)
        elif isinstance(problem, OtherLayoutError):
            self.windows.append(problem)
        elif isinstance(problem, NotFiniteError):
            self._problems.append(str(problem))
            self._not_finite = True
            if leads:
                announce("%s: it is passed over", problem, level=logging.WARNING)
        else:
            if problem is not None:
                log.warning("rank %d cannot use checkpoint %s: %s", self._comm.rank, directory, problem)
                self._problems.append(f"{directory}: {problem}")
            if leads:
                log.warning("checkpoint %s is skipped; the next older one is tried", directory)

    def damaged_of(self, beneath: Manifest | None) -> list[str]:
        """Returns what ranks know to be damaged of a checkpoint on storage that memory was laid over. A collective.

        Memory had what those files hold, so that nobody read them; later checkpoints would name them again.
        """
        if not self._any or beneath is None:  # alike on every rank
            return []
        return sorted(beneath.paths & set().union(*answers_of(self._comm, sorted(self._damaged))))

    def require_new(self, stored: Sequence[str], root: str) -> None:
        """Raises unless a new run may begin: storage has nothing, and the model is as the script made it.

        Args:
            stored: Checkpoints on storage, none of which can be used.
            root: Of the store.
        """
        if stored and self.windows:
            raise self.windows[0]
        if stored:
            problems = "; ".join(self._problems[:4]) or "see the other ranks"
            raise NoCheckpointError(
                f"no checkpoint in {root} can be used: {problems}. "
                f"To start over, move the directory away or choose another dirpath.{_BY_NAME * self._not_finite}"
            )
        if self._diverged is not None:  # the model is what the log came to
            raise_on_all_ranks(self._comm, *self._diverged)


def _rebuilding(restored: Restored, rank: int, memory: MemoryCheckpoints, passed_over: _PassedOver) -> Restored:
    """Sets ``Restored.rebuilds`` if the next checkpoint must not build on what storage has. A collective."""
    joined = restored.joined or restored
    if not joined.from_memory:
        return restored
    damaged = passed_over.damaged_of(joined.beneath)
    if damaged and rank == 0:
        announce(
            "%s on storage cannot be used. Memory has what was in it, and the next checkpoint saves everything anew",
            " and ".join(damaged),
            level=logging.WARNING,
        )
    same = (e for e in checkpoints_of(memory.shares) if e.directory == joined.manifest.directory)
    if not (damaged or any(map(memory.follows_what_is_gone, same))):
        return restored
    return replace(restored, rebuilds=True, joined=restored.joined and replace(joined, rebuilds=True))


def _candidates(directories: Sequence[str], memory: MemoryCheckpoints | None) -> Iterator[tuple[str, Opener | None]]:
    """Yields the checkpoints to try, newest first, each from memory before it is tried from storage alone.

    Memory is asked anew each time, since slots are excluded meanwhile, and others take their place.
    """
    remaining = list(directories)
    while True:
        offered = [] if memory is None else memory.offered()
        best = first_choice((*offered, *remaining), age_of)
        if best is None:
            return
        if memory is not None and best in offered:
            yield best, partial(memory.ask, best)
        else:
            remaining.remove(best)
            yield best, None


def _storage_fails(failure: NotUsableError, memory: MemoryCheckpoints | None, comm: Communicator) -> bool:
    """Returns whether some rank did not get from storage what it needs. A collective for a checkpoint in memory.

    Args:
        failure: Why the checkpoint cannot be used.
        memory: What gave it, or a part of it; None if it was read from storage alone.
        comm: The ranks.
    """
    if failure.kind != UNREAD or memory is None:
        return failure.kind == UNREAD
    problem = failure.problem
    return any(largest(comm, [isinstance(problem, StoreUnreadableError) and problem.path not in memory.used]))


def _keep_unread(storage: Storage, comm: Communicator, unread: Sequence[str], taken: str) -> None:
    """Lets retention keep the newer checkpoints that could not be read, and says so. A collective.

    Args:
        storage: Of the store.
        comm: The ranks.
        unread: Directories of these checkpoints.
        taken: Directory of the older one from which the run resumes.
    """

    def keep() -> None:
        for directory in unread:
            write_named(storage, f"{directory}/{KEEP_NAME}", [_KEEP_TEXT])

    on_rank_zero(comm, keep, f"keep {', '.join(unread)}")
    if comm.rank == 0:
        announce(
            "resuming from %s: the newer %s could not be read, and on_read_error='fallback' is set. They are kept; "
            "remove them by hand when you no longer need them",
            taken,
            ", ".join(unread),
            level=logging.WARNING,
        )


def _say_passed_over(window: Manifest, reason: str, taken: Manifest) -> None:
    """Announces what the fallback from a window of another layout costs."""
    routed = [int(np.asarray(manifest.tokens["applied"], dtype=np.int64).sum()) for manifest in (window, taken)]
    announce(
        "checkpoint %s is a sparse window %s. The dense checkpoint %s is used instead: %d steps, in which %d tokens "
        "were routed, are computed again. The window stays until newer checkpoints replace it; to resume from it, stop "
        "now and start with the layout of that run",
        window.directory,
        reason,
        taken.directory,
        window.step - taken.step,
        routed[0] - routed[1],
        level=logging.WARNING,
    )


def other_ranks(manifest: Manifest, world_size: int) -> str | None:
    """Returns a text on what is inexact because ``world_size`` differs from the checkpoint's; None if it does not.

    For adapters whose ranks load the plain state of the rank that ``executing.rank_of_state`` returns.
    """
    saved = manifest.world_size
    if saved == world_size:
        return None
    if world_size < saved:
        taken = f"the random numbers and data positions of {_ranks(world_size, saved)} are dropped"
    else:
        taken = f"random numbers and data positions of other ranks are copied to {_ranks(saved, world_size)}"
    return (
        f"checkpoint {manifest.directory} is of world size {saved}, and this run's is {world_size}. Parameters "
        f"and optimizer state are exact, but training from here on is not: {taken}, and a step trains on {world_size} "
        f"instead of {saved} batches. Only moe_ckpt.data.RecoverableDistributedSampler divides the rest of the epoch "
        "so that no sample is repeated or left out"
    )


def _ranks(begin: int, end: int) -> str:
    return f"rank {begin}" if begin + 1 == end else f"ranks {begin} to {end - 1}"


# --- a checkpoint that a user names, without a fallback ---


def load_step(
    comm: Communicator, opens: Opens, state: TrainingState, admits: Admits | None = None, *, model_only: bool = False
) -> tuple[StoreReader, Restored]:
    """Loads a checkpoint into ``state``, but for its plain state. A collective, on the training thread.

    Args:
        comm: The ranks.
        opens: Opens the same checkpoint on every rank.
        state: Its tensors are written; the caller loads its plain state afterwards.
        admits: See ``Admits``.
        model_only: Load no optimizer state (evaluation).

    Raises:
        NotUsableError: On every rank, if it failed on any: the checkpoint is damaged, a sparse window, or does not fit.
            Nothing was written, unless it broke between the two passes.
        PeerLostError: A peer is gone.
    """

    def fitting() -> tuple[StoreReader, Restored]:
        reader, manifest = opens()
        require_dense(manifest)
        restored = open_dense(reader, manifest, comm.rank, admits, state.buffers)
        require_fitting(reader, manifest, state, None if model_only else restored.plain.get("plain"))
        return reader, restored

    reader, restored = on_all_ranks(comm, fitting)
    StorageSource(reader, restored.manifest, state, weights_only=model_only).load(comm)
    return reader, restored


def whole_tensors(comm: Communicator, reader: StoreReader, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Returns every tensor of a checkpoint by key, whole and verified, on the CPU of every rank. A collective.

    Args:
        comm: The ranks.
        reader: Of the store.
        manifest: The checkpoint, which each rank has proved.

    Raises:
        NotUsableError: On every rank, if one could not read what it was to read.
        PeerLostError: A peer is gone.
    """
    stored_of = reader.index(manifest).tensors
    loader = TensorLoader(reader, [stored_of])
    loader.share(comm)
    tensors: dict[str, torch.Tensor] = {}

    def made() -> list[StateTensor]:
        for key in stored_of:
            meta = reader.index(manifest).meta(key)
            tensors[key] = torch.empty(meta.global_shape, dtype=TORCH_DTYPES[meta.dtype], device="cpu")
        return [
            StateTensor(key, split_key(key).fqn, whole, (0,) * whole.dim(), tuple(whole.shape))
            for key, whole in tensors.items()
        ]

    on_all_ranks(comm, lambda: loader.write(made))
    return tensors
