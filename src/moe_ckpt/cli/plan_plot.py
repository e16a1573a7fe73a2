"""A picture of a plan: what an iteration takes by what it has to save, under the roofs of compute and links."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ckpt.cli.window_plot import pyplot
from moe_ckpt.sim.costs import Costs
from moe_ckpt.sim.planner import Plan
from moe_ckpt.sim.scenario import Scenario

_LINKS = {"PCIe": "#1f4e8c", "NIC": "#d98c2b", "storage": "#7a3b8f"}


def plot_roof(scenario: Scenario, plan: Plan, ax: Any = None) -> tuple[Any, Any]:
    """Seconds of an iteration against bytes that a rank saves in it, on ``ax`` or on new axes; (figure, axes).

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    plt = pyplot("a picture of the plan")
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    costs = Costs(scenario.layout, scenario.precision, scenario.iteration, scenario.system)
    shown = [one for one in plan.candidates if one.use is not None and one.use.copied_bytes > 0]
    points = [one.use.copied_bytes for one in shown if one.use is not None]
    low, high = min([*points, costs.dense.rank]) / 3, max([*points, costs.dense.rank]) * 3
    nbytes = np.geomspace(low, high, 200)
    secs = scenario.iteration.secs
    cluster, ranks = scenario.layout.cluster, scenario.layout.parallel.ranks
    rates = {"PCIe": costs.copy_rate, "NIC": costs.nic_rate, "storage": cluster.storage_bytes_per_sec / ranks}
    ax.axhline(secs, color="#444444", linewidth=2, label=f"compute: {secs:.3g} s")
    for name, rate in rates.items():
        label = f"{name}: {rate / 1e9:.3g} GB/s per rank"
        ax.plot(nbytes, np.maximum(secs, nbytes / rate), color=_LINKS[name], label=label)
    ax.axvline(costs.dense.rank, color="#bbbbbb", linestyle=":", label="everything, at every iteration")
    for one in shown:
        at = (one.use.copied_bytes if one.use else 0.0, secs + one.stall_secs)
        ax.plot(*at, "o", color="#2b8a3e" if one.system.in_trainer else "#999999")
        ax.annotate(one.system.name, at, textcoords="offset points", xytext=(4, 5), fontsize=8, rotation=20)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bytes that a rank saves, per iteration",
        ylabel="seconds per iteration",
        title=f"{scenario.layout.model.name} on {cluster.name}",
        ylim=(secs / 2, None),
    )
    ax.legend(fontsize=8, frameon=False)
    return ax.get_figure(), ax
