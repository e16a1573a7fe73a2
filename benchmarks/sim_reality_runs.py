"""Real failing runs on the CPU, killed with SIGKILL at moments drawn beforehand.

The job's clock begins when the first life has done its first iteration, which does not count: how a job is started for
the first time is no part of a simulation. It ends ``secs`` later with a last kill, which is no failure. Whatever is
killed is started again at once; what a life was doing when it was killed is read from the diary that the recipe writes
(``recipes.gpt_moe_lightning.runlog``), and from the store.

Where checkpoints lie in memory and each rank is on a node of its own, every ``NODE_EVERY``-th kill of the recipe takes
the node: its memory directory is deleted, too. Of several ranks one is killed, drawn among all but the one whose diary
counts: the others hear of it, seal what they have, and end, or restart in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.sim_reality_contestants import Contestant
from benchmarks.sim_reality_jobs import Job, job_of
from moe_ckpt_sim.failures.failures import Poisson
from recipes.demonstrating import read_lines

NODE_EVERY = 3


def kill_times(seed: int, mtbf_secs: float, secs: float) -> tuple[float, ...]:
    """Failures without memory, from the library's own source. Some come while a restart is under way."""
    results: list[float] = []
    for event in Poisson(mtbf_secs).events(np.random.Generator(np.random.PCG64(seed)), 1):
        if event.at_secs >= secs:
            return tuple(results)
        results.append(event.at_secs)
    raise AssertionError("Poisson failures have no end")


@dataclass(frozen=True)
class Life:
    """One process of a run, by the parent's clock and its own diary. Seconds since the job's clock began.

    spawned: the parent asked for it. training: the loop was entered. steps: (number, end) of each, those computed again
        for a sparse window aside. killed: the signal was sent. from_step: of the state that the loop was entered with.
    """

    spawned: float
    training: float | None
    steps: tuple[tuple[int, float], ...]
    killed: float
    from_step: int | None = None


@dataclass(frozen=True)
class RealRun:
    """What was seen of one run. kills: moments at which the signal was really sent. began_unix_secs: clock's zero.

    stall_secs, snapshot_bytes, begun: sums over all lives, the bytes of all ranks. plt: of the state at the end.
    took_node: of each kill,
        whether the node's memory went with the process; all of them where that holds nothing. victims: the ranks.
    again: rank-iterations that were computed a second time.
    logged, log_held, brought: bytes of an upstream log, on the rank with most: what one iteration adds, all of it
        (the median over iterations: a start holds what the one before left, too), and what a recovery brings from
        others per iteration that it computes again; 0 without a log.
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
    victims: tuple[int, ...] = ()
    again: int = 0
    logged: float = 0.0
    log_held: float = 0.0
    brought: float = 0.0

    @property
    def profile_path(self) -> Path:
        return self.directory / "profile.json"


Tell = Callable[[float, int], None]
"""Told the seconds since the clock began, and the kills so far."""


def run(
    contestant: Contestant, directory: Path, kills: Sequence[float], secs: float, seed: int, tell: Tell | None = None
) -> RealRun:
    """One job from start to end. kills: seconds since its clock began, in order.

    Raises:
        RuntimeError: a process ended by itself, or never trained.
    """
    victims = np.random.Generator(np.random.PCG64(seed)).choice(contestant.victims, len(kills)).tolist()
    with job_of(contestant, directory, seed, len(kills)) as job:
        zero = job.wait_for_first_step()
        say = tell or (lambda at, count: None)
        counted = range(1, len(kills) + 1)
        takes_node = contestant.loses_nodes
        took_node = [not contestant.memory or (takes_node and number % NODE_EVERY == 0) for number in counted]
        for at, rank, node in zip(kills, victims, took_node, strict=True):
            job.sleep_until(zero + at, lambda now: say(now - zero, len(job.killed)))
            job.kill(rank, node=node and takes_node)
            job.start()
        job.sleep_until(zero + secs, lambda now: say(now - zero, len(job.killed)))
        job.kill(contestant.victims[-1])
    return _seen(job, zero, secs, tuple(took_node), tuple(victims))


def _seen(job: Job, zero: float, secs: float, took_node: tuple[bool, ...], victims: tuple[int, ...]) -> RealRun:
    contestant = job.contestant
    diaries = [_by_life(read_lines(job.diary(rank)), job) for rank in range(contestant.ranks)]
    lives = diaries[contestant.witness]
    metrics = [line for life in lives for line in life if "moe_ckpt/stall_ms" in line]
    every = [line for lives in diaries for life in lives for line in life]
    saved = [line for line in every if line.get("moe_ckpt/begun")]
    times = zip(lives, job.spawned, job.killed, strict=True)
    return RealRun(
        directory=job.directory,
        secs=secs,
        began_unix_secs=zero,
        kills=tuple(moment - zero for moment in job.killed[:-1]),
        lives=tuple(_life(lines, zero, begin, end) for lines, begin, end in times),
        stall_secs=sum(line["moe_ckpt/stall_ms"] for line in metrics) / 1e3,
        snapshot_bytes=sum(line["moe_ckpt/bytes"] for line in saved),
        begun=sum(bool(line["moe_ckpt/begun"]) for line in metrics),
        plt=_plt(metrics, job.spawned[-1]),
        took_node=took_node,
        victims=victims,
        again=steps_again(diaries, contestant.witness),
        logged=max((line["moe_ckpt/logged"] for line in every if "moe_ckpt/logged" in line), default=0.0),
        log_held=max(map(_log_held, diaries)),
        brought=max((line["bytes"] for line in every if line.get("event") == "brought"), default=0.0),
    )


def _log_held(lives: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Of one rank, by its diary."""
    held = [line["moe_ckpt/log_held"] for life in lives for line in life if "moe_ckpt/log_held" in line]
    return median(held) if held else 0.0


