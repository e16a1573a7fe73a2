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

    step: It comes when so many steps are done, before the next one begins.
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
        self._is_coming = False

    def at(self, step: int, *, last: bool = False) -> None:
        """So many steps are done. last: one more, and the run is over."""
        kill = self._kill
        if kill is None or step < kill.step:
            return
        if kill.stored is not None:
            newest = newest_step(self._store)
            if newest is None or newest < kill.stored:
                return
        if not kill.secs:
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._is_coming:
            self._is_coming = True
            subprocess.Popen(["sh", "-c", f"sleep {kill.secs}; kill -9 {os.getpid()}"])
        if last:
            time.sleep(60.0)


def drawn(seed: str, count: int, steps: int, epoch: int, ranks: int, secs: float) -> list[Kill]:
    """Kills of one run after another, of any rank, each later in the run than the one before.

    One comes while the first start opens, before anything can be committed, and one as soon as it trains; as many as
    there are, up to a quarter, come at ends of epochs, and all others at any time within a step or two.

    seed: Decides everything, and is printed. secs: Longest delay.
    """
    print(f"kills drawn from {seed!r}")
    rng = random.Random(seed)
    ends = rng.sample(range(epoch, steps, epoch), min(len(range(epoch, steps, epoch)), max(1, count // 4)))
    inner = [step for step in range(1, steps) if step not in ends]
    chosen = sorted([0, *ends, *rng.sample(inner, count - 2 - len(ends))])
    delays = [0.0 if step in ends or step == 0 else rng.uniform(0.0, secs) for step in chosen]
    kills = [Kill(step, rng.randrange(ranks), delay) for step, delay in zip(chosen, delays, strict=True)]
    return [Kill(OPENING, rng.randrange(ranks), rng.uniform(0.0, 0.3)), *kills]


def killed(start: Callable[[Kill | None], list[Outcome]], kills: list[Kill]) -> list[Any]:
    """What each rank returned at the end of a run that was killed so often. start: one life."""
    for number, kill in enumerate(kills):
        outcomes = start(kill)
        assert outcomes[kill.rank].exitcode == -signal.SIGKILL, (number, kill, [each.error for each in outcomes])
    outcomes = start(None)
    assert all(each.ok for each in outcomes), [each.error for each in outcomes]
    return [each.value for each in outcomes]
