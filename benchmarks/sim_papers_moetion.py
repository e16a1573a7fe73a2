"""MoEtion's figures of time (arXiv 2412.15411 v1): stalls (5), frequency (6), wasted work (7), more experts (9b),
ablation (10), and the rates at which stalls appear at all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

from benchmarks.sim_papers_data import Tick, constants, scenario
from benchmarks.sim_papers_render import bars, part, table
from benchmarks.tokens_at_risk import selected_again
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.cluster.redundancy import OperatorShare, deliveries
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.scenario import Outcome, Scenario

GEMINI_32 = (1820.0, 74.9)
"""GB and seconds of a dense checkpoint of MoE-GPT-3.8B with 32 experts (figure 9)."""
STORAGE = 5.0
"""GB/s of blob storage, all nodes together (section 7.1)."""
CHECKFREQ_WASTED, CHECKFREQ_EVERY = 331.9, 50
"""Seconds of figure 7 for 1.6B-64E, and 2 checkpoints in 100 iterations of figure 6."""
COPIES = 2
"""Peers that a checkpoint is sent to."""
GRADIENT_BYTES, WEIGHT_BYTES, STATE_BYTES = 2.0, 2.0, 10.0


@dataclass(frozen=True)
class Case:
    """One model, and what the paper says of it.

    selected: experts per layer; 6 is the paper's of the first model, 2 of the others come nearest to its figure 10.
    wasted: seconds per failure of MoEtion. ablation: seconds of a checkpoint with selection alone, then with bubbles,
        placement and recomputation added one by one; where printed.
    """

    name: str
    setup: str
    selected: int
    wasted: float
    ablation: tuple[float | None, float | None, float | None, float | None]

    @property
    def scenario(self) -> Scenario:
        return _composed(self.setup)

    @property
    def iteration_secs(self) -> float:
        """As figure 7 implies it for the first model; for the others in the ratio of the estimates."""
        return implied_secs() * self.scenario.iteration.secs / CASES[0].scenario.iteration.secs


CASES = (
    Case("1.6B-64E", "moetion_1_6b", 6, 11.9, (5.7, None, None, 2.7)),
    Case("2.9B-16E", "moetion_2_9b", 2, 9.8, (3.6, None, None, 1.5)),
    Case("3.8B-8E", "moetion_3_8b", 2, 14.9, (12.6, 10.9, 7.0, 3.9)),
)
STALL = {"CheckFreq": 100.0, "Gemini": 28.0, "MoEtion": 0.0}
FREQUENCY = {"CheckFreq": 2.0, "Gemini": 6.0, "MoEtion": 100.0}
POLICY = {"CheckFreq": "dense_sync", "Gemini": "gemini", "MoEtion": "moetion_peers"}
HIGH_FREQ, NO_STALL = "Gemini, at each iteration", "Gemini, without stalls"
STEPS = ("selection", "bubbles", "placement", "recomputation")


@lru_cache(maxsize=8)
def _composed(setup: str) -> Scenario:
    return scenario(f"setup={setup}", "policy=gemini")


def implied_secs() -> float:
    """T of 1.6B-64E: CheckFreq's 331.9 s are a write, a read, and half of 50 iterations."""
    return (CHECKFREQ_WASTED - 2 * _total(CASES[0]) / STORAGE) / (CHECKFREQ_EVERY / 2)


def rate() -> float:
    """GB/s of all 64 GPUs together."""
    return GEMINI_32[0] / GEMINI_32[1]


def _nominal() -> float:
    """GB/s that the PCIe links can do together."""
    cluster = CASES[0].scenario.layout.cluster
    return cluster.gpus * cluster.pcie_bytes_per_sec / 1e9


def _costs(case: Case) -> Costs:
    result = case.scenario
    return Costs(result.layout, result.precision, result.iteration, result.system)


def _total(case: Case) -> float:
    """GB of all state."""
    return _costs(case).bytes_of.dense.total / 1e9


