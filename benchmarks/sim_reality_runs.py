"""Real failing runs of the tiny recipe on the CPU, killed with SIGKILL at moments drawn beforehand.

The job's clock begins when the first life has done its first iteration, which does not count: how a job is started for
the first time is no part of a simulation. It ends ``secs`` later with a last kill, which is no failure. Whatever is
killed is started again at once; what a life was doing when it was killed is read from the diary that the recipe writes
(``recipes.gpt_moe_lightning.runlog``), and from the store.

Where checkpoints lie in memory, every ``NODE_EVERY``-th kill takes the node: its memory directory is deleted, too. Of
several ranks (DDP) the last is killed, and never the node: the others hear of it, seal what they have, and end.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.policies.base import Policy
from moe_ckpt.sim.failures import Poisson
from recipes.gpt_moe_lightning.runlog import read_lines

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_SECS = 120.0
GRACE_SECS = 30.0
"""What a launcher leaves ranks that live on to end."""
NODE_EVERY = 3
_TMPFS = Path("/dev/shm")
_POLL_SECS = 0.02


@dataclass(frozen=True)
class Contestant:
    """A policy, as Hydra overrides for the real run and as the object that the simulator asks.

    memory: what the simulator is told of checkpoints in memory, as in ``System``; empty where they are on storage.
    ranks: processes.
    """

    name: str
    title: str
    policy: Policy
    overrides: tuple[str, ...]
    memory: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1

    @property
    def loses_nodes(self) -> bool:
        return bool(self.memory) and self.ranks == 1


CONTESTANTS = (
    Contestant("dense", "Dense every 10", Dense(10), ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=10")),
    Contestant(
        "memory",
        "Dense every 10 in memory",
        Dense(10),
        (
            *("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=10"),
            *("moe_ckpt/memory=local", "moe_ckpt.memory.storage_every_n_steps=50"),
        ),
        {"durable": "node", "storage_every_n_steps": 50},
    ),
    Contestant(
        "survivors",
        "Dense every 200, DDP, one of 2 ranks killed",
        Dense(200),
        (
            *("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=200"),
            *("moe_ckpt/memory=local", "moe_ckpt.memory.storage_every_n_steps=200"),
        ),
        {"durable": "node", "storage_every_n_steps": 200, "survivors": True},
        ranks=2,
    ),
    Contestant(
        "moc",
        "MoC K=1 every 10",
        MoC(k=1, every_n_steps=10),
        ("moe_ckpt/policy=moc", "moe_ckpt.policy.k=1", "moe_ckpt.policy.every_n_steps=10"),
    ),
    Contestant(
        "moevement", "MoEvement W=3", MoEvement(window=3), ("moe_ckpt/policy=moevement", "moe_ckpt.policy.window=3")
    ),
)
NO_CHECKPOINTS = Contestant(
    "calibration", "no checkpoints", Dense(10**6), ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=1000000")
)


def kill_times(seed: int, mtbf_secs: float, secs: float) -> tuple[float, ...]:
    """Failures without memory, from the library's own source. Some come while a restart is under way."""
    found: list[float] = []
    for event in Poisson(mtbf_secs).events(np.random.Generator(np.random.PCG64(seed)), 1):
        if event.at_secs >= secs:
            return tuple(found)
        found.append(event.at_secs)
    raise AssertionError("Poisson failures have no end")


@dataclass(frozen=True)
class Life:
    """One process of a run, by the parent's clock and its own diary. Seconds since the job's clock began.

    spawned: the parent asked for it. training: the loop was entered. steps: (number, end) of each, those computed again
        for a sparse window aside. killed: the signal was sent.
    """

    spawned: float
    training: float | None
    steps: tuple[tuple[int, float], ...]
    killed: float


@dataclass(frozen=True)
class RealRun:
    """What was seen of one run. kills: moments at which the signal was really sent. began_unix_secs: clock's zero.

    stall_secs, snapshot_bytes, begun: sums over all lives. plt: of the state at the end. took_node: of each kill,
        whether the node's memory went with the process; all of them where that holds nothing.
    """

    directory: Path
    secs: float
    began_unix_secs: float
    kills: tuple[float, ...]
    lives: tuple[Life, ...]
    stall_secs: float
    snapshot_bytes: float
    begun: int
    plt: float
    took_node: tuple[bool, ...] = ()

    @property
    def profile_path(self) -> Path:
        return self.directory / "profile.json"


Tell = Callable[[float, int], None]
"""Told the seconds since the clock began, and the kills so far."""


def command(contestant: Contestant, directory: Path, seed: int) -> list[str]:
    """One process of the recipe. It is never to end by itself, and to do nothing but train."""
    return [
        sys.executable, "-W", "ignore", "-m", "moe_ckpt.cli.train", f"--config-dir={ROOT / 'conf'}",
        *contestant.overrides, f"run_dir={directory}", f"seed={seed}", f"moe_ckpt.profile={directory / 'profile.json'}",
        "trainer.max_steps=1000000", "trainer.val_batches=0", "trainer.progress_bar=false",
    ]  # fmt: skip


