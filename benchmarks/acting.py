"""What benchmarks share that run a real session: how to wait for its writing, and ranks that are only acted."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.format.manifest import GROUPS, step_dir
from moe_ckpt.run.agreement import StepConsensus, pack
from moe_ckpt.session.session import CheckpointSession

_WRITE_SECS = 300.0


def wait_until_written(session: CheckpointSession) -> None:
    """Return when everything begun is written. Books nothing, so that the next step does what it always does."""
    pipeline = session._snapshots.pipeline
    pipeline.join()
    if not pipeline.wait(_WRITE_SECS):
        raise TimeoutError(f"checkpoints have not been written in {_WRITE_SECS:g} s")


class ActedRank:
    """What of ``ports.Communicator`` does not depend on what is acted: all ranks route alike and commit everything."""

    agrees_late = False

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._ended: deque[tuple[bool, bool]] = deque()
        self._sequence = 0

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        """The tokens of as many ranks; of anything else this rank's own numbers."""
        if not summed.size or self.rank == 0:
            return summed * self.world_size, largest
        return summed * self.world_size, np.maximum(largest, self._first_rank_tells())

    def start_agreement(self, summed: Callable[[], Counts], largest: Counts) -> Future[tuple[Counts, Counts]]:
        agreed: Future[tuple[Counts, Counts]] = Future()
        agreed.set_result(self.agree(summed(), largest))
        return agreed

    def _first_rank_tells(self) -> Counts:
        """Which snapshots have been committed since the last step."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        return pack(StepConsensus(ended=tuple(ended)), leads=True)

    def _first_rank_commits(self) -> bytes:
        """What it announces of one more snapshot: two checkpoints stay, and nothing is shared."""
        self._ended.append((True, False))
        self._sequence += 1
        gone = {step_dir(self._sequence - 2, 0): (True, GROUPS)} if self._sequence > 2 else {}
        return json.dumps([None, False, False, gone]).encode()

    def enter(self, generation: int) -> None:
        """Messages are acted, and of no generation."""

    def abort(self, cause: str) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing was opened."""