def _experts(case: Case) -> int:
    """Of each layer."""
    return case.scenario.layout.model.catalog.layers[0].experts


def selected_bytes(case: Case) -> tuple[float, float]:
    """GB of non-experts, and of as many experts as MoEtion selects."""
    model = case.scenario.layout.model
    outside, experts = model.total - model.expert_total, model.expert_total * case.selected / _experts(case)
    return outside * STATE_BYTES / 1e9, experts * STATE_BYTES / 1e9


def run_at_rate(case: Case, policy: str, every: int, *more: str) -> Outcome:
    """One system at the calibrated rate and time."""
    item = rate() * 1e9 / case.scenario.layout.parallel.ranks
    chosen = [f"setup={case.setup}", f"policy={policy}", f"policy.policy.every_n_steps={every}"]
    chosen += [
        "policy.interval=policy",
        f"cluster.pcie_bytes_per_sec={item!r}",
        f"iteration.secs={case.iteration_secs!r}",
    ]
    return simulate(scenario(*chosen, *more))


def moetion_time(tick: Tick) -> dict[str, Any]:
    """Figures 5, 6, 7, 9b and 10, and rates."""
    ablation = _ablation()
    tick("figure 10")
    stalls, wasted = _stalls(tick), _wasted(tick)
    tables = [_calibrated(), stalls, _frequencies(), wasted, _wide(), ablation, _rates()]
    tick("rates")
    series = {f"{name} (paper)": [case.ablation[at] for case in CASES] for at, name in enumerate(STEPS)}
    ours = {name: [row[3] for row in ablation["rows"] if row[1] == name] for name in STEPS}
    groups = [case.name for case in CASES]
    picture = bars("sim_moetion_ablation", "seconds of a checkpoint", groups, {**ours, **series})
    what = "MoE-GPT on 64 A100: what a checkpoint at every iteration costs."
    return part("MoEtion: time", what, tables, notes_time(), picture)


def notes_time() -> list[str]:
    again = [f"{selected_again(_experts(case), case.selected):.0%}" for case in CASES]
    often = [f"{row[3]:.0f}" for row in _frequencies()["rows"] if row[1] == "Gemini"]
    return [
        f"Calibrated, once each: {rate():.1f} GB/s of 64 GPUs together, on figure 9b's 1 820 GB in 74.9 s under "
        f"Gemini, which is 1/{_nominal() / rate():.0f} of the nominal rate of their PCIe links, and nearly what "
        f"MoEvement's windows need of 96 ({constants().a100_rate}); and T of the first model, {implied_secs():.2f} s, "
        "on CheckFreq's 331.9 s of figure 7. The ratio of our estimates gives T of the other two. At nominal rates "
        "only CheckFreq stalls.",
        "Figure 5: the paper's 28 s are one figure for three models. Ours is the part of Gemini's copy that does not "
        "fit beside the iteration.",
        "Figure 6: in 100 iterations without stalls Gemini has 6 checkpoints in the paper, and here "
        f"{', '.join(often[:-1])} and {often[-1]}, as many as its copy allows.",
        "Figure 7: lost iterations and retrieval per failure, in six hours with a failure every half hour. The paper's "
        "formula leaves out reason 4, and retrieval has the calibrated rate here.",
        f"Figure 9b: MoEtion's 195 GB take 8.5 s in the paper, and {195 / rate():.1f} s here.",
        "Figure 10: two copies through one link, with 6, 2 and 2 experts per layer, give the paper's times of "
        "selection alone within 1.5 s. Bubbles are (p-1)/(m+p-1) (1F1B) of our estimate of an iteration. Placement "
        "leaves out the weights that all data-parallel ranks hold under ZeRO-1. Recomputation sends a gradient of 2 "
        "bytes in place of a state of 10, for an expert that was selected one iteration before: for "
        f"{', '.join(again)} of those that the library's policy selects, at skewness 0.1. The paper's gain needs about "
        "half, which a skewness of 0.6 and more gives.",
    ]


