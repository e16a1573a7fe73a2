"""Sizes and tokens at risk of MoEtion, PEC's reductions, and known answers of the closed forms."""

from __future__ import annotations

from typing import Any

from benchmarks.sim_papers_data import Tick, scenario
from benchmarks.sim_papers_render import lines, part, table
from moe_ckpt.core.operators import non_expert_id
from moe_ckpt_sim.failures.formulas import (
    Component,
    component_mtbf_hours,
    daly_interval_secs,
    observed_mtbf_hours,
    overhead_portion,
    system_mtbf_hours,
    young_interval_secs,
)
from moe_ckpt_sim.workload.model import SimModel
from moe_ckpt_sim.workload.size_formulas import moetion_bytes, pec_reduction


def _moetion(model: SimModel, selected: int, bytes_per_param: float) -> float:
    """GB of a checkpoint with so many experts of every layer."""
    layers, experts = len(model.catalog.layers), model.catalog.layers[0].experts
    return (
        moetion_bytes(
            non_expert=model.total - model.expert_total,
            one_expert=model.expert_total // (layers * experts),
            selected=[selected] * layers,
            experts=experts,
            bytes_per_param=bytes_per_param,
        )
        / 1e9
    )


def moetion(tick: Tick) -> dict[str, Any]:
    """arXiv 2412.15411 v1: figures 4, 9 and 11."""
    from benchmarks.tokens_at_risk import compare  # needs torch, by way of report.py

    rows = []
    large = scenario("setup=moetion_1_6b", "policy=dense").layout.model
    wide = scenario("setup=moetion_3_8b", "model.experts=32", "policy=dense").layout.model
    for name, model, selected, paper in (
        ("MoE-GPT-1.6B-64E, all experts", large, 64, 587.0),
        ("MoE-GPT-1.6B-64E, 6 of 64", large, 6, 61.0),
        ("MoE-GPT-3.8B with 32, all experts", wide, 32, 1820.0),
        ("MoE-GPT-3.8B with 32, 3 of 32", wide, 3, 195.0),
    ):
        ours = _moetion(model, selected, 10)
        rows.append([name, paper, ours, ours - paper, ours / paper - 1])
    sizes = table(
        "Checkpoints, 10 bytes per parameter",
        ["what", "paper GB", "ours GB", "difference GB", "difference"],
        ["", ".0f", ".1f", "+.1f", "+.1%"],
        rows,
    )
    tick("MoEtion, sizes")
    risk = compare([(16, 4, 1), (64, 16, 1)], steps=100, seeds=2)
    tick("MoEtion, tokens at risk")
    at_risk = [
        [
            row["experts"],
            row["skewness"],
            row["mean"]["round_robin"],
            row["mean"]["popular"],
            0.5,
            row["popular_over_round_robin"],
            row["popular_over_round_robin"] - 0.5,
        ]
        for row in risk
    ]
    half = table(
        "Tokens at risk, mean over 100 iterations, a quarter of the experts saved",
        ["experts", "skewness S", "taking turns", "popular first", "ratio, paper", "ratio, ours", "difference"],
        ["d", ".2f", ".2%", ".2%", ".2f", ".2f", "+.2f"],
        at_risk,
    )
    series = {f"{e} experts": [(row[1], row[5]) for row in at_risk if row[0] == e] for e in (16, 64)}
    series["any (paper)"] = [(row[1], 0.5) for row in at_risk if row[0] == 64]
    picture = lines("sim_tokens_at_risk", "skewness S", "ratio of tokens at risk", series)
    return part(
        "MoEtion",
        "What version 1 of the paper saves, and what that leaves at risk.",
        [sizes, half],
        notes_moetion(wide, at_risk),
        picture,
    )


def notes_moetion(wide: SimModel, at_risk: list[list[Any]]) -> list[str]:
    """wide: MoE-GPT-3.8B with 32 experts."""
    return [
        "The paper does not print the bytes per parameter; 10 give 587 GB for its 58.7 B parameters. It prints the "
        "number of selected experts for the first model only; for the second, 3 of 32 comes nearest "
        f"(4 would be {_moetion(wide, 4, 10):.0f} GB).",
        f"Figure 9's {1820} GB need {1820 / 10 - 46.7:.0f} B parameters in the 24 experts per layer beyond the model "
        f"of 46.7 B; the widths that give 46.7 B have {(wide.expert_total * 24 / 32) / 1e9:.0f} B there.",
        "The picture: with a quarter of the experts saved at a time, saving popular ones first leaves half the tokens "
        "at risk, as the paper says, at a skewness of about "
        + " and ".join(f"{_nearest(at_risk, experts):.2f} with {experts} experts" for experts in (16, 64))
        + ". The paper does not print its skewness.",
    ]


