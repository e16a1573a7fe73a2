"""What the simulator costs: time and memory against failures, GPUs, iterations and the length of the run.

Each row is a process of its own that composes a config as ``moe-ckpt simulate`` does and simulates it once. Time is
that of the processor, so that other programs on the machine enter into it little; memory is the process's highest, with
Python, numpy and Hydra (about 70 MB before anything is simulated).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

POLICIES = ("gemini_daly", "moc_peers", "moevement_peers")
LARGE = ("checkfreq", "gemini_daly", "gemini_young", "moc_peers", "moetion_peers", "moevement_peers", "gemini")
"""Of the figure of 16 384 GPUs; the last tries 32 intervals on the same failures, each a simulation."""

RESULTS = Path(__file__).parent / "results"
_FIXED = ("setup=moevement_deepseek", "failures.mtbf_secs=1800")
_SPREAD = ("setup=moevement_deepseek", "failures.mtbf_secs=1800", "parallel=pp8_ep8_dp2", "cluster=gpus_16384")
_ENOUGH = ("batch.sequences=8192",)
GROWTH: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "failures": (
        "fewer and fewer seconds between failures",
        [(*_FIXED, f"failures.mtbf_secs={secs}") for secs in (14400, 7200, 3600, 1800, 900, 450)],
    ),
    "gpus": (
        "as many pipelines as there are GPUs for, the iteration as long",
        [(*_SPREAD, *_ENOUGH, f"parallel.dp={dp}") for dp in (1, 4, 16, 64, 256)],
    ),
    "iterations": (
        "shorter and shorter iterations, as many failures",
        [(*_FIXED, f"iteration.secs={secs}") for secs in (27, 9, 2.7, 0.9, 0.27)],
    ),
    "duration": (
        "longer and longer runs with as many failures, and loads that do not change",
        [
            (*_FIXED, "load=even", f"duration_secs={hours * 3600}", f"failures.mtbf_secs={hours * 150}")
            for hours in (6, 24, 96, 384)
        ],
    ),
}
"""Name -> (what grows, settings of each row). Each is run with all of ``POLICIES``."""

_LARGE_SETTINGS = ("setup=moevement_671b", "failures.mtbf_secs=600", "duration_secs=43200")
_LARGE_LIMITS = {"cpu_secs": 10.0, "peak_mb": 1000.0}
_EXAMPLE = "example: python benchmarks/sim_growth.py --write    (10 to 20 minutes; --only gpus for a part)"


def measure(settings: Sequence[str]) -> dict[str, Any]:
    """One row, in a process of its own."""
    command = [sys.executable, __file__, "--one", *settings]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(settings)}: {done.stderr.strip() or done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return {"settings": list(settings), **result}


def one(settings: Sequence[str]) -> dict[str, Any]:
    """Compose, build and simulate, here."""
    from moe_ckpt_sim.conf.scenarios import scenario_of
    from moe_ckpt_sim.conf.sweeps import Combination, composed
    from moe_ckpt_sim.run.run import simulate

    before = time.process_time()
    scenario = scenario_of(composed(Combination(tuple(settings))))
    built, wall = time.process_time(), time.perf_counter()
    outcome = simulate(scenario)
    return {
        "system": outcome.system,
        "gpus": scenario.layout.parallel.ranks,
        "iterations": round(scenario.duration_secs / outcome.iteration_secs),
        "failures": outcome.failures,
        "plans": outcome.plans,
        "window": outcome.window,
        "ettr": outcome.to_dict(history=False)["ettr"],
        "build_secs": round(built - before, 3),
        "cpu_secs": round(time.process_time() - built, 3),
        "wall_secs": round(time.perf_counter() - wall, 3),
        "peak_mb": round(_peak_bytes() / 1e6),
    }


def _peak_bytes() -> int:
    """Of this process alone: what ``getrusage`` says begins with its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status: this benchmark needs Linux")


def growth(name: str, policies: Sequence[str]) -> list[dict[str, Any]]:
    """All rows of one part."""
    return [measure((*row, f"policy={policy}")) for policy in policies for row in GROWTH[name][1]]


def large(policies: Sequence[str]) -> list[dict[str, Any]]:
    """12 hours of 16 384 GPUs, a failure every 10 minutes; and whether that keeps within the limits."""
    rows = []
    for policy in policies:
        row = measure((*_LARGE_SETTINGS, f"policy={policy}"))
        rows.append({**row, "within": all(row[key] < most for key, most in _LARGE_LIMITS.items())})
    return rows


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table of them."""
    table = Table(title=title, title_justify="left")
    columns = ("system", "GPUs", "iterations", "GPUs x iterations", "failures", "plans", "ETTR", "seconds", "MB")
    for column in columns:
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows:
        large_too = f"{row['gpus'] * row['iterations']:.2g}"
        cells = [row["system"], row["gpus"], row["iterations"], large_too, row["failures"], row["plans"]]
        style = "red" if not row.get("within", True) else None
        cells += [f"{row['ettr']:.3f}", f"{row['cpu_secs']:.2f}", row["peak_mb"]]
        table.add_row(*map(str, cells), style=style)
    Console(width=120).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything ran, whatever it took."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--only", nargs="+", choices=(*GROWTH, "large"), default=[*GROWTH, "large"])
    parser.add_argument("--policies", nargs="+", help="instead of the usual ones")
    parser.add_argument("--write", action="store_true", help="write the JSON file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to")
    parser.add_argument("--one", nargs="+", metavar="SETTING", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    parts: dict[str, list[dict[str, Any]]] = {}
    for name in options.only:
        if name == "large":
            parts[name] = large(options.policies or LARGE)
            title = "12 hours of 16 384 GPUs, a failure every 10 minutes; red: 10 s or 1 GB or more"
        else:
            parts[name] = growth(name, options.policies or POLICIES)
            title = f"{name}: {GROWTH[name][0]}"
        show(title, parts[name])
    if options.write:
        from benchmarks import report  # brings torch, which rows are measured without

        command = "python benchmarks/sim_growth.py --write"
        content = {"command": command, "machine": report.machine(), "limits": _LARGE_LIMITS, **parts}
        report.write_json(options.out / "sim_growth.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