def _calibrated() -> dict[str, Any]:
    rows: list[list[Any]] = [
        ["copy bandwidth, 64 A100 together", rate(), "GB/s", "figure 9: 1 820 GB in 74.9 s under Gemini"],
        ["T of 1.6B-64E", implied_secs(), "s", "figure 7: (331.9 s - 2 * 587 GB / 5 GB/s) / 25 iterations"],
    ]
    return table("Calibrated, once each", ["what", "value", "unit", "from"], ["", ".2f", "", ""], rows)


def _stalls(tick: Tick) -> dict[str, Any]:
    rows = []
    for case in CASES:
        for system, paper in STALL.items():
            result = run_at_rate(case, POLICY[system], 1, "failures=none", "duration_secs=7200")
            stall = result.spent.total / max(result.steps, 1) - case.iteration_secs
            rows.append([case.name, system, case.iteration_secs, paper, stall, stall - paper])
            tick(f"figure 5, {case.name}, {system}")
    columns = ["model", "system", "T s", "paper s", "ours s", "difference s"]
    return table(
        "Figure 5: stall per iteration, a checkpoint at each", columns, ["", "", ".1f", ".0f", ".2f", "+.2f"], rows
    )


def _frequencies() -> dict[str, Any]:
    rows = []
    for case in CASES:
        copied = _total(case) / rate() / case.iteration_secs
        stored = _total(case) / STORAGE / case.iteration_secs
        for system, iterations in (("CheckFreq", stored), ("Gemini", copied), ("MoEtion", 0.0)):
            ours = 100 / max(1, ceil(iterations))
            rows.append([case.name, system, FREQUENCY[system], ours, ours - FREQUENCY[system]])
    columns = ["model", "system", "paper", "ours", "difference"]
    title = "Figure 6: checkpoints in 100 iterations without stalls"
    return table(title, columns, ["", "", ".0f", ".0f", "+.0f"], rows)


def _wasted(tick: Tick) -> dict[str, Any]:
    printed = {("1.6B-64E", "CheckFreq"): 331.9, ("3.8B-8E", HIGH_FREQ): 27.4, ("3.8B-8E", NO_STALL): 25.7}
    printed |= {(case.name, "MoEtion"): case.wasted for case in CASES}
    rows = []
    for case in CASES:
        every = {"CheckFreq": CHECKFREQ_EVERY, HIGH_FREQ: 1, NO_STALL: without_stall(case), "MoEtion": 1}
        for name, steps in every.items():
            system = "Gemini" if name in (HIGH_FREQ, NO_STALL) else name
            result = run_at_rate(case, POLICY[system], steps, "failures.mtbf_secs=1800", "duration_secs=21600")
            paper = printed.get((case.name, name))
            simulated = (result.spent.lost + result.spent.retrieve) / max(result.failures, 1)
            ours = wasted_secs(case, system, steps)
            rows.append([case.name, name, paper, ours, None if paper is None else ours - paper, simulated])
            tick(f"figure 7, {case.name}, {name}")
    columns = ["model", "system", "paper s", "formula s", "difference s", "simulated s"]
    return table("Figure 7: wasted work per failure", columns, ["", "", ".1f", ".1f", "+.1f", ".1f"], rows)


def without_stall(case: Case) -> int:
    """Iterations that a copy of all state takes, rounded up."""
    return max(1, ceil(_total(case) / rate() / case.iteration_secs))


def wasted_secs(case: Case, system: str, every: int) -> float:
    """T_ckpt + T_retrieve + f/2 * T (section 7.2), seconds."""
    costs = _costs(case)
    load = costs.copy_secs(costs.bytes_of.dense)
    if system == "CheckFreq":
        saved, load = _total(case) / STORAGE, load + _total(case) / STORAGE
    else:
        saved = (_total(case) if system == "Gemini" else sum(selected_bytes(case))) / rate()
        load += costs.bytes_of.dense.rank / costs.nic_rate
    return saved + load + every / 2 * case.iteration_secs


