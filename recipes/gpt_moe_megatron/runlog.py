"""The run's diary: one JSON line per iteration and event, in a file per rank, surviving any crash and restart.

An iteration's line is ``{"iteration": i, "generation": g, "time": t, "loss": l, ..., "moe_ckpt/stall_secs": s, ...}``
with the fields of ``StepRecord``; loss is null but on the last pipeline stage. An event's line has ``"event"``. An
iteration that was computed again after a restart appears once per generation; a line that a crash tore is left out when
read.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from moe_ckpt.run.events import StepRecord


def generation() -> int:
    """How often torchrun has restarted the processes of this run."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class RunLog:
    """Appends to ``run_dir/log.rank<r>.jsonl``; each line is handed to the operating system at once."""

    def __init__(self, run_dir: str | os.PathLike[str], rank: int) -> None:
        self.path = Path(run_dir) / f"log.rank{rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and (raw := self.path.read_bytes()) and not raw.endswith(b"\n"):
            self._append("\n")  # of a line that the last crash tore

    def iteration(self, iteration: int, record: StepRecord | None, **values: float | bool | None) -> None:
        kept = {} if record is None else {f"moe_ckpt/{k}": v for k, v in asdict(record).items() if k != "step"}
        self._write({"iteration": iteration, **values, **kept})

    def event(self, name: str, **values: Any) -> None:
        self._write({"event": name, **values})

    def _write(self, row: dict[str, Any]) -> None:
        self._append(json.dumps({"generation": generation(), "time": time.time(), **row}) + "\n")

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All whole lines."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def fingerprint(chunks: Iterable[torch.nn.Module]) -> str:
    """Hex digest over names and bytes of this rank's parameters: equal means ``torch.equal``."""
    digest = hashlib.sha256()
    for index, chunk in enumerate(chunks):
        for name, tensor in sorted(chunk.named_parameters()):
            digest.update(f"{index}.{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
