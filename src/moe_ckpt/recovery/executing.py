"""Attempts to return to a checkpoint: opens it, plans, logs the plan, verifies, and writes.

The part of a checkpoint that is in memory is read as files of a store (``slot_storage``). Every rank verifies what it
needs before any rank changes training state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.user_text import human_bytes
from moe_ckpt.errors import ConfigError, NotFiniteError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.reading.collective import NotUsableError, on_all_ranks, on_all_ranks_with_maximum
from moe_ckpt.reading.index import StoredSlice, split_key
from moe_ckpt.reading.memory.memory_shares import LeftBehind
from moe_ckpt.reading.memory.slot_storage import OpenedMemory, Span
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import (
    MODEL,
    StoredByKey,
    check_match,
    needed_slices,
    parameters_of,
    prepare_state,
    require_fitting,
)
from moe_ckpt.reading.shared_reading import TensorLoader
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery
from moe_ckpt.recovery.replay import StepReplay
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")

_TIERS = {Tier.HOST: "memory", Tier.PEER: "peers", Tier.STORAGE: "storage"}

_BUFFER = "side/{}/plain/buffers/{}"
"""Key of a side tensor: rank, name of a buffer in its plain state."""
_OF_OTHERS, _OF_STORAGE = 1, 2
"""What a rank still needs of a checkpoint in memory: bytes of other nodes; bytes of storage, which may be shared."""

_NOBODY = (
    "{} in memory is a step of a gradient log, whose updates cannot be repeated here. Remove it with moe-ckpt memory "
    "clear, to resume from storage"
)

Opener = Callable[[], Callable[[], OpenedMemory]]
"""``MemoryCheckpoints.ask`` of a checkpoint."""
Admits = Callable[[Manifest, Mapping[str, Any]], None]
"""Takes the checkpoint and this rank's plain state (of the first step, if it is a sparse window), on every rank, before
anything is written. Raises ``ConfigError`` if this run cannot resume from it (``OtherLayoutError`` if it can from an
older dense one), or ``DamagedError`` if it is no plain state."""


def versions_of(manifest: Manifest) -> dict[str, int]:
    """Returns operator -> the step that it is as of."""
    return {op: record.step for op, record in manifest.operators.items()}


@dataclass(frozen=True)
class Restored:
    """A checkpoint whose tensors are loaded, with this rank's plain state, which is not.

    Attributes:
        tokens_from_host: ``[L, E]`` tokens seen by experts that came from host memory, 0 elsewhere; None if none did.
        replay: For a sparse window, of which only the first step is loaded, and ``plain`` is of that step. Training
            must compute the others again before ``CheckpointSession.resume_from``.
        path: Path of the file of ``plain``, for messages.
        from_memory: It came from memory that outlived a process, as a whole or in part.
        beneath: If so, the checkpoint on storage that it is, or was laid over; None if storage has no part of it.
        rebuilds: Later checkpoints must not build on what storage has of it, because files of ``beneath`` are damaged,
            or the checkpoint that memory follows is gone. The next checkpoint saves everything.
        plan: Where each operator came from; None if storage alone was asked.
        left_behind: What memory had that is newer and cannot be used; None if nothing.
        joined: What all ranks resume from when they are at one step again, if only some pipeline stages go back; None
            if all ranks load the same step.
        planned_unix_secs: When the plan was made, so that only reading and copying was left.
    """

    manifest: Manifest
    plain: Mapping[str, Any]
    tokens_from_host: Counts | None = None
    replay: StepReplay | None = None
    path: str = ""
    from_memory: bool = False
    beneath: Manifest | None = None
    rebuilds: bool = False
    plan: RecoveryPlan | None = None
    left_behind: LeftBehind | None = None
    joined: Restored | None = None
    planned_unix_secs: float | None = None

    def out_of(self, opened: OpenedMemory, plan: RecoveryPlan) -> Restored:
        """Returns the same as restored from memory, by a plan that was made just now."""
        return replace(
            self,
            tokens_from_host=opened.tokens_from_memory(opened.manifest.operators),
            from_memory=True,
            beneath=opened.beneath,
            plan=plan,
            planned_unix_secs=time.time(),
        )

    @property
    def origin(self) -> str:
        """The place that the state came from, for people."""
        if not self.from_memory:
            return self.manifest.directory
        if self.beneath is None or self.manifest.window or not self._storage_has_part:
            return "memory"
        return f"memory and {self.beneath.directory}"

    @property
    def beyond_storage(self) -> bool:
        """True if storage alone would give an older state."""
        return self.plan is not None and self.plan.beyond_storage

    @property
    def versions(self) -> Mapping[str, int]:
        """The step that each operator came back as of."""
        return versions_of(self.manifest) if self.plan is None else self.plan.versions

    @property
    def is_unsaved(self) -> bool:
        """True if storage has no complete checkpoint of this state: it is newer, or some experts are older, or what
        storage has of it is damaged or gone."""
        stale = any(record.step != self.manifest.step for record in self.manifest.operators.values())
        return self.rebuilds or self.beyond_storage or (stale and not self.manifest.window)

    @property
    def _storage_has_part(self) -> bool:
        """True if an operator came from storage."""
        return self.plan is None or any(row.source.tier is Tier.STORAGE for row in self.plan.rows())

    @property
    def going_on(self) -> dict[str, Any]:
        """Arguments for ``CheckpointSession.resume_from``."""
        beneath: dict[str, Any] = {}
        if self.rebuilds:
            beneath = {"same_store": False, "rebuilds": True}
        elif self.from_memory:
            beneath = {"same_store": self.beneath is not None, "beneath": self.beneath}
        return {"tokens_from_host": self.tokens_from_host, **beneath}


class StorageSource(TensorLoader):
    """A checkpoint on storage, as training state takes it.

    Args:
        reader: Of the store.
        manifest: The checkpoint.
        state: Its tensors are written.
        weights_only: No optimizer state is loaded.
    """

    def __init__(
        self, reader: StoreReader, manifest: Manifest, state: TrainingState, *, weights_only: bool = False
    ) -> None:
        self._manifest, self._index, self._state = manifest, reader.index(manifest), state
        self._weights_only = weights_only
        tensors: StoredByKey = self._index.tensors
        if weights_only:
            tensors = {key: group for key, group in tensors.items() if split_key(key).optimizer is None}
        super().__init__(reader, (tensors, *self._index.replay.values()), lambda: parameters_of(state))

    def load(self, comm: Communicator) -> None:
        """Verifies what each rank needs, and writes it once all have verified theirs. A collective.

        Raises:
            NotUsableError: On every rank, if it failed on any.
        """
        self.share(comm)
        on_all_ranks(comm, self.verify)
        on_all_ranks(comm, self.prepare_and_write)

    def prepare(self) -> Sequence[StateTensor]:
        """Creates the optimizer state that the checkpoint has, and returns the live tensors.

        Raises:
            DeviceMemoryError: There is no room for the optimizer state.
        """
        if self._weights_only:
            return parameters_of(self._state)
        index = self._index
        prepare_state(self._state, {key: index.meta(key) for key in index.tensors if not key.startswith(MODEL)})
        tensors = self._state.tensors()
        check_match(self._manifest, index, self._state.specs(), index.tensors)
        return tensors

    def prepare_and_write(self) -> None:
        """Does ``prepare``, and writes everything, verified, into the live tensors, as ``write``."""
        self.write(self.prepare)


def plan_sources(reader: StoreReader, manifest: Manifest, opened: OpenedMemory | None = None) -> RecoveryPlan:
    """Returns which operators of a checkpoint come from memory of this node, of other nodes, and from storage.

    An operator counts for the farthest place that something of it comes from.

    Args:
        reader: Of the checkpoint.
        manifest: The checkpoint, which was proved to be whole.
        opened: What of it is in memory; None if all is on storage.
    """
    slots, beneath = (None, manifest) if opened is None else (opened.slots, opened.beneath)
    names = [] if slots is None else list(zip((Tier.HOST, Tier.PEER), slots.places, strict=False))
    storage = len(names)
    places = {op: at for at, op in enumerate(manifest.operators)}
    far = np.zeros(len(places), dtype=np.int64)
    nbytes = np.zeros(len(places), dtype=np.int64)
    for stored in reader.index(manifest).live:
        at = places.get(stored.entry.operator)
        if at is None:
            continue
        distance = storage
        if slots is not None and stored.path in slots.files:
            distance = 0 if storage == 1 or slots.is_near(stored.path) else 1
        far[at] = max(far[at], distance)
        nbytes[at] += stored.nbytes
    steps = np.array([record.step for record in manifest.operators.values()], dtype=np.int64)
    if manifest.window:  # which is of its last step, wherever its slots are
        steps = np.where(far < storage, manifest.step, steps)
    if beneath is not None:
        names.append((Tier.STORAGE, beneath.directory))
    inventories = [
        Inventory(tier, name, np.where(far == number, steps, ABSENT), nbytes)
        for number, (tier, name) in enumerate(names)
    ]
    first = manifest.window[0].step if manifest.window else None
    return plan_recovery(manifest.directory, manifest.step, tuple(manifest.operators), inventories, first=first)


class AlongLog(Protocol):
    """The return of a rank to a step of a gradient log in memory (the guest ``gradient_log``)."""

    def spans(self) -> Iterable[Span]:
        """Returns the spans that this rank reads. No collective, and no slice is read."""

    def go(self, received: int) -> Restored:
        """Restores the step. A collective, after ``spans`` were fetched.

        Args:
            received: How many bytes came from elsewhere.
        """


OpenLog = Callable[["Recovery", OpenedMemory], AlongLog]


class _Proven(NamedTuple):
    """A checkpoint in memory that has every element once.

    Attributes:
        opened: The checkpoint.
        spans: What this rank reads of it.
        along: How it is returned to, if it is a step of a gradient log.
        ready: What was opened and verified already: what is restored then, and from where. None if bytes have to come
            first, or updates are made once more.
    """

    opened: OpenedMemory
    spans: tuple[Span, ...]
    along: AlongLog | None
    ready: tuple[Restored, StorageSource] | None


@dataclass(frozen=True)
class Recovery:
    """Returns training to a checkpoint. On every rank, on the training thread.

    Attributes:
        storage: Of the store, into which a guest may write a checkpoint.
        reader: Of the store.
        comm: The ranks.
        state: Its tensors are written.
        admits: See ``Admits``.
        open_log: Begins the return to a step of a gradient log; None where nobody can.
    """

    storage: Storage
    reader: StoreReader
    comm: Communicator
    state: TrainingState
    admits: Admits | None
    open_log: OpenLog | None = None

    def attempt(self, directory: str, opener: Opener | None = None) -> Restored | NotUsableError:
        """Loads one checkpoint into ``state``, each operator from the best source. A collective.

        Args:
            directory: Of the checkpoint.
            opener: For what memory that outlived a process has of it, if any.

        Returns:
            What was restored; or why some rank cannot use the checkpoint. Then the model is unchanged, unless it was
            found while writing.

        Raises:
            PeerLostError: A peer is gone.
        """
        try:
            return self.return_to(directory) if opener is None else self._return_to_memory(opener)
        except NotUsableError as error:  # returned, so that its problem is raised later without this context
            return error

    def return_to(self, directory: str) -> Restored:
        """Loads a checkpoint that storage has. A collective.

        Raises:
            NotUsableError: Some rank cannot use it.
        """
        comm = self.comm
        restored, storage = on_all_ranks(
            comm, lambda: opening_checkpoint(self, self.reader, self.reader.manifest(directory))
        )
        plan = plan_sources(self.reader, restored.manifest)
        announce_plan(comm, plan)
        restored = replace(restored, plan=plan, planned_unix_secs=time.time())
        storage.load(comm)
        return restored

    def _return_to_memory(self, opener: Opener) -> Restored:
        """Loads a checkpoint that memory has, or has a part of. A collective.

        A return from a rank's own memory spends most of its time in waits for other ranks, so there are few.
        """
        comm, make = self.comm, opener()
        (opened, spans, along, ready), asked = on_all_ranks_with_maximum(comm, lambda: self._proven(make()))
        received = opened.slots.fetch(spans) if asked else 0
        if along is not None:
            return along.go(received)
        log.info("rank %d received %s of what memory elsewhere holds", comm.rank, human_bytes(received))
        divides = asked == _OF_STORAGE
        if asked or ready is None:
            restored, source = on_all_ranks(comm, lambda: ready or self._opened(opened, verifies=not divides))
        else:
            restored, source = ready
        if divides:
            source.share(comm, lambda path: path not in opened.slots.files)
            on_all_ranks(comm, lambda: None if ready else source.verify())
        announce_plan(comm, restored.plan)
        on_all_ranks(comm, source.prepare_and_write)
        return restored

    def _opened(self, opened: OpenedMemory, *, verifies: bool) -> tuple[Restored, StorageSource]:
        """Opens a checkpoint, plans, and verifies what this rank reads of it, if ``verifies``. Changes nothing."""
        restored, source = opening_checkpoint(self, opened.reader, opened.manifest)
        restored = restored.out_of(opened, plan_sources(opened.reader, opened.manifest, opened))
        if verifies:
            source.verify()
        return restored, source

    def _proven(self, opened: OpenedMemory) -> tuple[_Proven, int]:
        """Proves that a checkpoint is whole, and verifies it at once if this rank needs bytes of its own memory only.

        Returns:
            What was proved, and what this rank still needs: ``_OF_OTHERS``, ``_OF_STORAGE`` or 0.
        """
        opened.reader.prove(opened.manifest)
        along: AlongLog | None = None
        if opened.logged:
            if self.open_log is None:
                raise ConfigError(_NOBODY.format(opened.manifest.directory))
            along = self.open_log(self, opened)
        spans = tuple(self.spans(opened) if along is None else along.spans())
        asks = _OF_OTHERS if opened.slots.needs_others(spans) else 0
        if self.comm.world_size > 1 and opened.slots.needs_storage(spans):
            asks = _OF_STORAGE
        ready = None if asks or along is not None else self._opened(opened, verifies=True)
        return _Proven(opened, spans, along, ready), asks

    def spans(
        self, opened: OpenedMemory, slots: Sequence[Manifest] = (), *, besides: Iterable[StoredSlice] = ()
    ) -> Iterator[Span]:
        """Yields the spans that this rank reads of the checkpoint.

        Args:
            opened: The checkpoint.
            slots: Whose plain state is read, if not of those that the manifest names.
            besides: Further slices.
        """
        reader, manifest = opened.reader, opened.manifest
        index, rank = reader.index(manifest), rank_of_state(manifest, self.comm.rank)
        yield from plain_spans(reader, slots or manifest.slots, (rank,))
        missing = missing_buffers(manifest, index.side, rank, self.state.buffers)
        yield from (stored.span for stored in (*missing.values(), *besides))
        parameters = parameters_of(self.state)
        for stored_of in (index.tensors, *index.replay.values()):
            yield from (stored.span for stored in needed_slices(stored_of, parameters))


def plain_spans(reader: StoreReader, slots: Iterable[Manifest], ranks: Collection[int]) -> Iterator[Span]:
    """Yields the spans of the plain states of some ranks, with their side tensors.

    Args:
        reader: Of the checkpoint.
        slots: Whose plain states they are.
        ranks: That wrote them.
    """
    for slot in slots:
        yield from ((record.path, 0, record.nbytes) for record in slot.states if record.rank in ranks)
        yield from (stored.span for stored in reader.index(slot).side.values() if stored.file.rank in ranks)


def opening_checkpoint(recovery: Recovery, reader: StoreReader, manifest: Manifest) -> tuple[Restored, StorageSource]:
    """Opens the checkpoint, if this run can resume from it. Changes nothing, and reads no slice."""
    if manifest.not_finite:
        raise NotFiniteError(manifest.directory, manifest.not_finite)
    if manifest.window:
        from moe_ckpt.windows.replay import open_window

        return open_window(recovery, reader, manifest)
    restored = open_dense(reader, manifest, recovery.comm.rank, recovery.admits, recovery.state.buffers)
    require_fitting(reader, manifest, recovery.state, restored.plain.get("plain"))
    return restored, StorageSource(reader, manifest, recovery.state)


def open_dense(
    reader: StoreReader, manifest: Manifest, rank: int, admits: Admits | None, buffers: Collection[str] = ()
) -> Restored:
    """Returns a dense checkpoint with the plain state for ``rank``, completed by ``buffers``. Loads nothing."""
    taken = rank_of_state(manifest, rank)
    plain = reader.state(manifest, taken)
    if admits is not None:
        admits(manifest, plain)
    if missing := missing_buffers(manifest, reader.index(manifest).side, taken, buffers):
        names = {stored: name for name, stored in missing.items()}
        added = {names[stored]: values.clone() for stored, values in reader.read_many(names)}
        plain["plain"] = {**plain["plain"], "buffers": {**plain["plain"]["buffers"], **added}}
    return Restored(manifest, plain, path=state_path(manifest.directory, taken))


def missing_buffers(
    manifest: Manifest, side: Mapping[str, StoredSlice], rank: int, buffers: Collection[str]
) -> dict[str, StoredSlice]:
    """Returns, by name, those of ``buffers`` that the plain state of ``rank`` lacks, as another rank's has them.

    Args:
        manifest: The checkpoint.
        side: Its side tensors, by key.
        rank: A rank that wrote it.
        buffers: Names.
    """
    lacking = [name for name in buffers if _BUFFER.format(rank, name) not in side]
    keys = {name: [_BUFFER.format(other, name) for other in range(manifest.world_size)] for name in lacking}
    return {name: side[key] for name, of_ranks in keys.items() for key in of_ranks if key in side}


def rank_of_state(manifest: Manifest, rank: int) -> int:
    """Returns the rank whose plain state ``rank`` loads, for any world size."""
    return rank % manifest.world_size


def announce_plan(comm: Communicator, plan: RecoveryPlan | None) -> None:
    """Announces, on rank 0, what comes from where; logs a plan with one source and one step, for "resumed at ..." says
    as much."""
    if comm.rank == 0 and plan is not None:
        (announce if len(list(plan.rows())) > 1 or plan.updates is not None else log.info)("%s", plan_text(plan))


def plan_text(plan: RecoveryPlan) -> str:
    """Returns the plan as text: one line if all comes from one place as of one step, else a table."""
    rows = list(plan.rows())
    if len(rows) == 1 and plan.updates is None:
        [row] = rows
        medium = row.source.label if row.source.tier is Tier.STORAGE else _described(row.source)
        size = human_bytes(row.nbytes)
        return f"recovery plan: all {row.operators} operators ({size}) as of step {row.newest} from {medium}"
    cells = [["from", "of step", "operators", "experts", "size"]]
    for row in rows:
        steps = str(row.newest) if row.oldest == row.newest else f"{row.oldest} to {row.newest}"
        cells.append([_described(row.source), steps, str(row.operators), str(row.experts), human_bytes(row.nbytes)])
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join([name.ljust(first), *map(str.rjust, rest, widths)]) for name, *rest in cells]
    if plan.first < plan.step:
        table.append(f"then steps {plan.first + 1} to {plan.step} are computed again")
    if plan.updates is not None:
        first, last = plan.updates
        several = f"the {last - first} updates of steps {first + 1} to {last} are"
        repeated = several if last - first > 1 else f"the update of step {last} is"
        table.append(f"then {repeated} repeated, from the consumed gradients")
    return "\n  ".join([f"recovery plan for {plan.checkpoint}:", *table])


def _described(source: Inventory) -> str:
    return f"{_TIERS[source.tier]}: {source.label}"
