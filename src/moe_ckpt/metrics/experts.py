"""Staleness per expert: how far a failure would set it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_ckpt.metrics.base import ExpertMap, StepMetric


class OldestExpertAge(StepMetric):
    """Steps since the state of the expert whose newest committed copy is the oldest; 0 before the first commit."""

    higher_is_better = False
    plot_lower_bound = 0.0
    label = "age of the oldest expert (steps)"
    oldest_age: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("oldest_age", torch.tensor(0), "max")

    def update(self, oldest_expert_steps: Any) -> None:
        self.oldest_age = self._tensor(oldest_expert_steps, torch.int64)

    def compute(self) -> torch.Tensor:
        return self.oldest_age


class ExpertAges(ExpertMap):
    """Steps since each expert's newest committed copy, ``[L, E]``; -1 where there is none yet."""

    label = "steps since the expert was saved"
    ages: torch.Tensor

    def __init__(self, experts: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(experts, **kwargs)
        # Equal on every rank, because a commit is agreed on.
        self._state("ages", torch.zeros(0, 0, dtype=torch.int64), "max")

    def update(self, ages: Any) -> None:
        """Args:
            ages: ``[L, E]``, the newest.

        Raises:
            ConfigError: Another shape than before.
        """
        self.ages = self._table(ages)

    def compute(self) -> torch.Tensor:
        return self.ages


class UnsavedTokens(ExpertMap):
    """``U[l][e]``: tokens routed to each expert since its newest committed copy, ``[L, E]`` (spec of MoC, PEC)."""

    label = "unsaved tokens"
    unsaved: torch.Tensor

    def __init__(self, experts: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(experts, **kwargs)
        self._state("unsaved", torch.zeros(0, 0, dtype=torch.int64), "max")

    def update(self, unsaved: Any) -> None:
        """Args:
            unsaved: ``[L, E]``, summed over ranks, the newest.

        Raises:
            ConfigError: Another shape than before.
        """
        self.unsaved = self._table(unsaved)

    def compute(self) -> torch.Tensor:
        return self.unsaved