def _nearest(rows: list[list[Any]], experts: int) -> float:
    """The skewness at which the ratio is nearest to the paper's."""
    return float(min((row for row in rows if row[0] == experts), key=lambda row: abs(row[6]))[1])


def pec(tick: Tick) -> dict[str, Any]:
    """How much smaller K = 1 of 8 is; docs/sizes.md says which state each variant has."""
    hidden, layers, context = 768, 12, 1024
    tied = scenario("setup=pec", "policy=dense").layout.model
    rows = []
    experts, outside = tied.expert_total, tied.total - tied.expert_total
    head = tied.elements[non_expert_id("embedding")] - context * hidden
    masks = layers * context**2 // 3  # buffers of fp32: 4 bytes each, where a parameter has 12
    for name, non_expert in (
        ("a tied head", outside),
        ("a head of its own", outside + head),
        ("a head and causal masks", outside + head + masks),
    ):
        ours = pec_reduction(non_expert=non_expert, expert_total=experts, k=1, experts=8)
        rows.append([name, 0.542, ours, ours - 0.542, 0.577, ours - 0.577])
    tick("PEC")
    shown = table(
        "Left out at K = 1 of 8",
        ["what", "first version", "ours", "difference", "later version", "difference"],
        ["", ".1%", ".1%", "+.1%", ".1%", "+.1%"],
        rows,
    )
    notes = [
        "K = 1 of 8 leaves out "
        + ", ".join(f"{row[2]:.1%} with {row[0]}" for row in rows)
        + ". The last is the first version's figure; its others agree as well ([sizes.md](sizes.md)). The cause of the "
        "later version's 57.7% is unknown; it saves from Megatron-DeepSpeed with ZeRO-2.",
    ]
    return part("PEC", "GPT2-MoE-Small.", [shown], notes)


def known(tick: Tick) -> dict[str, Any]:
    """Answers that were published elsewhere."""
    meta = [Component("GPU", 4096, 25_000), Component("host", 512, 8_000), Component("switch", 32, 100_000)]
    llama = observed_mtbf_hours(failures=419, days=54)
    rows: list[list[Any]] = []
    for hours, minutes in ((24, 117.0), (6, 57.0), (0.25, 9.1)):
        ours = daly_interval_secs(checkpoint_secs=300, mtbf_secs=hours * 3600) / 60
        rows.append([f"Daly: saving takes 5 min, MTBF {hours} h", "min", minutes, ours])
    rows += [
        ["Young: 30 s, MTBF 2 h", "s", 657.0, young_interval_secs(checkpoint_secs=30, mtbf_secs=7200)],
        ["4 096 GPUs, 512 hosts, 32 switches: MTBF", "h", 4.4, system_mtbf_hours(meta)],
        ["Llama 3: 419 failures in 54 days: MTBF", "h", 3.1, llama],
        ["Llama 3: of one of its 16 384 GPUs", "h", None, component_mtbf_hours(system_mtbf_hours=llama, count=16384)],
        [
            "Young: 30 s, 2 h, what saving and lost work cost",
            "%",
            None,
            100 * overhead_portion(interval_secs=657, checkpoint_secs=30, mtbf_secs=7200),
        ],
    ]
    tick("known answers")
    shown = table(
        "",
        ["what", "unit", "known", "ours", "difference"],
        ["", "", ",.1f", ",.2f", "+.2f"],
        [[*row, None if row[2] is None else row[3] - row[2]] for row in rows],
    )
    return part(
        "Known answers",
        "Closed forms of time (`moe_ckpt_sim.failures.formulas`).",
        [shown],
        [
            "Daly's intervals, Young's interval, the MTBF of 4 096 GPUs with their hosts and switches, and that of "
            "Llama 3's 419 failures in 54 days come out as published, but for roundings of the published figures."
        ],
    )
