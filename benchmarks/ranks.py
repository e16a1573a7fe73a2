"""Starts the processes of a benchmark, one for each rank, and gathers what they found; and their side of that."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist


def gathered(
    module: str, order: Mapping[str, Any], ranks: int, scratch: Path, timeout_secs: float, *, killed: bool = False
) -> tuple[float, list[Any]]:
    """Runs ``python -m module ORDER RANK`` for each rank.

    Args:
        module: Of the ranks. They end with ``end``.
        order: For them, as JSON. Told besides: "root", a directory of this call, "out", "meet", a file to meet by, and
            "port", a free one.
        ranks: How many.
        scratch: Where to make the directory.
        timeout_secs: For each to end.
        killed: They are to end by ``kill -9``, and find nothing.

    Returns:
        When they were started, by ``time.monotonic``, and what each found.

    Raises:
        RuntimeError: One ended otherwise.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as place, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        full_order = {"root": place, **order, "out": f"{place}/out", "meet": f"{place}/meet", "port": port}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, json.dumps(full_order)]
        began, started = time.monotonic(), list[subprocess.Popen[bytes]]()
        try:
            started += (subprocess.Popen([*command, str(rank)], env=environment) for rank in range(ranks))
            codes = [process.wait(timeout_secs) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        if codes != [-signal.SIGKILL if killed else 0] * ranks:
            raise RuntimeError(f"{module}: the ranks ended with {codes}; their order was {dict(order)}")
        if killed:
            return began, []
        return began, [json.loads(Path(f"{place}/out.{rank}").read_text()) for rank in range(ranks)]


def end(order: Mapping[str, Any], rank: int, results: Any) -> int:
    """A rank has found something, and ends with all others. Returns the exit status."""
    Path(f"{order['out']}.{rank}").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0
