"""The batch of a simulated run, and the time of its iterations."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import above_zero, at_least, not_none, portion, whole


@dataclass(frozen=True)
class Batch:
    """The number of sequences in one optimizer step, and in one micro-batch of one pipeline."""

    sequences: int = 512
    micro_sequences: int = 32

    def __post_init__(self) -> None:
        whole("Batch", sequences=self.sequences, micro_sequences=self.micro_sequences)

    def micro_batches(self, pipelines: int) -> int:
        """Micro-batches of each pipeline (M).

        Raises:
            ConfigError: the batch does not divide.
        """
        if self.sequences % (self.micro_sequences * pipelines):
            raise ConfigError(
                f"Batch(sequences={self.sequences}, micro_sequences={self.micro_sequences}) does not divide over "
                f"{pipelines} pipelines (Parallel dp): sequences must be a multiple of micro_sequences * dp"
            )
        return self.sequences // (self.micro_sequences * pipelines)


@dataclass(frozen=True)
class Iteration:
    """One iteration without checkpointing, in seconds.

    Attributes:
        secs: The whole iteration.
        update_secs: The optimizer's update, in which tensors change and no copy may run.
        stage_secs: Forward and backward of all micro-batches of a stage without bubbles, which one stage alone needs to
            compute the iteration again from its neighbours' logs.
        drag_secs_per_byte: Slowdown of training for each byte that a rank saves, besides waits for copies: a snapshot
            is begun on the training thread, and the threads that copy and write it take time from it.
        frozen_saving: The portion of forward and backward that computes weight gradients, which frozen operators do not
            need (a third, MoEvement, section 3.5).
        boundary_bytes: Activations and their gradients that the rank that sends most sends to other pipeline stages.
    """

    secs: float
    update_secs: float = 0.0
    stage_secs: float | None = None
    frozen_saving: float = 1 / 3
    drag_secs_per_byte: float = 0.0
    boundary_bytes: float = 0.0

    def __post_init__(self) -> None:
        above_zero("Iteration", secs=self.secs, **not_none(stage_secs=self.stage_secs))
        at_least("Iteration", 0, update_secs=self.update_secs, drag_secs_per_byte=self.drag_secs_per_byte)
        at_least("Iteration", 0, boundary_bytes=self.boundary_bytes)
        portion("Iteration", frozen_saving=self.frozen_saving)
        if self.update_secs >= self.secs:
            raise ConfigError(
                f"Iteration(secs={self.secs:g}, update_secs={self.update_secs:g}): update_secs must be below secs"
            )

    @property
    def open_secs(self) -> float:
        """Time from one optimizer update to the next, in which a copy does not make training wait."""
        return self.secs - self.update_secs

    @property
    def alone_secs(self) -> float:
        """Time of an iteration of one stage by itself, with its update."""
        return self.secs if self.stage_secs is None else min(self.secs, self.stage_secs + self.update_secs)
