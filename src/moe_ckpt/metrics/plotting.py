"""Curves, and heat maps of experts. matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_ckpt.errors import ConfigError, MissingPackageError

NOTHING = "#e8e8e8"
"""Colour of a cell for which there is no value: never saved, or no such expert."""
MAX_ROW_LABELS = 32


def axes_or_new(ax: Any) -> tuple[Any, Any]:
    """Returns the figure and axes to draw on. Raises ``MissingPackageError``: matplotlib is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingPackageError("matplotlib", "plot()", "plot") from error
    return plt.subplots(layout="constrained") if ax is None else (ax.get_figure(), ax)


def draw_curves(ax: Any, value: Any, label: str, scale: float) -> None:
    """Draws a line for each name in ``value``: numbers or dicts of them, one or a sequence; a lone one is a dot."""
    if isinstance(value, Sequence):
        named = isinstance(value[0], Mapping)
        value = {key: [step[key] for step in value] for key in value[0]} if named else {"": [*map(float, value)]}
    longest = 0
    for key, values in (value if isinstance(value, Mapping) else {"": value}).items():
        numbers = scale * np.atleast_1d(np.asarray(values, dtype=np.float64))
        longest = max(longest, len(numbers))
        ax.plot(range(len(numbers)), numbers, label=key, marker="o" if len(numbers) == 1 else None)
    ax.set_ylabel(label)
    if longest > 1:
        ax.set_xlabel("Step")
    else:
        ax.set_xticks([])
    if len(ax.lines) > 1:
        ax.legend(frameon=False)


def draw_tables(ax: Any, value: Any, label: str, experts: Sequence[int] | None) -> None:
    """Draws one table ``[layers, experts]``, layers down and experts across, or a sequence of them over time.

    Raises:
        ConfigError: There is nothing in it.
    """
    tables = np.asarray(
        [np.atleast_2d(table) for table in value] if isinstance(value, Sequence) else [np.atleast_2d(value)]
    )
    if not tables.size:
        raise ConfigError(
            f"plot of {label}: no table of layers and experts, only {tables.shape}; give one, or train a step"
        )
    if isinstance(value, Sequence):
        draw_over_time(ax, tables, label, experts)
        return
    _, layers, width = tables.shape
    _heat(ax, _masked(tables, experts)[0], label)
    ax.set(xlabel="expert", ylabel="MoE layer", xticks=_ticks(width), yticks=_ticks(layers))


def draw_over_time(
    ax: Any, tables: Any, label: str, experts: Sequence[int] | None = None, *,
    steps: Sequence[float] | None = None, vmax: float | None = None,
) -> None:  # fmt: skip
    """Draws ``(layer, expert)`` down, time across.

    Args:
        tables: ``[steps, layers, experts]``.
        experts: Number of experts of each layer; None if all have the same.
        steps: The step of each table, 0, 1, ... if None.
        vmax: The value of the strongest colour; the largest if None.
    """
    count, layers, width = np.shape(tables)
    rows = [(la, ex) for la in range(layers) for ex in range(width if experts is None else experts[la])]
    stacked = _masked(tables, experts)[:, [la for la, _ in rows], [ex for _, ex in rows]].T
    at = list(range(count)) if steps is None else list(steps)
    half = (at[-1] - at[0]) / (count - 1) / 2 if count > 1 else 0.5
    _heat(ax, stacked, label, vmax=vmax, extent=(at[0] - half, at[-1] + half, len(rows) - 0.5, -0.5))
    for row, (_, expert) in enumerate(rows):
        if row and expert == 0:
            ax.axhline(row - 0.5, color="white", linewidth=1.5)
    every = -(-len(rows) // MAX_ROW_LABELS)
    ax.set(xlabel="Step", ylabel="MoE layer / expert")
    ax.set_yticks(range(0, len(rows), every), [f"{la} / {ex}" for la, ex in rows[::every]], fontsize=7)


def _masked(tables: Any, experts: Sequence[int] | None) -> Any:
    """Masks negative values, and experts that a layer does not have."""
    values = np.asarray(tables, dtype=np.float64)
    hidden = values < 0
    if experts is not None:
        hidden = hidden | (np.arange(values.shape[-1]) >= np.asarray(experts)[:, None])
    return np.ma.masked_array(values, hidden)


def _heat(ax: Any, values: Any, label: str, **options: Any) -> None:
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, **options)
    ax.set_facecolor(NOTHING)
    ax.get_figure().colorbar(image, ax=ax, label=label)


def _ticks(count: int) -> range:
    return range(0, count, -(-count // 16) or 1)
