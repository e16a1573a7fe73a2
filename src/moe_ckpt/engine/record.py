"""What checkpointing tells of one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """What checkpointing did at one step. Bytes are this rank's tensor bytes.

    begun, skipped: a snapshot began, or was due but dropped because earlier ones were still being written.
    waited: training waited for earlier snapshots, because no buffer was free on this rank.
    skips, waits: how often either happened so far in this life of the run.
    k: experts per layer that the policy sends to storage, where it counts them so.
    plt_budget_left: what of the policy's PLT budget is left, if it has one.
    oldest_expert_steps: steps since the state of the expert whose newest committed copy is the oldest.
    stall_secs: time that training waited for checkpointing since the last record.
    agree_secs: time in the ranks' agreement. Nearly all of it is waiting for the slowest rank, which the
        next gradient reduction would have waited for instead, so it is not counted as a stall.
    at_risk_plt: PLT if the run failed now and came back to the newest committed step.
    committed_step: newest committed step, None before the first.
    frozen_nbytes: of ``nbytes``, what is saved at compute fidelity only (sparse windows).
    window, slot: size W of the sparse window that this step belongs to, 0 without one, and its place in it.
    replayed: this step was computed again to bring a window back; nothing is saved at it.
    """

    step: int
    begun: bool = False
    skipped: bool = False
    waited: bool = False
    skips: int = 0
    waits: int = 0
    nbytes: int = 0
    experts_saved: int = 0
    k: int | None = None
    plt_budget_left: float | None = None
    oldest_expert_steps: int = 0
    stall_secs: float = 0.0
    agree_secs: float = 0.0
    plt: float = 0.0
    at_risk_plt: float = 0.0
    lost_tokens: int = 0
    routed_tokens: int = 0
    committed_step: int | None = None
    failed_checkpoints: int = 0
    halt: str | None = None
    frozen_nbytes: int = 0
    window: int = 0
    slot: int = 0
    replayed: bool = False
