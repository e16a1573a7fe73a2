"""What MoC's checkpoints of the PEC paper's model weigh, and what the busiest rank of them writes.

Counts bytes of the 323 M GPT2-MoE-Small (conf/model/gpt2_moe_small.yaml) on the meta device: nothing is trained or
written. The shares are those that the engine assigns (``slices.assignment``), the experts those that the policy plans.
docs/sizes.md explains the numbers beside the paper's (arXiv 2408.04307).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import numpy as np
import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import report
from benchmarks.moc_sim import SimulatedRun
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import ShardingUnit, everywhere, shares_adaptive, water_level
from moe_ckpt.core.tokens import Counts
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers
from moe_ckpt.policies import MoC
from moe_ckpt.ports import StateTensor
from moe_ckpt.slices.assignment import Weights, weigh
from recipes.gpt_moe_lightning.model import GPTMoE, GPTMoEConfig

_MODEL = Path(__file__).resolve().parents[1] / "conf" / "model" / "gpt2_moe_small.yaml"
_EXAMPLE = "example: python benchmarks/moc_sizes.py --k 2 --ranks 4 8"

PAPER = {
    "parameters": 323e6,
    "times the dense model": 2.18,
    "K=1 of full": 1 - 0.542,
    "K=1 with every rank writing all, of full": 1 - 0.15,
    "K=1 sharded, busiest rank, of every rank writing all in full": 1 - 0.769,
    "adaptive to equal": 1 - 0.117,
}
"""Figures of the first version of arXiv 2408.04307. The last is of time, ours of the busiest rank's bytes at worst."""

LATER = 0.423
"""K=1 of full in a later version of the paper."""

VARIANTS = {
    "tied": "as in the recipe: the head is the token embedding",
    "untied": "a head of its own",
    "untied, masks": "a head of its own, and fp32 causal masks [context, context] as buffers of each attention layer",
}


@dataclass(frozen=True)
class Subject:
    """A model's operators, and the bytes of each with fp32 AdamW: 12 per parameter, 4 per step count."""

    catalog: Catalog
    weights: Weights
    parameters: int
    expert_parameters: int
    dense_bytes: int

    @property
    def non_expert_bytes(self) -> int:
        return sum(unit.nbytes for unit in self.weights.units)

    @property
    def expert_bytes(self) -> int:
        return sum(self.weights.experts.values())

    def size(self, k: int) -> int:
        """Bytes of a checkpoint of K experts per layer, without redundancy."""
        return self.non_expert_bytes + self.expert_bytes * k // self.catalog.layers[0].experts


def subject(variant: str = "tied") -> Subject:
    config = GPTMoEConfig(**yaml.safe_load(_MODEL.read_text()))
    with torch.device("meta"):
        model = GPTMoE(config)
        if variant != "tied":
            model.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        parameters = sum(p.numel() for p in model.parameters())
        if variant == "untied, masks":
            for block in model.blocks:
                # A parameter without optimizer state weighs what a buffer does.
                mask = nn.Parameter(torch.empty(config.context, config.context), requires_grad=False)
                block.get_submodule("attention").register_parameter("mask", mask)
    catalog = build_catalog(model, find_moe_layers(model))
    weights = weigh(catalog, _state(model))
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    # In the dense model each MoE layer is one more MLP, which is one expert.
    dense = sum(unit.nbytes for unit in weights.units) + sum(weights.experts.values()) // config.experts
    return Subject(catalog, weights, parameters, experts, dense)


def _state(model: nn.Module) -> list[StateTensor]:
    """fp32 AdamW: weights, two moments, a step count."""
    results = []
    for name, p in model.named_parameters():
        shape, zeros = tuple(p.shape), (0,) * p.ndim
        results.append(StateTensor(f"model/{name}", name, p, zeros, shape))
        if p.requires_grad:
            for state in ("exp_avg", "exp_avg_sq"):
                results.append(StateTensor(f"optim/0/{name}/{state}", name, p, zeros, shape))
            results.append(StateTensor(f"optim/0/{name}/step", name, torch.empty((), device="meta"), (), ()))
    return results


