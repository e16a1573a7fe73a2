"""How unevenly a router spreads its tokens over the experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError


def normalized_hhi(counts: Counts, experts: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
    """Skewness ``S`` of each layer's load, ``[L]``: 0 if every expert gets the same, 1 if one gets everything.

    ``HHI = sum p^2``, ``S = (HHI - 1/E) / (1 - 1/E)`` (MoEvement, NSDI'26, appendix D), where ``p`` is the share of
    the layer's tokens that an expert gets. A layer that got no token, or has one expert, is not skewed: 0.

    Args:
        counts: ``[L, E_max]`` tokens per expert; layers with fewer experts are padded with zeros.
        experts: Number of experts of each layer, ``E_max`` for all if None.

    Raises:
        ConfigError: shapes that do not fit, a negative count, or tokens beyond a layer's experts.
    """
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2:
        raise ConfigError(f"normalized_hhi: counts have shape {table.shape}, wanted [layers, experts]")
    layers, width = table.shape
    numbers = np.full(layers, width) if experts is None else np.asarray(experts, dtype=np.int64)
    _check(table, numbers)
    total = table.sum(axis=1)
    skewed = (total > 0) & (numbers > 1)
    shares = table / np.where(total > 0, total, 1.0)[:, None]
    even = 1.0 / np.where(skewed, numbers, 2)
    skew = ((shares**2).sum(axis=1) - even) / (1.0 - even)
    return np.where(skewed, skew.clip(0.0, 1.0), 0.0)  # clip: an even load may round to just below 0


def _check(table: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64]) -> None:
    layers, width = table.shape
    if numbers.shape != (layers,) or (layers and not 1 <= numbers.min() <= numbers.max() <= width):
        raise ConfigError(
            f"normalized_hhi: experts={numbers.tolist()} does not fit counts of shape {table.shape}: "
            f"give one number between 1 and {width} for each of the {layers} layers"
        )
    if table.size and table.min() < 0:
        raise ConfigError("normalized_hhi: a count of tokens is negative")
    if table[np.arange(width) >= numbers[:, None]].any():
        raise ConfigError(f"normalized_hhi: tokens beyond a layer's experts, experts={numbers.tolist()}")
