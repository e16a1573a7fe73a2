"""Stops this process by SIGSTOP where it is known who waits for it, and what of it is on its way to peers."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_ckpt.format.slot import decode_slot
from moe_ckpt.peers.replication import Replicator
from moe_ckpt.run.agreement import StepAgreement
from tests.support.waiting import retry_until

_SENT_SECS = 0.2
"""For gloo's threads: what they were given of a collective is with the kernel by then."""


def stands_still(how: str, n: int) -> Callable[[int], None]:
    """What to call at each backward pass, in this process only: see ``Run.crash``."""
    stop = Stop()
    times = itertools.count(1)
    if how == "stop":
        return lambda step: stop() if next(times) == n else None

    def updated(*_: Any) -> None:
        if next(times) == n:
            stop()

    register_optimizer_step_post_hook(updated)
    return lambda step: None


def is_stopped(pid: int) -> bool:
    """Whether a process stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def steps_of(node: Path, rank: int) -> list[int]:
    """Of the sealed slots on a node that hold what a rank saved, its own or copies."""
    found = []
    for path in node.rglob("*.head"):
        try:
            header = decode_slot(path.read_bytes(), str(path))
        except FileNotFoundError:  # unsealed meanwhile, for the next snapshot
            continue
        found += [header.step] * (header.rank == rank)
    return sorted(found)


class Stop:
    """Called, it stops this process until somebody continues it: when the ranks have agreed on the newest step that was
    sent, and peers have answered for all copies that were submitted."""

    def __init__(self) -> None:
        self._agreed: Any = None
        self._replicator: Replicator | None = None
        send, submit = StepAgreement.send, Replicator.submit

        def sending(*args: Any) -> Any:
            self._agreed = send(*args)
            return self._agreed

        def submitting(replicator: Replicator, *args: Any) -> Any:
            self._replicator = replicator
            return submit(replicator, *args)

        StepAgreement.send = sending  # type: ignore[method-assign]
        Replicator.submit = submitting  # type: ignore[method-assign]

    def __call__(self) -> None:
        self._agreed.result(60.0)
        assert retry_until(lambda: self._replicator is None or not self._replicator.in_flight, 60.0)
        time.sleep(_SENT_SECS)
        os.kill(os.getpid(), signal.SIGSTOP)