@dataclass(frozen=True)
class Peaks:
    """Bytes of the busiest rank, per checkpoint of one full round: every expert is saved once.

    every_rank_all: each rank writes its own copy of the non-expert part and its own experts (the paper's baseline).
    whole_tensors: adaptive without splitting, as in the paper. lowest: what no sharding can be below.
    """

    ranks: int
    selector: str
    every_rank_all: list[int]
    none: list[int]
    equal: list[int]
    whole_tensors: list[int]
    adaptive: list[int]
    lowest: list[int]


def peaks(of: Subject, ranks: int, selector: str, k: int) -> Peaks:
    results: dict[str, list[int]] = {name: [] for name in WAYS}
    owners = everywhere(of.catalog.layers, ranks).owner_of
    units, rest = of.weights.units, of.non_expert_bytes
    equal = shares_adaptive(units, [0] * ranks, grain_bytes=rest)  # fixed, whatever experts a checkpoint holds
    writers = {unit.name: part.rank for unit, (part,) in zip(equal.units, equal.dealt, strict=True)}
    for operators in round_of(of.catalog, ranks, selector, k):
        preload = [0] * ranks
        for op in operators:
            if op in owners:
                preload[owners[op]] += of.weights.experts[op]
        results["every_rank_all"].append(rest + max(preload))
        results["none"].append(max(preload[0] + rest, *preload))
        results["equal"].append(max(loaded(units, writers, preload)))
        results["whole_tensors"].append(max(shares_adaptive(units, preload, grain_bytes=rest).loads))
        results["adaptive"].append(max(shares_adaptive(units, preload).loads))
        results["lowest"].append(max(*preload, water_level(preload, rest)))
    return Peaks(ranks, selector, **results)


def loaded(units: Iterable[ShardingUnit], writers: Mapping[Any, int], preload: list[int]) -> list[int]:
    """Bytes of each rank, if each unit has the same writer in every checkpoint."""
    loads = list(preload)
    for unit in units:
        loads[writers[unit.name]] += unit.nbytes
    return loads


WAYS = {
    "every_rank_all": "every rank all",
    "none": "none",
    "equal": "equal",
    "whole_tensors": "adaptive, whole tensors",
    "adaptive": "adaptive",
    "lowest": "(lowest possible)",
}
"""Field of ``Peaks`` -> its name in tables."""


