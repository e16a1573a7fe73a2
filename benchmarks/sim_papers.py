"""The simulator against the papers: windows, ETTR, scaling, ablation, skewed loads, a failure trace, sizes.

Every figure that the papers print is beside what comes out of the closed forms and of the simulator with the library's
own policies, with the difference and, where they differ, the reason. What is calibrated is listed first. The report,
docs/simulator_papers.md, is made from the JSON alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import (
    sim_papers_ablation,
    sim_papers_ettr,
    sim_papers_figures,
    sim_papers_moetion,
    sim_papers_pec,
    sim_papers_scaling,
    sim_papers_sizes,
    sim_papers_windows,
)
from benchmarks.sim_papers_data import Tick, constants, scenario
from benchmarks.sim_papers_render import draw, markdown, part, print_part, table

ROOT = Path(__file__).resolve().parents[1]
JSON = Path("benchmarks", "results", "sim_papers.json")
REPORT = Path("docs", "simulator_papers.md")
IMAGES = Path("docs", "images")
_EXAMPLE = "example: python benchmarks/sim_papers.py --only windows figure13"


def calibrated(tick: Tick) -> dict[str, Any]:
    figures, rows = constants(), constants().listed()
    cluster = scenario("setup=moevement_deepseek", "policy=moevement_peers").layout.cluster
    nominal = cluster.gpus * cluster.pcie_bytes_per_sec
    tick("calibration")
    shown = table("", ["what", "value", "unit", "from"], ["", "", "", ""], rows)
    notes = [
        "All other inputs are the papers' own, or assumed in the configs.",
        f"The first bandwidth is a {nominal / (figures.a100_rate * 1e9):.0f}th of the nominal rate of these machines' "
        "PCIe links, at which W would be 1 or 2.",
    ]
    return part("What is calibrated", "Each value is calibrated once, never per cell.", [shown], notes)


PARTS: dict[str, tuple[Callable[[Tick], dict[str, Any]], int]] = {
    "calibrated": (calibrated, 1),
    "windows": (sim_papers_windows.windows, 9),
    "dense": (sim_papers_windows.dense, 1),
    "inside": (sim_papers_windows.inside, 1),
    "overheads": (sim_papers_ettr.overheads, 4),
    "table3": (sim_papers_ettr.table3, 16),
    "figure10": (sim_papers_figures.figure10, 4),
    "figure11": (sim_papers_scaling.figure11, 12),
    "figure13": (sim_papers_ablation.figure13, 4),
    "figure16": (sim_papers_figures.figure16, 4),
    "moetion": (sim_papers_sizes.moetion, 2),
    "moetion_time": (sim_papers_moetion.moetion_time, 20),
    "pec": (sim_papers_sizes.pec, 1),
    "loss_over_k": (sim_papers_pec.loss_over_k, 1),
    "two_levels": (sim_papers_pec.two_levels, 3),
    "known": (sim_papers_sizes.known, 1),
}
"""Name -> (what makes it, how often it says that something is done)."""


def make(names: list[str], console: Console) -> dict[str, Any]:
    """The parts, in the order of the report."""
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(PARTS[name][1] for name in names))
        for name in names:
            progress.update(task, description=name)

            def tick(done: str) -> None:
                progress.update(task, advance=1, description=done)

            # By way of text, so that what is shown is what the file has.
            results[name] = json.loads(json.dumps(_rounded(PARTS[name][0](tick))))
    return results


def _rounded(value: Any) -> Any:
    """Nine digits, as ``Outcome.to_dict``: two machines write the same text."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def differences(results: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """What is not as in the committed JSON: numbers off by more than a millionth, anything else at all."""
    return [one for name in results for one in _differ(name, results[name], kept.get(name))]


def _differ(where: str, ours: Any, theirs: Any) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [one for key in ours for one in _differ(f"{where}.{key}", ours[key], theirs[key])]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [one for at in range(len(ours)) for one in _differ(f"{where}[{at}]", ours[at], theirs[at])]
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        same = abs(ours - theirs) <= 1e-6 * max(abs(ours), abs(theirs), 1e-6)
    else:
        same = ours == theirs
    return [] if same else [f"{where}: {ours!r} here, {theirs!r} committed"]


def write(results: Mapping[str, Any], root: Path) -> None:
    """JSON, report and pictures. Parts that were not made stay as they are in the JSON."""
    kept = json.loads((root / JSON).read_text()) if (root / JSON).exists() else {}
    every = {name: results.get(name, kept.get(name)) for name in PARTS if name in results or name in kept}
    for folder in (JSON.parent, REPORT.parent, IMAGES):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / JSON).write_text(json.dumps(every, indent=1, ensure_ascii=False) + "\n")
    (root / REPORT).write_text(markdown(every, IMAGES.name))
    for one in every.values():
        draw(one, root / IMAGES)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                      help=f"of {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare with the committed JSON; 1 if anything differs")
    parser.add_argument("--write", action="store_true", help="keep JSON, report and pictures")
    parser.add_argument("--out", type=Path, default=ROOT, help="repository to write to, or to compare with")
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    began = time.perf_counter()
    result = make([name for name in PARTS if name in options.only], console)
    for one in result.values():
        print_part(console, one)
    console.print(f"{time.perf_counter() - began:.0f} s")
    if options.write:
        write(result, options.out)
    if not options.check:
        return 0
    unlike = differences(result, json.loads((options.out / JSON).read_text()))
    console.print("\n".join(unlike) or "as committed", markup=False)
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
