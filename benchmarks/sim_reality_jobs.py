"""Processes of a real run: started, killed and started again; or killed alone, where the others restart in place."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from benchmarks.sim_reality_contestants import Contestant
from recipes.demonstrating import read_lines

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_SECS = 120.0
GRACE_SECS = 30.0
"""What a launcher leaves ranks that live on to end."""
_TMPFS = Path("/dev/shm")
_POLL_SECS = 0.02


class Process(Protocol):
    """Of one rank."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Raises ``subprocess.TimeoutExpired``."""


class Job:
    """Starts, kills and starts again. Use as a context, so that no process outlives it.

    Attributes:
        spawned, killed: Moments of Unix time; a life is from the one to the other.
    """

    def __init__(self, contestant: Contestant, directory: Path, seed: int) -> None:
        self.contestant, self._seed = contestant, seed
        self.directory = directory.resolve()
        self._memory: Path | None = None
        if contestant.memory:
            self._memory = Path(tempfile.mkdtemp(prefix="sim_reality_", dir=_TMPFS if _TMPFS.is_dir() else None))
        self._output = self.directory / "output.log"
        self.directory.mkdir(parents=True)
        self._processes: list[Process] = []
        self.spawned: list[float] = []
        self.killed: list[float] = []

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._processes)
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)

    def diary(self, rank: int) -> Path:
        """Of one rank, all lives."""
        return self.directory / f"metrics.rank{rank}.jsonl"

    def start(self) -> None:
        """All ranks."""
        self.spawned.append(time.time())
        self._processes = self._started()

    def _started(self) -> list[Process]:
        """The recipe."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        command = [sys.executable, "-W", "ignore", "-m", "recipes.gpt_moe_lightning.train"]
        with self._output.open("ab") as output:
            return [
                subprocess.Popen(
                    [*command, *self.arguments(rank)],
                    cwd=ROOT,
                    env={**environment, **each},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank, each in enumerate(self._places(self.contestant.ranks))
            ]

    def arguments(self, rank: int) -> list[str]:
        """Of the recipe. It is never to end by itself, and to do nothing but train."""
        return [
            *(*self.contestant.overrides, f"run_dir={self.directory}"),
            *(f"seed={self._seed}", f"moe_ckpt.profile={self.directory / 'profile.json'}"),
            *("trainer.max_steps=1000000", "trainer.val_batches=0", "trainer.progress_bar=false"),
            *self._node_override(rank),
        ]

    def _node_override(self, rank: int) -> list[str]:
        if self._memory is None:
            return []
        node = self._node(rank)
        node.mkdir(exist_ok=True)
        return [f"moe_ckpt.memory.directory={node}"]

    def _node(self, rank: int) -> Path:
        """The memory directory of its node."""
        contestant = self.contestant
        return Path(str(self._memory), f"node_{rank * contestant.nodes // contestant.ranks}")

    def _places(self, processes: int) -> list[dict[str, str]]:
        """What a launcher would tell each process."""
        if processes == 1:
            return [{}]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        nodes = self.contestant.nodes
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "sim_reality"}
        job |= {"WORLD_SIZE": str(processes), "GROUP_WORLD_SIZE": str(nodes), "GLOO_SOCKET_IFNAME": "lo"}
        width = processes // nodes
        job["LOCAL_WORLD_SIZE"] = str(width)
        return [
            {**job, "RANK": str(rank), "LOCAL_RANK": str(rank % width), "GROUP_RANK": str(rank // width)}
            for rank in range(processes)
        ]

    def kill(self, rank: int, *, node: bool = False) -> None:
        """One rank ends by SIGKILL, and all others with it. node: with what the memory of its node holds."""
        self.check()
        self.killed.append(time.time())
        others = [process for at, process in enumerate(self._processes) if at != rank]
        _end([self._processes[rank]])
        for process in others:  # as a launcher does
            process.terminate()
        try:
            for process in others:
                process.wait(GRACE_SECS)
        except subprocess.TimeoutExpired:
            _end(others)
        if node:
            shutil.rmtree(self._node(rank))

    def check(self) -> None:
        """Raises ``RuntimeError`` with the end of its output if a process ended by itself."""
        code = next((code for process in self._processes if (code := process.poll()) is not None), None)
        if code is not None:
            tail = "\n".join(self._output.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the run in {self.directory} ended by itself with code {code}:\n{tail}")

    def wait_for_first_step(self) -> float:
        """Moment at which the first life had done it."""
        return self._wait_for(lambda line: "train/loss" in line)

    def _wait_for(self, requested: Callable[[dict[str, Any]], bool]) -> float:
        """Moment of the first such line in the diary that counts."""
        deadline = time.monotonic() + START_LIMIT_SECS
        while time.monotonic() < deadline:
            self.check()
            lines = read_lines(self.diary(self.contestant.witness))
            done = next((line["time"] for line in lines if requested(line)), None)
            if done is not None:
                return float(done)
            time.sleep(_POLL_SECS)
        raise RuntimeError(f"the run in {self.directory} did not train within {START_LIMIT_SECS:.0f} s")

    def sleep_until(self, moment: float, tell: Callable[[float], None]) -> None:
        """Unix time."""
        while (left := moment - time.time()) > 0:
            time.sleep(min(left, 0.25))
            tell(time.time())
        self.check()


class ForkedJob(Job):
    """Several ranks. They are forks of a process that has imported everything, since as many imports at the same time
    would be most of what a restart takes here."""

    preload: ClassVar[tuple[str, ...]] = ("benchmarks.sim_reality", "recipes.gpt_moe_lightning.train", "hydra")
    """The first, since a fork executes the main module once more, and then finds there what it imports."""
    spares = 0

    def _started(self) -> list[Process]:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*self.preload])
        started = list[Process]()
        for rank, variables in enumerate(self._places(self.contestant.ranks + self.spares)):
            # Where ranks wait by timeouts, torch would tell each.
            environment = {**variables, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            fork: Any = context.Process(target=_rank, args=(environment, *self._told(rank), str(self._output)))
            fork.start()
            started.append(_Fork(fork))
        return started

    def _told(self, rank: int) -> tuple[str, list[str]]:
        """The program, and its arguments."""
        return "recipes.gpt_moe_lightning.train", self.arguments(rank)


class LoopJob(ForkedJob):
    """A loop of Megatron-Core."""

    preload = ("benchmarks.sim_reality", "benchmarks.sim_reality_rank")

    def __init__(self, contestant: Contestant, directory: Path, seed: int) -> None:
        if contestant.loop is None:
            raise ValueError(f"{contestant.name} is the recipe's, no loop")
        super().__init__(contestant, directory, seed)
        self._order = json.dumps(
            {
                **asdict(contestant.loop),
                "directory": str(self.directory),
                "memory": str(self._memory),
                "ranks": contestant.ranks,
                "ranks_per_node": contestant.ranks // contestant.nodes,
                "policy": (type(contestant.policy).__name__, dict(vars(contestant.policy))),
            }
        )

    def _told(self, rank: int) -> tuple[str, list[str]]:
        return "benchmarks.sim_reality_rank", [self._order]


class InPlaceJob(LoopJob):
    """Only one process is killed, and a spare takes its place; the others restart within themselves.

    Args:
        kills: How many there will be: as many spares wait.
    """

    def __init__(self, contestant: Contestant, directory: Path, seed: int, kills: int) -> None:
        super().__init__(contestant, directory, seed)
        self.spares = kills

    def start(self) -> None:
        """All ranks; behind a kill, the return of those that live on, up to the first step."""
        if not self.spawned:
            super().start()
            return
        generation = len(self.spawned)
        moment = self._wait_for(lambda line: line.get("event") == "start" and line["generation"] == generation)
        self.spawned.append(moment)
        self._wait_for(lambda line: "train/loss" in line and line["generation"] == generation)

    def kill(self, rank: int, *, node: bool = False) -> None:
        """Whoever is that rank now."""
        self.check()
        begun = [line for line in read_lines(self.diary(rank)) if line.get("event") == "start"]
        victim = next(
            process for process in self._processes if isinstance(process, _Fork) and process.pid == begun[-1]["pid"]
        )
        self._processes.remove(victim)
        self.killed.append(time.time())
        _end([victim])


class _Fork:
    """A ``Process`` of ``multiprocessing``, as ``subprocess`` has them."""

    def __init__(self, fork: Any) -> None:
        self._fork = fork
        self.pid = int(fork.pid)
        self.kill, self.terminate = fork.kill, fork.terminate

    def poll(self) -> int | None:
        code: int | None = self._fork.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._fork.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return code


def job_of(contestant: Contestant, directory: Path, seed: int, kills: int) -> Job:
    """Returns the job that runs ``contestant``, to be killed so many times."""
    if contestant.in_place:
        return InPlaceJob(contestant, directory, seed, kills)
    kind = Job if contestant.ranks == 1 else ForkedJob if contestant.loop is None else LoopJob
    return kind(contestant, directory, seed)


def _rank(environment: Mapping[str, str], program: str, arguments: Sequence[str], output: str) -> None:
    """In a fork."""
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    os.chdir(ROOT)
    warnings.simplefilter("ignore")
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
