"""Sparse-to-dense conversion: from the first step of a window to one state, by computing its steps again.

A window (MoEvement, section 3.2) holds each operator in full as of one of its steps, and as compute weights as of the
steps before. Training goes on from the window's first step. After each step that is computed again, whatever the
window holds of that step replaces what the optimizer made of it: operators that are anchored there, in full, and the
compute weights of those that come later. An operator that is anchored has had exact gradients ever since, because every
forward and backward pass read exact weights; so at the window's end all are exact, to the last bit.

What the optimizer does to operators that are not anchored yet is meaningless, and gone before anything reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_ckpt.errors import (
    CoverageError,
    DamagedError,
    NoCheckpointError,
    OtherLayoutError,
    ReplayDivergedError,
    SparseWindowError,
)
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.ports import TensorMeta, TrainingState
from moe_ckpt.recovery.index import TensorIndex, split_key
from moe_ckpt.recovery.reader import StoreReader, check_checkpoint
from moe_ckpt.recovery.restore import check_match, copy_slices, verify_needed, weight_specs

_MODEL = "model/"
log = logging.getLogger("moe_ckpt")


def require_dense(manifest: Manifest) -> None:
    """Raise ``SparseWindowError`` unless the checkpoint is one state of the run."""
    if manifest.window:
        raise SparseWindowError(manifest.directory, manifest.window[0].step, manifest.step)


def dense_checkpoints(reader: StoreReader) -> Iterator[tuple[Manifest, tuple[str, ...]]]:
    """Yields (checkpoint that is one state of the run, the sparse windows newer than it, newest first), newest first.

    Only their manifests are read; damaged ones are passed over with a warning.

    Raises:
        SparseWindowError: There are only sparse windows.
        NoCheckpointError: There are none, or all manifests are damaged.
    """
    windows: list[Manifest] = []
    problems: list[str] = []
    found = False
    for directory in reader.directories():
        try:
            manifest = reader.manifest(directory)
        except DamagedError as error:
            log.warning("checkpoint %s is passed over: %s", directory, error)
            problems.append(f"{directory} ({error})")
            continue
        if manifest.window:
            windows.append(manifest)
        else:
            found = True
            yield manifest, tuple(window.directory for window in windows)
    if found:
        return
    if windows and not problems:
        require_dense(windows[0])
    raise NoCheckpointError(
        f"no dense checkpoint in {reader.storage.root} can be used: {'; '.join(problems[:4]) or 'there is none yet'}"
    )


def newest_dense(reader: StoreReader) -> tuple[Manifest, tuple[str, ...]]:
    """Returns (the newest good checkpoint that is one state of the run, the newer sparse windows, newest first).

    Raises:
        SparseWindowError: There are only sparse windows.
        NoCheckpointError: All others are damaged, or there are none.
    """
    problems: list[str] = []
    for manifest, windows in dense_checkpoints(reader):
        try:
            check_checkpoint(reader, manifest, slices=False)
            return manifest, windows
        except (DamagedError, CoverageError) as error:
            log.warning("checkpoint %s is passed over: %s", manifest.directory, error)
            problems.append(f"{manifest.directory} ({error})")
    raise NoCheckpointError(f"no dense checkpoint in {reader.storage.root} can be used: {'; '.join(problems[:4])}")


Admits = Callable[[Manifest, Mapping[str, Any]], None]
"""(the checkpoint, this rank's plain state; of a sparse window, that of its first step): raises ``ConfigError`` if this
run cannot go on from it (``OtherLayoutError``: but from an older dense one), or ``DamagedError`` if the state is none.
Called on every rank before anything is written."""


def begin_replay(
    reader: StoreReader,
    manifest: Manifest,
    state: TrainingState,
    rank: int,
    world_size: int,
    admits: Admits | None = None,
) -> tuple[Mapping[str, Any], Replay]:
    """Load the first step of a window: (this rank's plain state of that step, what brings back the rest).

    Called on every rank, on the training thread, before training. Everything that the replay will read is verified
    before anything is written.

    Raises:
        OtherLayoutError: another number of ranks than the window's: they would compute other steps; or as ``admits``
            says. ConfigError: as ``state.require_loadable`` says.
        DamagedError, CoverageError: as ``restore``.
    """
    if world_size != manifest.world_size:
        raise OtherLayoutError(
            manifest.directory,
            f"that {manifest.world_size} ranks computed, and this run has {world_size}",
            f"Start {manifest.world_size} ranks; a dense checkpoint, such as the last of a run that ended well, can go "
            "on with any number.",
        )
    reader.prove(manifest)
    index = reader.index(manifest)
    plain, *_ = (reader.state(slot, rank) for slot in manifest.slots)  # the others are read again when due
    if admits is not None:
        admits(manifest, plain)
    parameters = [tensor for tensor in state.tensors() if tensor.key.startswith(_MODEL)]
    stored = [key for key in index.tensors if key.startswith(_MODEL)]
    check_match(manifest, index, weight_specs(state.specs()), stored)
    if "plain" in plain:
        state.require_loadable(plain["plain"], index.tensors.keys())
    for stored_of in (index.tensors, *index.replay.values()):
        verify_needed(reader, stored_of, parameters)
    replay = Replay(reader, manifest, index, state, rank)
    replay.advance(replay.steps[0])
    return plain, replay


@dataclass
class Replay:
    """What a window still has to give. Driven by the adapter; all ranks alike.

    steps: of the window. loaded: how many of them are loaded.
    """

    reader: StoreReader
    manifest: Manifest
    index: TensorIndex
    state: TrainingState
    rank: int
    loaded: int = 0
    steps: tuple[int, ...] = field(init=False)
    _loaded_versions: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = tuple(slot.step for slot in self.manifest.slots)

    @property
    def done(self) -> bool:
        """True when the state is that of the window's last step."""
        return self.loaded == len(self.steps)

    def advance(self, step: int) -> None:
        """Step ``step`` was computed again: replace what the window holds of it. Before anything reads weights.

        Raises:
            ReplayDivergedError: it is not the step that comes next.
            DamagedError: the window was damaged since the replay began.
        """
        expected = self.steps[self.loaded]
        if step != expected:
            raise ReplayDivergedError(expected, f"the next optimizer step was step {step}")
        self.state.prepare(self._optimizer_tensors(step))
        self._copy(step)
        self.loaded += 1

    def repeat(self) -> None:
        """The same as of the step loaded last, if anything was changed in place since: what runs at a batch's end may
        have changed weights once more."""
        if self._versions() != self._loaded_versions:
            self._copy(self.steps[self.loaded - 1])

    def _versions(self) -> list[tuple[int, int]]:
        """Address and torch's version counter of every tensor of the state."""
        return [(tensor.local.data_ptr(), tensor.local._version) for tensor in self.state.tensors()]

    def upcoming(self) -> Mapping[str, Any]:
        """This rank's plain state as it was at the step that is computed next: what was recorded of it."""
        return self.reader.state(self.manifest.slots[self.loaded], self.rank)

    @property
    def upcoming_path(self) -> str:
        """The file of ``upcoming``, for messages."""
        return state_path(self.manifest.slots[self.loaded].directory, self.rank)

    def frozen_parameters(self) -> frozenset[str]:
        """Names of the parameters of which no row is anchored yet."""
        reached = self.steps[self.loaded - 1]
        return frozenset(
            split_key(key).fqn
            for key, group in self.index.tensors.items()
            if key.startswith(_MODEL) and all(stored.file.step > reached for stored in group)
        )

    def _optimizer_tensors(self, step: int) -> dict[str, TensorMeta]:
        """The optimizer state that exists at ``step``: of the parameters that are anchored in part or whole."""
        known = {
            split_key(key).fqn
            for key, group in self.index.tensors.items()
            if key.startswith(_MODEL) and any(stored.file.step <= step for stored in group)
        }
        optimizer = (key for key in self.index.tensors if not key.startswith(_MODEL))
        return {key: self.index.meta(key) for key in optimizer if split_key(key).fqn in known}

    def _copy(self, step: int) -> None:
        anchored = {
            key: those
            for key, group in self.index.tensors.items()
            if (those := tuple(stored for stored in group if stored.file.step == step))
        }
        tensors = self.state.tensors()
        copy_slices(self.reader, anchored, tensors)
        copy_slices(self.reader, self.index.replay.get(step, {}), tensors)
        self._loaded_versions = self._versions()
