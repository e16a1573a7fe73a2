"""Tokens lost and at risk, how many experts are saved, and how unevenly the tokens fall on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_ckpt.core.skew import normalized_hhi
from moe_ckpt.errors import ConfigError
from moe_ckpt.metrics.base import StepMetric


class PortionOfLostTokens(StepMetric):
    """PLT of the run so far: tokens whose updates recovered experts lack, over tokens * k (PEC, section 3).

    ``update`` takes the run's totals, which survive restarts in the checkpoints, so PLT is that of the whole run
    and not of this process. 0 before anything was routed. Model quality is unharmed up to 3.75 % (MoC) or
    7.5 % (PEC).
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    label, scale = "lost tokens (%)", 100.0
    lost_total: torch.Tensor
    lost_routed_total: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("lost_total", torch.tensor(0), "max")
        self._state("lost_routed_total", torch.tensor(0), "max")

    def update(self, lost_tokens: Any, routed_tokens: Any) -> None:
        """Args:
        lost_tokens: Token-expert pairs since the run began, summed over ranks.
        routed_tokens: Likewise.
        """
        self.lost_total = self._tensor(lost_tokens, torch.int64)
        self.lost_routed_total = self._tensor(routed_tokens, torch.int64)

    def compute(self) -> torch.Tensor:
        return self.lost_total / self.lost_routed_total.clamp(min=1)


class PortionAtRisk(StepMetric):
    """How much a failure now would add to PLT, if the run resumed from its newest committed step."""

    higher_is_better = False
    plot_lower_bound = 0.0
    label, scale = "tokens at risk (%)", 100.0
    at_risk_total: torch.Tensor
    at_risk_routed_total: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("at_risk_total", torch.tensor(0), "max")
        self._state("at_risk_routed_total", torch.tensor(0), "max")

    def update(self, at_risk_tokens: Any, routed_tokens: Any) -> None:
        """Args:
        at_risk_tokens: Token-expert pairs that the experts of the newest committed step lack, summed over ranks.
        routed_tokens: All since the run began.
        """
        self.at_risk_total = self._tensor(at_risk_tokens, torch.int64)
        self.at_risk_routed_total = self._tensor(routed_tokens, torch.int64)

    def compute(self) -> torch.Tensor:
        return self.at_risk_total / self.at_risk_routed_total.clamp(min=1)


class MomentaryLostTokens(StepMetric):
    """MLT, of single failures: portion of a layer's tokens that a recovery loses, mean over layers (MoEtion, 4.1).

    ``mlt_if_failed_now``: of a recovery to the newest committed step. ``mlt_newest`` and ``mlt_worst``: of the
    recoveries that were; NaN before the first. A layer's tokens are those of the whole run up to the step returned to,
    so that all of them are between 0 and 1; the paper finds no harm up to 3 %, and a sharp rise of loss beyond 6 %
    (arXiv 2412.15411 v1, table 1).
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    label, scale = "momentary lost tokens (%)", 100.0
    parts = ("mlt_if_failed_now", "mlt_newest", "mlt_worst")
    mlt_now: torch.Tensor
    mlt_newest: torch.Tensor
    mlt_worst: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("mlt_now", torch.tensor(0.0), "max")
        self._state("mlt_newest", torch.tensor(torch.nan), "max")
        self._state("mlt_worst", torch.tensor(torch.nan), "max")

    def update(self, at_risk_mlt: Any, mlt_newest: Any = None, mlt_worst: Any = None) -> None:
        """Args:
        at_risk_mlt: Of a recovery to the newest committed step.
        mlt_newest: Of the run's newest recovery; None before the first.
        mlt_worst: The highest of its recoveries; None before the first.
        """
        self.mlt_now = self._tensor(at_risk_mlt, torch.float32)
        self.mlt_newest, self.mlt_worst = (
            self._tensor(torch.nan if value is None else value, torch.float32) for value in (mlt_newest, mlt_worst)
        )

    def compute(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.parts, (self.mlt_now, self.mlt_newest, self.mlt_worst), strict=True))


class OwedTokens(StepMetric):
    """Lost tokens that boosted experts have still to make up (``core.capacity_boost``). NaN without a boost."""

    higher_is_better = False
    plot_lower_bound = 0.0
    label = "tokens to make up"
    owed_total: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("owed_total", torch.tensor(torch.nan, dtype=torch.float64), "max")

    def update(self, owed_tokens: Any) -> None:
        """Args:
        owed_tokens: Of all experts and ranks; None without a boost in this process.
        """
        self.owed_total = self._tensor(torch.nan if owed_tokens is None else owed_tokens, torch.float64)

    def compute(self) -> torch.Tensor:
        return self.owed_total


class ExpertsPerLayer(StepMetric):
    """K: how many experts of each MoE layer a checkpoint saves. NaN for policies that do not count so."""

    plot_lower_bound = 0.0
    label = "experts per layer"
    experts_per_layer: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("experts_per_layer", torch.tensor(torch.nan), "max")

    def update(self, k: Any) -> None:
        """Args:
        k: Of the newest plan; None if the policy has none.
        """
        self.experts_per_layer = self._tensor(torch.nan if k is None else k, torch.float32)

    def compute(self) -> torch.Tensor:
        return self.experts_per_layer


class ExpertLoadSkewness(StepMetric):
    """How unevenly tokens fall on experts: normalised HHI, mean over layers (MoEvement, appendix D).

    0: every expert gets the same; 1: one expert gets everything. Over all updates since ``reset``; ``forward`` gives
    that of one step. Layers without tokens count as 0.

    Args:
        experts: Number of experts of each layer; None if all have the same.
        **kwargs: Of ``torchmetrics.Metric``.
    """

    higher_is_better = False
    plot_lower_bound, plot_upper_bound = 0.0, 1.0
    label = "skewness of expert load"
    load: torch.Tensor

    def __init__(self, experts: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.experts = None if experts is None else tuple(int(number) for number in experts)
        # Shares of a sum over ranks: right for counts of this rank, and for counts that are reduced already.
        self._state("load", torch.zeros(0, 0, dtype=torch.int64), "sum")

    def update(self, popularity: Any) -> None:
        """Args:
            popularity: ``[L, E]`` tokens per expert of one step.

        Raises:
            ConfigError: Another shape than before.
        """
        counts = self._tensor(popularity, torch.int64)
        if self.load.numel() and counts.shape != self.load.shape:
            raise ConfigError(
                f"ExpertLoadSkewness.update: shape {tuple(counts.shape)} after {tuple(self.load.shape)}; "
                "call reset() before another model's counts"
            )
        self.load = self.load + counts if self.load.numel() else counts.clone()

    @property
    def per_layer(self) -> torch.Tensor:
        """``[L]``, of this rank's counts."""
        return torch.from_numpy(normalized_hhi(self.load.cpu().numpy(), self.experts if self.load.numel() else None))

    def compute(self) -> torch.Tensor:
        skews = self.per_layer.float()
        return (skews.mean() if skews.numel() else torch.tensor(0.0)).to(self.device)
