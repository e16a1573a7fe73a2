"""Curves and heat maps, on the axes given or on new ones. matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.errors import ConfigError, MissingPackageError

Floats = npt.NDArray[np.float64]

NOTHING = "#e8e8e8"
"""Colour of a cell for which there is no value: never saved, or no such expert."""
MAX_ROW_LABELS = 32


def axes_or_new(ax: Any, figsize: tuple[float, float] | None = None) -> tuple[Any, Any]:
    """The figure and axes to draw on.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingPackageError("matplotlib", "plot()", "plot") from error
    if ax is not None:
        return ax.get_figure(), ax
    return plt.subplots(figsize=figsize, layout="constrained")


def draw_curves(ax: Any, series: Mapping[str, Sequence[float]], label: str, name: str) -> None:
    """One line per entry of ``series``, over the number of the value; a lone value is a dot."""
    longest = 0
    for key, values in series.items():
        ax.plot(range(len(values)), values, label=key, marker="o" if len(values) == 1 else None)
        longest = max(longest, len(values))
    ax.set(ylabel=label, title=name)
    if longest > 1:
        ax.set_xlabel("Step")
    else:
        ax.set_xticks([])
    if len(series) > 1:
        ax.legend(frameon=False)


def masked(table: Any, experts: Sequence[int] | None) -> Any:
    """``[..., L, E]`` as floats, with negative values and experts that a layer does not have masked."""
    values = np.asarray(table, dtype=np.float64)
    hidden = values < 0
    if experts is not None:
        if values.shape[-2] != len(experts):
            raise ConfigError(f"a heat map of {values.shape[-2]} layers, but experts={tuple(experts)}")
        hidden = hidden | (np.arange(values.shape[-1]) >= np.asarray(experts)[:, None])
    return np.ma.masked_array(values, hidden)


def draw_now(ax: Any, table: Any, label: str, experts: Sequence[int] | None = None) -> Any:
    """Layers down, experts across: one moment.

    Args:
        table: ``[L, E]``.

    Returns:
        The image, for a colour bar.
    """
    layers, width = np.shape(table)
    image = _image(ax, masked(table, experts), vmax=None)
    ax.set(xlabel="expert", ylabel="MoE layer", xticks=_ticks(width), yticks=_ticks(layers))
    ax.get_figure().colorbar(image, ax=ax, label=label)
    return image


def draw_over_time(
    ax: Any,
    tables: Any,
    label: str,
    experts: Sequence[int] | None = None,
    *,
    steps: Sequence[float] | None = None,
    vmax: float | None = None,
) -> Any:
    """``(layer, expert)`` down, time across.

    Args:
        tables: ``[T, L, E]``.
        steps: The step of each table, 0, 1, ... if None.
        vmax: The value of the strongest colour.

    Returns:
        The image, for a colour bar.
    """
    count, layers, width = np.shape(tables)
    rows = [(la, ex) for la in range(layers) for ex in range(width if experts is None else experts[la])]
    stacked = masked(tables, experts)[:, [la for la, _ in rows], [ex for _, ex in rows]].T
    at = list(range(count)) if steps is None else list(steps)
    half = (at[-1] - at[0]) / (count - 1) / 2 if count > 1 else 0.5
    image = _image(ax, stacked, vmax, extent=(at[0] - half, at[-1] + half, len(rows) - 0.5, -0.5))
    for row, (_, expert) in enumerate(rows):
        if row and expert == 0:
            ax.axhline(row - 0.5, color="white", linewidth=1.5)
    ax.set(xlabel="Step", ylabel="MoE layer / expert")
    every = -(-len(rows) // MAX_ROW_LABELS)
    ax.set_yticks(range(0, len(rows), every), [f"{la} / {ex}" for la, ex in rows[::every]], fontsize=7)
    ax.get_figure().colorbar(image, ax=ax, label=label)
    return image


def _image(ax: Any, values: Any, vmax: float | None, **options: Any) -> Any:
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=vmax, **options)
    ax.set_facecolor(NOTHING)
    return image


def _ticks(count: int) -> range:
    return range(0, count, -(-count // 16) or 1)
