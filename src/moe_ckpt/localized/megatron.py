"""Logs messages over the boundaries of this rank's pipeline stage, and lets the stage compute steps again alone."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_ckpt.driver.host import LocalizedRecovery
from moe_ckpt.driver.run import Driver
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.localized.attempt import LocalAttempt, LocalPart, Rejoining
from moe_ckpt.localized.boundary import Boundary, Interception
from moe_ckpt.localized.exchange import Answers
from moe_ckpt.localized.log_files import LogHeader, sealed_logs
from moe_ckpt.localized.recording import UpstreamLog
from moe_ckpt.megatron.world import layout
from moe_ckpt.reading.memory.memory_checkpoints import MemoryCheckpoints
from moe_ckpt.recovery.executing import Opener, Recovery, Restored
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.options import Options
from moe_ckpt.session.session import CheckpointSession

_REFUSED = {
    "use_ring_exchange_p2p": "sends by a function that torch.distributed does not have, so that nothing can be logged",
    "overlap_moe_expert_parallel_comm": (
        "computes the forward pass of one micro-batch beside the backward pass of another, on streams of its own: no "
        "run has shown that a stage that is alone comes to the same bits"
    ),
}
"""Settings of Megatron's model that do not work with an upstream log, and why."""


def upstream_budget(options: Options, stages: Mapping[int, int], chunks: Sequence[Any]) -> int:
    """Returns the most bytes of this rank's log.

    Args:
        options: The user's options.
        stages: Rank -> pipeline stage.
        chunks: Model chunks on this rank.

    Raises:
        ConfigError: The pipeline has one stage, or options contradict each other.
        UnsupportedError: The schedule does not send by ``torch.distributed``.
    """
    budget = 0 if options.memory is None else int(options.memory.upstream_bytes or 0)
    if len(set(stages.values())) == 1:
        raise ConfigError(
            f"Memory(upstream_bytes={budget}): this pipeline has one stage, so no messages cross a boundary. Leave it "
            "out, or set pipeline_model_parallel_size above 1"
        )
    if options.needs.boost:
        raise ConfigError(
            f"Memory(upstream_bytes={budget}) and a policy with capacity_boost: a boost needs all ranks to go back "
            "after a failure. Leave one of them out"
        )
    for name, why in _REFUSED.items():
        if any(getattr(getattr(chunk, "config", None), name, False) for chunk in chunks):
            raise UnsupportedError(f"Memory(upstream_bytes={budget}) and {name}, which {why}. Leave one of them out")
    return budget


class PipelineStage(LocalizedRecovery):
    """Logs and answers this rank's messages over the boundaries of its stage. On the training thread.

    Args:
        driver: Driver of the run; its session opens later.
        stages: Rank -> pipeline stage.
        chunks: Model chunks on this rank.

    Raises:
        ConfigError, UnsupportedError: As ``upstream_budget``.

    Attributes:
        boundary: Sees the messages, from ``open`` on.
    """

    boundary: Boundary

    def __init__(self, driver: Driver, stages: Mapping[int, int], chunks: Sequence[Any]) -> None:
        self._budget_bytes = upstream_budget(driver.options, stages, chunks)
        self._driver = driver
        self._stage_of = tuple(stages[rank] for rank in sorted(stages))
        self._layout = json.dumps(layout(chunks), sort_keys=True)
        self._attempt: LocalAttempt | None = None
        self._rejoining: Rejoining | None = None
        self._interception: Interception | None = None
        self._answers: Answers | None = None
        self._sealed: threading.Event | None = None

    def open(self, session: CheckpointSession) -> None:
        tier, comm = session.tier, session.comm
        if not tier.outlives_process:
            raise ConfigError("Memory(upstream_bytes=...): there is no memory that outlives the process")
        self._tier, files = tier, tier.files
        life = files.run_id, files.life, files.generation
        header = LogHeader(*life, files.generation, files.rank, comm.world_size, self._layout)
        log_path, *earlier_paths = files.paths
        logs = [sealed for path in earlier_paths for sealed in sealed_logs(path)]
        self._earlier_logs = tuple(sealed for sealed in logs if sealed.header.layout == self._layout)
        self._log = UpstreamLog(log_path, header, self._budget_bytes, logs)
        self.boundary = Boundary(self._stage_of, self._log, session.stopwatch)

    # --- a return in which some ranks keep their state ---

    def attempt(self, recovery: Recovery, memory: MemoryCheckpoints) -> Callable[[str, Opener | None], Restored | None]:
        diverged = self._tier.files.diverged
        self._attempt = LocalAttempt(recovery, memory, self._stage_of, self._earlier_logs, diverged=diverged)
        return self._attempt.make

    def rejoin(self, joined: Restored) -> None:
        if self._attempt is not None and self._attempt.part is not None:
            self._rejoining = Rejoining(self._attempt.part, joined, self._driver.session)

    def step_replayed(self, tokens: Deferred[StepTokens], *, last: bool) -> None:
        if self._rejoining is not None:
            self._rejoining.step_replayed(tokens, last=last)

    def diverged(self) -> None:
        self._tier.files.note_divergence()

    # --- training ---

    def resumed(self, iteration: int) -> None:
        """Begins to intercept messages, after ``resume``.

        Args:
            iteration: The iteration after which training begins.
        """
        if self._rejoining is None:
            self._log.drop(sys.maxsize)  # steps computed from now on may differ from the logged ones
        else:
            self._log.continue_history(self._rejoining.part.history)
        self._attempt, self._earlier_logs = None, ()  # which hold readers, and headers of all messages
        self.boundary.before_first(lambda: self._begin(iteration))
        self._interception = Interception(self.boundary)

    def _begin(self, iteration: int) -> None:
        self._log.step_begins(iteration + 1)
        if self._rejoining is None:
            return
        if self._rejoining.part.goes_back:
            self._compute_next(self._rejoining.part)
        self._rejoining.wait()

    def _compute_next(self, part: LocalPart) -> None:
        """Lets this stage compute the next step alone, with the messages that its neighbours logged; together with the
        others once it has reached their step."""
        step = part.since + 1 if self._answers is None else self._answers.step + 1
        if step in part.steps:
            self._answers = Answers(step, part.received.pop(step, {}), self.diverged)
            self.boundary.go_alone(part.recovery.ranks, self._answers)
        else:
            self._answers = None
            self.boundary.together(part.recovery.step)

    def step_computed(self) -> None:
        if self._answers is not None and self._rejoining is not None:
            self._answers.require_all_given()
            self._compute_next(self._rejoining.part)

    def step_ends(self) -> None:
        """An iteration was computed."""
        self._log.continue_generation(self._driver.session.generation)
        self._sealed = self._log.step_ends()

    def step_begins(self, iteration: int) -> None:
        """Notes that messages belong to ``iteration`` from now on. A skipped iteration has no log."""
        since = self._tier.complete_since
        if since is not None:
            self._log.drop(since)
        self._log.step_begins(iteration)
        if self._driver.replaying is None:
            self._tier.files.forget_divergence()

    def write_log(self, secs: float) -> None:
        if self._sealed is not None:
            self._sealed.wait(secs)  # if the time is not enough, all ranks go back

    def close(self) -> None:
        """Releases ``torch.distributed``. May be called twice."""
        interception, self._interception = self._interception, None
        if interception is not None:
            interception.close()
        self._log.close()
