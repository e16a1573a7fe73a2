"""Time of the agreement that precedes every step's plan, on two processes of this machine."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator
from moe_ckpt.policies.base import Measured
from moe_ckpt.run.agreement import Deferred, StepAgreement, StepConsensus, StepTokens

_EXAMPLE = "example: python benchmarks/agreement.py --repeats 3"
_GRIDS = ((0, 0), (6, 8), (48, 128))
"""The first without any counts: what the others take longer is the price of knowing them."""
_CALLS = 50


def agreement_secs(repeats: int = 9, timeout_secs: float = 120.0) -> dict[str, float]:
    """Median seconds of one agreement on rank 0, per ``layers x experts``; the median of all calls."""
    with tempfile.TemporaryDirectory() as scratch:
        case = json.dumps([scratch, max(1, repeats) * _CALLS])
        command = [sys.executable, str(Path(__file__).resolve()), "--case", case]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in (0, 1)]
        try:
            codes = [process.wait(timeout_secs) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        found: dict[str, float] = json.loads(Path(scratch, "result.json").read_text())
        return found


def _rank(rank: int, scratch: str, calls: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=2)
    agreement = StepAgreement(GlooCommunicator(60.0))
    results = {}
    for layers, experts in _GRIDS:
        counts = np.ones((layers, experts), dtype=np.int64)
        times = []
        tokens = Deferred(functools.partial(StepTokens, counts))
        for _ in range(calls):
            began = time.perf_counter()
            agreement.send(0, tokens, StepConsensus(measured=Measured(0.1, 0.1, 0.1)))
            agreement.receive()
            times.append(time.perf_counter() - began)
        results[f"{layers} x {experts}"] = median(times[5:])
    if rank == 0:
        Path(scratch, "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--repeats", type=int, default=9, help=f"times {_CALLS} agreements (default: %(default)s)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        _rank(options.rank, *json.loads(options.case))
        return
    for grid, secs in agreement_secs(options.repeats).items():
        print(f"{grid}: {secs * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
