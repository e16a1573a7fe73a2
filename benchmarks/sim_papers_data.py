"""What the papers print, the constants that are calibrated on it, and scenarios from the shipped configs.

MoEvement is NSDI '26 (arXiv 2412.15411 v5), MoEtion its first version, PEC arXiv 2408.04307. Iteration times are not
printed; those in ``conf/simulate/iteration`` are derived from pairs of (overhead in seconds, in percent).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from hydra import compose, initialize_config_dir

from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.conf.scenarios import CONFIG_DIR, scenario_of
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.scenario import Outcome, Scenario
from moe_ckpt_sim.workload.size_formulas import CountedWindow, window_by_count

MTBF_SECS = {"2H": 7200.0, "1H": 3600.0, "30M": 1800.0, "20M": 1200.0, "10M": 600.0}
SYSTEMS = ("CheckFreq", "Gemini", "MoC", "MoEvement")
RUN_SECS = 12 * 3600.0


@dataclass(frozen=True)
class Model:
    """One model of table 3.

    overhead, percent: per iteration, of the four systems (MoC's at 2H), in seconds and of an iteration without
        checkpoints, as rounded there.
    recovery, ettr: of the four systems at each MTBF; recovery in seconds, of a whole run.
    gemini: intervals at 2H and 10M where the text gives them (46-92, 17-31: the ends, and 92 is DeepSeek's).
    """

    name: str
    setup: str
    window: int
    interval: int
    overhead: tuple[float, float, float, float]
    percent: tuple[int, int, int, int]
    recovery: dict[str, tuple[float, float, float, float]]
    ettr: dict[str, tuple[float, float, float, float]]
    gemini: tuple[int, int] | None = None

    @property
    def iteration_range(self) -> tuple[float, float]:
        """Iteration times with which seconds and percent, each rounded, belong together."""
        pairs = list(zip(self.overhead, self.percent, strict=True))
        return (
            max((secs - 0.005) / (percent + 0.5) for secs, percent in pairs) * 100,
            min((secs + 0.005) / (percent - 0.5) for secs, percent in pairs) * 100,
        )


def _rows(*rows: tuple[float, ...]) -> dict[str, tuple[float, float, float, float]]:
    return {mtbf: (row[0], row[1], row[2], row[3]) for mtbf, row in zip(MTBF_SECS, rows, strict=True)}


TABLE_3 = (
    Model(
        "MoE-LLaVa", "moevement_llava", 3, 57, (0.03, 0.02, 0.14, 0.01), (2, 1, 8, 1),
        _rows((1265, 938, 10, 11), (2530, 1551, 20, 24), (5059, 2203, 41, 57), (7589, 2570, 61, 74),
              (11178, 4161, 98, 117)),
        _rows((0.945, 0.959, 0.922, 0.981), (0.914, 0.939, 0.375, 0.979), (0.853, 0.897, 0.328, 0.975),
              (0.792, 0.852, 0.231, 0.971), (0.712, 0.764, 0.184, 0.964)),
        (46, 17),
    ),
    Model(
        "GPT-MoE", "moevement_gpt", 3, 78, (0.03, 0.03, 0.18, 0.03), (1, 1, 9, 2),
        _rows((1424, 1121, 13, 18), (2848, 1718, 25, 28), (4486, 2160, 50, 78), (8543, 3259, 76, 105),
              (13086, 4627, 132, 161)),
        _rows((0.937, 0.947, 0.919, 0.979), (0.903, 0.923, 0.384, 0.976), (0.834, 0.868, 0.326, 0.971),
              (0.765, 0.815, 0.220, 0.966), (0.687, 0.722, 0.179, 0.959)),
    ),
    Model(
        "QWen-MoE", "moevement_qwen", 5, 113, (0.05, 0.04, 0.19, 0.04), (2, 2, 9, 2),
        _rows((1170, 961, 15, 17), (2340, 1402, 30, 33), (4680, 2114, 60, 83), (7020, 2331, 90, 140),
              (10040, 3495, 146, 207)),
        _rows((0.927, 0.934, 0.927, 0.981), (0.898, 0.915, 0.380, 0.977), (0.841, 0.868, 0.325, 0.970),
              (0.783, 0.819, 0.205, 0.963), (0.703, 0.717, 0.162, 0.957)),
    ),
    Model(
        "DeepSeek-MoE", "moevement_deepseek", 6, 124, (0.08, 0.07, 0.22, 0.06), (3, 2, 8, 2),
        _rows((992, 800, 17, 22), (1984, 1218, 35, 43), (3967, 1879, 70, 104), (5951, 1983, 104, 167),
              (9402, 3236, 176, 241)),
        _rows((0.902, 0.910, 0.933, 0.975), (0.877, 0.894, 0.349, 0.970), (0.827, 0.853, 0.324, 0.965),
              (0.777, 0.814, 0.168, 0.956), (0.672, 0.728, 0.134, 0.951)),
        (92, 31),
    ),
)  # fmt: skip
MOC_DENSE_OVERHEAD = 4.7
"""Of DeepSeek-MoE at 10M, when MoC saves all experts (section 5.2)."""


@dataclass(frozen=True)
class LowPrecision:
    """One row of table 7. dense_secs: MoC's overhead per iteration at 10M, when it saves all experts."""

    setup: str
    window: int
    dense_secs: float

    @property
    def name(self) -> str:
        return self.setup.removeprefix("moevement_")


TABLE_7 = (
    LowPrecision("moevement_fp16_fp16_fp16", 3, 3.51),
    LowPrecision("moevement_fp8_fp32_fp32", 6, 10.70),
    LowPrecision("moevement_fp8_fp16_fp32", 4, 8.73),
    LowPrecision("moevement_fp8_fp16_fp8fp16", 3, 3.52),
    LowPrecision("moevement_fp8_fp8_fp8fp16", 3, 2.63),
)
CONTRADICTING = ("moevement_llava", "moevement_fp8_fp16_fp32")
"""Windows that need another bandwidth than all others of their cluster: left out of its calibration."""


def scenario(*overrides: str) -> Scenario:
    """Composed from the shipped configs, as ``moe-ckpt simulate`` does."""
    with initialize_config_dir(str(CONFIG_DIR), version_base=None):
        return scenario_of(compose("simulate", overrides=list(overrides)))


@dataclass(frozen=True)
class Counted:
    """A model as Algorithm 1 sees it: so many operators of one size."""

    operators: int
    params: int
    full: float
    compute: float
    iteration_secs: float
    gpus: int

    def window(self, bytes_per_sec: float, iteration_secs: float | None = None) -> CountedWindow:
        """bytes_per_sec: of all GPUs together."""
        item = self.params / self.operators
        return window_by_count(
            operators=self.operators, full_bytes=item * self.full, compute_bytes=item * self.compute,
            budget_bytes=bytes_per_sec * (iteration_secs or self.iteration_secs),
        )  # fmt: skip


@lru_cache(maxsize=32)
def counted(setup: str) -> Counted:
    result = scenario(f"setup={setup}")
    model, precision = result.layout.model, result.precision
    return Counted(
        len(model.elements), model.total, precision.full_bytes, precision.compute_bytes, result.iteration.secs,
        result.layout.parallel.ranks,
    )  # fmt: skip


def rate_range(setup: str, window: int) -> tuple[float, float]:
    """The least and the highest aggregate bandwidth, in GB/s, with which Algorithm 1 gives that window.

    In table 3 iteration times are known within a range only (``Model.iteration_range``): with one of them.
    """
    counts = counted(setup)
    times = next((one.iteration_range for one in TABLE_3 if one.setup == setup), (counts.iteration_secs,) * 2)

    def least(most: int) -> float:
        """Bytes in an iteration with which W is at most that, in 1e9."""
        low, high = 0.0, 10000.0
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if counts.window(middle * 1e9, 1.0).size <= most else (middle, high)
        return high

    return least(window) / times[1], least(window - 1) / times[0]


def shared_rate(requested: dict[str, int]) -> tuple[float, float, float]:
    """(least, highest, the middle to one decimal) of the bandwidths that give all these windows."""
    ranges = [rate_range(setup, window) for setup, window in requested.items() if setup not in CONTRADICTING]
    low, high = max(one[0] for one in ranges), min(one[1] for one in ranges)
    if low > high:
        raise ValueError(f"no one bandwidth gives these windows: {ranges}")
    return low, high, round((low + high) / 2, 1)


def extrapolated(model: Model, system: int) -> tuple[float, float]:
    """(overhead without failures, seconds per failure) that a column of printed ETTRs implies, by its two ends.

    1/ETTR = (1 + overhead) * (1 + E[R] / MTBF), which is linear in 1/MTBF.
    """
    ends = [(1 / MTBF_SECS[mtbf], 1 / model.ettr[mtbf][system]) for mtbf in ("2H", "10M")]
    slope = (ends[1][1] - ends[0][1]) / (ends[1][0] - ends[0][0])
    flat = ends[0][1] - slope * ends[0][0]
    return flat - 1, slope / flat


def recovery_per_failure(model: Model, system: int, mtbf: str) -> float:
    """The printed recovery time over the expected number of failures of 12 hours."""
    return model.recovery[mtbf][system] / (RUN_SECS / MTBF_SECS[mtbf])


@dataclass(frozen=True)
class Constants:
    """All that is calibrated. Bandwidths are of all GPUs together, in GB/s."""

    a100_range: tuple[float, float]
    a100_rate: float
    h100_range: tuple[float, float]
    h100_rate: float
    h100_dense_rate: float
    restart_secs: float
    moc_budget: float

    def listed(self) -> list[list[Any]]:
        """Name, value, unit, source."""
        return [
            ["copy bandwidth, 96 A100 together", self.a100_rate, "GB/s",
             f"the middle of {self.a100_range[0]:.2f} to {self.a100_range[1]:.2f}, with which Algorithm 1 gives table "
             "3's windows but MoE-LLaVa's"],
            ["copy bandwidth, 128 H100 together", self.h100_rate, "GB/s",
             f"the middle of {self.h100_range[0]:.2f} to {self.h100_range[1]:.2f}, likewise, of table 7's windows but "
             "the third"],
            ["bandwidth of dense snapshots, 128 H100", self.h100_dense_rate, "GB/s",
             "least squares over table 7's five overheads of MoC at 10M; used there only"],
            ["restart after a failure", self.restart_secs, "s",
             "mean over table 3's models of E[R] as MoEvement's ETTRs at 2H and 10M imply it, less the printed "
             "recovery"],
            ["MoC's budget of lost tokens", self.moc_budget, "of all tokens",
             "not printed; figure 12: K = E after the second failure"],
        ]  # fmt: skip


@lru_cache(maxsize=1)
def constants() -> Constants:
    a100 = shared_rate({model.setup: model.window for model in TABLE_3})
    h100 = shared_rate({row.setup: row.window for row in TABLE_7})
    restart = fmean(extrapolated(model, 3)[1] - recovery_per_failure(model, 3, "10M") for model in TABLE_3)
    return Constants(a100[:2], a100[2], h100[:2], h100[2], round(_dense_rate(), 1), round(restart, 1), moc_budget())


def _dense_rate() -> float:
    """B of stall = bytes / B - T, by least squares in 1/B."""
    counts = [(counted(row.setup), row.dense_secs) for row in TABLE_7]
    sizes = [(one.params * one.full, secs + one.iteration_secs) for one, secs in counts]
    return sum(size * size for size, _ in sizes) / sum(size * secs for size, secs in sizes) / 1e9


def moc_budget() -> float:
    """By arithmetic, from figure 12: failures at 2 000 and 4 000, K = 8 at first, and K = 64 after the second.

    Taking turns, an expert's last copy is (E / K - 1) / 2 iterations old on average. The library saves all experts when
    7/8 of the budget are used up (8, 16, 32, then 64); so the tokens of both failures, both at K = 8 at most, must be
    7/8 of the budget's at iteration 4 000. Rounded to one digit.
    """
    lost = 2 * (64 / 8 - 1) / 2
    return float(f"{lost / 4000 / (7 / 8):.1g}")


def rates(results: Scenario | str, gigabytes_per_sec: float) -> str:
    """The override that gives each GPU its share of an aggregate bandwidth."""
    made = scenario(f"setup={results}") if isinstance(results, str) else results
    return f"cluster.pcie_bytes_per_sec={gigabytes_per_sec * 1e9 / made.layout.parallel.ranks!r}"


def copy_secs_of(rate_for: str, secs: float) -> str:
    """The override with which a dense snapshot's copy takes so long."""
    made = scenario(f"setup={rate_for}", "policy=dense")
    dense = Costs(made.layout, made.precision, made.iteration, made.system).bytes_of.dense
    return f"cluster.pcie_bytes_per_sec={dense.rank / secs!r}"


def restart() -> str:
    return f"cluster.restart_secs={constants().restart_secs}"


def policy_of(system: str) -> str:
    """The config of a paper's system, all of which keep checkpoints in the memory of peers but CheckFreq."""
    return {"MoC": "moc_peers", "MoEvement": "moevement_peers"}.get(system, system.lower())


def run(setup: str, system: str, *more: str) -> Outcome:
    """One system at the calibrated bandwidth, MoC with the calibrated budget."""
    chosen = [f"setup={setup}", f"policy={policy_of(system)}", rates(setup, constants().a100_rate), restart(), *more]
    if system == "MoC":
        chosen.append(f"policy.policy.plt_budget={constants().moc_budget}")
    return simulate(scenario(*chosen))


Tick = Callable[[str], None]
"""Told what was done last."""