def round_of(catalog: Catalog, ranks: int, selector: str, k: int) -> list[tuple[str, ...]]:
    """The operators of each checkpoint of a round, after the dense one that every run begins with."""
    experts = catalog.layers[0].experts
    run = SimulatedRun(MoC(k=k, selector=selector), catalog, ranks)
    counts = routed(len(catalog.layers), experts)
    run.step(counts)
    return [run.step(counts).full for _ in range(-(-experts // k))]


def routed(layers: int, experts: int) -> Counts:
    """``[L, E]`` tokens of a step: popularity falls as 1, 1/2, 1/3, ..., in another order in each layer."""
    order = (np.arange(experts)[None] + 3 * np.arange(layers)[:, None]) % experts
    return np.asarray(32_768 / (1 + order), dtype=np.int64)


def _show_sizes(console: Console, subjects: Mapping[str, Subject]) -> None:
    shown = Table(title="checkpoint of K experts per layer, of full", title_justify="left")
    shown.add_column("")
    experts = next(iter(subjects.values())).catalog.layers[0].experts
    for name in ("M parameters", "of them experts", "full MiB", *(f"K={k}" for k in range(1, experts + 1)), "x dense"):
        shown.add_column(name, justify="right")
    for name, of in subjects.items():
        full = of.size(experts)
        shown.add_row(
            name,
            f"{of.parameters / 1e6:.1f}",
            f"{of.expert_parameters / 1e6:.1f}",
            f"{full / report.MIB:.0f}",
            *(f"{of.size(k) / full:.1%}" for k in range(1, experts + 1)),
            f"{full / of.dense_bytes:.2f}",
        )
    console.print(shown)
    paper = PAPER["K=1 of full"], LATER, PAPER["times the dense model"]
    console.print("the paper: 323 M; K=1 {:.1%} of full, later version {:.1%}; {} x dense".format(*paper))


def _show_peaks(console: Console, name: str, results: list[Peaks], k: int) -> None:
    shown = Table(title=f"{name}, K={k}: MiB of the busiest rank, mean (worst) of a round", title_justify="left")
    for column in ("ranks, selector", *WAYS.values(), "adaptive / equal"):
        shown.add_column(column, justify="right")
    for p in results:
        cells = []
        for way in WAYS:
            values = [n / report.MIB for n in getattr(p, way)]
            cells.append(f"{mean(values):.0f} ({max(values):.0f})")
        ratio = f"{mean(p.adaptive) / mean(p.equal) - 1:+.1%}"
        shown.add_row(f"{p.ranks} {p.selector}", *cells, ratio)
    console.print(shown)


def reconstruction(of: Subject, k: int = 1, ranks: int = 8) -> dict[str, float]:
    """The paper's figures, computed for one variant. Its setting: 8 ranks, sequential selection."""
    experts = of.catalog.layers[0].experts
    result = peaks(of, ranks, "sequential", k)
    full_rank = of.non_expert_bytes + of.expert_bytes // ranks
    mean_rank = of.non_expert_bytes + of.expert_bytes * k // experts // ranks
    return {
        "parameters": of.parameters,
        "times the dense model": of.size(experts) / of.dense_bytes,
        "K=1 of full": of.size(k) / of.size(experts),
        "K=1 with every rank writing all, of full": mean_rank / full_rank,
        "K=1 sharded, busiest rank, of every rank writing all in full": mean(result.whole_tensors) / full_rank,
        "adaptive to equal": max(result.whole_tensors) / max(result.equal),
    }


def _show_reconstruction(console: Console, results: Mapping[str, Mapping[str, float]]) -> None:
    title = "the paper's figures, by what may have been saved; sharding without splits"
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for name in ("paper", *results):
        shown.add_column(name, justify="right")
    for figure, entry in PAPER.items():
        values = [entry, *(item[figure] for item in results.values())]
        plain = {"parameters": "{:.3g}", "times the dense model": "{:.2f}"}.get(figure, "{:.1%}")
        shown.add_row(figure, *(plain.format(value) for value in values))
    console.print(shown)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--k", type=int, default=1, help="experts per layer and checkpoint in the second table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--selectors", nargs="+", default=["sequential", "load_aware"])
    parser.add_argument("--write", action="store_true", help="keep the JSON in results/")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    subjects = {variant: subject(variant) for variant in VARIANTS}
    _show_sizes(console, subjects)
    for name, meaning in VARIANTS.items():
        console.print(f"  {name}: {meaning}", markup=False, highlight=False)
    measured = [peaks(subjects["tied"], r, s, options.k) for s in options.selectors for r in options.ranks]
    _show_peaks(console, "tied", measured, options.k)
    figures = {name: reconstruction(of) for name, of in subjects.items()}
    _show_reconstruction(console, figures)
    if options.write:
        report.write_json(options.out / "moc_sizes.json", _as_dict(subjects, measured, figures, options.k))
    return 0


def _as_dict(
    subjects: Mapping[str, Subject], results: list[Peaks], figures: Mapping[str, Mapping[str, float]], k: int
) -> dict[str, Any]:
    return {
        "paper": PAPER,
        "models": {
            name: {
                "parameters": of.parameters,
                "expert_parameters": of.expert_parameters,
                "non_expert_bytes": of.non_expert_bytes,
                "expert_bytes": of.expert_bytes,
                "dense_bytes": of.dense_bytes,
                "size_by_k": [of.size(number) for number in range(1, of.catalog.layers[0].experts + 1)],
                "figures": dict(figures[name]),
            }
            for name, of in subjects.items()
        },
        "peaks": {"k": k, "model": "tied", "rounds": [asdict(p) for p in results]},
    }


if __name__ == "__main__":
    sys.exit(main())
