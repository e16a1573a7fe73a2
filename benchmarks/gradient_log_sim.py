"""A log of gradients beside MoEvement's windows on the papers' clusters, simulated: what each costs, where each wins.

With the links as their makers name them, and with the rate of copies that MoEvement's windows imply
(benchmarks/sim_papers.py, "calibrated"). docs/gradient_log.md has the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks.sim_papers_data import constants, rates, scenario
from moe_ckpt.sim.log_or_windows import Cost, break_even_secs
from moe_ckpt.sim.run import simulate
from moe_ckpt.sim.scenario import Outcome, Scenario

_EXAMPLE = "example: python benchmarks/gradient_log_sim.py --only moevement_deepseek --markdown"
SETUPS = ("moevement_deepseek", "moevement_qwen")
"""Of the smaller models everything fits into an iteration with nominal links: W is 1 with both."""
LINKS = ("nominal", "calibrated")
SYSTEMS = {
    "windows, the failed stage alone": ("policy=moevement_peers",),
    "windows": ("policy=moevement_peers", "policy.rollback=global", "policy.freeze=false"),
    "log, gradients of 4 bytes": ("policy=gradient_log_peers",),
    "log, gradients of 2 bytes": ("policy=gradient_log_peers", "precision.gradient_bytes=2"),
    "Gemini": ("policy=gemini",),
}
FAILING = ("failures.mtbf_secs=1800",)
HEADINGS = ("links", "system", "W", "bytes", "stall", "per failure", "ETTR")


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
    rate = () if links == "nominal" else (rates(setup, constants().a100_rate),)
    return scenario(f"setup={setup}", *SYSTEMS[system], *FAILING, *rate)


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
    if log.cost.running == windows.cost.running:
        return "at any rate of failures" if log.cost.failure_secs < windows.cost.failure_secs else "nowhere"
    if apart <= 0:
        return "at any rate of failures" if log.cost.running < windows.cost.running else "nowhere"
    less = "less" if log.cost.running > windows.cost.running else "more"
    return f"with failures {less} than {apart / 60:.3g} min apart"


def main(argv: Sequence[str]) -> int:
    """Prints a table per model; with ``--markdown`` as they stand in the docs."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=SETUPS, help="setups of moe-ckpt simulate")
    parser.add_argument("--markdown", action="store_true", help="as tables for the docs")
    options = parser.parse_args(argv)
    for setup in options.only:
        rows = {(links, system): row(setup, links, system) for links in LINKS for system in SYSTEMS}
        if options.markdown:
            for cells in (HEADINGS, ("---",) * len(HEADINGS), *(each.cells for each in rows.values())):
                print(f"| {' | '.join(cells)} |")
        else:
            shown = Table(*HEADINGS, title=setup)
            for each in rows.values():
                shown.add_row(*each.cells)
            Console().print(shown)
        for links in LINKS:
            for number in (4, 2):
                log = rows[links, f"log, gradients of {number} bytes"]
                print(f"{setup}, {links}, {number} bytes: the log wins {wins(log, rows[links, 'windows'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
