"""Jobs of processes that restart within themselves: started by hand, as ``moe_ckpt.inprocess`` wants it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.lives import free_port

LIFE_SECS = 240.0


def has_extension() -> bool:
    """Whether it can be imported here."""
    return None not in map(find_spec, ("nvidia_resiliency_ext", "defusedxml", "pynvml"))


needs_extension = pytest.mark.skipif(
    not has_extension(),
    reason="nvidia-resiliency-ext is not installed: pip install 'moe_ckpt[inprocess]'",
)


def launch(
    program: str, told: Mapping[str, Any], world: int, directory: Path, python: str = sys.executable
) -> list[int]:
    """Exit codes of ``world`` processes of the module ``program``, by the rank that each began as.

    Each gets ``told`` as JSON, with the name of its journal.
    """
    text = json.dumps({"journal": str(directory / "journal"), **told})
    port = free_port()
    processes = []
    for rank in range(world):
        own = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own |= {"LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [python, "-W", "ignore", "-m", program, text]
        with open(directory / f"log{rank}", "a") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own}))
    until = time.monotonic() + LIFE_SECS
    try:
        return [process.wait(max(1.0, until - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def logs(directory: Path) -> str:
    """The last words of every process, for a failure's message."""
    return "\n".join(path.read_text()[-3000:] for path in sorted(directory.glob("log*")))


def lines(directory: Path, rank: int) -> list[dict[str, Any]]:
    """The journal of the process that began as ``rank``."""
    return [json.loads(line) for line in Path(f"{directory}/journal.{rank}").read_text().splitlines()]


def require_one_process(journal: list[dict[str, Any]], calls: int, most_lost: int) -> None:
    """The journal of rank 0: one process, ``calls`` calls, each of which lost at most so many steps."""
    assert len({line["pid"] for line in journal}) == 1
    begun = [line for line in journal if "call" in line]
    assert [line["rank"] for line in begun] == [0] * calls, "survivors stay in their places"
    at = 0
    for line in journal:
        if "call" in line:
            assert at - line["resumed"] <= most_lost
        at = line.get("iteration", at)
