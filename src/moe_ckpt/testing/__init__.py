"""Tools to test your own runs with: storage that fails, and processes that die, at named places and repeatably.

They are put around or into the real thing:

- ``FaultyStorage(inner, fail_at=n)``: the n-th storage call fails. Loop over n = 1, 2, ... until a save
  passes without a failure, and every call has failed once.
- ``crash_at("rename", 2)``: a callable for ``watch_phases`` that kills the process at a named phase.
- ``KillSchedule``: which rank dies at which step and phase of a long run with restarts, alone or with its node's
  memory.

    schedule = KillSchedule.draw(seed=7, kills=3, ranks=2, first_step=20, last_step=200)
    hook = schedule.hook(rank=0, memory_path="kills.jsonl")
    watch_phases(hook.on_phase)
    for step in range(1, 201):
        hook.on_step(step)
        ...
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_ckpt.driver import run as driver
from moe_ckpt.errors import ConfigError, StoreUnwritableError
from moe_ckpt.storage.base import Stamp, Stamped, Storage

__all__ = [
    "PHASES",
    "FaultyStorage",
    "Kill",
    "KillHook",
    "KillSchedule",
    "crash_at",
    "kill_process",
    "lose_node",
    "watch_phases",
]

PHASES = ("compute", "copy", "write", "fsync", "rename", "manifest", "gc")
"""Moments at which a process can be killed, in the forward or backward pass, while the snapshot is copied, before a
file is written, synced, or given its name, before the commit record is written, or before a file is deleted."""
RANK_0_PHASES = frozenset({"manifest", "gc"})
"""Phases that only rank 0 goes through."""


def _counted(verb: str) -> Callable[..., Any]:
    """Returns a method of ``FaultyStorage`` that counts a call and makes it."""

    def call(storage: FaultyStorage, path: str = "", *args: Any, **kwargs: Any) -> Any:
        storage._count(verb, path)
        return getattr(storage.inner, verb)(path, *args, **kwargs)

    return call


class FaultyStorage:
    """A storage that works until its N-th call. May be used from several threads.

    Args:
        inner: The real one.
        fail_at: The call that fails, counted from 1; None for no failure (counts only).
        error: What is raised; a fresh instance each time. None: an ``OSError`` with EIO.
        persistent: All later calls fail, too (a dead disk); else just that one (a hiccup).
        verbs: Count only calls of these methods; None counts all of them.

    Attributes:
        calls: ``(verb, path)`` of the calls counted so far.
        failures: How many of them failed.

    Raises:
        ConfigError: ``fail_at`` is below 1.
    """

    def __init__(
        self,
        inner: Storage,
        fail_at: int | None,
        error: OSError | None = None,
        persistent: bool = False,
        verbs: Collection[str] | None = None,
    ) -> None:
        if fail_at is not None and fail_at < 1:
            raise ConfigError(f"FaultyStorage: fail_at={fail_at} must be at least 1 (the first call), or None")
        self.inner = inner
        self.root = inner.root
        self.fail_at = fail_at
        self.persistent = persistent
        self.failures = 0
        self.calls: list[tuple[str, str]] = []
        self._error = error or OSError(errno.EIO, "injected storage failure")
        self._verbs = verbs
        self._guard = threading.Lock()

    def probe(self) -> None:
        try:
            self._count("probe", "")
        except OSError as error:
            raise StoreUnwritableError(f"the store {self.root} cannot be written: {error}") from error
        self.inner.probe()

    def stamp(self, path: str) -> Stamp | None:
        self._count("stamp", path)
        return self.inner.stamp(path) if isinstance(self.inner, Stamped) else None

    write = _counted("write")
    read = _counted("read")
    size = _counted("size")
    list = _counted("list")
    exists = _counted("exists")
    delete = _counted("delete")
    delete_dir = _counted("delete_dir")
    clean_temporaries = _counted("clean_temporaries")

    def _count(self, verb: str, path: str) -> None:
        if self._verbs is not None and verb not in self._verbs:
            return
        with self._guard:
            self.calls.append((verb, path))
            number = len(self.calls)
            fails = self.fail_at is not None and (number >= self.fail_at if self.persistent else number == self.fail_at)
            self.failures += fails
        if fails:
            raise type(self._error)(*self._error.args)


def kill_process() -> None:
    """``kill -9`` of this process: no handler runs, nothing is flushed, Python does not notice."""
    os.kill(os.getpid(), signal.SIGKILL)


def lose_node(directory: str | os.PathLike[str], kill: Callable[[], None] = kill_process) -> None:
    """The node dies: its memory is gone, and this process with it.

    To the next life it is as if another node had come in its place, with an empty memory. Other processes of the node
    are left to the launcher, which ends them when it sees this one dead.

    Args:
        directory: What the node has as ``Memory(directory=...)``: a separate directory, which need not exist.
        kill: What is called last.
    """
    gone = f"{os.fspath(directory)}.lost"
    with contextlib.suppress(FileNotFoundError):
        os.rename(directory, gone)  # at once, so that no other thread seals anything in it meanwhile
        shutil.rmtree(gone, ignore_errors=True)
    kill()


def watch_phases(on_phase: Callable[[str], None] | None) -> None:
    """Calls ``on_phase`` with each of ``PHASES`` but "compute" as the runs of this process reach it.

    Args:
        on_phase: Called on the thread that reaches the phase, in every run that begins from now on; None: nothing is.
    """
    driver.on_phase = on_phase


def crash_at(phase: str, n: int = 1, kill: Callable[[], None] = kill_process) -> Callable[[str], None]:
    """Returns a callable for ``watch_phases`` that kills the process the n-th time that ``phase`` is reached.

    Args:
        phase: One of ``PHASES``.
        n: Counted from 1.
        kill: What is called then.

    Raises:
        ConfigError: Unknown phase, or n < 1.
    """
    _require_phases((phase,))
    if n < 1:
        raise ConfigError(f"crash_at: n={n} must be at least 1 (the first time)")
    reached = 0
    guard = threading.Lock()

    def on_phase(now: str) -> None:
        nonlocal reached
        if now != phase:
            return
        with guard:
            reached += 1
            if reached == n:
                kill()

    return on_phase


@dataclass(frozen=True, order=True)
class Kill:
    """Rank ``rank`` dies in ``phase``, in step ``step`` or the first later step that gets to the phase.

    Attributes:
        node: Its node is lost: memory that outlives the process dies, too (``lose_node``).
    """

    step: int
    rank: int
    phase: str
    node: bool = False

    def __post_init__(self) -> None:
        _require_phases((self.phase,))


@dataclass(frozen=True)
class KillSchedule:
    """Schedule of the ranks to kill, and of the phases to kill them in.

    Build it by ``draw``, or spell it out as a tuple of ``Kill``.
    """

    kills: tuple[Kill, ...] = ()

    @classmethod
    def draw(
        cls,
        seed: int,
        kills: int,
        ranks: int,
        first_step: int,
        last_step: int,
        *,
        phases: Sequence[str] = PHASES,
        nodes: int = 0,
    ) -> KillSchedule:
        """Returns random kills, the same for the same arguments: at most one per step.

        Args:
            seed: Of the drawing.
            kills: How many.
            ranks: Of the run. Phases that only rank 0 goes through are given to rank 0.
            first_step: First step in which a rank may die.
            last_step: Last one.
            phases: To draw from.
            nodes: How many of the kills, the last ones, lose a node. The others stay as they are without.

        Raises:
            ConfigError: Unknown phase, no ranks, more kills than steps, or more nodes lost than kills.
        """
        _require_phases(phases)
        steps = range(first_step, last_step + 1)
        if ranks < 1 or not phases or not 0 <= kills <= len(steps):
            raise ConfigError(
                f"KillSchedule: {kills} kills do not fit into the {len(steps)} steps from {first_step} to {last_step} "
                f"with {ranks} ranks and {len(phases)} phases; every kill needs a step of its own"
            )
        if not 0 <= nodes <= kills:
            raise ConfigError(f"KillSchedule: nodes={nodes} says how many of the {kills} kills lose a node")
        rng = random.Random(seed)
        drawn = []
        for step in sorted(rng.sample(steps, kills)):
            phase = rng.choice(list(phases))
            rank = rng.randrange(ranks)
            drawn.append(Kill(step, 0 if phase in RANK_0_PHASES else rank, phase))
        ordinary = kills - nodes
        return cls(tuple(replace(kill, node=number >= ordinary) for number, kill in enumerate(drawn)))

    def to_json(self) -> str:
        return json.dumps([asdict(kill) for kill in self.kills])

    @classmethod
    def from_json(cls, text: str) -> KillSchedule:
        """Inverse of ``to_json``.

        Raises:
            ConfigError: ``to_json`` did not write the text.
        """
        try:
            return cls(tuple(Kill(**row) for row in json.loads(text)))
        except (TypeError, json.JSONDecodeError) as error:
            raise ConfigError(f"KillSchedule: not a schedule in JSON: {error}") from error

    def hook(
        self,
        rank: int,
        memory_path: str | os.PathLike[str],
        kill: Callable[[], None] = kill_process,
        node_memory: str | os.PathLike[str] | None = None,
    ) -> KillHook:
        """Returns what carries out this rank's kills.

        Args:
            rank: Whose.
            memory_path: See ``KillHook``; one file serves all ranks.
            kill: See ``KillHook``.
            node_memory: See ``KillHook``.

        Raises:
            ConfigError: A node is to be lost, and ``node_memory`` is not given.
        """
        return KillHook(tuple(k for k in self.kills if k.rank == rank), Path(memory_path), kill, node_memory)

    def fired(self, memory_path: str | os.PathLike[str]) -> tuple[Kill, ...]:
        """The kills that have happened, in the order of their happening. Assert at the end that none is missing."""
        return _remembered(Path(memory_path))


@dataclass
class KillHook:
    """Kills this process where its schedule says, each kill once over all restarts.

    Call ``on_step`` on the training thread when the step's forward pass begins, and give ``on_phase`` to the storage
    and the engine. A kill fires as soon as its phase is reached in its step or a later one (a phase need not occur in
    every step).

    Attributes:
        kills: This rank's.
        memory_path: A file with one line of JSON per kill that has happened, written and synced before the process
            dies, so that the restarted job is not killed again at the same place.
        kill: What is called.
        node_memory: The memory of this rank's node, see ``lose_node``. What stands for the node that comes in a lost
            one's place creates the directory again before it opens a session.

    Raises:
        ConfigError: A node is to be lost, and ``node_memory`` is not given.
    """

    kills: tuple[Kill, ...]
    memory_path: Path
    kill: Callable[[], None] = kill_process
    node_memory: str | os.PathLike[str] | None = None
    _step: int | None = None
    _pending: list[Kill] = field(init=False)
    _guard: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        lost = next((kill for kill in self.kills if kill.node), None)
        if lost is not None and self.node_memory is None:
            raise ConfigError(
                f"KillHook: the node of rank {lost.rank} is to be lost in step {lost.step}; node_memory= must name its "
                "Memory(directory=...)"
            )
        done = set(_remembered(self.memory_path))
        self._pending = [kill for kill in sorted(self.kills) if kill not in done]

    def on_step(self, step: int) -> None:
        """The training thread begins the step; "compute" kills happen here."""
        self._step = step
        self.on_phase("compute")

    def on_phase(self, phase: str) -> None:
        """The process is about to do ``phase``, on any thread."""
        with self._guard:
            due = [k for k in self._pending if k.phase == phase and self._step is not None and k.step <= self._step]
            if not due:
                return
            self._pending.remove(due[0])
            _remember(self.memory_path, due[0])
            if due[0].node and self.node_memory is not None:
                lose_node(self.node_memory, self.kill)
            else:
                self.kill()


def _remembered(path: Path) -> tuple[Kill, ...]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return ()
    return tuple(Kill(**json.loads(line)) for line in lines)


def _remember(path: Path, kill: Kill) -> None:
    """Append one line: a single small append does not mix with those of other ranks."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, (json.dumps(asdict(kill)) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_phases(phases: Sequence[str]) -> None:
    unknown = [phase for phase in phases if phase not in PHASES]
    if unknown:
        raise ConfigError(f"unknown phase {unknown[0]!r}; the phases are {', '.join(PHASES)}")
