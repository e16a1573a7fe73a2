"""Makes the synthetic failure trace that comes with the package: six hours in which 24 times a node is lost.

Shaped like the trace of MoEvement's figure 10a, which is not published as data: 24 failures in 6 hours on 12 nodes.
Their times are drawn evenly over the six hours, which is what a Poisson process does once their number is known.
Nothing in it was recorded anywhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

HOURS, REMOVALS, NODES, SEED = 6, 24, 12, 20
AWAY_SECS = (180, 900)
"""Until a node is back, drawn evenly."""

_EXAMPLE = "example: python benchmarks/failure_trace.py --out gcp_like_6h.csv"
PATH = Path(__file__).parents[1] / "src/moe_ckpt_sim/conf/simulate/failures/gcp_like_6h.csv"
HEAD = f"""\
# Synthetic, by benchmarks/failure_trace.py (seed {SEED}): {REMOVALS} removals in {HOURS} hours on {NODES} nodes.
time,event,node
"""


def rows() -> list[tuple[int, str, int]]:
    """(time in seconds, event, node), in order of time."""
    rng = np.random.Generator(np.random.PCG64(SEED))
    end = HOURS * 3600
    times = sorted(int(rng.random() * end) for _ in range(REMOVALS))
    back: dict[int, int] = {}
    lines: list[tuple[int, str, int]] = []
    for at in times:
        there = [node for node in range(NODES) if back.get(node, -1) < at]
        node = there[int(rng.random() * len(there))]
        back[node] = at + AWAY_SECS[0] + int(rng.random() * (AWAY_SECS[1] - AWAY_SECS[0]))
        lines.append((at, "remove", node))
        if back[node] < end:
            lines.append((back[node], "add", node))
    return sorted(lines, key=lambda row: row[0])


def text() -> str:
    return HEAD + "".join(f"{at},{event},{node}\n" for at, event, node in rows())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], epilog=_EXAMPLE)
    parser.add_argument("--out", type=Path, default=PATH, help="file to write (default: the one in the package)")
    parser.parse_args(argv).out.write_text(text())


if __name__ == "__main__":
    main()
