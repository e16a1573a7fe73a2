"""Logs this rank's messages over the boundaries of its stage, and answers from logs while the stage computes alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.localized.exchange import Answers
from moe_ckpt.localized.log_files import Channel
from moe_ckpt.localized.recording import UpstreamLog
from moe_ckpt.stopwatch import Stopwatch, timed


class Boundary:
    """The boundary of this rank's stage (see the module). On the training thread.

    Args:
        stage_of: Per rank, its pipeline stage.
        log: Gets messages that are sent; None to log nothing.
        stopwatch: Counts the time of all methods.
    """

    def __init__(self, stage_of: Sequence[int], log: UpstreamLog | None, stopwatch: Stopwatch | None = None) -> None:
        self.stopwatch = stopwatch or Stopwatch()
        self._stage_of, self._log = tuple(stage_of), log
        self._first: Callable[[], None] | None = None
        self._alone: frozenset[int] = frozenset()
        self._came_up: int | None = None
        self._answers: Answers | None = None
        self._resting = self._aside = False

    @property
    def is_alone(self) -> bool:
        """True while this rank's stage computes a step again, without the other stages."""
        return self._answers is not None

    def before_first(self, call: Callable[[], None]) -> None:
        """Runs ``call`` before the first message is sent or awaited."""
        self._first = call

    def begin(self) -> None:
        """Begins a step, unless a message has begun it."""
        self._resting = False
        first, self._first = self._first, None
        if first is not None:
            first()

    def rest(self) -> None:
        """Ends the step, for a loop whose stages communicate between steps.

        Messages until ``begin`` belong to no step, and stages that compute alone do not send them.
        """
        self._resting = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Encloses a validation. Its messages belong to no step, and stages that compute alone do not send them."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def go_alone(self, ranks: Collection[int], answers: Answers) -> None:
        """Makes ``ranks``, this one included, compute the next step alone, with ``answers`` of the other ranks."""
        self._alone, self._answers = frozenset(ranks), answers

    def together(self, step: int | None = None) -> None:
        """Lets all ranks compute from here on.

        Args:
            step: The step that this rank has reached; None if it failed before.
        """
        self._alone, self._answers, self._came_up = frozenset(), None, step

    def _passes(self) -> None:
        """Notes that a message of training, or of an evaluation, is sent or awaited. Evaluations are never replayed."""
        self.begin()
        if self._aside:
            return
        if torch.is_grad_enabled():
            self._came_up = None
        elif self._came_up is not None:
            raise ReplayDivergedError(
                self._came_up,
                "the loop evaluates the model right after it, but ranks that kept their state do not. Evaluate before "
                "after_step(), or leave out Memory(upstream_bytes=...)",
            )
        elif self._log is not None:
            self._log.leave_out()

    # --- what crosses it ---

    def crosses(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether some of ``ranks`` are of another stage than others."""
        return len({self._stage_of[rank] for rank in ranks}) > 1

    @timed
    def sends(self, channel: Channel, tensor: torch.Tensor) -> bool:
        """Logs a message. Returns whether it must be sent."""
        self._passes()
        self._keep(channel, [tensor])
        return self._answers is None or channel.ranks[1] in self._alone

    @timed
    def receives(self, channel: Channel, tensor: torch.Tensor) -> bool:
        """Answers a receiving call from logs, if this stage computes alone. Returns whether ``tensor`` was written."""
        self._passes()
        if self._answers is None or channel.ranks[0] in self._alone:
            return False
        self._answers.give(channel, tensor)
        return True

    @timed
    def answers(self, channel: Channel, results: Sequence[torch.Tensor]) -> bool:
        """Answers a collective from logs, if this stage computes alone. Returns whether ``results`` were written."""
        if self._resting and self._came_up is not None:
            raise ReplayDivergedError(
                self._came_up, f"{channel} is needed right after it, but ranks that kept their state take no part"
            )
        if self._answers is None or self._alone.issuperset(channel.ranks):
            return False
        for result in results:
            self._answers.give(channel, result)
        self._keep(channel, results)
        return True

    @timed
    def agreed(self, channel: Channel, results: Sequence[torch.Tensor]) -> None:
        """Logs the results of a collective."""
        self._keep(channel, results)

    @timed
    def refused(self, channel: Channel) -> None:
        """Ends logging, after a call over a boundary whose results differ between ranks, or whose sender is not
        known."""
        if self._log is not None:
            self._log.give_up(f"{channel}: its results are not the same on all ranks, or its sender is not known")

    def _keep(self, channel: Channel, tensors: Sequence[torch.Tensor]) -> None:
        if self._log is not None and not (self._resting or self._aside):
            for tensor in tensors:
                self._log.append(channel, tensor)
