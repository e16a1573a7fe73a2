"""Which torchrun command lines bring a job back after ``kill -9`` of a worker: each is tried, several times.

Every job is a few gloo ranks that connect as training does (``init_process_group``, then the library's own groups) and
reduce in a loop. A rank kills itself with SIGKILL, torchrun's agents start all of them again, and so on. A restart that
does not come as far as the first reduction has failed: torchrun then starts once more, as long as ``--max-restarts``
lasts. Prints the table of docs/torchrun.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, machine, write_json

_EXAMPLE = """example:
  python benchmarks/torchrun_restarts.py                       # everything; 20 minutes on 2 cores
  python benchmarks/torchrun_restarts.py --only standalone     # those whose name contains the text
  python benchmarks/torchrun_restarts.py --trials 3 --ranks 4 --nodes 1 --write
"""
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SPARE = 4
"""Restarts beyond the kills that torchrun is granted. A job that needs more is given up."""
TIMEOUT_SECS = 8.0
"""Of the workers' process groups: a rank that waits for a peer in vain fails after it."""


@dataclass(frozen=True)
class Launch:
    """A way to start torchrun. options: with {port} and {node}; own_store: the variable is set."""

    name: str
    options: tuple[str, ...]
    own_store: bool
    nodes: int = 1

    @property
    def title(self) -> str:
        return self.name + (f", {VARIABLE}=1" if self.own_store else "")


def launches() -> list[Launch]:
    one = {
        "--master-addr --master-port": ("--master-addr=127.0.0.1", "--master-port={port}"),
        "--standalone": ("--standalone",),
        "--rdzv-backend=c10d, fixed port": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"),
        "--rdzv-backend=c10d, port 0": ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
    }
    two = {
        "--master-addr --master-port": (*one["--master-addr --master-port"], "--node-rank={node}"),
        "--rdzv-backend=c10d, fixed port": (
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-id=restarts", "--local-addr=127.0.0.1",
        ),
    }  # fmt: skip
    return [
        Launch(name, options, own_store, nodes)
        for nodes, ways in ((1, one), (2, two))
        for name, options in ways.items()
        for own_store in (False, True)
    ]


@dataclass
class Found:
    """What became of the jobs of one launch.

    restarts: after kills, those that were needed because one before had failed included. failed: those that ended
    before all ranks had reduced. gave_up: jobs that used up all restarts. hung: jobs that did not end in time.
    secs: from each kill until all ranks had reduced again.
    """

    name: str
    own_store: bool
    nodes: int
    ranks: int
    jobs: int
    restarts: int
    failed: int
    gave_up: int
    hung: int
    secs: list[float]
    errors: dict[str, int]


# --- the worker ---


