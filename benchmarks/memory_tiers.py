"""What memory that outlives the process costs a step, and how soon it brings a run back, beside storage.

Two processes, each a node of its own, take a dense checkpoint at every step; a sleep stands for the work of
accelerators. Each round measures every way of saving in turn. Then it kills both ranks of a run and starts them again:
with their memory; of another run, with one node's memory gone (its peer's copy); and of a third, with none (storage, in
the page cache).

--write keeps every measurement, and --docs puts those that were kept into the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks import memory_tiers_docs, report
from benchmarks.memory_tiers_rank import LOOPBACK, RANKS, SENT, STAGER, STEPS
from benchmarks.ranks import gathered

_EXAMPLE = "example: python benchmarks/memory_tiers.py --mib 256 --recovery-mib 256 512 --rounds 5 --write"
IDLE, PRIVATE, STORAGE = "no checkpoint", "private memory, storage", "storage in the page cache"
Way = dict[str, Any] | str | None
WAYS: dict[str, Way] = {
    PRIVATE: None,
    "Memory(), storage": {"storage_every": 1},
    "Memory(), no storage": {"storage_every": 1000},
    "Memory(replicas=1), storage": {"storage_every": 1, "replicas": 1},
    "Memory(replicas=1), no storage": {"storage_every": 1000, "replicas": 1},
    "DCP _ReplicationStager, no storage": STAGER,
}
THREE: dict[str, Way] = {
    PRIVATE: None,
    **{f"Memory(replicas={number}), no storage": {"storage_every": 1000, "replicas": number} for number in range(3)},
}
"""Of three nodes."""
LOST: dict[str, tuple[int, ...]] = {"own memory": (), "a peer's memory": (1,), STORAGE: (0, 1)}
"""Source of what comes back -> nodes whose memory is lost."""
SPANS = ("imports", "model", "open", "resume", "first step")
"""Start of the process and imports; process group and model; ``session.open``; ``resume_newest``, ``resume_from``; the
next step, whose checkpoint has begun."""
PARTS = ("plan", "transfer", "verify", "load")
"""Of ``resume``: what lies where, and what is needed of it; from other nodes; checksums; into the live tensors."""
BACK, STARTED = "open + resume", "open + resume + first step"
RATIOS = ("resume", BACK, STARTED)
"""Told as parts of storage's."""
_TIMEOUT_SECS = 300.0

Stalls = dict[str, list[dict[str, float]]]
Recoveries = dict[str, list[dict[str, float]]]


def run_ranks(scratch: Path, order: Mapping[str, Any], *, killed: bool = False) -> tuple[float, list[Any]]:
    """Returns when the processes were started, and what each rank found.

    killed: They are to end by ``kill -9``, and find nothing.
    """
    ranks = order.get("ranks", RANKS)
    module = "benchmarks.memory_tiers_rank"
    return gathered(module, {"ranks": ranks, **order}, ranks, scratch, _TIMEOUT_SECS, killed=killed)


def turned(names: Sequence[str], turn: int) -> list[str]:
    """Each round begins with another one."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def stalls(
    scratch: Path, args: argparse.Namespace, turn: int, ways: Mapping[str, Way], ranks: int = RANKS
) -> Mapping[str, dict[str, float]]:
    """Of rank 0, of one round."""
    root = scratch / "stalls"
    root.mkdir()
    order = {
        "job": "stalls",
        "root": str(root),
        "mib": args.mib,
        "compute_secs": args.compute_ms / 1e3,
        "iterations": args.iterations,
        "idle": IDLE,
        "ranks": ranks,
        "ways": [(name, ways[name]) for name in turned(list(ways), turn)],
    }
    result: Mapping[str, dict[str, float]] = run_ranks(scratch, order)[1][0]
    shutil.rmtree(root)
    return result


def recoveries(scratch: Path, mib: int, turn: int) -> dict[str, dict[str, float]]:
    """Source -> seconds of each span, of the slower rank: for each source a life that is killed, and one that follows.

    Each has a run of its own: a copy would take room on the tmpfs that no run takes.
    """
    root = scratch / "life"
    order = {"root": str(root), "mib": mib, "memory": WAYS["Memory(replicas=1), no storage"]}
    results = {}
    for name in turned(list(LOST), turn):
        root.mkdir()
        run_ranks(scratch, {**order, "job": "first"}, killed=True)
        for node in LOST[name]:
            shutil.rmtree(root / f"node_{node}")
        began, ranks = run_ranks(scratch, {**order, "job": "second"})
        expected = 1 if name == STORAGE else STEPS  # storage has the first step only, so that the step tells the source
        if any(rank["step"] != expected for rank in ranks):
            raise RuntimeError(f"{name}: came back to steps {[each['step'] for each in ranks]}, not {expected}")
        marks = [began, *(max(reached) for reached in zip(*(rank["marks"] for rank in ranks), strict=True))]
        spans = dict(zip(SPANS, (after - before for before, after in pairwise(marks)), strict=True))
        parts = {part: max(rank["parts"][part] for rank in ranks) for part in PARTS[1:]}
        parts["plan"] = spans["resume"] - sum(parts.values())
        back = spans["open"] + spans["resume"]
        results[name] = {
            **spans,
            **parts,
            BACK: back,
            STARTED: back + spans["first step"],
            "total": marks[-1] - marks[0],
        }
        shutil.rmtree(root)
    return results


def sends(scratch: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round, of rank 0, which sends."""
    root = scratch / "sends"
    root.mkdir()
    memory = WAYS["Memory(replicas=1), no storage"]
    order = {"job": "sends", "root": str(root), "mib": args.mib, "rounds": args.rounds, "memory": memory}
    result: dict[str, list[float]] = run_ranks(scratch, order)[1][0]
    shutil.rmtree(root)
    return result


