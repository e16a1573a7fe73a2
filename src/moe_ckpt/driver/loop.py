"""The position of a training loop that counts its own steps, and the order in which it must call the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.optimizer_state import require_plain


class LoopPosition:
    """The position of a loop. Calls on the training thread.

    Attributes:
        unit: The framework's name for a step.
        arguments: Further arguments of ``after_step``, for messages.
        step: Steps done.
        counters: Further counters of the loop, as of that step.
        moved: A step was done in this process.
        is_updating: An update has begun that no step has counted, so weights may be those of the next step.
    """

    unit, arguments = "step", ""

    def __init__(self) -> None:
        self.moved = self.is_updating = False
        self.set_position(0, {})

    def set_position(self, step: int, counters: Mapping[str, Any]) -> None:
        """Sets the position at which training begins."""
        self.step, self.counters = step, counters

    def count(self, call: str, step: int, counters: Mapping[str, Any] | None) -> None:
        """Counts a step.

        Args:
            call: The function that the loop called, for messages.
            step: Steps done, this one included.
            counters: Plain data by name; None: unchanged.

        Raises:
            ConfigError: The step does not follow the one before.
            UnencodableStateError: A counter, which is named, is no plain data.
        """
        if step != self.step + 1:
            raise ConfigError(
                f"{call}({step}) follows {self.unit} {self.step}: call it once per {self.unit}, with the number of "
                f"{self.unit}s done, and start from the position that resume() returned"
            )
        if counters is not None:
            require_plain(counters, "counters")
            self.counters = deepcopy(dict(counters))
        self.step, self.moved, self.is_updating = step, True, False

    def require_counted(self, call: str) -> None:
        """Raises ``ConfigError`` between an update and ``after_step``: the state has no step's number yet."""
        if self.is_updating:
            after_step = f"after_step({self.step + 1}{self.arguments})"
            raise ConfigError(
                f"{call}: weights are no longer those of {self.unit} {self.step}, for optimizer.step() or "
                f"before_step() was called since, but {after_step} was not called, so they cannot be saved under "
                f"their own number. Call {after_step} first: a loop that ends early does so after it"
            )
