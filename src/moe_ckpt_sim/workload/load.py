"""Tokens per expert, drawn with a given skewness and drift (MoEvement, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import above_zero, portion
from moe_ckpt_sim.cluster.clock import on_clock

Popularity = npt.NDArray[np.float64]
"""``[L, E]`` logarithms of each expert's popularity, without unit: a layer's tokens are divided by their exponentials.
With a small ``alpha``, all popularities of a layer may be below the least float; logarithms are not."""


@dataclass(frozen=True)
class ExpertLoad:
    """The distribution of tokens over experts.

    Attributes:
        skewness: S, the mean normalised HHI of a layer's load; 0 is even. Loads are drawn from a symmetric Dirichlet
            distribution with ``alpha = (1/S - 1) / E``, whose expected HHI is S.
        drift: Portion of each layer's experts, on average, whose popularity is drawn again every ``drift_secs``. They
            are independent of each other, so that a load stays as skewed after any number of drifts.
    """

    skewness: float = 0.05
    drift: float = 0.1
    drift_secs: float = 600.0

    def __post_init__(self) -> None:
        portion("ExpertLoad", skewness=self.skewness, drift=self.drift)
        above_zero("ExpertLoad", drift_secs=self.drift_secs)
        if self.skewness >= 1:
            raise ConfigError(f"ExpertLoad(skewness={self.skewness!r}): skewness must be below 1")

    @property
    def drifts(self) -> bool:
        """True if the load changes."""
        return self.drift > 0 and self.skewness > 0

    def alpha(self, experts: int) -> float:
        """The parameter of the Dirichlet distribution over ``experts`` experts."""
        return (1 / self.skewness - 1) / experts

    def draw(self, rng: np.random.Generator, layers: int, experts: int) -> Popularity:
        """Draw the first load."""
        if not self.skewness or experts <= 1:
            return np.zeros((layers, experts))
        return _log_gammas(rng, self.alpha(experts), layers * experts).reshape(layers, experts)

    def drifted(self, rng: np.random.Generator, popularity: Popularity) -> Popularity:
        """Returns the load after another ``drift_secs``."""
        layers, experts = popularity.shape
        if not self.drifts or experts <= 1:
            return popularity
        changed = rng.random((layers, experts)) < self.drift
        changed_load = popularity.copy()
        changed_load[changed] = _log_gammas(rng, self.alpha(experts), int(changed.sum()))
        return changed_load


class DriftingLoad:
    """The load of one simulated run: drawn at its start, and again in part every ``drift_secs``.

    Args:
        experts: Number of experts in each MoE layer.
        assignments: Tokens times top-k that one iteration routes in each layer.
    """

    def __init__(self, load: ExpertLoad, experts: Sequence[int], assignments: int, rng: np.random.Generator) -> None:
        self._load, self._experts, self._assignments, self._rng = load, experts, assignments, rng
        self._popularity = load.draw(rng, len(experts), max(experts, default=0))
        self.drifts_at = on_clock(load.drift_secs) if load.drifts else inf
        """Time of the next change, in seconds of the run's clock; ``inf`` if the load never changes."""

    def counts(self) -> Counts:
        """``[L, E]`` tokens that one iteration routes now."""
        return tokens_of(self._popularity, self._assignments, self._experts)

    def drift(self, now_secs: float) -> bool:
        """Apply all changes up to ``now_secs`` one by one, so that the load at a time is the same for all systems.

        Returns:
            True if the load changed.
        """
        if now_secs < self.drifts_at:
            return False
        while now_secs >= self.drifts_at:
            self._popularity = self._load.drifted(self._rng, self._popularity)
            self.drifts_at += on_clock(self._load.drift_secs)
        return True


def tokens_of(popularity: Popularity, assignments: int, experts: Sequence[int] | None = None) -> Counts:
    """``[L, E]`` whole numbers of tokens, ``assignments`` per layer, by largest remainder.

    Args:
        experts: Number of experts of each layer; further columns get no tokens. None: all columns.
    """
    if not popularity.size:
        return np.zeros(popularity.shape, dtype=np.int64)
    if experts is not None:
        has = np.arange(popularity.shape[1]) < np.asarray(experts, dtype=np.int64)[:, None]
        popularity = np.where(has, popularity, -np.inf)
    return _whole_parts(np.exp(popularity - popularity.max(axis=1, keepdims=True)), assignments)


def _log_gammas(rng: np.random.Generator, alpha: float, count: int) -> npt.NDArray[np.float64]:
    """Draw logarithms of ``Gamma(alpha)``, whose normalised values are Dirichlet-distributed.

    ``Gamma(alpha) = Gamma(alpha + 1) * U**(1/alpha)``.
    """
    drawn: npt.NDArray[np.float64] = np.log(rng.standard_gamma(alpha + 1, count))
    drawn += np.log1p(-rng.random(count)) / alpha
    return drawn


def _whole_parts(weights: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Divide ``total`` by each row in whole numbers; the rest goes to the largest remainders, then the first."""
    exact = weights / weights.sum(axis=1, keepdims=True) * total
    whole: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    rest = np.maximum(total - whole.sum(axis=1, keepdims=True), 0)
    order = np.argsort(-(exact - whole), axis=1, kind="stable")
    columns = whole.shape[1]
    more = rest // columns + (np.arange(columns) < rest % columns)  # of the first in order, the second, ...
    np.put_along_axis(whole, order, np.take_along_axis(whole, order, axis=1) + more, axis=1)
    return whole
