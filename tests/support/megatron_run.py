"""One life of a Megatron run with checkpoints, for tests that kill it and start it again; body of ``run_ranks``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_ckpt.testing import watch_phases
from tests.integration import memory_phases
from tests.integration.pauses import Stop
from tests.support import megatron_gpt
from tests.support.constants import policy_of
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import digests
from tests.support.opened import note_shards
from tests.support.resources import taken

SLOW_COPY_SECS = 1.0
_STORAGE_PHASES = ("write", "fsync", "rename", "manifest", "gc")


def _newest_step(store: str) -> int:
    """That anything was written of."""
    return max((int(path.name[5:13]) for path in Path(store).glob("step_*")), default=0)


@dataclass(frozen=True)
class Life:
    """What one start of the job does.

    policy: as ``moe_ckpt.policies`` names it, with its arguments.
    seed: of the model's initial weights. Lives of one run get different ones: what is right must come from the store.
    kill: (rank, iteration, phase) of a SIGKILL: at the begin of that iteration ("forward"), when its gradients are
        there ("train"), when one of the chained optimizers has written and others not ("update"), when all have
        ("updated"), while the n-th iteration is computed again to bring back a window ("replay"), in the middle of
        coming back ("resume"), or when the engine is in that phase (see ``on_phase``) for the first time with a
        checkpoint of that iteration or a later one; training may be ahead of it. Or the n-th time that a phase of
        ``memory_phases`` is reached, or n milliseconds after the first iteration's begin, wherever it is ("anywhere").
        Or of what stops the ranks in another way, with rank 0: all raise when gradients are there ("error"), "term"
        and "stuck" (see ``_stopped``).
    journal: where every rank writes down, in ``<journal>.<rank>``, what it does; see ``Journal``. Kills cannot undo it.
    opened: where every rank notes what it opens of the store's tensors, see ``tests.support.opened``.
    memory: where the nodes' memory directories are; None: private memory. copies: other arguments of ``Memory``.
    ranks_per_node: that share such a directory.
    sabotage: what is broken on purpose in this life; a function without arguments, called once everything is imported.
    survives: a rank that hears of another one's death keeps its newest iteration, as under ``with``.
    together: ranks that die with that of ``kill``.
    lost: (seconds, ranks): those get a SIGKILL so long after they have resumed.
    digests: the journal has those of ``megatron_log.digests`` at each state that a rank comes to.
    number: of the life, for the journal.
    pause: (rank, iteration, phase): it stops itself (``pauses.Stop``) at that iteration's begin ("forward"), or when
        its update is made ("updated"), and goes on when somebody says so. All ranks take long to copy.
    """

    store: str
    steps: int
    setup: Setup = field(default_factory=Setup)
    policy: tuple[str, dict[str, Any]] = ("MoC", {"k": 1})
    seed: int = 1
    kill: tuple[int, int, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    journal: str | None = None
    opened: str | None = None
    memory: str | None = None
    copies: dict[str, int] = field(default_factory=dict)
    ranks_per_node: int = 2
    sabotage: Callable[[], None] | None = None
    survives: bool = False
    together: tuple[int, ...] = ()
    lost: tuple[float, tuple[int, ...]] | None = None
    pause: tuple[int, int, str] | None = None
    digests: bool = False
    number: int = 0


class Journal:
    """JSON lines of one rank, of all lives: {"resumed": iteration, "restored_step", "resources"} and, for each,
    {"iteration", "loss": hexadecimal or null} when it is computed and {"updated": iteration, "made", "replayed"} then.
    With ``Life.digests`` also {"final": iteration, "digests"} in between, and "digests" and "lost" beside "resumed".
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = None if path is None else f"{path}.{rank}"

    def note(self, **line: Any) -> None:
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        if self._path is None or not os.path.exists(self._path):
            return []
        with open(self._path) as file:
            return [json.loads(line) for line in file]


