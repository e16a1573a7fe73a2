"""What a model and its checkpoints weigh: parameters, bytes of each rank, and what each policy would save.

Needs no GPU, no memory for the model, and no training run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by its path, a script does not find the rest of the clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_ckpt.core.placement import everywhere
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.policies.base import Measured, ModelFacts, Policy, PolicyContext, RunFacts
from moe_ckpt.policies.moevement import WindowReport
from moe_ckpt.tables import print_table
from moe_ckpt_sim.planner.window_text import costs_of, facts_of, heaviest_by_size
from recipes.gpt_moe_megatron.config import RunConfig
from recipes.gpt_moe_megatron.counting import Precision, RankCount, WholeModel, rank_counts, whole_model

HERE = Path(__file__).resolve().parent

EPILOG = """\
examples:
  python recipes/gpt_moe_megatron/sizes.py experiment=deepseek_moe_16_4b_64e
  python recipes/gpt_moe_megatron/sizes.py model=qwen_moe_14_3b_64e parallel=node8_ep8 parallel.dp=2 --k 4
  python recipes/gpt_moe_megatron/sizes.py experiment=gpt_moe_7_3b_32e --iteration-secs 2 --bandwidth 0.2 --json

overrides choose and change the config as for train.py. Bandwidth is that of one rank in GB/s: the slower of what it
copies to host memory and what it writes to storage. GB are 10^9 bytes, as in the papers.
"""


WINDOWS_COMPARED = 8
"""Least bandwidth is told for windows of 1, 2 ... this many iterations."""


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="sizes.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("overrides", nargs="*", metavar="group=choice", help="as for train.py")
    command.add_argument("--k", type=int, default=1, help="experts per layer that MoC saves (default: 1)")
    command.add_argument("--iteration-secs", type=float, default=2.0, metavar="SECS", help="of training (default: 2)")
    command.add_argument("--bandwidth", type=float, default=1.0, metavar="GB/S", help="of one rank (default: 1)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


def compose(overrides: Sequence[str]) -> RunConfig:
    """The run that ``train.py`` would make of these overrides; here ``parallel.dp: null`` counts as 1."""
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(HERE / "conf"), version_base="1.3"):
        cfg = composed("train", [*overrides, "run_dir=unused"])
        plain: Any = OmegaConf.to_container(cfg, resolve=False)
    return RunConfig.of(plain)


def context(whole: WholeModel, precision: Precision, ranks: int, secs: float, bandwidth: float) -> PolicyContext:
    """A run whose last checkpoint is dense and done, with the given speeds."""
    measured = Measured(recent_iteration_secs=secs, copy_bytes_per_sec=bandwidth, persist_bytes_per_sec=bandwidth)
    model = ModelFacts(whole.catalog, everywhere(whole.catalog.layers, ranks), whole.sizes(precision))
    return PolicyContext(model, RunFacts(1, last_step=0), measured)


def saved_bytes(policy: Policy, policy_context: PolicyContext) -> int:
    """Bytes of one checkpoint, all ranks together."""
    policy.check(policy_context.model.catalog)
    return sum(policy_context.model.sizes[op].full for op in policy.plan(policy_context).full)


def window(policy_context: PolicyContext) -> WindowReport:
    """MoEvement's window."""
    report: WindowReport = MoEvement().explain(policy_context)
    return report