def steps_again(diaries: Sequence[Sequence[Sequence[dict[str, Any]]]], witness: int) -> int:
    """Rank-iterations that had been done before, by the diary of ``witness``: those that a failure undid, and those of
    a sparse window.

    Args:
        diaries: Of each rank, of each life, its lines.
        witness: A rank that is never killed, or the only one.
    """
    newest = [max(map(_done, life), default=0) for life in diaries[witness]]
    before = [0, *accumulate(newest, max)]
    return sum(
        0 < _done(line) <= reached
        for lives in diaries
        for reached, life in zip(before, lives, strict=False)
        for line in life
    )


def _done(line: dict[str, Any]) -> int:
    """The step that it tells the end of; 0 if it tells something else."""
    return int(line["step"]) if "train/loss" in line else 0


def _by_life(lines: Sequence[dict[str, Any]], job: Job) -> list[list[dict[str, Any]]]:
    """What one rank wrote in each. A rank that lives on may end a step behind the kill."""
    lines = [line for line in lines if line["time"] <= job.killed[-1]]
    if job.contestant.in_place:
        return [[line for line in lines if line["generation"] == life] for life in range(len(job.spawned))]
    times = pairwise([*job.spawned, inf])
    return [[line for line in lines if begin <= line["time"] < end] for begin, end in times]


def _plt(metrics: Sequence[dict[str, Any]], spawned: float) -> float:
    """The newest in the books; where the last life did no step yet, what a recovery would put there."""
    if not metrics:
        return 0.0
    newest = metrics[-1]
    return float(newest["moe_ckpt/plt" if newest["time"] >= spawned else "moe_ckpt/plt_if_failed_now"])


def _life(lines: Sequence[dict[str, Any]], zero: float, begin: float, end: float) -> Life:
    """Of what the diary has of it. A step that was computed again for a sparse window does not count."""
    again = {line["step"] for line in lines if line.get("moe_ckpt/replayed")}
    entered = next((line for line in lines if line.get("event") == "training"), None)
    steps = [
        (line["step"], line["time"] - zero) for line in lines if "train/loss" in line and line["step"] not in again
    ]
    at, from_step = (None, None) if entered is None else (entered["time"] - zero, entered["from_step"])
    return Life(begin - zero, at, tuple(steps), end - zero, from_step)
