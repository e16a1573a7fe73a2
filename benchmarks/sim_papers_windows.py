"""Window sizes of MoEvement's tables 3 and 7, and the stalls of dense snapshots that table 7 implies."""

from __future__ import annotations

from typing import Any

from benchmarks.sim_papers_data import (
    RUN_SECS,
    TABLE_3,
    TABLE_7,
    Tick,
    constants,
    counted,
    extrapolated,
    rate_range,
    rates,
    scenario,
)
from benchmarks.sim_papers_render import part, table
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.run.run import simulate

_COLUMNS = ["model", "T s", "paper", "Algorithm 1", "difference", "needs GB/s", "library", "difference"]
_FORMATS = ["", "", "d", "", "", "", "d", "+d"]


def library_window(setup: str, gigabytes_per_sec: float) -> int:
    """W that the policy settles on: by bytes, on the rank with most of them, at the configured iteration time."""
    result = simulate(
        scenario(
            f"setup={setup}",
            "policy=moevement_peers",
            "failures=none",
            "load=even",
            "duration_secs=300",
            rates(setup, gigabytes_per_sec),
        )
    )
    if result.window is None:
        raise RuntimeError(f"{setup}: no window in {result.steps} steps")
    return result.window


def row(setup: str, name: str, paper: int, rate: float, times: tuple[float, float]) -> list[Any]:
    counts = counted(setup)
    least, most = (counts.window(rate * 1e9, secs).size for secs in reversed(times))
    library = library_window(setup, rate)
    low, high = rate_range(setup, paper)
    inside = least <= paper <= most
    return [
        name,
        f"{times[0]:.2f}" if times[0] == times[1] else f"{times[0]:.2f} to {times[1]:.2f}",
        paper,
        f"{least}" if least == most else f"{least} to {most}",
        "0" if inside else f"{(most if most < paper else least) - paper:+d}",
        f"{low:.1f} to {high:.1f}",
        library,
        library - paper,
    ]


def windows(tick: Tick) -> dict[str, Any]:
    """W of both tables."""
    figures, made = constants(), []
    for title, rate, target in (
        ("Table 3: 96 A100", figures.a100_rate, [(m.setup, m.name, m.window, m.iteration_range) for m in TABLE_3]),
        (
            "Table 7: 128 H100, DeepSeek-MoE; compute weights, masters, moments",
            figures.h100_rate,
            [(r.setup, r.name, r.window, (counted(r.setup).iteration_secs,) * 2) for r in TABLE_7],
        ),
    ):
        rows = []
        for setup, name, paper, times in target:
            rows.append(row(setup, name, paper, rate, times))
            tick(f"W of {name}")
        made.append(table(f"{title}, {rate} GB/s", _COLUMNS, _FORMATS, rows))
    third, second = rate_range("moevement_fp8_fp16_fp32", 4), rate_range("moevement_fp8_fp32_fp32", 6)
    result = scenario("setup=moevement_llava", "policy=moevement_peers")
    dense = Costs(result.layout, result.precision, result.iteration, result.system).bytes_of.dense
    uneven = dense.rank * result.layout.parallel.ranks / dense.total
    notes = [
        "Algorithm 1 treats all operators as equally large and all GPUs as equally loaded; *needs* are the bandwidths "
        "with which it gives the paper's W. The library packs the bytes of the busiest rank, so it needs a longer "
        "window where one stage is heavier than others.",
        f"MoE-LLaVa's ranks are uneven: the busiest has {uneven:.2f} times the mean, and so {figures.a100_rate} GB/s "
        f"act as {figures.a100_rate / uneven:.1f} GB/s on even ranks, which is in the range that it needs.",
        f"No single bandwidth gives the third and the second window of table 7: they need at least {third[0]:.1f} GB/s "
        f"and at most {second[1]:.1f} GB/s.",
    ]
    return part("Windows", "W, the iterations of a sparse window (section 3.5).", made, notes)


