"""Steps that are computed again after a failure, to bring a sparse window back (see ``recovery.replay``).

Training itself computes them: the loops go on from the window's first step. What the window holds of a step is put in
place twice: before any other callback hears that the batch ended, since they may read weights (averaging), and again
after all of them, since they may change weights as they did the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ckpt.callbacks.freezing import ClipNorms, Freezing
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.recovery.divergence import Repeated, require_repeated
from moe_ckpt.recovery.handing_back import handing_back
from moe_ckpt.recovery.replay import Replay


class Replaying:
    """From ``on_fit_start`` until the window's last step. Drives one ``Replay``."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._freezing: Freezing | None = None
        self._norms: ClipNorms | None = None
        self._recorded: Mapping[str, Any] = {}

    def begin(self, norms: ClipNorms, freezing: Freezing | None) -> None:
        """Training begins. freezing: None where nothing may be left out."""
        self._norms, self._freezing = norms, freezing
        self._next_step()

    def _next_step(self) -> None:
        if self.done:
            self.close()
            return
        self._recorded = self._replay.upcoming()
        if self._freezing is not None and self._norms is not None:
            self._freezing.apply(self._replay.frozen_parameters())
            with handing_back("the steps of a sparse window", self._replay.upcoming_path):
                self._norms.given = list(self._recorded["replay"]["norms"])

    def before_update(self) -> None:
        """All gradients of a step are there, and nobody has used them yet."""
        if self._freezing is not None:
            self._freezing.drop_gradients()

    def close(self) -> None:
        """Nothing is left out any more. Safe to call twice."""
        if self._freezing is not None:
            self._freezing.release()
        if self._norms is not None:
            self._norms.given = []

    @property
    def manifest(self) -> Manifest:
        """The window's checkpoint."""
        return self._replay.manifest

    @property
    def done(self) -> bool:
        return self._replay.done

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step of the window."""
        return self._replay.steps[0], self._replay.steps[-1]

    def in_front(self, step: int) -> None:
        """Step ``step`` was computed again, and nobody has read its weights yet."""
        self._replay.advance(step)

    def behind(self, step: int, captured: Mapping[str, Any]) -> None:
        """Everybody has heard of the step. captured: its plain state, which must be what it was the first time.

        Raises:
            ReplayDivergedError: it is not.
        """
        self._replay.repeat()
        require_repeated(step, _REPEATED, self._recorded, captured)
        self._next_step()


_REPEATED: tuple[Repeated, ...] = (
    ("the state of the random number generators", lambda state: state["rng"]),
    ("the hyperparameters of the optimizers", lambda state: _groups(state["plain"]["optimizers"])),
    ("the state of the learning rate schedulers", lambda state: state["checkpoint"]["lr_schedulers"]),
    ("the number of batches", lambda state: _batches(state["checkpoint"]["loops"]["fit_loop"])),
)


def _groups(optimizers: list[Mapping[str, Any]]) -> list[Any]:
    return [optimizer["param_groups"] for optimizer in optimizers]


def _batches(loop: Mapping[str, Any]) -> Any:
    return loop["epoch_loop.batch_progress"]["current"]["processed"]
