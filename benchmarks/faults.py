"""Breaks runs of a small MoE on purpose, again and again, and shows that every acknowledged step comes back.

A scenario is a seed: a policy, ranks, and up to seven faults in a row, after each of which the program is started
again, perhaps with another policy or on other ranks: kill -9 at any moment, within saves, commits and updates; SIGTERM;
errors of the program; errors of the disk (EIO, ENOSPC, EAGAIN); shards, manifests and slots in memory that are flipped,
cut or deleted; nodes that are lost. Then it runs to its end. The program keeps a record of its own (``faults_life``),
by which ``faults_check`` judges each start and each step: acknowledged steps are there, every operator is as it was,
lost tokens are counted right, and losses, state and random numbers equal those of the run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

from benchmarks.faults_check import PARTIAL, Event, History, Wrong, reference_of
from benchmarks.faults_life import POLICIES, Fault, Life, live
from moe_ckpt.format.manifest import MANIFEST_NAME, parse_step_dir
from moe_ckpt.testing import PHASES

_EXAMPLE = (
    "example: python benchmarks/faults.py --seeds 0:50 --write; one seed again, with what it said: --seeds 17:18 -v"
)
RESULTS = Path(__file__).parent / "results" / "faults.json"
_LIFE_SECS = 150.0
"""A life that takes longer stands still."""
_FAULTS = 7
"""In one scenario."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.faults_life"])
_ports = threading.Lock()


@dataclass
class Outcome:
    """What became of a scenario.

    Attributes:
        faults: What was done, in words, each with the policy that was in force and what came of it.
        backs: Of each start after a fault: policy, what it was, finished steps that are computed again, stale experts.
        wrong: The promise that was not kept; "" if all were.
        said: The last words of the program, then.
    """

    seed: int
    faults: list[str] = field(default_factory=list)
    backs: list[tuple[str, str, int, int]] = field(default_factory=list)
    worlds: set[str] = field(default_factory=set)
    judged: int = 0
    wrong: str = ""
    said: str = ""


def drawn(rng: random.Random, home: str, only: str | None) -> Life:
    """Returns the first life of a scenario."""
    world = rng.choice((1, 1, 1, 2, 2, 4))
    name = only or rng.choice(tuple(POLICIES))
    if name == "Gemini":
        world = max(world, 2)
    life = Life(home, None, world, sharded=world > 1 and rng.random() < 0.4, optimizer=rng.choice(("adamw", "sgd")))
    life = replace(life, listed=not life.sharded and rng.random() < 0.3)
    life = replace(life, memory=rng.random() < 0.6, to_storage=rng.choice((1, 1, 3)))
    if world > 1 and rng.random() < 0.5:
        life = replace(life, memory=True, replicas=1)
    return with_policy(life, name, rng)


def with_policy(life: Life, name: str, rng: random.Random) -> Life:
    """Returns the life under another policy, with the memory that this needs."""
    if name == "GradientLog":
        life = replace(life, memory=True)
    if name == "Gemini":
        life = replace(life, memory=True, replicas=1)
    smallest = 2 if name in ("MoEvement", "GradientLog") else 1
    return replace(life, policy=(name, rng.randint(smallest, 3)))


