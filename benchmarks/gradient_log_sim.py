"""A log of gradients beside MoEvement's windows on the papers' clusters, simulated: what each costs, where each wins.

With the links as their makers name them, and with the rate of copies that the papers' own figures imply
(benchmarks/sim_papers.py, "calibrated"). docs/gradient_log.md has the tables of results/gradient_log_sim.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks import sim_papers_moetion
from benchmarks.report import RESULTS, write_json
from benchmarks.sim_papers_data import constants, rates, scenario
from moe_ckpt_sim.planner.log_or_windows import Cost, break_even_secs
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.scenario import Outcome, Scenario

_EXAMPLE = """examples:
  python benchmarks/gradient_log_sim.py --json gradient_log_sim.json     # all clusters; a minute
  python benchmarks/gradient_log_sim.py --only moevement_deepseek --markdown"""
KEPT = RESULTS / "gradient_log_sim.json"
"""What docs/gradient_log.md tells of."""
SETUPS = {
    "moevement_deepseek": "DeepSeek-MoE, 96 A100",
    "moevement_qwen": "QWen-MoE, 96 A100",
    "moevement_fp8_fp32_fp32": "DeepSeek-MoE, fp8, 128 H100",
    "moetion_1_6b": "MoE-GPT-1.6B-64E, 64 A100",
}
"""Of the smaller models of table 3 everything fits into an iteration with nominal links: W is 1 with both."""
LINKS = ("nominal", "calibrated")
SYSTEMS = {
    "windows, the failed stage alone": ("policy=moevement_peers",),
    "windows": ("policy=moevement_peers", "policy.rollback=global", "policy.freeze=false"),
    "log, gradients of 4 bytes": ("policy=gradient_log_peers", "precision.gradient_bytes=4"),
    "log, gradients of 2 bytes": ("policy=gradient_log_peers", "precision.gradient_bytes=2"),
    "Gemini": ("policy=gemini",),
}
FAILING = ("failures.mtbf_secs=1800",)
HEADINGS = ("links", "system", "W", "bytes", "stall", "per failure", "ETTR")
BESIDE = ("", "nominal: per failure", "ETTR", "calibrated: stall", "per failure", "ETTR")
WINS = ("", *(f"{links}, {nbytes} bytes" for links in LINKS for nbytes in (4, 2)))


@dataclass(frozen=True)
class Row:
    """One system on one cluster. nbytes: per parameter and iteration. cost: see ``Cost``."""

    links: str
    system: str
    outcome: Outcome
    nbytes: float
    cost: Cost

    @property
    def cells(self) -> tuple[str, ...]:
        every = str(self.outcome.window) if self.outcome.window else f"every {self.outcome.interval}"
        return (
            self.links,
            self.system,
            every,
            f"{self.nbytes:.1f}",
            f"{self.cost.running:.1%}",
            f"{self.cost.failure_secs:.1f} s",
            f"{self.outcome.ettr:.3f}",
        )


def made(setup: str, links: str, system: str) -> Scenario:
    """The scenario of one row."""
    rate = () if links == "nominal" else (rates(setup, _calibrated(setup)),)
    implied = f"iteration.secs={sim_papers_moetion.implied_secs()!r}"
    return scenario(f"setup={setup}", *SYSTEMS[system], *FAILING, *rate, *([implied] if _is_moetion(setup) else []))


def _is_moetion(setup: str) -> bool:
    """Iteration times of that paper are what its figures imply."""
    return setup.startswith("moetion")


def _calibrated(setup: str) -> float:
    """GB/s of all GPUs of its cluster together."""
    if _is_moetion(setup):
        return sim_papers_moetion.rate()
    return constants().h100_rate if setup == "moevement_fp8_fp32_fp32" else constants().a100_rate


def row(setup: str, links: str, system: str) -> Row:
    """One row, simulated."""
    tried = made(setup, links, system)
    outcome = simulate(tried)
    spent = outcome.spent
    failing = (spent.lost + spent.retrieve + spent.replay) / outcome.failures
    cost = Cost(outcome.mean_stall_secs / tried.iteration.secs, failing)
    return Row(links, system, outcome, outcome.total_bytes_per_step / tried.layout.model.total, cost)


def wins(log: Row, windows: Row) -> str:
    """Where the log costs less than the windows."""
    apart = break_even_secs(log.cost, windows.cost)
    if log.cost == windows.cost:
        return "both alike"
    if log.cost.running == windows.cost.running:
        return "at any rate" if log.cost.failure_secs < windows.cost.failure_secs else "nowhere"
    if apart <= 0:
        return "at any rate" if log.cost.running < windows.cost.running else "nowhere"
    less = "below" if log.cost.running > windows.cost.running else "above"
    return f"{less} {apart / 60:.3g} min"


def measure(setup: str) -> dict[str, Any]:
    """All rows of one cluster, as they are kept."""
    rows = {(links, system): row(setup, links, system) for links in LINKS for system in SYSTEMS}
    won = {
        links: [wins(rows[links, f"log, gradients of {number} bytes"], rows[links, "windows"]) for number in (4, 2)]
        for links in LINKS
    }
    return {"rows": [list(each.cells) for each in rows.values()], "wins": won}


def beside(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows of one cluster, a line for each system. With nominal links none of them stalls."""
    cells = {tuple(row[:2]): row for row in rows}
    return [
        [system, *cells[LINKS[0], system][5:], *cells[LINKS[1], system][4:]]
        for links, system in cells
        if links == LINKS[0]
    ]


def compared(summary: Mapping[str, Any]) -> list[list[str]]:
    """Where logs cost less than windows, a line for each cluster."""
    return [[SETUPS[setup], *(won for links in LINKS for won in one["wins"][links])] for setup, one in summary.items()]


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as it stands in the docs."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ("---",) * len(headings), *rows))


def main(argv: Sequence[str]) -> int:
    """Prints a table per cluster, and one that compares them; with ``--markdown`` as they stand in the docs."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=list(SETUPS), help="setups of moe-ckpt simulate")
    parser.add_argument("--markdown", action="store_true", help="as tables for the docs")
    parser.add_argument("--json", type=Path, default=None, help="keep the tables in this file")
    options = parser.parse_args(argv)
    summary = {}
    for setup in options.only:
        summary[setup] = measure(setup)
        if options.json:
            write_json(options.json, summary)
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        (SETUPS[setup], BESIDE, beside(one["rows"])) if options.markdown else (SETUPS[setup], HEADINGS, one["rows"])
        for setup, one in summary.items()
    ]
    for title, headings, rows in [*tables, ("where the log wins", WINS, compared(summary))]:
        if options.markdown:
            print(f"{markdown(headings, rows)}\n")
        else:
            shown = Table(*headings, title=title)
            for each in rows:
                shown.add_row(*each)
            Console().print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
