"""The record of each step, and the events that a session sends to its observers. Observers do not change what it does.

Observers are called on the training thread, on every rank, in their order. An error of an observer ends training, so
that one whose work may fail catches its errors itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import TensorSpec
from moe_ckpt.run.run_ledger import RunLedger
from moe_ckpt.slices.assignment import ComputeTypes

if TYPE_CHECKING:
    from moe_ckpt.run.context import RunContext


@dataclass(frozen=True)
class StepRecord:
    """The record of checkpointing at one step, with the token counts and PLT of that step. Bytes are tensor bytes of
    this rank.

    On several ranks the counts of a step are exchanged while the next one is computed, so tokens, PLT and committed
    checkpoints are those of the step before; after the end of training the newest record is complete.

    Attributes:
        step: Optimizer step.
        begun: A snapshot began.
        skipped: A snapshot was due, but was left out because earlier ones were still being written.
        waited: Training waited for earlier snapshots, because no buffer was free on this rank.
        skips: Checkpoints left out since this start of the run because earlier ones were still being written: those
            ``skipped``, and those that were due on storage and stayed in memory. A window counts once, at its first
            step.
        waits: Snapshots that training waited for since this start of the run.
        nbytes: Tensor bytes that go to storage.
        experts_saved: Experts that go to storage, of all ranks.
        k: Experts per layer that the policy sends to storage, if it has such a number.
        plt_budget_left: The rest of the policy's PLT budget, if it has one.
        oldest_expert_steps: Age in steps of the newest committed copy of an expert, of the expert whose copy is oldest.
        stall_secs: Time that checkpointing kept the training thread since the last record: waits, copies that it makes
            itself, Python, metrics and loggers, in every hook of the trainer, the optimizers and the model's layers.
            Not in it: ``agree_secs``, kernels that were queued on a device or compiled into the model, and what threads
            beside training take from it. 0 for a step that is ``replayed``.
        agree_secs: Time that training waited for the ranks' agreement on the step before; near 0 unless a rank is slow,
            for which the next gradient reduction would have waited instead, so that it is not counted as a stall.
        plt: Proportion of lost tokens.
        at_risk_plt: PLT if the run failed now and resumed from the newest committed step. Logged as the metric
            ``plt_if_failed_now``.
        at_risk_mlt: MLT of such a recovery (``core.tokens.tokens_at_risk``). Logged as the metric
            ``mlt_if_failed_now``.
        mlt_newest: MLT of the run's newest recovery; None before the first.
        mlt_worst: The highest MLT of a recovery of the run so far; None as before.
        lost_tokens: Lost in all recoveries of the run.
        owed_tokens: Lost tokens that boosted experts must still make up; None without a capacity boost in this process.
        routed_tokens: Token assignments whose update ran, of all ranks, since the run began.
        committed_step: Newest committed step; None before the first.
        failed_checkpoints: Checkpoints that failed since this start of the run.
        frozen_nbytes: The part of ``nbytes`` that is saved at compute fidelity only (sparse windows).
        window: Size W of the sparse window that this step belongs to; 0 without one.
        slot: The step's place in its window.
        replayed: This step was computed again to restore a window; nothing is saved at it.
        to_storage: The snapshot goes to storage, not only into memory.
        memory_step: Newest checkpoint that every rank has in memory that outlives the process; None without one.
        memory_nbytes: Bytes that this rank has there, copies of peers included.
        replica_lag_steps: Steps by which this rank's copies on peers are behind.
        replica_sent_nbytes: Bytes sent to peers since this start of the run.
        replica_saved_nbytes: Bytes of the copies on peers that were not sent, because the peers hold the same training
            state.
        gradient_factor: Bytes of this step's operators for peers and storage in full, over their bytes in the snapshot,
            for the whole model; None if the snapshot has no gradients in place of full state.
        bubble_nbytes: Bytes copied or sent to peers, since this start of the run, while the pipeline schedule left this
            rank idle; 0 if copies do not wait for that (``bubbles``).
        beside_nbytes: The same at all other times, mostly during compute.
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
    at_risk_mlt: float = 0.0
    mlt_newest: float | None = None
    mlt_worst: float | None = None
    lost_tokens: int = 0
    owed_tokens: int | None = None
    routed_tokens: int = 0
    committed_step: int | None = None
    failed_checkpoints: int = 0
    frozen_nbytes: int = 0
    window: int = 0
    slot: int = 0
    replayed: bool = False
    to_storage: bool = False
    memory_step: int | None = None
    memory_nbytes: int = 0
    replica_lag_steps: int = 0
    replica_sent_nbytes: int = 0
    replica_saved_nbytes: int = 0
    gradient_factor: float | None = None
    bubble_nbytes: int = 0
    beside_nbytes: int = 0

    @property
    def window_age(self) -> int | None:
        """Steps since the newest complete window's last step, or the newest checkpoint; None before the first."""
        return None if self.committed_step is None else self.step - self.committed_step


