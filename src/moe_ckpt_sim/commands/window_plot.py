"""A picture of a sparse window: slots across, operators down, coloured by fidelity."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.errors import MissingPackageError
from moe_ckpt.policies.moevement import WindowReport
from moe_ckpt_sim.planner.window_text import costs_of, dense_bytes

FULL, COMPUTE, NOT_SAVED = 2, 1, 0
COLOURS = ("#e8e8e8", "#9ec5e8", "#1f4e8c")
"""Of ``NOT_SAVED``, ``COMPUTE``, ``FULL``."""
LABELS = ("not saved", "compute weights", "in full")
MAX_ROW_LABELS = 40


def fidelities(report: WindowReport) -> npt.NDArray[np.int8]:
    """``[operators, W]``: how each slot saves each operator, operators in the order in which they are anchored."""
    table = np.full((len(report.window.order), report.size), NOT_SAVED, dtype=np.int8)
    first = 0
    for number, anchors in enumerate(report.window.slots):
        after = first + len(anchors)
        table[first:after, number] = FULL
        table[after:, number] = COMPUTE
        first = after
    return table


def pyplot(needed_for: str) -> Any:
    """``matplotlib.pyplot``. Raises ``MissingPackageError`` where it is not installed."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingPackageError("matplotlib", needed_for, "plot") from error
    return plt


def plot_window(report: WindowReport, ax: Any = None) -> tuple[Any, Any]:
    """Draw the schedule on ``ax``, or on new axes; returns (figure, axes).

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    plt = pyplot("a plot of the window")
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    table = fidelities(report)
    count = len(table)
    if ax is None:
        height = min(12.0, 2.5 + 0.16 * min(count, MAX_ROW_LABELS))
        _, ax = plt.subplots(figsize=(max(5.0, 3.0 + 0.6 * report.size), height), layout="constrained")
    ax.imshow(table, aspect="auto", interpolation="nearest", cmap=ListedColormap(COLOURS), vmin=0, vmax=2)
    dense, costs = max(dense_bytes(report), 1), costs_of(report)
    every = -(-report.size // 16)
    shown = range(0, report.size, every)
    ax.set_xticks(shown, [f"{n}\n{costs[n].nbytes / dense:.0%}" for n in shown])
    rows = range(0, count, -(-count // MAX_ROW_LABELS))
    ax.set_yticks(rows, [report.window.order[row] for row in rows], fontsize=6)
    for at in np.arange(1, report.size) - 0.5:
        ax.axvline(at, color="white", linewidth=1)
    ax.set(
        xlabel="slot, and its share of a dense checkpoint",
        ylabel="operators, as they are anchored",
        title=f"Sparse window, W = {report.size}",
    )
    handles = [Patch(facecolor=COLOURS[kind], label=LABELS[kind]) for kind in (FULL, COMPUTE, NOT_SAVED)]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return ax.get_figure(), ax