def dense(tick: Tick) -> dict[str, Any]:
    """Table 7's overheads of MoC once it saves everything."""
    rate = constants().h100_dense_rate
    rows: list[list[Any]] = []
    for one in TABLE_7:
        counts = counted(one.setup)
        ours = counts.params * counts.full / (rate * 1e9) - counts.iteration_secs
        rows.append([one.name, counts.iteration_secs, one.dense_secs, ours, ours - one.dense_secs])
    tick("dense overheads")
    shown = table(
        f"Overhead per iteration when all is saved, bytes / B - T with B = {rate} GB/s",
        ["precision", "T s", "paper s", "ours s", "difference s"],
        ["", ".1f", ".2f", ".2f", "+.2f"],
        rows,
    )
    windows_rate = constants().h100_rate
    notes = [
        f"One bandwidth, {rate} GB/s, explains all five overheads of MoC within "
        f"{max(abs(row[-1]) for row in rows):.2f} s; the windows of the same table need "
        f"{constants().h100_range[0]:.1f} to {constants().h100_range[1]:.1f} GB/s. At {windows_rate} GB/s snapshots "
        "would stall "
        f"{1 - sum(_stall(r.setup, windows_rate) for r in TABLE_7) / sum(r.dense_secs for r in TABLE_7):.0%} "
        "less in sum. The paper gives no reason.",
    ]
    return part("Dense snapshots on H100", "Table 7, MoC at an MTBF of 10 minutes (K = E).", [shown], notes)


def _stall(setup: str, rate: float) -> float:
    counts = counted(setup)
    return counts.params * counts.full / (rate * 1e9) - counts.iteration_secs


def inside(tick: Tick) -> dict[str, Any]:
    """What table 3's columns imply of each other."""
    rows: list[list[Any]] = []
    for model in TABLE_3:
        secs = counted(model.setup).iteration_secs
        for system, name in ((0, "CheckFreq"), (3, "MoEvement")):
            flat, per_failure = extrapolated(model, system)
            half = model.interval * secs / 2 if system == 0 else 1.5 * model.window * secs
            printed = model.recovery["1H"][system] / (RUN_SECS / 3600)
            rows.append([model.name, name, model.percent[system] / 100, flat, printed, half, per_failure])
    tick("table 3 against itself")
    shown = table(
        "Of one failure: recovery as printed, by the paper's formula, and as its ETTRs imply",
        [
            "model",
            "system",
            "overhead printed",
            "overhead at no failures",
            "recovery printed s",
            "formula s",
            "ETTRs imply s",
        ],
        ["", "", ".0%", ".1%", ".1f", ".1f", ".1f"],
        rows,
    )
    deepseek = TABLE_3[3]
    stated = 1 / (
        (1 + deepseek.percent[0] / 100)
        * (1 + deepseek.recovery["1H"][0] / RUN_SECS / (1 - deepseek.recovery["1H"][0] / RUN_SECS))
    )
    notes = [
        f"CheckFreq on DeepSeek-MoE at 1H: {deepseek.percent[0]} % overhead and "
        f"{deepseek.recovery['1H'][0]:.0f} s of recovery in 12 hours make an ETTR of {stated:.3f}; "
        f"{deepseek.ettr['1H'][0]:.3f} is printed.",
        "CheckFreq's printed recovery is half an interval on DeepSeek-MoE only; on the other models it is "
        + ", ".join(f"{rows[i][4] / rows[i][5]:.1f}" for i in (0, 2, 4))
        + " times that. MoEvement's is "
        + ", ".join(f"{rows[2 * i + 1][4] / counted(m.setup).iteration_secs:.1f}" for i, m in enumerate(TABLE_3))
        + " iterations; section 3.6 has 1.5 W. No model of recovery gives all columns, so the sections below compare "
        "ETTR.",
    ]
    return part("Table 3 against itself", "What the columns imply of each other.", [shown], notes)
