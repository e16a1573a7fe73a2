"""``kill -9`` at moments that a seed draws, in runs whose processes say where they are."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_ckpt import newest_step
from tests.support.processes import Outcome

OPENING = -1
"""Steps that are done when a life begins: nothing is built yet."""


@dataclass(frozen=True)
class Kill:
    """One ``kill -9``.

    step: It comes when so many steps are done, before the next one begins; in a life that begins later, after its first
        step, since memory refuses to be resumed from for ever.
    rank: Whom it hits.
    secs: It comes so much later, from another process, whatever the rank does then.
    stored: It waits until storage has a checkpoint of this step, or of a later one. None: it does not.
    """

    step: int
    rank: int = 0
    secs: float = 0.0
    stored: int | None = None


class Killer:
    """Kills its own process, or has it killed. store: of the run."""

    def __init__(self, kill: Kill | None, rank: int, store: str) -> None:
        self._kill = kill if kill is not None and kill.rank == rank else None
        self._store = store
        self._begin: int | None = None
        self._waits: int | None = None  # for a kill that is coming, so that it finds the run about where it was

    def at(self, step: int) -> None:
        """So many steps are done."""
        kill = self._kill
        if kill is None:
            return
        is_first = self._begin is None and step != OPENING
        self._begin = step if is_first else self._begin
        if self._waits is not None:
            self._waits = step + 1 if is_first else self._waits
            if step >= self._waits:
                time.sleep(60.0)
            return
        if step < kill.step or kill.step < step == self._begin:
            return
        if kill.stored is not None:
            newest = newest_step(self._store)
            if newest is None or newest < kill.stored:
                return
        if not kill.secs:
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sh", "-c", f"sleep {kill.secs}; kill -9 {os.getpid()}"])
        self._waits = step + (1 if step > kill.step else 3)


def drawn(seed: str, count: int, steps: int, epoch: int, ranks: int, secs: float) -> list[Kill]:
    """Kills of one run after another, of any rank, each later in the run than the one before.

    One comes while the first start opens, before anything can be committed, and one as soon as it trains; of the others
    a tenth come while a later start opens, up to a quarter at ends of epochs, and the rest at any time from a step on.

    seed: Decides everything, and is printed. steps: In which they come. secs: Longest delay.
    """
    print(f"kills drawn from {seed!r}")
    rng = random.Random(seed)
    epochs = range(epoch, steps, epoch)
    ends = rng.sample(epochs, min(len(epochs), max(1, count // 4)))
    opening = count // 10
    inner = [step for step in range(1, steps) if step not in ends]
    chosen = sorted([*ends, *rng.sample(inner, count - 2 - len(ends) - opening)])
    kills = [Kill(step, rng.randrange(ranks), 0.0 if step in ends else rng.uniform(0.0, secs)) for step in chosen]
    for at in sorted(rng.sample(range(1, len(kills), 2), opening), reverse=True):
        kills.insert(at, Kill(OPENING, rng.randrange(ranks), rng.uniform(0.0, 0.5)))
    first = Kill(OPENING, rng.randrange(ranks), rng.uniform(0.0, 0.3)), Kill(0, rng.randrange(ranks))
    return [*first, *kills]


def killed(start: Callable[[Kill | None], list[Outcome]], kills: list[Kill]) -> list[Any]:
    """What each rank returned at the end of a run that was killed so often. start: one life."""
    for number, kill in enumerate(kills):
        outcomes = start(kill)
        assert outcomes[kill.rank].exitcode == -signal.SIGKILL, (number, kill, [each.error for each in outcomes])
    outcomes = start(None)
    assert all(each.ok for each in outcomes), [each.error for each in outcomes]
    return [each.value for each in outcomes]
