"""The gradient log of a training loop, as every adapter keeps it: recorded while training, repeated after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from moe_ckpt.core.operators import Catalog
from moe_ckpt.gradients.capture import GradientCapture
from moe_ckpt.gradients.recording import Ignored, StepRecorder
from moe_ckpt.gradients.returning import LogReplayer


class RunLog:
    """Hooks the optimizers while training logs gradients. For the training thread.

    Args:
        attach: The adapter's ``capture_gradients``, to which a consumer and the type of rounded gradients are given.
        optimizers: Of this rank.
        recorder: For the session; None where the policy logs no gradients.
        finish: As of ``LogReplayer``.

    Attributes:
        recorder: As given.
    """

    def __init__(
        self,
        attach: Callable[..., GradientCapture],
        optimizers: Sequence[Optimizer],
        recorder: StepRecorder | None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.recorder = recorder
        self._attach, self._optimizers, self._finish = attach, optimizers, finish
        self._capture: GradientCapture | None = None

    def replayer(self, catalog: Catalog) -> LogReplayer:
        """Returns what repeats the updates of a log.

        Args:
            catalog: Of the whole model.
        """
        return LogReplayer(self._optimizers, catalog, lambda: self._attach(Ignored()), self._finish)

    def begin(self) -> None:
        """Training begins."""
        if self.recorder is not None:
            self._capture = self._attach(self.recorder, self.recorder.rounded)
            self.recorder.begin(self._capture)

    def close(self) -> None:
        """Removes all hooks. Safe to call twice."""
        if self._capture is not None:
            self._capture.close()
