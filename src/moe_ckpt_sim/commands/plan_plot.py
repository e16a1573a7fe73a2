"""A roofline plot of a plan: the time of an iteration over the bytes it saves, bounded by compute and links."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.commands.outputs import require_picture
from moe_ckpt_sim.commands.window_plot import pyplot
from moe_ckpt_sim.planner.planner import Plan
from moe_ckpt_sim.run.scenario import Scenario

_LINKS = {"PCIe": "#1f4e8c", "NIC": "#d98c2b", "storage": "#7a3b8f"}


def require_writable(path: str) -> None:
    """Check that a plot can be written, before minutes are spent on simulating.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: the suffix is of no picture format, or the file cannot be written.
    """
    pyplot("a picture of the plan")
    require_picture("--plot", path)


def plot_roof(scenario: Scenario, plan: Plan, ax: Any = None) -> tuple[Any, Any]:
    """Draw seconds per iteration over bytes that a rank saves in it, on ``ax`` or new axes. Returns (figure, axes).

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    plt = pyplot("a picture of the plan")
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    costs = Costs(scenario.layout, scenario.precision, scenario.iteration, scenario.system)
    ranks = scenario.layout.parallel.ranks
    saved = [(one.outcome.total_bytes_per_step / ranks, one) for one in plan.candidates if one.outcome is not None]
    shown = sorted(((at, one) for at, one in saved if at > 0), key=lambda pair: pair[0])
    dense, secs = costs.bytes_of.dense.total / ranks, scenario.iteration.secs
    extent = [dense, *(at for at, _ in shown)]
    nbytes = np.geomspace(min(extent) / 3, max(extent) * 3, 200)
    ax.axhline(secs, color="#444444", linewidth=2, label=f"compute: {secs:.3g} s")
    for name, rate in _roofs(costs, plan).items():
        label = f"{name}: {rate / 1e9:.3g} GB/s per rank"
        ax.plot(nbytes, np.maximum(secs, nbytes / rate), color=_LINKS[name.partition(",")[0]], label=label)
    ax.axvline(dense, color="#bbbbbb", linestyle=":", label="everything, at every iteration")
    for number, (at, one) in enumerate(shown):
        needs = secs + one.stall_secs
        ax.plot(at, needs, "o", color="#2b8a3e" if one.system.in_trainer else "#999999")
        below, far = number % 2, 8 + 12 * (number // 2 % 3)
        offset = (0, -far - 8 if below else far)
        ax.annotate(one.system.name, (at, needs), textcoords="offset points", xytext=offset, fontsize=8, ha="center")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="bytes that a rank saves per iteration, mean over ranks",
        ylabel="seconds per iteration",
        title=f"{scenario.layout.model.name} on {scenario.layout.cluster.name}",
        ylim=(secs / 3, None),
    )
    ax.legend(fontsize=8, frameon=False)
    return ax.get_figure(), ax


def _roofs(costs: Costs, plan: Plan) -> dict[str, float]:
    """Bytes per second and rank of each link. If ranks save unevenly, the one that saves most sets the pace."""
    ranks = costs.layout.parallel.ranks
    dense = costs.bytes_of.dense
    even = dense.total / ranks / dense.rank
    copies = max((one.system.replicas for one in plan.candidates if one.system.durable == "peers"), default=1)
    return {
        "PCIe": costs.copy_rate * even,
        f"NIC, {copies} copies" if copies > 1 else "NIC": costs.nic_rate / copies * even,
        "storage": costs.layout.cluster.storage_bytes_per_sec / ranks,
    }
