"""Sparse-to-dense conversion: from the first step of a window to one state, by computing its steps again.

A window (MoEvement, section 3.2) has each operator in full as of one of its steps, and as compute weights as of the
steps before. Training resumes at the first step. After each replayed step, what the window has of it replaces the
optimizer's result: operators anchored there in full, and compute weights of those anchored later. An anchored operator
has had exact gradients since, because every pass read exact weights; so at the window's end all are exact, to the last
bit. Updates of operators that are not anchored yet are meaningless, and are overwritten before anything reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.ports import StateTensor, TensorMeta, TrainingState
from moe_ckpt.reading.index import StoredSlice, TensorIndex, split_key
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.shared_reading import SharedReading, load_slices

_MODEL = "model/"


@dataclass
class Replay:
    """The replay of one window; the same on all ranks.

    Attributes:
        steps: Of the window.
        loaded: How many of them are loaded.
        shared: What this rank and others read together of storage; None if nothing.
    """

    reader: StoreReader
    manifest: Manifest
    index: TensorIndex
    state: TrainingState
    rank: int
    loaded: int = 0
    shared: SharedReading | None = None
    steps: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = tuple(slot.step for slot in self.manifest.slots)

    @property
    def done(self) -> bool:
        """True if the state is that of the window's last step."""
        return self.loaded == len(self.steps)

    def advance(self, step: int) -> None:
        """Loads what the window has of ``step``, which was computed again. Called before anything reads weights.

        A collective if reading is shared.

        Raises:
            ReplayDivergedError: It is not the step that comes next.
            DamagedError: The window was damaged since the replay began.
            StoreError: The same on another rank.
        """
        expected = self.steps[self.loaded]
        if step != expected:
            raise ReplayDivergedError(expected, f"the next optimizer step was step {step}")
        if self.shared is None:
            self.load(step)
        else:
            self.shared.agreed(self.manifest.directory, lambda: self.load(step))

    def load(self, step: int) -> None:
        """Loads the step that comes next, as ``advance`` does; other ranks do not learn of an error."""

        def prepared() -> Sequence[StateTensor]:
            self.state.prepare(self._optimizer_tensors(step))
            return self.state.tensors()

        load_slices(self.reader, self._stored(step), prepared, self.shared)
        self.loaded += 1

    def repeat(self) -> None:
        """Loads the newest step once more: batch-end hooks may have changed weights since.

        Always, since torch does not tell of every change: ``.data``, which Megatron's QK-clip writes to, has a version
        counter of its own.
        """
        load_slices(self.reader, self._stored(self.steps[self.loaded - 1]), self.state.tensors)

    def upcoming(self) -> Mapping[str, Any]:
        """Returns this rank's recorded plain state of the step that is computed next."""
        return self.reader.state(self.manifest.slots[self.loaded], self.rank)

    @property
    def upcoming_step(self) -> int:
        """The step that is computed next."""
        return self.steps[self.loaded]

    @property
    def upcoming_path(self) -> str:
        """The file of ``upcoming``, for messages."""
        return state_path(self.manifest.slots[self.loaded].directory, self.rank)

    def frozen_parameters(self) -> frozenset[str]:
        """Returns names of the parameters of which no row is anchored yet."""
        reached = self.steps[self.loaded - 1]
        return frozenset(
            split_key(key).fqn
            for key, group in self.index.tensors.items()
            if key.startswith(_MODEL) and all(stored.file.step > reached for stored in group)
        )

    def _optimizer_tensors(self, step: int) -> dict[str, TensorMeta]:
        """Returns the optimizer state at ``step``: of parameters that are anchored in part or whole."""
        trained = {
            split_key(key).fqn
            for key, group in self.index.tensors.items()
            if key.startswith(_MODEL) and any(stored.file.step <= step for stored in group)
        }
        optimizer = (key for key in self.index.tensors if not key.startswith(_MODEL))
        return {key: self.index.meta(key) for key in optimizer if split_key(key).fqn in trained}

    def _stored(self, step: int) -> dict[str, list[StoredSlice]]:
        """Returns what the window has of a step, by key: what is anchored there, and compute weights of the rest."""
        slices: dict[str, list[StoredSlice]] = {}
        for key, group in self.index.tensors.items():
            if anchored := [stored for stored in group if stored.file.step == step]:
                slices[key] = anchored
        for key, later in self.index.replay.get(step, {}).items():
            slices[key] = [*slices.get(key, ()), *later]
        return slices