def _wide() -> dict[str, Any]:
    """Figure 9b: Gemini's is what the rate is calibrated on."""
    rows = []
    for name, gigabytes, paper in (("Gemini", *GEMINI_32), ("MoEtion", 195.0, 8.5)):
        ours = gigabytes / rate()
        rows.append([name, gigabytes, paper, ours, ours - paper])
    columns = ["system", "GB, paper", "paper s", "ours s", "difference s"]
    return table("Figure 9b: MoE-GPT-3.8B with 32 experts", columns, ["", ".0f", ".1f", ".1f", "+.1f"], rows)


def ablated(case: Case) -> list[float]:
    """Seconds of a checkpoint with each of the four techniques added to those before.

    Data-parallel ranks hold the weights of non-experts and of their experts alike, under ZeRO-1 nothing else.
    """
    parallel, batch = case.scenario.layout.parallel, case.scenario.batch
    outside, experts = selected_bytes(case)
    bubble = (parallel.pp - 1) / (batch.micro_batches(parallel.dp) + parallel.pp - 1)
    free = case.scenario.iteration.secs * bubble * rate()
    again = experts * selected_again(_experts(case), case.selected)
    everybody = range(parallel.dp) if parallel.dp > 1 else ()
    share = [_piece("non-experts", outside, everybody), _piece("experts", experts, everybody)]
    anew = _piece("in full", experts - again, everybody)
    gradients = [*share[:1], anew, OperatorShare("gradients", 0, _as_gradient(again))]
    whole, peers = outside + experts, range(1, 1 + COPIES)
    placed, recomputed = (
        sum(deliverie.nbytes for deliverie in deliveries(group, peers)) / 1e9 for group in (share, gradients)
    )
    sent = [COPIES * whole, COPIES * whole, placed, recomputed]
    return [sent[0] / rate(), *(max(0.0, item - free) / rate() for item in sent[1:])]


def _piece(name: str, gigabytes: float, everybody: Collection[int]) -> OperatorShare:
    """State of which ``everybody`` has the weights."""
    weights = round(gigabytes * 1e9 * WEIGHT_BYTES / STATE_BYTES)
    return OperatorShare(name, weights, round(gigabytes * 1e9) - weights, everybody)


def _as_gradient(gigabytes: float) -> int:
    """Bytes of the gradients of so much state."""
    return round(gigabytes * 1e9 * GRADIENT_BYTES / STATE_BYTES)


def _ablation() -> dict[str, Any]:
    rows = []
    for case in CASES:
        for name, paper, ours in zip(STEPS, case.ablation, ablated(case), strict=True):
            rows.append([case.name, name, paper, ours, None if paper is None else ours - paper])
    columns = ["model", "with", "paper s", "ours s", "difference s"]
    return table("Figure 10: a checkpoint beside compute", columns, ["", "", ".1f", ".1f", "+.1f"], rows)


def _rates() -> dict[str, Any]:
    """GB/s of all GPUs together below which an iteration with a checkpoint is longer than one without."""
    rows = []
    for case in CASES:
        costs = _costs(case)
        outside, experts = selected_bytes(case)
        for secs, source in ((costs.iteration.open_secs, "estimated"), (case.iteration_secs, "implied")):
            heavy = costs.bytes_of.dense.rank * case.scenario.layout.parallel.ranks / 1e9
            rows.append([case.name, source, secs, heavy / secs, (outside + experts) / secs, outside / secs])
    columns = ["model", "T", "T s", "dense GB/s", "selected GB/s", "non-experts alone GB/s"]
    title = f"Rates below which training stalls; nominal are {_nominal():,.0f} GB/s, calibrated {rate():.1f}"
    return table(title, columns, ["", "", ".2f", ".0f", ".0f", ".0f"], rows)