class _ComingBack:
    """Something stateful of the user's own, which tells when it is loaded."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._on_phase = on_phase

    def state_dict(self) -> dict[str, Any]:
        return {"told": True}

    def load_state_dict(self, state_dict: Any) -> None:
        assert state_dict == self.state_dict()
        self._on_phase("resume")


def _stopped(how: str, rank: int) -> None:
    """All ranks get SIGTERM ("term"); or one does, while it waits for the others, which raise later ("stuck")."""
    if how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "stuck" and rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    elif how == "stuck":
        time.sleep(5.0)
        raise RuntimeError("the user's program fails")


@functools.cache
def _kill_later(secs: float) -> None:
    timer = threading.Timer(secs, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What the library tells the user meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("moe_ckpt").removeHandler(handler)


@contextlib.contextmanager
def overheard() -> Iterator[list[str]]:
    """The same, while the library speaks to the user as it would: a handler that it finds would be asked instead."""
    said: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logging.getLogger("moe_ckpt").addFilter(note)
    try:
        yield said
    finally:
        logging.getLogger("moe_ckpt").removeFilter(note)


def node_memory(root: str, rank: int, ranks_per_node: int = 2) -> Path:
    """The memory directory of this rank's node."""
    directory = Path(root, f"node_{rank // ranks_per_node}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def live(rank: int, world_size: int, life: Life) -> dict[str, Any]:
    """Train to ``life.steps``. What is returned tells everything that must be alike in two equal runs."""
    if life.opened is not None:
        note_shards(life.store, life.opened, rank)
    random.seed(life.seed)
    np.random.seed(life.seed)
    built = megatron_gpt.build(life.setup, life.seed)
    from moe_ckpt import Memory, megatron

    if life.sabotage is not None:
        life.sabotage()
    in_memory = life.kill is not None and life.kill[2] in memory_phases.PHASES
    if life.kill is not None and in_memory and life.kill[0] == rank:
        memory_phases.kill_in(life.kill[2], life.kill[1])
    stop = None if life.pause is None else Stop()
    name, arguments = life.policy
    at = {"iteration": 0, "replayed": 0}
    journal = Journal(life.journal, rank)

    def on_phase(phase: str) -> None:
        if phase == "train" and life.kill == (0, at["iteration"], "error"):
            raise RuntimeError("the user's program fails")
        if phase == "forward" and life.kill is not None and life.kill[:2] == (0, at["iteration"]):
            _stopped(life.kill[2], rank)
        if stop is not None and (rank, at["iteration"], phase) == life.pause:
            stop()
        if stop is not None and phase == "copy":
            time.sleep(SLOW_COPY_SECS)
        if life.kill is not None and (rank, phase, life.kill[2]) == (life.kill[0], "forward", "anywhere"):
            _kill_later(life.kill[1] / 1e3)
        if life.kill is None or phase != life.kill[2] or rank not in (life.kill[0], *life.together):
            return
        reached = at["replayed" if phase == "replay" else "iteration"]
        if phase in _STORAGE_PHASES:
            reached = min(reached, _newest_step(life.store))
        if reached >= life.kill[1]:
            time.sleep(0.5 if phase == "forward" else 0.0)  # as in the middle of an iteration that takes longer
            os.kill(os.getpid(), signal.SIGKILL)

    watch_phases(on_phase)
    node = None if life.memory is None else node_memory(life.memory, rank, life.ranks_per_node)
    ckpt = megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=policy_of(name, arguments),
        dirpath=life.store,
        stateful={"coming back": _ComingBack(on_phase)},
        memory=None if node is None else Memory(directory=node, **life.copies),
        **{"when_busy": "wait", "timeout_secs": 60.0, **life.options},
    )
    with heard() as said:
        progress = ckpt.resume()
    seen = {"digests": digests(built), "lost": ckpt.session.run_ledger.tokens.lost_tokens} if life.digests else {}
    seen["resources"] = taken()
    journal.note(resumed=progress.iteration, restored_step=ckpt.restored_step, life=life.number, **seen)
    if life.lost is not None and rank in life.lost[1]:
        threading.Timer(life.lost[0], os.kill, (os.getpid(), signal.SIGKILL)).start()
    draw(3 if progress.restored else 1)
    built.consumed_samples = progress.consumed_samples
    try:
        with overheard() as later:
            return _train(life, ckpt, built, progress, at, journal, on_phase) | {"said": said, "said_later": later}
    except Exception as error:
        if life.survives:
            ckpt.close(10.0, error)
        raise


