"""Reads what a run that ended left in memory, from one process outside of the run, which has all its directories.

Directories of several nodes may have been brought to one machine; peers' copies stand for those of a node that is lost.
No file in them is changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.user_text import name_ranks
from moe_ckpt.errors import (
    CoverageError,
    DamagedError,
    MoECheckpointError,
    NoCheckpointError,
    StepRemovedError,
    StoreError,
    sparse_window,
)
from moe_ckpt.format.manifest import Manifest, ModelRecord, age_of, step_of
from moe_ckpt.memory.directory import (
    RankDirectory,
    entries,
    holder_of,
    owner_of,
    rank_directories,
    said_holder,
    user_directory,
)
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.memory.slot import Slot
from moe_ckpt.reading.memory.memory_checkpoints import MemoryCheckpoints
from moe_ckpt.reading.memory.memory_shares import MemoryCheckpoint, checkpoints_of, snapshots_of
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.reader import StoreReader, check_checkpoint

log = logging.getLogger("moe_ckpt")

_SHOWN = 4


class _Memory:
    """The slots of all directories, as the memory of one rank (``slot_storage.RankMemory``)."""

    node, root = "", ""
    complete_step: int | None = None
    outlives_process = True

    def __init__(self, slots: Sequence[FoundSlot], run_id: str, model: ModelRecord) -> None:
        self.model, self.run_id = model, run_id
        self.left_slots = LeftSlots(slots, lambda gone: None)  # no run resumes from them, so that none is deleted


class MemoryOutside:
    """The checkpoints in memory directories of a run, for one process. Use as a context: the directories are locked.

    Args:
        reader: Of the run's store.
        roots: As in ``Memory(directory=...)``, of all nodes.

    Attributes:
        damages: Texts on headers of slots that are damaged, and on the damage that ``opened`` met.

    Raises:
        NoCheckpointError: The directories have nothing of the store's run; the text says what they have. Or the store
            has no checkpoint yet.
        StoreError: A process of the run is alive.
        ConfigError: One of ``roots`` cannot be used.
    """

    def __init__(self, reader: StoreReader, roots: Sequence[str]) -> None:
        self._reader = reader
        self.damages: list[str] = []
        run_id, model = reader.identity().run_id, _model_of(reader)
        slots: list[FoundSlot] = []
        with contextlib.ExitStack() as locks:
            for run in (run for root in roots for run in sorted(user_directory(root).glob(f"{run_id}-*"))):
                for _, _, path in rank_directories(run):
                    locks.callback(_locked(path).release)
                    slots += self._slots_of(path)
            if not slots:
                raise NoCheckpointError(_nothing(reader, roots))
            self.memory = MemoryCheckpoints(SoloCommunicator(), _Memory(slots, run_id, model), reader)
            self._locks = locks.pop_all()

    def __enter__(self) -> MemoryOutside:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def _slots_of(self, path: Path) -> Iterator[FoundSlot]:
        owner, store = owner_of(path).store, self._reader.storage.root
        if owner != store:
            log.warning(
                "%s was written for the store %s, and is used for %s, because it is of the same run",
                path,
                owner or "(unknown)",
                store,
            )
        for header in sorted(path.glob("*.head")):
            try:
                yield FoundSlot(*Slot.open(header.with_suffix("")))
            except (DamagedError, OSError) as error:
                log.warning("the memory slot %s is left out: %s", header.with_suffix(""), error)
                self.damages.append(str(error))

    def steps(self) -> list[int]:
        """Returns the steps that memory can give and that storage does not have, newest first."""
        return list(dict.fromkeys(checkpoint.step for checkpoint in self._complete() if not self._stored(checkpoint)))

    def _stored(self, checkpoint: MemoryCheckpoint) -> bool:
        return checkpoint.directory in self.memory.stored

    def _complete(self, *, windows: bool = False) -> list[MemoryCheckpoint]:
        """Returns complete checkpoints, newest first; sparse windows, which must be replayed, only if ``windows``."""
        return [one for one in checkpoints_of(self.memory.shares) if one.is_complete and (windows or not one.is_window)]

    def unstored(self) -> Iterator[OpenedMemory]:
        """Yields the checkpoints that are whole in memory, and that storage does not have, newest first. Of a gradient
        log, whose steps are all checkpoints, only the newest.

        Raises:
            MoECheckpointError: As ``MemoryCheckpoints.opener``.
        """
        checkpoints = [one for one in self._complete(windows=True) if not self._stored(one)]
        newest_log = next((one for one in checkpoints if one.is_log), None)
        for checkpoint in checkpoints:
            if checkpoint is newest_log or not checkpoint.is_log:
                yield self.memory.opener(checkpoint)()

    def stored(self, named: str | None, *, windows: bool = False) -> str | None:
        """Returns the step directory to read on storage; None if only memory may have it.

        Args:
            named: A step directory; another of the same step is taken if neither has this one. None for the newest
                that is not passed over, as values that are not finite are.
            windows: As of ``opened``.
        """
        directories, in_memory = self._reader.directories(), [one.directory for one in self._complete(windows=windows)]
        if named is None:
            newest = next((directory for directory in directories if self._is_taken(directory, windows=windows)), None)
            if newest is None or not in_memory or age_of(newest) < age_of(in_memory[0]):
                return None
            return newest
        if named in directories or named in in_memory:
            return named if named in directories else None
        return next((directory for directory in directories if step_of(directory) == step_of(named)), None)

    def _is_taken(self, directory: str, *, windows: bool) -> bool:
        try:
            manifest = self._reader.manifest(directory)
        except DamagedError:  # which is said by whoever reads it then
            return True
        return not manifest.not_finite and (windows or not manifest.window)

    def opened(
        self, step: int | None, verify: Callable[[OpenedMemory], None], *, windows: bool = False
    ) -> OpenedMemory:
        """Returns a checkpoint whose bytes were verified: of damaged slots other copies are taken, if there are any.

        Args:
            step: None for the newest.
            verify: Reads what is needed. Raises ``DamagedError``.
            windows: Sparse windows will do.

        Raises:
            NoCheckpointError: It cannot be made; says which operators lack which steps, or which slots are damaged. Or
                storage has it.
            DamagedError: A file on storage that memory is laid over is damaged, and without it the step is not whole.
            UnsupportedError: Memory has a sparse window instead.
            MoECheckpointError: As ``MemoryCheckpoints.opener``.
        """
        requested, beneath = step, None
        while True:
            checkpoint = next((one for one in self._complete(windows=windows) if requested in (None, one.step)), None)
            if checkpoint is None:
                for window in self._complete(windows=True):
                    if requested in (None, window.step):
                        raise sparse_window(window.directory, window.shares[0].step, window.step)
                raise NoCheckpointError(self._unreached(requested))
            if self._stored(checkpoint):
                raise NoCheckpointError(f"{self._reader.storage.root}/{checkpoint.directory} is there already")
            requested = checkpoint.step  # damage found in the newest is said, and is no reason to take an older one
            try:
                opened = self.memory.opener(checkpoint)()
                opened.reader.prove(opened.manifest)
                verify(opened)
            except (DamagedError, StepRemovedError) as error:
                if isinstance(error, DamagedError):
                    self.memory.note_damage_beneath(error.path)
                bad = self.memory.set_aside(checkpoint.directory, error)
                of_slots = [f"{self.memory.paths[slot]} is damaged ({error})" for slot in bad or ()]
                self.damages += [text for text in of_slots or [str(error)] if text not in self.damages]
                beneath = beneath or (None if of_slots else error)
                if bad is None:
                    raise
            except (CoverageError, NoCheckpointError) as error:
                raise beneath or error from None
            else:
                return opened

    # --- why not ---

    def _unreached(self, step: int | None) -> str:
        steps = self.steps()
        can = f"steps that can be made: {', '.join(map(str, steps[:12]))}" if steps else "no step can be made"
        if step is None:
            return f"no checkpoint in memory is complete; {can}{_because(self.damages)}"
        return f"step {step} cannot be made: {self._lacking(step)}{_because(self.damages)}; {can}"

    def _lacking(self, step: int) -> str:
        """Says what is missing of a step, or of steps of the gradient log that lead to it."""
        shares = self.memory.shares
        snapshots = {snapshot.step: snapshot for snapshot in snapshots_of(shares)}
        if step not in snapshots:
            extent = f"memory has steps {min(snapshots)} to {max(snapshots)}" if snapshots else "memory has none"
            return f"no slot holds a part of it ({extent})"
        last = snapshots[step].shares[-1]
        first = step if last.since is None else step - (last.identity.number - last.since)
        gaps: dict[str, list[int]] = defaultdict(list)
        for at in range(first, step + 1):
            if at not in snapshots:
                gaps["no slot holds a part of it"].append(at)
            elif not snapshots[at].is_complete:
                gone = [rank for rank in range(snapshots[at].writers) if rank not in snapshots[at].snapshots[0]]
                gaps[f"the share of {name_ranks(gone)} is in none of the given directories"].append(at)
        for checkpoint in checkpoints_of(shares) if not gaps else ():
            if checkpoint.is_log and checkpoint.step == step and not checkpoint.is_complete:
                gaps["gradients that lead to it are gone: no newer step needs them, or a slot is damaged"].append(step)
        if not gaps:
            return "it is a step of a sparse window, or the snapshots of its ranks do not fit together"
        problems = (f"step {', '.join(map(str, steps[:_SHOWN]))}: {problem}" for problem, steps in gaps.items())
        return f"{'; '.join(problems)}. Give the directories of all nodes, or of the peers that hold copies"


def verify_opened(opened: OpenedMemory) -> None:
    """Reads every byte of a checkpoint, the gradients of a log included. Raises as ``check_checkpoint``."""
    check_checkpoint(opened.reader, opened.manifest)
    opened.reader.verify(stored for snapshot in opened.logged for stored in snapshot.gradients)


def _because(damages: Sequence[str]) -> str:
    return f", because of damage: {'; '.join(damages)}" if damages else ""


def _locked(path: Path) -> RankDirectory:
    taken = RankDirectory.take(path)
    if taken is None:
        raise StoreError(f"{path} is held by {said_holder(holder_of(path))}: its run is still running. End it first")
    return taken


def _model_of(reader: StoreReader) -> ModelRecord:
    """Returns the model's record in the newest manifest that can be read."""
    for directory in reader.directories():
        try:
            manifest: Manifest = reader.manifest(directory)
            return manifest.model
        except MoECheckpointError as error:
            log.warning("%s is skipped: %s", directory, error)
    raise NoCheckpointError(
        f"{reader.storage.root} has no checkpoint that describes the model's layers. Start the run again, with the "
        "same ranks and layout, to resume from memory"
    )


def _nothing(reader: StoreReader, roots: Sequence[str]) -> str:
    runs_of_roots = []
    for root in roots:
        for run in entries(user_directory(root)):
            stores = {owner_of(path).store for _, _, path in rank_directories(run)} - {""}
            if stores:
                runs_of_roots.append(f"{root} has run {run.name[:12]} of {', '.join(sorted(stores))}")
    others = f": {'; '.join(runs_of_roots[:_SHOWN])}" if runs_of_roots else ""
    return (
        f"no slot in {', '.join(roots)} is of run {reader.identity().run_id[:12]} of {reader.storage.root}{others}. "
        "Set --directory to the run's Memory(directory=...), and give the store of that run. A run that was not killed "
        "has removed its memory at its end"
    )
