"""Age of the newest sparse window (MoEvement), which is how far a failure sets a run back, and the step's place in its
window."""

from __future__ import annotations

from typing import Any

import torch

from moe_ckpt.metrics.base import StepMetric


class WindowAge(StepMetric):
    """Steps since the last step of the newest complete window; NaN before the first.

    A failure now would compute so many steps again, and the W - 1 of that window after its first. It grows to W, until
    the next window is complete, and a little more where writing is slow. A checkpoint of any other policy counts as a
    window of one step.
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    label = "age of the newest complete window (steps)"
    age_of_window: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("age_of_window", torch.tensor(torch.nan), "max")  # equal on every rank: a commit is agreed on

    def update(self, window_age: Any) -> None:
        """Args:
        window_age: Of the newest step; None before the first window is complete.
        """
        self.age_of_window = self._tensor(torch.nan if window_age is None else window_age, torch.float32)

    def compute(self) -> torch.Tensor:
        return self.age_of_window


class WindowPlace(StepMetric):
    """``window_size``: W of the sparse window that the newest step belongs to; ``window_slot``: the step's place in it.

    Places count from 0. Both are NaN for a step that belongs to none: under other policies, and where a snapshot was
    left out.
    """

    plot_lower_bound = 0.0
    label = "steps"
    parts = ("window_size", "window_slot")
    size_of_window: torch.Tensor
    slot_of_window: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("size_of_window", torch.tensor(0), "max")
        self._state("slot_of_window", torch.tensor(0), "max")

    def update(self, window_size: Any, window_slot: Any) -> None:
        """Args:
        window_size: W; 0 without a window.
        window_slot: The step's place in it.
        """
        self.size_of_window = self._tensor(window_size, torch.int64)
        self.slot_of_window = self._tensor(window_slot, torch.int64)

    def compute(self) -> dict[str, torch.Tensor]:
        without = self.size_of_window == 0
        values = zip(self.parts, (self.size_of_window, self.slot_of_window), strict=True)
        return {name: value.float().masked_fill(without, torch.nan) for name, value in values}
