"""Gradient logs of a Megatron training loop: what records them, and what comes back along them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moe_ckpt.core.operators import Catalog
from moe_ckpt.engine.options import Options
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.gradients.capture import GradientCapture
from moe_ckpt.gradients.recording import Ignored, StepRecorder
from moe_ckpt.gradients.returning import LogReplayer
from moe_ckpt.megatron.gradients import capture_gradients, inner_optimizers, weights_from_masters
from moe_ckpt.megatron.inventory import ModelInventory


class GradientLogging:
    """Does nothing unless the policy logs gradients, or memory holds a log.

    Args:
        inventory: Of the model chunks.
        optimizer: Megatron's.
        chunks: The model chunks.
        options: The user's.
        session: Gives the session, once it is open.

    Attributes:
        recorder: For the driver; None where the policy logs no gradients.
    """

    def __init__(
        self,
        inventory: ModelInventory,
        optimizer: Any,
        chunks: Sequence[Any],
        options: Options,
        session: Callable[[], CheckpointSession],
    ) -> None:
        self.recorder: StepRecorder | None = None
        self._optimizer, self._chunks = optimizer, chunks
        self._attach = partial(capture_gradients, inventory, optimizer, chunks)
        self._capture: GradientCapture | None = None
        self._session = session
        if options.needs.gradients:
            self._attach(Ignored()).close()  # whatever is refused, is refused before training
            inner = inner_optimizers(optimizer)
            keys, stored = [0] * len(inner), options.needs.stored_gradients  # keys as ``megatron.state`` has them
            self.recorder = StepRecorder(inner, self._release, keys, stored)

    def _release(self) -> None:
        if self._session().is_open:
            self._session().before_update(receive=False, of_gradients=True)

    def replayer(self, catalog: Catalog) -> LogReplayer:
        """Returns what makes the updates of a log once more.

        Args:
            catalog: Of the whole model.
        """
        finish = partial(weights_from_masters, self._optimizer, self._chunks)
        optimizers = [] if self._optimizer is None else inner_optimizers(self._optimizer)
        return LogReplayer(optimizers, catalog, lambda: self._attach(Ignored()), finish)

    def begin(self) -> None:
        """Training begins."""
        if self.recorder is not None:
            self._capture = self._attach(self.recorder, self.recorder.rounded)
            self.recorder.begin(self._capture)

    def close(self) -> None:
        """Takes all hooks away. Safe to call twice."""
        if self._capture is not None:
            self._capture.close()
