"""The part that checkpoints of training loops have in common: what they tell, how they end, and the ``with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeVar

from moe_ckpt.driver.run import CLOSE_SECS, Driver
from moe_ckpt.run.events import StepRecord
from moe_ckpt.session.session import CheckpointSession

_Self = TypeVar("_Self", bound="AttachedCheckpoint")


class AttachedCheckpoint(ABC):
    """Checkpoints one training loop, which calls it around each step. All ranks, on the training thread."""

    _driver: Driver

    @property
    def session(self) -> CheckpointSession:
        """The session, with its catalog, its ledger and the newest committed step."""
        return self._driver.session

    @property
    def last(self) -> StepRecord | None:
        """The record of the newest step; ``last.halt`` is the reason if the policy asks to end training, else None."""
        return self._driver.last

    @property
    def restored_step(self) -> int | None:
        """The step of the checkpoint that training resumed from; None for a new run."""
        return self._driver.restored_step

    @property
    def replaying(self) -> bool:
        """True while a sparse window is replayed; until that is done, the model holds no complete state."""
        return self._driver.replaying is not None

    @abstractmethod
    def finish(self, *, ended: bool = True) -> None:
        """Training ended without an error: saves a complete last checkpoint, and waits for it."""

    @abstractmethod
    def _release(self) -> None:
        """Removes all hooks. May be called twice."""

    def _end(self, *, moved: bool, ended: bool) -> None:
        halted = self.last is not None and self.last.halt is not None
        try:
            self._driver.catch_up()
            self._driver.finish(moved=moved, ended=ended and not halted)
        finally:
            self._release()

    def close(self, timeout_secs: float | None = None, failure: BaseException | str | None = None) -> None:
        """Releases threads, lock and hooks after a failure. Safe to call twice, and after ``finish``.

        Args:
            timeout_secs: Longest wait for what is being written.
            failure: What happened. Memory that outlives the process then keeps the newest step, within
                ``Memory(survivor_secs)``, unless the failure came in the middle of an update.
        """
        if failure is not None:
            self._driver.survive(failure)
        self._release()
        self._driver.close(timeout_secs)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None and self.session.is_open:  # else it was finished or closed inside
                self.finish()
        finally:
            self.close(CLOSE_SECS, error)