class Job:
    """Starts, kills and starts again. Use as a context, so that no process outlives it."""

    def __init__(self, contestant: Contestant, directory: Path, seed: int) -> None:
        directory = directory.resolve()
        self._command = command(contestant, directory, seed)
        self._memory: Path | None = None
        if contestant.memory:
            self._memory = Path(tempfile.mkdtemp(prefix="sim_reality_", dir=_TMPFS if _TMPFS.is_dir() else None))
            self._command.append(f"moe_ckpt.memory.directory={self._memory}")
        self.diary = directory / "metrics.rank0.jsonl"
        self._output = directory / "output.log"
        directory.mkdir(parents=True)
        self.ranks = contestant.ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self.spawned: list[float] = []
        self.killed: list[float] = []
        """Moments of Unix time."""

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._processes)
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        with self._output.open("ab") as output:
            self.spawned.append(time.time())
            self._processes = [
                subprocess.Popen(
                    self._command, cwd=ROOT, env={**environment, **each}, stdout=output, stderr=subprocess.STDOUT
                )
                for each in self._places()
            ]

    def _places(self) -> list[dict[str, str]]:
        """What a launcher would tell each rank."""
        if self.ranks == 1:
            return [{}]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "sim_reality"}
        job |= {"WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks), "GROUP_RANK": "0"}
        return [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.ranks)]

    def _end(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    def kill(self, *, node: bool = False) -> None:
        """End it. node: with what the node's memory holds."""
        self.check()
        self.killed.append(time.time())
        *others, last = self._processes
        self._end([last])
        for process in others:  # as a launcher does
            process.terminate()
        try:
            for process in others:
                process.wait(GRACE_SECS)
        except subprocess.TimeoutExpired:
            self._end(others)
        if node and self._memory is not None:
            for one in self._memory.iterdir():
                shutil.rmtree(one)

    def check(self) -> None:
        """Raises ``RuntimeError`` with the end of its output if a process ended by itself."""
        code = next((code for process in self._processes if (code := process.poll()) is not None), None)
        if code is not None:
            tail = "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the run in {self.diary.parent} ended by itself with code {code}:\n{tail}")

    def wait_for_first_step(self) -> float:
        """Moment at which the first life had done it."""
        deadline = time.monotonic() + START_LIMIT_SECS
        while time.monotonic() < deadline:
            self.check()
            done = next((line["time"] for line in read_lines(self.diary) if "train/loss" in line), None)
            if done is not None:
                return float(done)
            time.sleep(_POLL_SECS)
        raise RuntimeError(f"the run in {self.diary.parent} did not begin to train within {START_LIMIT_SECS:.0f} s")

    def sleep_until(self, moment: float, tell: Callable[[float], None]) -> None:
        """Unix time."""
        while (left := moment - time.time()) > 0:
            time.sleep(min(left, 0.25))
            tell(time.time())
        self.check()


def run(
    contestant: Contestant, directory: Path, kills: Sequence[float], secs: float, seed: int, tell: Tell | None = None
) -> RealRun:
    """One job from start to end. kills: seconds since its clock began, in order.

    Raises:
        RuntimeError: a process ended by itself, or never trained.
    """
    with Job(contestant, directory, seed) as job:
        zero = job.wait_for_first_step()
        say = tell or (lambda at, count: None)
        counted = range(1, len(kills) + 1)
        takes_node = contestant.loses_nodes
        took_node = [not contestant.memory or (takes_node and number % NODE_EVERY == 0) for number in counted]
        for at, node in zip(kills, took_node, strict=True):
            job.sleep_until(zero + at, lambda now: say(now - zero, len(job.killed)))
            job.kill(node=node)
            job.start()
        job.sleep_until(zero + secs, lambda now: say(now - zero, len(job.killed)))
        job.kill()
    return _seen(job, directory, zero, secs, tuple(took_node))


def _seen(job: Job, directory: Path, zero: float, secs: float, took_node: tuple[bool, ...]) -> RealRun:
    lines = read_lines(job.diary)
    metrics = [line for line in lines if "moe_ckpt/stall_ms" in line]
    saved = [line for line in metrics if line["moe_ckpt/begun"]]
    return RealRun(
        directory=directory,
        secs=secs,
        began_unix_secs=zero,
        kills=tuple(moment - zero for moment in job.killed[:-1]),
        lives=tuple(_life(lines, zero, begin, end) for begin, end in zip(job.spawned, job.killed, strict=True)),
        stall_secs=sum(line["moe_ckpt/stall_ms"] for line in metrics) / 1e3,
        snapshot_bytes=sum(line["moe_ckpt/bytes"] for line in saved) * job.ranks,  # each has as much
        begun=len(saved),
        plt=_plt(metrics, job.spawned[-1]),
        took_node=took_node,
    )


def _plt(metrics: Sequence[dict[str, Any]], spawned: float) -> float:
    """The newest in the books; where the last life did no step yet, what a recovery would put there."""
    if not metrics:
        return 0.0
    newest = metrics[-1]
    return float(newest["moe_ckpt/plt" if newest["time"] >= spawned else "moe_ckpt/plt_if_failed_now"])


def _life(lines: Sequence[dict[str, Any]], zero: float, begin: float, end: float) -> Life:
    """Of what the diary has between two moments."""
    mine = [line for line in lines if begin <= line["time"] <= end]
    again = {line["step"] for line in mine if line.get("moe_ckpt/replayed")}
    entered = next((line["time"] - zero for line in mine if line.get("event") == "training"), None)
    steps = [(line["step"], line["time"] - zero) for line in mine if "train/loss" in line and line["step"] not in again]
    return Life(begin - zero, entered, tuple(steps), end - zero)
