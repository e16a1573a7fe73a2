"""A life of a Megatron job while it runs: what its ranks have said and done, and their processes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.integration.pauses import steps_of
from tests.megatron.exactness import LIFE_SECS, WARM, Case, life_of
from tests.support.megatron_run import Journal, Life, live
from tests.support.processes import Outcome, start_ranks
from tests.support.waiting import retry_until


def begins(directory: str, beside: Callable[[], None] | None = None) -> None:
    """Of each rank: its process, and what it says, are known to the test. beside: What else is done then."""
    rank = os.environ["RANK"]
    logging.getLogger("moe_ckpt").addHandler(logging.FileHandler(Path(directory, f"said_{rank}")))
    if beside is not None:
        beside()
    path = Path(directory, f"pid_{rank}")
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


@dataclass
class Running:
    """A life that goes on in processes of its own, two ranks to a node.

    pids: by rank. outcomes: of all ranks, when they have ended.
    """

    case: Case
    directory: Path
    pids: list[int]
    outcomes: list[Outcome]

    def node(self, number: int) -> Path:
        return self.directory / "memory" / f"node_{number}"

    def said(self, rank: int) -> str:
        return (self.directory / f"said_{rank}").read_text()

    def newest(self, rank: int) -> int:
        """Of its own slots on its node."""
        return max(steps_of(self.node(rank // 2), rank))

    def reached(self) -> int:
        """The newest iteration that every rank has ended."""
        path = life_of(self.case, self.directory).journal
        of_ranks = [[line["updated"] for line in Journal(path, rank).lines() if "updated" in line] for rank in range(4)]
        return min(max(steps, default=0) for steps in of_ranks)

    def comes_to(self, iteration: int) -> None:
        """Waits until every rank has ended it."""
        assert retry_until(lambda: self.reached() >= iteration, LIFE_SECS)

    def kill_all(self) -> int:
        """At once: no rank hears of another's death. Returns the newest iteration that all ended."""
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids:
                os.kill(pid, how)
        return self.reached()


@contextmanager
def running(case: Case, directory: Path, life: Life, beside: Callable[[], None] | None = None) -> Iterator[Running]:
    """What is left at the end is killed. beside: See ``begins``."""
    life = replace(life, sabotage=partial(begins, str(directory), beside))
    found = Running(case, directory, [], [])

    def run() -> None:
        found.outcomes.extend(start_ranks(live, case.ranks, life, timeout=LIFE_SECS, grace=60.0, preload=WARM))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert retry_until(lambda: all((directory / f"pid_{each}").exists() for each in range(4)), LIFE_SECS)
        found.pids += [int((directory / f"pid_{each}").read_text()) for each in range(4)]
        yield found
        thread.join(LIFE_SECS)
    finally:
        if thread.is_alive():
            for pid in found.pids:
                os.kill(pid, signal.SIGKILL)
        thread.join()
