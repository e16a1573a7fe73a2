"""Sparse-to-dense conversion: from the first step of a window to one state, by computing its steps again.

A window (MoEvement, section 3.2) has each operator in full as of one of its steps, and as compute weights as of the
steps before. Training resumes at the first step; a ``StepSource`` computes the others again. After each replayed step,
what the window has of it replaces the optimizer's result: operators anchored there in full, and compute weights of
those anchored later. An anchored operator has had exact gradients since, because every pass read exact weights; so at
the window's end all are exact, to the last bit. Updates of operators that are not anchored yet are meaningless, and are
overwritten before anything reads them. What does not depend on weights must be as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moe_ckpt.core.tokens import WINDOW_BEGAN, Counts, window_began
from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.ports import Communicator, StateTensor, TensorMeta, TrainingState
from moe_ckpt.reading.index import StoredSlice, TensorIndex, split_key
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.shared_reading import SharedReading, load_slices
from moe_ckpt.run.agreement import Deferred, StepTokens

_MODEL = "model/"

Plain = Mapping[str, Any]
"""A rank's plain state."""

Repeated = tuple[str, Callable[[Plain], Any]]
"""(what it is, where it is found in an adapter's plain state): random numbers, schedules, positions in the data."""

RepeatedOf = Callable[[Plain, Plain], Iterable[Repeated]]
"""(state before a step, recorded state after it) -> the parts of the latter that a replay must repeat."""


class StepSource:
    """Computes the steps of a window: by itself, by training's own passes, which continue from its first step."""

    def prepare(self, replay: WindowReplay, recorded: Plain) -> None:
        """Called before each step.

        Args:
            replay: Of the window.
            recorded: The plain state after it, the first time.
        """

    def before_backward(self, loss: torch.Tensor) -> None:
        """Called before a backward pass of a step, where the framework tells."""

    def before_update(self) -> None:
        """Called when gradients of a step are final, before clipping."""

    def done(self) -> None:
        """Called when the last step was computed, before ``close``."""

    def close(self) -> None:
        """Called when no step is left, and when training ends."""


