"""Gradient logs of a Megatron training loop: what records them, and what comes back along them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from moe_ckpt.core.operators import Catalog
from moe_ckpt.engine.options import Options
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.errors import ConfigError
from moe_ckpt.gradients.capture import GradientCapture
from moe_ckpt.gradients.recording import Ignored, StepRecorder
from moe_ckpt.gradients.returning import LogReplayer
from moe_ckpt.megatron.gradients import capture_gradients, inner_optimizers, weights_from_masters
from moe_ckpt.megatron.inventory import ModelInventory
from moe_ckpt.megatron.optimizers import slots


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
            _refuse_qk_clip(chunks, type(options.policy).__name__)
            self._attach(Ignored()).close()  # whatever is refused, is refused before training
            inner = inner_optimizers(optimizer)
            keys, stored = [0] * len(inner), options.needs.stored_gradients  # keys as ``megatron.state`` has them
            copies, gathered = list(_copies(inventory, optimizer)), _gathers_late(chunks)
            self.recorder = StepRecorder(inner, self._release, keys, stored, copies, gathered=gathered)

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

    def stepped(self) -> None:
        """``optimizer.step()`` of Megatron's optimizer ended: model weights are those of the masters now."""
        if self.recorder is not None:
            self.recorder.copies_written()

    def begin(self) -> None:
        """Training begins."""
        if self.recorder is not None:
            self._capture = self._attach(self.recorder, self.recorder.rounded)
            self.recorder.begin(self._capture)

    def close(self) -> None:
        """Takes all hooks away. Safe to call twice."""
        if self._capture is not None:
            self._capture.close()


def _copies(inventory: ModelInventory, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's weights of which the optimizer updates a master copy, with their names."""
    names = {live.parameter: live.parts[0].name for live in inventory.parameters}
    for parameter, slot in slots(optimizer).items():
        if slot.master is not None:
            yield names[parameter], parameter


def _gathers_late(chunks: Sequence[Any]) -> bool:
    """Whether the next forward pass gathers weights from other ranks."""
    return any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)


def _refuse_qk_clip(chunks: Sequence[Any], policy: str) -> None:
    """Raises ``ConfigError`` if Megatron clips weights behind updates, by ``.data``: torch does not count that."""
    modules = (module for chunk in chunks for module in chunk.modules())
    if any(getattr(getattr(module, "config", None), "qk_clip", False) for module in modules):
        raise ConfigError(
            f"{policy} and Megatron's qk_clip contradict each other: QK-clip changes weights behind the optimizer's "
            "update, and a log of gradients holds the update alone. Train without --qk-clip, or take a policy that "
            "saves full state (MoEvement, Dense, MoC, or MoEtion without recompute)"
        )
