"""What training waits for at each step, with few ranks and many, and with messages that are slow.

Real processes and gloo on one machine. Each computes an iteration (a sleep, and a barrier that stands for the reduction
of gradients), then takes what the ranks agreed on at the step before and begins to agree on this one, as the trainer
does. Beside it two all-reduces that are waited for. ``--delay-ms`` is really added to every message of ours; an
all-reduce of gloo sends 2 (R - 1) messages one after the other, for which the same is added by that formula.
docs/scale.md has the table of results/agreement_stall.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, machine, write_json
from moe_ckpt.comm.communicator import GlooCommunicator
from moe_ckpt.policies.base import Measured
from moe_ckpt.run.agreement import Deferred, StepAgreement, StepConsensus, StepTokens

_EXAMPLE = """examples:
  python benchmarks/agreement_stall.py --json agreement_stall.json    # everything; two minutes
  python benchmarks/agreement_stall.py --ranks 2,4 --delay-ms 0,20 --iteration-ms 300"""
KEPT = RESULTS / "agreement_stall.json"
"""What docs/scale.md tells of."""
_SHAPE = (48, 128)


def measure(ranks: int, delay_secs: float, iteration_secs: float, steps: int) -> dict[str, float]:
    """Median seconds that rank 0 waited at a step: "late", as the trainer agrees now, and "waited for"."""
    with tempfile.TemporaryDirectory() as scratch:
        case = json.dumps([scratch, ranks, delay_secs, iteration_secs, steps])
        command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
        started = [subprocess.Popen([*command, str(rank), "--case", case]) for rank in range(ranks)]
        try:
            codes = [process.wait(60 + 4 * ranks + 4 * steps * (iteration_secs + ranks)) for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        found: dict[str, float] = json.loads(Path(scratch, "result.json").read_text())
        return found


def _rank(rank: int, scratch: str, ranks: int, delay_secs: float, iteration_secs: float, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=ranks)
    send = dist.isend

    def slow(*args: Any, **kwargs: Any) -> dist.Work | None:
        time.sleep(delay_secs)
        return send(*args, **kwargs)

    dist.isend = slow
    comm = GlooCommunicator(120.0)
    agreement, counts, numbers = StepAgreement(comm), np.ones(_SHAPE, dtype=np.int64), np.ones(12, dtype=np.int64)
    late, waited = [], []
    for step in range(steps):
        time.sleep(iteration_secs)
        dist.barrier()
        began = time.perf_counter()
        agreement.receive()
        agreement.send(step, Deferred(lambda: StepTokens(counts)), StepConsensus(measured=Measured(0.1, 0.1, 0.1)))
        late.append(time.perf_counter() - began)
    agreement.receive()
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(torch.from_numpy(counts))
        dist.all_reduce(torch.from_numpy(numbers), dist.ReduceOp.MAX)
        waited.append(time.perf_counter() - began + 2 * 2 * (ranks - 1) * delay_secs)
    if rank == 0:
        results = {"late": median(late[2:]), "waited for": median(waited[2:])}
        Path(scratch, "result.json").write_text(json.dumps(results))
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def cells(row: Mapping[str, Any]) -> list[str]:
    """One row of the table in docs/scale.md: ranks, delay, and the two waits in ms."""
    waits = (row["late_ms"], row["waited_ms"])
    shown = [f"{wait:,.0f}".replace(",", " ") if wait >= 10 else f"{wait:.1f}" for wait in waits]
    return [str(row["ranks"]), f"{row['delay_ms']:g} ms", *shown]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,16", help="numbers of processes (default: %(default)s)")
    parser.add_argument("--delay-ms", default="0,50", help="added to every message (default: %(default)s)")
    parser.add_argument("--iteration-ms", type=float, default=600.0, help="of computing (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="per case (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=None, help="keep what was measured in this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        _rank(options.rank, *json.loads(options.case))
        return
    head = {"machine": machine(), "iteration_ms": options.iteration_ms, "steps": options.steps}
    rows: list[dict[str, float]] = []
    console = Console()
    for ranks in map(int, options.ranks.split(",")):
        for delay_ms in map(float, options.delay_ms.split(",")):
            with console.status(f"{ranks} ranks, {delay_ms:g} ms added"):
                result = measure(ranks, delay_ms / 1e3, options.iteration_ms / 1e3, options.steps)
            late_ms, waited_ms = (round(result[name] * 1e3, 2) for name in ("late", "waited for"))
            rows.append(
                {
                    "ranks": ranks,
                    "delay_ms": delay_ms,
                    "hops": 2 * (ranks - 1).bit_length(),
                    "late_ms": late_ms,
                    "waited_ms": waited_ms,
                }
            )
            if options.json:
                write_json(options.json, {**head, "rows": rows})
    table = Table(title=f"ms that rank 0 waits at a step; iteration {options.iteration_ms:g} ms", title_justify="left")
    for column in ("ranks", "added per message", "moe_ckpt", "two all-reduces waited for"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)


if __name__ == "__main__":
    main()