def facts(run: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed, as plain data; bytes of all ranks together unless named otherwise."""
    whole, ranks = whole_model(run.model), rank_counts(run.model, run.parallel)
    precision = Precision.of(run.trainer.precision)
    given = context(whole, precision, run.parallel.ranks, args.iteration_secs, args.bandwidth * 1e9)
    report = window(given)
    compared = min(len(report.window.order), WINDOWS_COMPARED)
    return {
        "model": {
            "total": whole.total,
            "active": whole.active,
            "experts": whole.experts,
            "paper": None if run.model.paper is None else asdict(run.model.paper),
        },
        "precision": run.trainer.precision,
        "ranks": run.parallel.ranks,
        "stages": [_stage(count, run, precision) for count in ranks],
        "dense_bytes": saved_bytes(Dense(), given),
        "moc_bytes": saved_bytes(MoC(k=args.k), given),
        "moc_k": args.k,
        "moevement": {
            **{k: v for k, v in facts_of(report).items() if k not in ("slots", "frequencies")},
            "slot_bytes": [slot.nbytes for slot in costs_of(report)],
            "slot_rank_bytes": list(report.rank_bytes),
            "bandwidth_by_window": {
                size: nbytes / run.parallel.ranks / args.iteration_secs
                for size, nbytes in enumerate(heaviest_by_size(report, compared), start=1)
            },
        },
    }


def _stage(count: RankCount, run: RunConfig, precision: Precision) -> dict[str, Any]:
    both = {name: count.state_bytes(precision, name == "sharded") for name in ("whole", "sharded")}
    return {
        **asdict(count),
        "parameters": count.dense + count.expert,
        **{name: {**asdict(b), "total": b.total} for name, b in both.items()},
    }


def show(run: RunConfig, results: dict[str, Any]) -> None:
    _show_model(results)
    _show_ranks(run, results)
    _show_policies(results)


def _show_model(results: dict[str, Any]) -> None:
    model, rows = results["model"], []
    paper = model["paper"] or {}
    for name in ("total", "active"):
        size = paper.get(name)
        compared = ("-", "-") if size is None else (f"{size / 1e9:g} B", f"{model[name] / size - 1:+.1%}")
        rows.append((name, _count(model[name]), *compared))
    rows.append(("in experts", _count(model["experts"]), "-", "-"))
    print_table(("parameters", "here", paper.get("name", "paper"), "off by"), rows)


def _show_ranks(run: RunConfig, results: dict[str, Any]) -> None:
    p = run.parallel
    print(
        f"bytes of one rank: tp={p.tp} pp={p.pp} ep={p.ep} dp={p.dp or 1}, {results['ranks']} ranks, "
        f"{results['precision']}"
    )
    columns = ("stage", "parameters", "weights", "gradients", "masters", "Adam", "sum", "masters", "Adam", "sum")
    rows = []
    for stages, stage in _alike(results["stages"]):
        whole, sharded = stage["whole"], stage["sharded"]
        cells = [_count(stage["parameters"]), _gb(whole["weights"]), _gb(whole["gradients"])]
        for kind in (whole, sharded):
            cells += [_gb(kind["masters"]), _gb(kind["moments"]), _gb(kind["total"])]
        rows.append((stages, *cells))
    print_table(columns, rows)
    used = "used" if p.distributed_optimizer else "not used"
    print(f"the last three columns: with the distributed optimizer, which this layout has {used}\n")


def _alike(stages: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Neighbouring stages that hold equally much, as one: ("1-4", facts)."""
    results: list[tuple[int, dict[str, Any]]] = []
    for stage in stages:
        if not results or {**results[-1][1], "stage": 0} != {**stage, "stage": 0}:
            results.append((stage["stage"], stage))
    ends = [first - 1 for first, _ in results[1:]] + [stages[-1]["stage"]]
    return [
        (str(first) if first == end else f"{first}-{end}", stage)
        for (first, stage), end in zip(results, ends, strict=True)
    ]


def _show_policies(results: dict[str, Any]) -> None:
    dense, ranks, moevement = results["dense_bytes"], results["ranks"], results["moevement"]
    rows = [
        _saved("dense", dense, dense, ranks),
        _saved(f"MoC, K = {results['moc_k']}", results["moc_bytes"], dense, ranks),
    ]
    size, slots = moevement["window"], moevement["slot_bytes"]
    shown = range(size) if size <= WINDOWS_COMPARED else sorted({0, slots.index(max(slots)), size - 1})
    for number in shown:
        rows.append(_saved(f"MoEvement, W = {size}, iteration {number + 1}", slots[number], dense, ranks))
    print_table(("saved at one iteration", "all ranks", "of dense", "per rank"), rows)
    secs, rate = moevement["iteration_secs"], moevement["bytes_per_sec"]
    verdict = "fits" if moevement["fits"] else f"does not fit: training stalls by up to {moevement['stall_secs']:.2g} s"
    print(f"W = {size} at {secs:g} s per iteration and {rate / 1e9:g} GB/s per rank: {verdict}")
    needs = [f"W={size}: {_gb(int(rate))}" for size, rate in moevement["bandwidth_by_window"].items()]
    print("least bandwidth per rank and second for " + ", ".join(needs))
    held = [stage["parameters"] for stage in results["stages"]]
    print(
        f"per rank: if all ranks saved equally much; the fullest stage holds {max(held) * len(held) / sum(held):.2f} "
        "times the average"
    )


def _saved(name: str, nbytes: int, dense: int, ranks: int) -> tuple[str, ...]:
    return name, _gb(nbytes), f"{nbytes / dense:.1%}", _gb(-(-nbytes // ranks))


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e8 else f"{number:,}"


def _gb(nbytes: int) -> str:
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    run = compose(args.overrides)
    result = facts(run, args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(run, result)


if __name__ == "__main__":
    main()