def worker(directory: Path, kills: int, seed: int) -> None:
    """One rank. ``directory`` holds a line per event, by all ranks and attempts."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    log = _Log(directory, rank)
    log.note("begin")
    torch.set_num_threads(1)
    try:
        from moe_ckpt.comm.communicator import make_communicator

        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECS))
        make_communicator(TIMEOUT_SECS)
        done = _killed(directory)
        rng = random.Random(f"{seed} {done}")
        victim, at = rng.randrange(dist.get_world_size()), 3 + rng.randrange(20)
        for number in range(30):
            if number == at and rank == victim and done < kills:
                log.note("kill")
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
            if number == 0:
                log.note("reduced")
            time.sleep(0.01)
    except Exception as error:
        log.note("failed", error=f"{type(error).__name__}: {error}"[:300])
        raise
    log.note("ended")


class _Log:
    def __init__(self, directory: Path, rank: int) -> None:
        self._path, self._who = directory / f"rank{rank}.jsonl", {"rank": rank, "pid": os.getpid()}

    def note(self, event: str, **more: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, **self._who, "at": time.time(), **more}) + "\n")


def _events(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("rank*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted((json.loads(line) for line in lines), key=lambda line: float(line["at"]))


def _killed(directory: Path) -> int:
    return sum(line["event"] == "kill" for line in _events(directory))


# --- the job ---


def run(launch: Launch, ranks: int, kills: int, seed: int, limit_secs: float) -> dict[str, Any]:
    """One job. ``code``: of torchrun, None if it did not end within ``limit_secs``; ``events``: of all ranks."""
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_restarts_") as scratch:
        with _agents(launch, ranks, kills, seed, Path(scratch)) as agents:
            deadline = time.monotonic() + limit_secs
            codes = [_wait(agent, deadline) for agent in agents]
        ended = [abs(code) for code in codes if code is not None]
        return {"code": max(ended) if len(ended) == len(codes) else None, "events": _events(Path(scratch))}


@contextmanager
def _agents(
    launch: Launch, ranks: int, kills: int, seed: int, scratch: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One torchrun per node, all on this machine; ended with their workers however the block is left."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if launch.own_store:
        environment[VARIABLE] = "1"
    port = _free_port()
    agents = []
    try:
        for node in range(launch.nodes):
            options = [option.format(port=port, node=node) for option in launch.options]
            command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nnodes={launch.nodes}"]
            command += [f"--nproc-per-node={ranks // launch.nodes}", f"--max-restarts={kills + SPARE}"]
            command += ["--monitor-interval=0.1", str(Path(__file__).resolve()), "--worker"]
            with (scratch / f"node{node}.log").open("wb") as output:
                agents.append(
                    subprocess.Popen(
                        [*command, str(scratch), str(kills), str(seed)],
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # an agent's workers are in sessions of their own: it ends them
        for agent in agents:
            if _wait(agent, time.monotonic() + 40) is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def judge(launch: Launch, ranks: int, jobs: Sequence[dict[str, Any]]) -> Found:
    """What ``run`` found of several jobs, in sum."""
    result = Found(launch.name, launch.own_store, launch.nodes, ranks, len(jobs), 0, 0, 0, 0, [], {})
    for job in jobs:
        events = job["events"]
        result.hung += job["code"] is None
        result.gave_up += job["code"] not in (None, 0)
        kills = [line["at"] for line in events if line["event"] == "kill"]
        for at, until in pairwise([*kills, float("inf")]):
            _judge_restarts([line for line in events if at < line["at"] < until], at, ranks, result)
    return result


def _judge_restarts(events: Sequence[dict[str, Any]], killed_at: float, ranks: int, results: Found) -> None:
    """Those between one kill and the next. Agents count restarts each for itself, so processes are what is counted."""
    reduced = [line for line in events if line["event"] == "reduced"]
    came = {line["pid"] for line in reduced}
    began = {line["pid"] for line in events if line["event"] == "begin"}
    lost = [line for line in events if line["event"] == "failed" and line["pid"] in began - came]
    by_rank = Counter(line["rank"] for line in lost)
    failed = max(by_rank.values(), default=0)
    results.failed += failed
    results.restarts += failed
    if len(came) >= ranks:
        results.restarts += 1
        results.secs.append(reduced[-1]["at"] - killed_at)
    shown = next((line["rank"] for line in lost if by_rank[line["rank"]] == failed), None)
    for line in (line for line in lost if line["rank"] == shown):
        kind = kind_of(line["error"])
        results.errors[kind] = results.errors.get(kind, 0) + 1


def kind_of(error: str) -> str:
    """The words by which to look for an error."""
    known = ("connectFullMesh", "store based barrier", "Timed out", "Connection refused", "Connection reset")
    return next((words for words in known if words in error), error.splitlines()[0][:60])


def table(results: Sequence[Found]) -> Table:
    shown = Table(title="Restarts after kill -9 of a worker", title_justify="left")
    for title in ("torchrun", "variable"):
        shown.add_column(title)
    for title in ("nodes", "ranks", "jobs", "restarts", "failed", "given up", "hung", "s", "most s"):
        shown.add_column(title, justify="right")
    for one in results:
        middle = f"{sorted(one.secs)[len(one.secs) // 2]:.1f}" if one.secs else "-"
        most = f"{max(one.secs):.0f}" if one.secs else "-"
        numbers = (one.nodes, one.ranks, one.jobs, one.restarts, one.failed, one.gave_up, one.hung)
        shown.add_row(one.name, "=1" if one.own_store else "-", *map(str, numbers), middle, most)
    return shown


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(
        prog="torchrun_restarts.py",
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("--only", nargs="+", metavar="TEXT", help="launches whose title contains one of these")
    command_line.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="in all (default 2 4)")
    command_line.add_argument(
        "--nodes", nargs="+", type=int, default=[1, 2], help="agents on this machine (default 1 2)"
    )
    command_line.add_argument("--variable", choices=("set", "unset", "both"), default="both", help=VARIABLE)
    command_line.add_argument("--trials", type=int, default=2, help="jobs of each (default 2)")
    command_line.add_argument("--kills", type=int, default=4, help="per job (default 4)")
    command_line.add_argument("--seed", type=int, default=1, help="of the kills (default 1)")
    command_line.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which a job has hung (default 120)"
    )
    command_line.add_argument("--write", action="store_true", help=f"keep the JSON in {RESULTS.name}/")
    command_line.add_argument("--out", type=Path, default=RESULTS, help="another directory for --write")
    return command_line


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    cases = [
        (launch, ranks)
        for launch in launches()
        for ranks in options.ranks
        if launch.nodes in options.nodes
        and ranks % launch.nodes == 0
        and options.variable in ("both", "set" if launch.own_store else "unset")
        and (not options.only or any(text in launch.title for text in options.only))
    ]
    if not cases:
        raise SystemExit(f"--only {' '.join(options.only or [])}: there is no such launch")
    results: list[Found] = []
    for launch, ranks in cases:
        jobs = []
        for trial in range(options.trials):
            jobs.append(run(launch, ranks, options.kills, options.seed + trial, options.limit))
        results.append(judge(launch, ranks, jobs))
        last = results[-1]
        console.print(
            f"{launch.title}, {launch.nodes} nodes, {ranks} ranks: {last.failed} of {last.restarts} "
            f"restarts failed {last.errors or ''}, {last.gave_up} jobs given up, {last.hung} hung",
            markup=False, soft_wrap=True,
        )  # fmt: skip
        if options.write:
            content = {"machine": machine(), "kills": options.kills, "rows": [asdict(item) for item in results]}
            write_json(options.out / "torchrun_restarts.json", content)
    console.print(table(results))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