@dataclass(frozen=True)
class Opened:
    """The store is open and the threads run. The fields are valid until ``Closed``.

    Attributes:
        run: Context of the session.
        run_id: Of the store.
        generation: Life of the run.
        host_memory_bytes: Budget of this rank's snapshot buffers.
    """

    run: RunContext
    run_id: str
    generation: int
    host_memory_bytes: int


@dataclass(frozen=True)
class Loaded:
    """The tensors of a checkpoint are loaded; a sparse window's other steps have yet to be computed again.

    Attributes:
        planned_unix_secs: Time at which the recovery plan was made; None if it was not noted.
    """

    planned_unix_secs: float | None = None


@dataclass(frozen=True)
class Resumed:
    """The state of ``step`` is in place: loaded, or computed again."""

    step: int


@dataclass(frozen=True)
class TrainingBegins:
    """The state is complete, and training is about to enter its loop."""


@dataclass(frozen=True)
class Joined:
    """The optimizer may change tensors from ``now`` (``time.perf_counter``) on."""

    now: float


@dataclass(frozen=True)
class SnapshotBegan:
    """A snapshot began.

    Attributes:
        nbytes: Bytes that this rank writes.
        layout_changes: How often the set of tensors has changed (``LiveState.changes``).
        specs: The tensors of all ranks.
        compute_types: Types in which kernels read the parameters.
        held_alike: Each rank holds all training state, as under plain data parallelism.
    """

    nbytes: int
    layout_changes: int
    specs: Sequence[TensorSpec]
    compute_types: ComputeTypes
    held_alike: bool


@dataclass(frozen=True)
class SnapshotEnded:
    """A snapshot was committed, or failed."""

    committed: bool


@dataclass(frozen=True)
class StepEnded:
    """An optimizer step is done, and its snapshot has begun if one was due.

    Attributes:
        record: Of the step.
        final_at: ``time.perf_counter`` of the moment when its state was final.
        loaded: A snapshot was under way during the step.
        measured: Measurements of the ranks.
        run_ledger: Of the session, which later steps change.
    """

    record: StepRecord
    final_at: float
    loaded: bool
    measured: Measured
    run_ledger: RunLedger


@dataclass(frozen=True)
class StepReplayed:
    """A step of a sparse window was computed again, and nothing saved at it. For attributes see ``StepEnded``."""

    record: StepRecord
    run_ledger: RunLedger


@dataclass(frozen=True)
class TrainingEnded:
    """Training ended.

    Attributes:
        record: The newest, with the last agreement.
        run_ledger: See ``StepEnded``.
    """

    record: StepRecord
    run_ledger: RunLedger


@dataclass(frozen=True)
class Closed:
    """The session is over. Sent again if it is closed again.

    Attributes:
        finished: Training ended well.
    """

    finished: bool


SessionEvent = (
    Opened
    | Loaded
    | Resumed
    | TrainingBegins
    | Joined
    | SnapshotBegan
    | SnapshotEnded
    | StepEnded
    | StepReplayed
    | TrainingEnded
    | Closed
)
Observer = Callable[[SessionEvent], None]
