"""One rank of a run that torchrun starts, and starts again: ``python -m tests.megatron.elastic_rank <directory>``.

Reads ``<directory>/job.json`` and writes ``<directory>/ended.<rank>``, what ``live`` tells of everything in ``EXACT``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.megatron.exactness import Case
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT, Life, live


def write_job(case: Case, directory: Path) -> None:
    """What ``main`` is to do: in each life the next of the case's kills, and none in the one after."""
    job = {"steps": case.steps, "setup": asdict(case.setup), "policy": case.policy, "kills": case.kills}
    job |= {"memory": case.memory, "copies": dict(case.copies), "survives": case.survives}
    (directory / "job.json").write_text(json.dumps(job))


def telling(result: Mapping[str, Any]) -> Any:
    """What two equal runs have alike, as JSON has it."""
    return json.loads(json.dumps({what: result[what] for what in EXACT}))


def ended(directory: Path, ranks: int) -> Sequence[Any]:
    """What each rank wrote at its end."""
    return [json.loads((directory / f"ended.{rank}").read_text()) for rank in range(ranks)]


def main(directory: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job = json.loads((directory / "job.json").read_text())
    kills = [tuple(kill) for kill in job["kills"]]
    life = Life(
        str(directory / "store"),
        job["steps"],
        Setup(**job["setup"]),
        tuple(job["policy"]),
        seed=1 + number,
        kill=kills[number] if number < len(kills) else None,
        journal=str(directory / "journal"),
        memory=str(directory / "memory") if job["memory"] else None,
        copies=job["copies"],
        survives=job["survives"],
    )
    result = telling(live(rank, world_size, life))
    (directory / f"ended.{rank}").write_text(json.dumps(result))


if __name__ == "__main__":
    from tests.support import megatron_warm  # noqa: F401 - quiet, and Megatron made ready for the CPU

    main(Path(sys.argv[1]))