class WindowReplay:
    """The replay of one window, step by step; the same on all ranks. Recovery loads its first step.

    Args:
        reader: Of the checkpoint.
        manifest: Of the window.
        state: Is written.
        rank: This one.
        loaded: How many of its steps are loaded.

    Attributes:
        manifest: As given.
        shared: What this rank and others read together of storage; None if nothing.
        source: Computes the steps.
    """

    def __init__(
        self, reader: StoreReader, manifest: Manifest, state: TrainingState, rank: int, loaded: int = 0
    ) -> None:
        self.manifest, self._reader, self._state, self._rank = manifest, reader, state, rank
        self._index: TensorIndex = reader.index(manifest)
        self._steps = tuple(slot.step for slot in manifest.slots)
        self._loaded = loaded
        self.shared: SharedReading | None = None
        self.source = StepSource()
        self._reached = self._until = 0
        self._tokens: list[Deferred[StepTokens]] = []

    # --- loading: by recovery the first step, then by the methods below ---

    @property
    def is_loaded(self) -> bool:
        """True if all that the window has is loaded."""
        return self._loaded == len(self._steps)

    def load(self) -> None:
        """Loads the step that comes next. Other ranks do not learn of an error."""
        step = self._steps[self._loaded]

        def prepared() -> Sequence[StateTensor]:
            self._state.prepare(self._optimizer_tensors(step))
            return self._state.tensors()

        load_slices(self._reader, self._stored(step), prepared, self.shared)
        self._loaded += 1

    def repeat(self) -> None:
        """Loads the newest step once more: batch-end hooks may have changed weights since.

        Always, since torch does not tell of every change: ``.data``, which Megatron's QK-clip writes to, has a version
        counter of its own.
        """
        load_slices(self._reader, self._stored(self._steps[self._loaded - 1]), self._state.tensors)

    # --- computing: by the driver ---

    def resume(
        self,
        plain: Plain,
        repeated: RepeatedOf,
        *,
        until: int = 0,
        changed: str = "",
    ) -> None:
        """The first step is loaded, and the others are computed from here on.

        Args:
            plain: This rank's plain state at that step.
            repeated: The parts of an adapter's plain state that must repeat.
            until: Last step to compute: the window's, or a later one.
            changed: In what the script differs from the one that wrote the window, as text.
        """
        self._before, self._repeated, self._until, self._changed = plain, repeated, until, changed
        self._recorded: Plain = self.upcoming()

    def upcoming(self) -> Plain:
        """Returns this rank's recorded plain state of the step that is computed next, if the window has one."""
        return {} if self.is_loaded else self._reader.state(self.manifest.slots[self._loaded], self._rank)

    @property
    def upcoming_step(self) -> int:
        """The step that is computed next."""
        return self._steps[self._loaded]

    @property
    def upcoming_path(self) -> str:
        """The file of ``upcoming``, for messages."""
        return state_path(self.manifest.slots[self._loaded].directory, self._rank)

    @property
    def done(self) -> bool:
        """True if the state is that of the last step to compute."""
        return self.is_loaded and self._reached >= self._until

    @property
    def steps(self) -> tuple[int, int]:
        """First step of the window, and the last one to compute."""
        return self._steps[0], max(self._steps[-1], self._until)

    def begin(self, source: StepSource) -> None:
        """Training begins with ``source``."""
        self.source = source
        self._prepare()

    def _prepare(self) -> None:
        if self.done:
            self.source.done()
            self.close()
        else:
            self.source.prepare(self, self._recorded)

    def close(self) -> None:
        """No step is left, or training ends. Safe to call twice."""
        self.source.close()

    def put_back(self, step: int) -> None:
        """Loads what the window has of ``step``, which was computed again. Called before anything reads weights.

        A collective if reading is shared.

        Raises:
            ReplayDivergedError: It is not the next step.
            DamagedError: The window was damaged since the replay began.
            StoreError: The same on another rank.
        """
        if self.is_loaded or step == self._steps[self._loaded - 1]:
            return
        if step != self.upcoming_step:
            problem = f"it is computed now, and was skipped then (the run computed {self.upcoming_step})"
            raise ReplayDivergedError(step, problem, self._changed)
        if self.shared is None:
            self.load()
        else:
            self.shared.agreed(self.manifest.directory, self.load)

    def skip(self, step: int) -> None:
        """Raises ``ReplayDivergedError`` if ``step``, which is skipped, was computed the first time."""
        if not self.is_loaded and step >= self.upcoming_step:
            raise ReplayDivergedError(step, "it is skipped now, and was computed then", self._changed)

    def compare(self, step: int, captured: Plain) -> None:
        """Raises ``ReplayDivergedError`` unless ``captured``, the plain state after ``step``, is as recorded."""
        self._reached = step
        if self._recorded:
            self.put_back(step)
            self.repeat()  # other callbacks or QK-clip may have changed weights since
            parts = self._repeated(self._before, self._recorded)
            require_repeated(step, parts, self._recorded, captured, self._changed)
            self._before, self._recorded = self._recorded, self.upcoming()
        self._prepare()

    def count(self, tokens: Deferred[StepTokens]) -> None:
        """A step was computed again, in which this rank counted ``tokens``."""
        self._tokens.append(tokens)

    def routes_alike(self, comm: Communicator) -> bool:
        """Returns whether all steps together gave each expert as many tokens as the first time. A collective.

        What a step computes is not recorded, so data or kernels that do not repeat are noticed by this alone. True
        also where there are no experts, and of windows of releases that did not note it.
        """
        began = self.manifest.tokens.get(WINDOW_BEGAN)
        ended = np.asarray(self.manifest.tokens.get("applied", ()), dtype=np.int64)
        if began is None or not ended.size:
            return True

        def counted() -> Counts:
            return sum((tokens.result().applied for tokens in self._tokens), start=np.zeros_like(ended))

        again, _ = comm.start_agreement(counted, np.zeros(0, dtype=np.int64)).result()
        return window_began(ended - again) == {WINDOW_BEGAN: began}

    # --- what the window has ---

    def frozen_parameters(self) -> frozenset[str]:
        """Returns names of the parameters of which no row is anchored yet."""
        reached = self._steps[self._loaded - 1]
        return frozenset(
            split_key(key).fqn
            for key, group in self._index.tensors.items()
            if key.startswith(_MODEL) and all(stored.file.step > reached for stored in group)
        )

    def _optimizer_tensors(self, step: int) -> dict[str, TensorMeta]:
        """Returns the optimizer state at ``step``: of parameters that are anchored in part or whole."""
        trained = {
            split_key(key).fqn
            for key, group in self._index.tensors.items()
            if key.startswith(_MODEL) and any(stored.file.step <= step for stored in group)
        }
        optimizer = (key for key in self._index.tensors if not key.startswith(_MODEL))
        return {key: self._index.meta(key) for key in optimizer if split_key(key).fqn in trained}

    def _stored(self, step: int) -> dict[str, list[StoredSlice]]:
        """Returns what the window has of a step, by key: what is anchored there, and compute weights of the rest."""
        slices: dict[str, list[StoredSlice]] = {}
        for key, group in self._index.tensors.items():
            if anchored := [stored for stored in group if stored.file.step == step]:
                slices[key] = anchored
        for key, later in self._index.replay.get(step, {}).items():
            slices[key] = [*slices.get(key, ()), *later]
        return slices


def require_repeated(step: int, parts: Iterable[Repeated], recorded: Plain, captured: Plain, changed: str = "") -> None:
    """Raises ``ReplayDivergedError``, which names the first of ``parts`` in which the two plain states differ."""
    for name, part in parts:
        try:
            before = part(recorded)
        except (LookupError, TypeError) as error:
            problem = f"{name} was not recorded ({type(error).__name__}: {error})"
            raise ReplayDivergedError(step, problem, changed) from error
        if not same_plain(before, part(captured)):
            raise ReplayDivergedError(step, f"{name} differs from what was recorded", changed)


def same_plain(one: Any, other: Any) -> bool:
    """Returns whether two values of plain state are equal, tensors and arrays to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_plain(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_plain, one, other))
    if isinstance(one, (torch.Tensor, Mapping, list, tuple)) or isinstance(other, (torch.Tensor, Mapping, list, tuple)):
        return False
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
