"""What the recipes' demos share: a directory of their own, processes that end with them, kills, and verdicts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ERROR = re.compile(r"(?:\[rank\d+\]: *)?[\w.]+(?:Error|Exception|Interrupt): ")

MARKER = ".moe_ckpt_demo"  # in directories that a demo made and may therefore empty


@dataclass(frozen=True)
class Verdict:
    """Something that a demo promises, checked on what was measured."""

    passed: bool
    sentence: str


def prepare(out: Path) -> None:
    """An empty directory of our own. Raises ``FileExistsError`` rather than emptying somebody else's."""
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise FileExistsError(f"{out} is not empty and was not made by this demo: choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does: processes are ended and directories removed. Main thread only."""

    def leave(signum: int, _frame: object) -> None:
        signal.signal(signum, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which is ended and waited for however the block is left (Ctrl-C too)."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to the workers
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a diary, in the order of writing; empty when there is no file yet."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # blank, or torn by a crash
    return [r for r in records if isinstance(r, dict)]


@dataclass(frozen=True)
class Killed:
    """One kill that has happened. node: The memory of the rank's node was lost with it."""

    rank: int
    step: int
    node: bool


def kills_in(run_dir: Path) -> list[Killed]:
    """The kills so far, as the processes wrote them down before they died."""
    kills = read_lines(run_dir / "kills.jsonl")
    return [Killed(kill.get("rank", 0), kill["step"], kill.get("node", False)) for kill in kills]


class KillNews:
    """Says of each kill, once, that it was meant."""

    def __init__(self) -> None:
        self._told = 0

    def lines(self, run_dir: Path) -> list[str]:
        """Of the kills since the last call."""
        new = kills_in(run_dir)[self._told :]
        self._told += len(new)
        return [
            f"rank {kill.rank} was killed on purpose in iteration {kill.step} (kill -9)"
            f"{', and the memory of its node deleted' if kill.node else ''}; torchrun starts all processes again"
            for kill in new
        ]


def last_words(title: str, code: int, output: Path) -> str:
    """Why a run under torchrun ended: the errors of its processes, which torchrun's own last words are far from."""
    lines = output.read_text(errors="replace").splitlines()
    errors = [line.strip() for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    told = list(dict.fromkeys(errors))[-5:] or lines[-40:]
    return "\n".join([f"run {title!r} ended with code {code}; {output} says:", *told])


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