def _median(samples: Sequence[Mapping[str, float]], key: str) -> float:
    return median(sample[key] for sample in samples)


def stall_table(results: Stalls, title: str) -> Table:
    """Ratios against private memory; CPU beyond that of no checkpoint."""
    idle = _median(results[IDLE], "cpu_secs")
    reference = _median(results[PRIVATE], "stall_secs"), _median(results[PRIVATE], "cpu_secs") - idle
    of = "of private"
    table = _table(title, "stall ms", of, "CPU ms", "beyond none", of, "to storage")
    for name, samples in results.items():
        stall, cpu = _median(samples, "stall_secs"), _median(samples, "cpu_secs")
        row = [f"{stall * 1e3:.2f}", "-", f"{cpu * 1e3:.1f}", f"{(cpu - idle) * 1e3:.1f}", "-"]
        if name != IDLE:
            row[1], row[4] = _ratio(stall, reference[0]), _ratio(cpu - idle, reference[1])
        table.add_row(name, *row, f"{_median(samples, 'to_storage'):g}")
    return table


def recovery_table(results: Recoveries, title: str) -> Table:
    """Milliseconds of each span; ratios against storage."""
    keys = (*SPANS, "total")
    table = _table(title, *(f"{key} ms" for key in keys), *(f"{key} of storage" for key in RATIOS))
    for name, samples in results.items():
        of_storage = (_ratio(_median(samples, key), _median(results[STORAGE], key)) for key in RATIOS)
        table.add_row(name, *(f"{_median(samples, key) * 1e3:.0f}" for key in keys), *of_storage)
    return table


def parts_table(results: Recoveries, title: str) -> Table:
    """Milliseconds of each part of ``resume``."""
    table = _table(title, *(f"{part} ms" for part in PARTS))
    for name, samples in results.items():
        table.add_row(name, *(f"{_median(samples, part) * 1e3:.0f}" for part in PARTS))
    return table


def sends_table(results: Mapping[str, Sequence[float]], title: str, mib: int) -> Table:
    """Ratios against the bare bytes."""
    table = _table(title, "ms", "GB/s", "of loopback")
    for name, secs in results.items():
        speed = (mib << 20) / median(secs) / 1e9
        table.add_row(
            name, f"{median(secs) * 1e3:.0f}", f"{speed:.2f}", _ratio(median(secs), median(results[LOOPBACK]))
        )
    return table


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference > 0 else "-"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=96, help="that each rank saves at a step (default: %(default)s)")
    parser.add_argument(
        "--recovery-mib", type=int, nargs="+", metavar="MIB", help="that each rank comes back with (default: as --mib)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=6, help="of each way and round (default: %(default)s)")
    parser.add_argument("--compute-ms", type=float, default=150.0, help="of an iteration (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="a tmpfs, for memory and store")
    parser.add_argument("--write", action="store_true", help="keep every measurement in --out")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--docs", action="store_true", help="measure nothing: put what --out has into the docs")
    args = parser.parse_args(argv)
    if args.docs:
        memory_tiers_docs.put(json.loads((args.out / "memory_tiers.json").read_text()))
        return 0
    stalled: Stalls = {name: [] for name in (IDLE, *WAYS)}
    three: Stalls = {name: [] for name in (IDLE, *THREE)}
    sent: dict[str, list[float]] = {SENT: [], LOOPBACK: []}
    recovered: dict[int, Recoveries] = {mib: {name: [] for name in LOST} for mib in args.recovery_mib or [args.mib]}
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="memory_tiers_") as scratch:
        for turn in range(args.rounds):
            for ways, ranks, costs in ((WAYS, RANKS, stalled), (THREE, 3, three)):
                for name, cost in stalls(Path(scratch), args, turn, ways, ranks).items():
                    costs[name].append(cost)
            for mib, of_sources in recovered.items():
                for name, spans in recoveries(Path(scratch), mib, turn).items():
                    of_sources[name].append(spans)
        for name, secs in sends(Path(scratch), args).items():
            sent[name] += secs
    console = Console(width=None if sys.stdout.isatty() else 120)
    size = f"{args.mib} MiB per rank, {RANKS} ranks, medians of {args.rounds}"
    console.print(stall_table(stalled, f"a dense checkpoint at each iteration of {args.compute_ms:g} ms; {size}"))
    console.print(stall_table(three, f"the same on 3 nodes of a rank; {args.mib} MiB per rank"))
    for mib, of_sources in recovered.items():
        title = f"from kill -9 to the first new step; {mib} MiB per rank, {RANKS} ranks, medians of {args.rounds}"
        console.print(recovery_table(of_sources, title))
        console.print(parts_table(of_sources, "of which resume"))
    console.print(sends_table(sent, f"{args.mib} MiB from one rank to another", args.mib))
    options = {name: getattr(args, name) for name in ("mib", "rounds", "iterations", "compute_ms")}
    facts = {"machine": report.machine(), **options, "stalls": stalled, "three_nodes": three}
    facts |= {"recoveries": {str(mib): of_sources for mib, of_sources in recovered.items()}, "sends": sent}
    print("\nas docs/benchmarks.md has them:\n", *memory_tiers_docs.tables(facts), sep="\n")
    if args.write:
        report.write_json(args.out / "memory_tiers.json", facts)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what lies in memory is removed then, too
    sys.exit(main())
