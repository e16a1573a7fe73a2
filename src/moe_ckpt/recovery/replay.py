"""Replays steps after a recovery: training computes them again, and continues if they are as recorded.

Training's own passes compute each step. Then the part of it that a sparse window has is loaded (``windows.replay``),
and whatever does not depend on weights must be as recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from moe_ckpt.core.tokens import WINDOW_BEGAN, Counts, window_began
from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import Communicator
from moe_ckpt.run.agreement import Deferred, StepTokens

Plain = Mapping[str, Any]
"""A rank's plain state."""

Repeated = tuple[str, Callable[[Plain], Any]]
"""(what it is, where it is found in an adapter's plain state): random numbers, schedules, positions in the data."""

RepeatedOf = Callable[[Plain, Plain], Iterable[Repeated]]
"""(state before a step, recorded state after it) -> the parts of the latter that a replay must repeat."""


class StepReplay:
    """Replays steps one by one; the same on all ranks. This class replays steps of which nothing is recorded.

    Args:
        manifest: Of the checkpoint that was loaded: a sparse window, or the step at which the replay begins.
        loaded: How many of the checkpoint's steps are loaded; None for all.

    Attributes:
        manifest: As given.
        recorded: This rank's plain state after the step that is computed next, if the checkpoint has one.
    """

    def __init__(self, manifest: Manifest, loaded: int | None = None) -> None:
        self.manifest = manifest
        self.recorded: Plain = {}
        self._steps = tuple(slot.step for slot in manifest.slots)
        self._loaded = len(self._steps) if loaded is None else loaded
        self._reached = self._until = 0
        self._tokens: list[Deferred[StepTokens]] = []

    # --- of the checkpoint ---

    def load(self) -> None:
        """Loads what the checkpoint has of the next step. Other ranks do not learn of an error."""
        self._loaded += 1

    def load_agreed(self) -> None:
        """Does ``load``. If ranks read together, all of them raise if one does."""
        self.load()

    def repeat(self) -> None:
        """Loads the newest step once more, since batch-end hooks may have changed weights."""

    def upcoming(self) -> Plain:
        """Returns this rank's recorded plain state of the step that is computed next, if the checkpoint has one."""
        return {}

    @property
    def is_loaded(self) -> bool:
        """True if all that the checkpoint has is loaded."""
        return self._loaded == len(self._steps)

    @property
    def upcoming_step(self) -> int:
        """The step that is computed next."""
        return self._steps[self._loaded]

    # --- of training ---

    def resume(self, plain: Plain, repeated: RepeatedOf, *, until: int = 0, changed: str = "") -> None:
        """The first step is loaded, and the others are computed from here on.

        Args:
            plain: This rank's plain state at that step.
            repeated: The parts of an adapter's plain state that must repeat.
            until: Last step to compute: the checkpoint's, or a later one.
            changed: How the script differs from the one that wrote the window, as text.
        """
        self._before, self._repeated, self._until, self._changed = plain, repeated, until, changed
        self.recorded = self.upcoming()

    @property
    def done(self) -> bool:
        """True if the state is that of the last step to compute."""
        return self.is_loaded and self._reached >= self._until

    @property
    def steps(self) -> tuple[int, int]:
        """First step of the checkpoint, and the last one to compute."""
        return self._steps[0], max(self._steps[-1], self._until)

    def put_back(self, step: int) -> None:
        """Loads what the checkpoint has of ``step``, which was computed again. Called before anything reads weights.

        A collective if reading is shared.

        Raises:
            ReplayDivergedError: It is not the next step.
            DamagedError: The checkpoint was damaged since the replay began.
            StoreError: The same on another rank.
        """
        if self.is_loaded or step == self._steps[self._loaded - 1]:
            return
        if step != self.upcoming_step:
            problem = f"it is computed now, and was skipped then (the run computed {self.upcoming_step})"
            raise ReplayDivergedError(step, problem, self._changed)
        self.load_agreed()

    def skip(self, step: int) -> None:
        """Raises ``ReplayDivergedError`` if ``step``, which is skipped, was computed the first time."""
        if self.is_loaded or step >= self.upcoming_step:  # ranks that go back alone skip nothing: it has no log
            raise ReplayDivergedError(step, "it is skipped now, and was computed then", self._changed)

    def compare(self, step: int, captured: Plain) -> None:
        """Raises ``ReplayDivergedError`` unless ``captured``, the plain state after ``step``, is as recorded."""
        self._reached = step
        if self.recorded:
            self.put_back(step)
            self.repeat()  # other callbacks or QK-clip may have changed weights since
            parts = self._repeated(self._before, self.recorded)
            require_repeated(step, parts, self.recorded, captured, self._changed)
            self._before, self.recorded = self.recorded, self.upcoming()

    def count(self, tokens: Deferred[StepTokens]) -> None:
        """Notes the tokens that this rank counted in a step that was computed again."""
        self._tokens.append(tokens)

    def routes_alike(self, comm: Communicator) -> bool:
        """Returns whether all steps together gave each expert as many tokens as the first time. A collective.

        The results of a step are not recorded, so this alone shows data or kernels that do not repeat. True also if the
        model has no experts.
        """
        began = self.manifest.tokens.get(WINDOW_BEGAN)
        ended = np.asarray(self.manifest.tokens.get("applied", ()), dtype=np.int64)
        if began is None or not ended.size:
            return True

        def counted() -> Counts:
            return sum((tokens.result().applied for tokens in self._tokens), start=np.zeros_like(ended))

        again, _ = comm.start_agreement(counted, np.zeros(0, dtype=np.int64)).result()
        return window_began(ended - again) == {WINDOW_BEGAN: began}


def require_repeated(step: int, parts: Iterable[Repeated], recorded: Plain, captured: Plain, changed: str = "") -> None:
    """Raises ``ReplayDivergedError``, which names the first of ``parts`` in which the two plain states differ."""
    for name, part in parts:
        try:
            before = part(recorded)
        except (LookupError, TypeError) as error:
            problem = f"{name} was not recorded ({type(error).__name__}: {error})"
            raise ReplayDivergedError(step, problem, changed) from error
        if not are_plain_states_equal(before, part(captured)):
            raise ReplayDivergedError(step, f"{name} differs from what was recorded", changed)


def are_plain_states_equal(one: Any, other: Any) -> bool:
    """Returns whether two values of plain state are equal, tensors and arrays to the last bit; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_plain_states_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(are_plain_states_equal, one, other))
    if isinstance(one, (torch.Tensor, Mapping, list, tuple)) or isinstance(other, (torch.Tensor, Mapping, list, tuple)):
        return False
    equal = (one == other) | ((one != one) & (other != other))
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
