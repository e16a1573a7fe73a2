"""Tokens per expert, drawn with a wanted skewness that drifts (MoEvement, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.checks import above_zero, portion

_PARTS = 1 << 40
"""Shares are kept in whole parts: what differs in the last bit of a machine's logarithm is gone after that."""


@dataclass(frozen=True)
class ExpertLoad:
    """How a router spreads tokens.

    skewness: S, the mean normalised HHI of a layer's load, 0 for even: drawn from a symmetric Dirichlet with
        ``alpha = (1/S - 1) / E``, whose expected S it is.
    drift: portion of each layer's load that is drawn anew every ``drift_secs``; what remains is the old load.
    """

    skewness: float = 0.05
    drift: float = 0.1
    drift_secs: float = 600.0

    def __post_init__(self) -> None:
        portion("ExpertLoad", skewness=self.skewness, drift=self.drift)
        above_zero("ExpertLoad", drift_secs=self.drift_secs)
        if self.skewness >= 1:
            raise ConfigError(f"ExpertLoad(skewness={self.skewness!r}): skewness must be below 1")

    def alpha(self, experts: int) -> float:
        """Of the Dirichlet distribution over ``experts`` experts."""
        return (1 / self.skewness - 1) / experts

    def draw(self, rng: np.random.Generator, layers: int, experts: int) -> npt.NDArray[np.int64]:
        """``[L, E]`` shares in parts of 2**40."""
        if not self.skewness or experts <= 1:
            drawn = np.ones((layers, experts))
        else:
            drawn = _dirichlet(rng, self.alpha(experts), layers, experts)
        return _whole_parts(drawn, _PARTS)

    def drifted(self, rng: np.random.Generator, shares: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The load after another ``drift_secs``."""
        fresh = self.draw(rng, *shares.shape)
        return _whole_parts((1 - self.drift) * shares + self.drift * fresh, _PARTS)


def tokens_of(shares: npt.NDArray[np.int64], assignments: int, experts: Sequence[int] | None = None) -> Counts:
    """``[L, E]`` whole numbers of tokens, ``assignments`` per layer, by largest remainder.

    experts: how many each layer has; columns beyond get nothing. None: all of them.
    """
    if experts is None:
        return _whole_parts(shares, assignments)
    has = np.arange(shares.shape[1]) < np.asarray(experts, dtype=np.int64)[:, None]
    return _whole_parts(np.where(has, shares, 0), assignments)


def _dirichlet(rng: np.random.Generator, alpha: float, layers: int, experts: int) -> npt.NDArray[np.float64]:
    """Gamma draws, normalised in the logarithm: with a small ``alpha`` all of a layer may be below the least float.

    ``Gamma(alpha) = Gamma(alpha + 1) * U**(1/alpha)``.
    """
    logs = np.log(rng.standard_gamma(alpha + 1, (layers, experts))) + np.log1p(-rng.random((layers, experts))) / alpha
    logs -= logs.max(axis=1, keepdims=True)
    grown: npt.NDArray[np.float64] = np.exp(logs)
    shares: npt.NDArray[np.float64] = grown / grown.sum(axis=1, keepdims=True)
    return shares


def _whole_parts(weights: npt.NDArray[np.float64] | npt.NDArray[np.int64], total: int) -> npt.NDArray[np.int64]:
    """Each row in whole numbers that add up to ``total``; the rest goes by largest remainder, then to the first."""
    portions = np.asarray(weights, dtype=np.float64)
    exact = portions / portions.sum(axis=1, keepdims=True) * total
    found: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    left = np.maximum(total - found.sum(axis=1, keepdims=True), 0)
    order = np.argsort(-(exact - found), axis=1, kind="stable")
    columns = found.shape[1]
    more = left // columns + (np.arange(columns) < left % columns)  # of the first in order, the second, ...
    np.put_along_axis(found, order, np.take_along_axis(found, order, axis=1) + more, axis=1)
    return found
