"""Bytes that copies on peers cost the network per iteration, with MoEtion's Algorithms 2 and 3 on and off.

Real runs on gloo processes, each a node of its own, with one copy on a peer. Off, each rank sends its whole share; on,
what data-parallel peers hold alike they take from their own tensors (``MirroredShares``). Policies named "gradients"
are MoEtion(recompute=True), Algorithm 3, beside the same without. Nothing is timed. The paper (arXiv 2412.15411 version
1, sections 5.1 and 5.2) saves up to 40 % by the one, a factor of up to 5 by the other. docs/moetion.md has the table.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.ranks import gathered

_EXAMPLE = "example: python benchmarks/sent_bytes.py --only 'Lightning DDP' --json"
_TIMEOUT_SECS = 300.0
PAPER = 0.40
"""That Algorithm 2 saves at most, in the paper."""
WHOLE = ("Dense", "MoEtion")
RECOMPUTED = (*WHOLE, "MoEtion, gradients", "MoEtion, 6 of 8", "MoEtion, 6 of 8, gradients")
CASES: dict[str, dict[str, Any]] = {
    "Lightning DDP": {"ranks": 2, "strategy": "ddp", "policies": (*WHOLE, "GradientLog")},
    "Lightning FSDP2": {"ranks": 2, "strategy": "fsdp2", "policies": (*RECOMPUTED, "GradientLog")},
    "Megatron EP2 x DP2, bf16": {"ranks": 4, "precision": "bf16", "divided": False, "policies": WHOLE},
    "the same, distributed optimizer": {"ranks": 4, "precision": "bf16", "divided": True, "policies": RECOMPUTED},
    "the same, fp32": {"ranks": 4, "precision": "fp32", "divided": True, "policies": WHOLE},
}
Row = dict[str, Any]


def measure(scratch: Path, order: Mapping[str, Any]) -> dict[str, int]:
    """Bytes per iteration, of all ranks."""
    _, result = gathered("benchmarks.sent_bytes_rank", order, order["ranks"], scratch, _TIMEOUT_SECS)
    return {name: sum(item[name] for item in result) // order["steps"] for name in ("sent", "saved")}


def row(scratch: Path, name: str, policy: str, args: argparse.Namespace) -> Row:
    """One case under one policy, off and on."""
    order = {**CASES[name], "policy": policy, "steps": args.steps, "width": args.width}
    off, on = (measure(scratch, order | {"redundancy": used}) for used in (False, True))
    return {"case": name, "policy": policy, "off": off, "on": on, "saved": on["saved"] / (on["sent"] + on["saved"])}


def table(rows: Sequence[Row]) -> Table:
    """KiB per iteration, all ranks together."""
    grid = Table(title=f"KiB sent per iteration, one copy; the paper saves up to {PAPER:.0%}", title_justify="left")
    grid.add_column(no_wrap=True)
    grid.add_column("policy")
    for heading in ("off", "on", "saved"):
        grid.add_column(heading, justify="right")
    for each in rows:
        sent = (f"{each[way]['sent'] / 1024:,.0f}" for way in ("off", "on"))
        grid.add_row(each["case"], each["policy"], *sent, f"{each['saved']:.1%}")
    return grid


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES), help="some of the cases")
    parser.add_argument(
        "--steps",
        type=int,
        default=9,
        help="that are counted, after some; 9: a full copy, 8 gradients (default: %(default)s)",
    )
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for memory and store")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, and no table")
    parser.add_argument("--write", action="store_true", help="keep what was found in --out")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="sent_bytes_") as scratch:
        rows = [row(Path(scratch), name, policy, args) for name in args.only for policy in CASES[name]["policies"]]
    facts = {"machine": report.machine(), "steps": args.steps, "width": args.width, "paper": PAPER, "rows": rows}
    if args.json:
        print(json.dumps(facts))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    if args.write:
        report.write_json(args.out / "sent_bytes.json", facts)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what lies in memory is removed then, too
    sys.exit(main())