class Scenario:
    """One seed.

    Args:
        seed: Decides everything but when processes run.
        home: An empty directory.
        references: Of undisturbed runs, by what decides them.
        policy: That it begins with; None for any.
    """

    def __init__(self, seed: int, home: Path, references: _References, policy: str | None) -> None:
        self.rng = random.Random(seed)
        self.outcome = Outcome(seed)
        self._home, self._references = home, references
        self.now = drawn(self.rng, str(home), policy)
        self.history = History(references.of(self.now), self.now.sharded)
        self._offsets: dict[int, int] = {}
        self._memory_counts = True
        self._spoiled: set[str] = set()  # step directories of which a file was damaged

    def run(self) -> Outcome:
        """Breaks it and lets it run to its end."""
        try:
            ended, before, label = False, self.now, ""
            for _ in range(_FAULTS):
                life, fault, ended = self._broken()
                self._judge(life, before, label)
                before, label = life, fault
                if ended:
                    break
                label = " and ".join(filter(None, (label, self._damage(life))))
                self.outcome.faults.append(f"{life.policy[0] if life.policy else ''}: {label}")
                self._change()
            if not ended:
                codes = self._lived(replace(self.now, fault=None), None)
                self._judge(self.now, before, label)
                if codes != [0] * self.now.world or not self.outcome.backs:
                    raise Wrong(f"the last life, which nobody disturbed, ended with {codes}")
        except Wrong as wrong:
            self.outcome.wrong = str(wrong)
            self.outcome.said = "\n".join(
                Path(path).read_text(errors="replace")[-3000:] for path in sorted(self._home.glob("said.*"))
            )
        self.outcome.judged += self.history.judged
        return self.outcome

    # --- one life ---

    def _broken(self) -> tuple[Life, str, bool]:
        """Lives until something goes wrong. Returns the life, what was done, and whether it came to its end."""
        rng, life = self.rng, self.now
        rank = rng.randrange(life.world)
        kind = rng.choice(("kill", "kill", "kill one", "term", "phase", "phase", "io", "program", "update"))
        if kind == "phase":
            what = rng.choice([phase for phase in PHASES if phase != "compute"])
            rank = 0 if what in ("manifest", "gc") else rank
            life = replace(life, fault=Fault("phase", rng.randint(1, 9), what), faulty=rank)
        elif kind == "io":
            what = rng.choice(("read", "write", "write", "fsync", "rename"))
            number = rng.choice(
                (errno.EIO, errno.EAGAIN) if what == "read" else (errno.EIO, errno.ENOSPC, errno.EDQUOT)
            )
            count = rng.randint(1, 3) if what == "read" else rng.choice((1, 2, 5, 1000))
            life = replace(life, fault=Fault("io", rng.randint(1, 12), what, number, count), faulty=rank)
        elif kind == "program":
            life = replace(life, fault=Fault(rng.choice(("raise", "batch end")), rng.randint(1, 6)), faulty=rank)
        elif kind == "update":
            what = rng.choice(("in update", "updated", "update raises"))
            life = replace(life, fault=Fault(what, rng.randint(1, 6)), faulty=rank)
        outside = kind if kind in ("kill", "kill one", "term") else "kill" if kind in ("io", "phase") else None
        self._lived(life, outside, rank)
        label = kind if life.fault is None else f"{life.fault.kind} {life.fault.what}".strip()
        if life.fault is not None and kind == "io":
            label += f" {errno.errorcode[life.fault.number]}"
        return life, label, any(event["event"] == "end" for event in self._events(life, 0))

    def _lived(self, life: Life, outside: str | None, rank: int = 0) -> list[int | None]:
        """Exit codes of one life. ``outside``: what is done to it after some steps, where nothing else ends it."""
        lines, delay, grace = self.rng.randint(1, 9), self.rng.uniform(0.0, 0.08), self.rng.choice((0.0, 1.0))
        patience = 30.0 if life.fault is not None and life.fault.kind == "phase" else 0.0
        lines += 8 if patience or (life.fault is not None and life.fault.kind == "io") else 0
        self._offsets = {number: _size(life.log(number)) for number in range(life.world)}
        processes = [
            _context.Process(target=live, args=(life, number, port), daemon=True)
            for port in [_port()]
            for number in range(life.world)
        ]
        for process in processes:
            process.start()
        until, acted, ending = time.monotonic() + _LIFE_SECS, False, None
        try:
            while any(process.is_alive() for process in processes):
                now = time.monotonic()
                if now > until:
                    raise Wrong(f"a life stood still for {_LIFE_SECS:.0f} s")
                if outside is not None and not acted and len(self._events(life, rank)) > lines:
                    time.sleep(delay)
                    acted = True
                    self._act(outside, processes, rank)
                if ending is None and any(process.exitcode for process in processes):
                    ending = now + grace + (25.0 if outside == "term" else 0.0)
                if ending is not None and now > ending:
                    for process in processes:
                        process.kill()
                time.sleep(0.004)
            return [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()

    @staticmethod
    def _act(outside: str, processes: Sequence[Any], rank: int) -> None:
        for number, process in enumerate(processes):
            if outside == "kill one" and number != rank:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM if outside == "term" else signal.SIGKILL)

    def _events(self, life: Life, rank: int) -> list[Event]:
        """What a rank has written down in the newest life."""
        with contextlib.suppress(FileNotFoundError), open(life.log(rank), "rb") as file:
            file.seek(self._offsets.get(rank, 0))
            return [json.loads(line) for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        return []

    def _judge(self, life: Life, before: Life, label: str) -> None:
        same = (life.world, life.sharded) == (before.world, before.sharded)
        self.history.sharded = life.sharded
        ranks = [self._events(life, rank) for rank in range(life.world)]
        required = self._required(life, before)
        policy = life.policy[0] if life.policy else ""
        back = self.history.life(ranks, policy, required, same=same)
        if back is None and life.fault is None and label:
            raise Wrong("a start did not come as far as training")
        self.outcome.worlds.add(f"{'FSDP2' if life.sharded else 'DDP'} {life.world}" if life.world > 1 else "1")
        if back is not None:
            if label:
                was = before.policy[0] if before.policy else ""
                self.outcome.backs.append((was, label, back.behind, back.stale))
            self._intact, self._memory_counts = None, True

    _intact: int | None = None
    """Newest checkpoint on storage that damage left whole; None: none was damaged."""

    def _required(self, life: Life, before: Life) -> int:
        """The step that the start must have come back to at least."""
        stored = self.history.stored if self._intact is None else min(self._intact, self.history.stored)
        alike = (life.world, life.sharded, life.policy) == (before.world, before.sharded, before.policy)
        return max(stored, self.history.sealed) if self._memory_counts and alike else stored

    # --- between two lives ---

    def _damage(self, life: Life) -> str:
        """Damages files, or loses a node. Returns what was done; "" for nothing."""
        rng, kind = self.rng, self.rng.choice(("", "", "", "storage", "storage", "memory", "node"))
        store, memory = Path(life.store), self._home / "memory"
        if kind == "node" and life.replicas and self._memory_counts:
            shutil.rmtree(memory / str(rng.randrange(life.world)), ignore_errors=True)
            return "a lost node"
        if kind == "memory" and life.memory:
            files = [path for path in sorted(memory.rglob("*")) if path.is_file() and path.stat().st_size]
            if files:
                self._memory_counts = False
                return f"{_spoil(rng.choice(files), rng)} a file in memory"
        if kind == "storage":
            files = [path for path in sorted(store.glob("step_*/*")) if path.is_file() and path.stat().st_size]
            newest = sorted(files, key=lambda path: path.parent.name)[-8:]
            if not files:
                return ""
            chosen = rng.choice(newest if rng.random() < 0.7 else files)
            self._spoiled.add(chosen.parent.name)
            whole = [step for step, parts in _checkpoints(store) if not parts & self._spoiled]
            if not whole:
                self._spoiled.discard(chosen.parent.name)  # the run would be lost, as it must
                return ""
            self._intact = min([max(whole), *([] if self._intact is None else [self._intact])])
            if chosen.name == MANIFEST_NAME:
                self._memory_counts = False  # what is only laid over a lost checkpoint
            return f"{_spoil(chosen, rng)} {'a manifest' if chosen.name == MANIFEST_NAME else 'a file on storage'}"
        return ""

    def _change(self) -> None:
        """The next life may have another policy, or other ranks."""
        rng = self.rng
        if rng.random() < 0.12:
            self.now = with_policy(self.now, rng.choice([name for name in POLICIES if name != "Gemini"]), rng)
        if rng.random() < 0.1 and self.now.policy and self.now.policy[0] in ("Dense", "CheckFreq", "MoC"):
            world = rng.choice((1, 2))
            sharded = world > 1 and self.now.sharded
            self.now = replace(self.now, world=world, sharded=sharded, replicas=min(self.now.replicas, world - 1))


def _checkpoints(store: Path) -> list[tuple[int, set[str]]]:
    """(step, directories that it needs) of every committed checkpoint."""
    results = []
    for path in store.glob(f"*/{MANIFEST_NAME}"):
        directory = parse_step_dir(path.parent.name)
        try:
            body = path.read_text(errors="replace")
        except FileNotFoundError:
            continue
        if directory is not None:
            needs = {item.name for item in store.glob("step_*") if f'"{item.name}' in body}
            results.append((directory[0], needs | {path.parent.name}))
    return results


def _spoil(path: Path, rng: random.Random) -> str:
    how, size = rng.choice(("flipped", "cut", "deleted")), path.stat().st_size
    if how == "deleted":
        path.unlink()
    elif how == "cut":
        os.truncate(path, rng.randrange(size))
    else:
        with open(path, "r+b") as file:
            file.seek(rng.randrange(size))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
    return how


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _port() -> int:
    with _ports, socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class _References:
    """Undisturbed runs, each made once.

    Args:
        home: Where they run.
    """

    def __init__(self, home: Path) -> None:
        self._home, self._found, self._guard = home, dict[str, Mapping[int, Event]](), threading.Lock()

    def of(self, life: Life) -> Mapping[int, Event]:
        """Returns that of the same program without the library.

        Raises:
            RuntimeError: It failed.
        """
        plain = Life("", None, life.world, life.sharded, life.listed, life.optimizer, steps=life.steps)
        with self._guard:
            name = f"{len(self._found)}"
            if str(plain) not in self._found:
                run = replace(plain, home=str(self._home / f"reference_{name}"))
                os.mkdir(run.home)
                port = _port()
                processes = [
                    _context.Process(target=live, args=(run, number, port), daemon=True) for number in range(run.world)
                ]
                for process in processes:
                    process.start()
                for process in processes:
                    process.join(_LIFE_SECS)
                    if process.exitcode != 0:
                        process.kill()
                        raise RuntimeError(
                            f"the undisturbed run failed: {Path(run.home, 'said.0').read_text()[-3000:]}"
                        )
                ranks = [
                    [json.loads(line) for line in Path(run.log(number)).read_text().splitlines()]
                    for number in range(run.world)
                ]
                self._found[str(plain)] = reference_of(ranks, run.sharded)
            return self._found[str(plain)]


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns what came of the faults, by policy."""
    by_policy = collections.defaultdict[str, list[tuple[str, int, int]]](list)
    for outcome in outcomes:
        for policy, kind, behind, stale in outcome.backs:
            by_policy[policy].append((kind, behind, stale))
    rows = ["| policy | faults | computed again, mean (most) | stale experts, mean |", "| --- | --: | --: | --: |"]
    for policy in filter(by_policy.__contains__, POLICIES):
        again = [steps for _, steps, _ in by_policy[policy]]
        older = f"{statistics.mean(stale for *_, stale in by_policy[policy]):.1f}" if policy in PARTIAL else "-"
        rows.append(f"| {policy} | {len(again)} | {statistics.mean(again):.2f} ({max(again)}) | {older} |")
    return "\n".join(rows)


def campaign(
    seeds: Sequence[int], minutes: float, policy: str | None, jobs: int, *, verbose: bool = False
) -> list[Outcome]:
    """Returns the outcome of each seed that was begun in time."""
    until, outcomes = time.monotonic() + 60.0 * minutes, list[Outcome]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        references = _References(Path(directory))

        def one(seed: int) -> None:
            if time.monotonic() > until:
                return
            home = Path(directory, f"seed_{seed}")
            home.mkdir()
            outcome = Scenario(seed, home, references, policy).run()
            outcomes.append(outcome)
            shutil.rmtree(home, ignore_errors=True)
            faults = sum(len(outcome.faults) for outcome in outcomes)
            print(f"seed {seed}: {len(outcome.faults)} faults; {faults} in all", file=sys.stderr, flush=True)
            if outcome.wrong or verbose:
                print(
                    *outcome.faults, outcome.wrong, outcome.said if outcome.wrong else "", sep="\n  ", file=sys.stderr
                )

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, seeds))
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 1 if a promise was not kept."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE, formatter_class=form)
    parser.add_argument("--seeds", default="0:50", help="A:B, from A up to B - 1; about six faults each")
    parser.add_argument("--minutes", type=float, default=35.0, help="begin no seed later than that")
    parser.add_argument("--policy", choices=tuple(POLICIES), help="that every scenario begins with; any by default")
    parser.add_argument("--jobs", type=int, default=2, help="scenarios at a time")
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was done")
    order = parser.parse_args(argv)
    first, _, last = order.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    began = time.monotonic()
    outcomes = campaign(seeds, order.minutes, order.policy, order.jobs, verbose=order.verbose)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    kinds = collections.Counter(fault.partition(": ")[2] for outcome in outcomes for fault in outcome.faults)
    summary: dict[str, Any] = {
        "seeds": [outcome.seed for outcome in outcomes],
        "faults": sum(len(outcome.faults) for outcome in outcomes),
        "minutes": round((time.monotonic() - began) / 60.0, 1),
        "worlds": sorted({world for outcome in outcomes for world in outcome.worlds}),
        "kinds": dict(kinds.most_common()),
        "backs": [back for outcome in outcomes for back in outcome.backs],
        "wrong": [{**asdict(outcome), "worlds": sorted(outcome.worlds)} for outcome in wrong],
    }
    if order.write:
        RESULTS.write_text(json.dumps(summary, indent=1) + "\n")
    print(table(outcomes))
    survived = f"{len(wrong)} not survived"
    print(f"{summary['faults']} faults in {len(outcomes)} scenarios, {summary['minutes']} minutes; {survived}")
    for outcome in wrong:
        print(f"seed {outcome.seed}: {outcome.wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