def _train(
    life: Life,
    ckpt: Any,
    built: megatron_gpt.Built,
    progress: Any,
    at: dict[str, int],
    journal: Journal,
    on_phase: Callable[[str], None],
) -> dict[str, Any]:
    losses, records = {}, {}
    if life.kill is not None and life.kill[2] == "update":
        register_optimizer_step_post_hook(lambda *_: on_phase("update"))
    for iteration in range(progress.iteration, life.steps):
        at["iteration"] = iteration + 1
        on_phase("forward")
        loss = losses[iteration + 1] = megatron_gpt.forward_backward(built, iteration)
        journal.note(iteration=iteration + 1, loss=None if loss is None else loss.hex())
        on_phase("train")
        if ckpt.replaying:
            at["replayed"] += 1
            on_phase("replay")
        made, _ = megatron_gpt.update(built)
        on_phase("updated")
        if life.digests:
            journal.note(final=iteration + 1, digests=digests(built))
        record = ckpt.after_step(iteration + 1, consumed_samples=built.consumed_samples, updated=made)
        records[iteration + 1] = record
        journal.note(updated=iteration + 1, made=made, replayed=record.replayed)
    told = describe(ckpt, built)
    ckpt.finish()
    told["routed"] = ckpt.session.run_ledger.tokens.routed_tokens  # the last iteration's are agreed on by now
    plan = ckpt.recovery_plan
    told |= {"losses": losses, "records": records, "progress": progress, "restored_step": ckpt.restored_step}
    return told | {"remade": plan and plan.updates}


def draw(times: int) -> None:
    """What building data iterators does between ``resume`` and the first step."""
    for _ in range(times):
        torch.rand(1)
        random.random()
        np.random.rand()


def describe(ckpt: Any, built: megatron_gpt.Built) -> dict[str, Any]:
    """Digests of every tensor of this rank's state, and of random numbers and schedules."""
    state = ckpt._host.state
    run_ledger = ckpt.session.run_ledger
    tensors: dict[str, str] = {}
    for tensor in state.tensors():
        tensors[f"{tensor.key}@{list(tensor.offsets)}{list(tensor.local.shape)}"] = digest(tensor.local)
    generators = [torch.get_rng_state(), *_tracker_states()]
    return {
        "tensors": tensors,
        "steps": state.plain()["optimizer"]["step"],
        "groups": [(group["lr"], group["weight_decay"]) for group in state.plain()["optimizer"]["groups"]],
        "buffers": {name: digest(buffer) for name, buffer in state.plain()["buffers"].items()},
        "rng": [digest(each) for each in generators] + [random.getrandbits(64), int(np.random.randint(1 << 60))],
        "scheduler": built.scheduler.state_dict(),
        "consumed": built.consumed_samples,
        "saved": run_ledger.tokens.to_dict(),
        "ages": run_ledger.ledger.expert_ages(ckpt.session.run_ledger.last_step or 0).tolist(),
        "lost": run_ledger.tokens.lost_tokens,
        "routed": run_ledger.tokens.routed_tokens,
        "plt": run_ledger.tokens.plt,
    }


def _tracker_states() -> list[torch.Tensor]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return list(get_cuda_rng_tracker().get_states().values())


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


EXACT = ("tensors", "steps", "groups", "buffers", "rng", "scheduler", "consumed")
"""What two equal runs have alike on every rank."""
