"""The process that ``megatron_prepare.py`` starts for each case: one rank, ours and the peer, JSON to a file."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks import megatron_ours, megatron_peer, report
from benchmarks.failing import Failures
from benchmarks.megatron_world import Case, build
from moe_ckpt.memory.limits import default_budget_bytes


def main(argv: list[str]) -> int:
    """argv: the options as JSON, and the file to write to."""
    options, out = json.loads(argv[0]), Path(argv[1])
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # The arena for checkpoints reserves addresses up to its budget, and takes memory only where it is written.
    limit = (options["memory_gib"] << 30) + default_budget_bytes(1)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    case = Case(**options["case"])
    rank = build(case)
    # As large Megatron jobs run: collections at chosen moments only, here outside of the clock.
    gc.collect()
    gc.freeze()
    gc.disable()
    results: dict[str, Any] = {"case": options["case"], "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_bench_", dir=options["dir"]) as home:
        failures = Failures()
        with failures.of("ours"):
            results["ours"] = megatron_ours.measure(case, rank, options["steps"], Path(home), _tell)
        if "ours" in failures:
            results["failed"] = failures.reasons["ours"]
        report.write_json(out, results)  # should the peer take all memory
        if options["peer_saves"]:
            results["peer"] = megatron_peer.measure(
                case, rank, options["peer_saves"], options["peer_secs"], Path(home), _tell
            )
    results["load_after"] = os.getloadavg()[0]
    results["resident_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // report.MIB
    report.write_json(out, results)
    return 0


def _tell(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
