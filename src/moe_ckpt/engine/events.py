"""Events that a session sends to its observers. The session does the same with and without observers.

Observers are called on the training thread, on every rank, in the order in which they were given to the session. What
one raises ends training, so that an observer whose work may fail catches its errors itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.run_ledger import RunLedger
from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.assignment import ComputeTypes


@dataclass(frozen=True)
class Opened:
    """The store is open and the threads run. The fields stay valid as long as they do.

    Attributes:
        catalog: Of the model.
        placement: Which rank holds what.
        policy: ``Policy.describe()``.
        run_id: Of the store.
        generation: Life of the run.
        ranks: Of the job.
        ranks_per_node: Ranks that share this host's memory.
        host_memory_bytes: Budget of this rank's snapshot buffers.
        replicas: Copies that the memory of peers holds.
    """

    catalog: Catalog
    placement: Placement
    policy: Mapping[str, Any]
    run_id: str
    generation: int
    ranks: int
    ranks_per_node: int
    host_memory_bytes: int
    replicas: int = 0


@dataclass(frozen=True)
class Loaded:
    """The tensors of a checkpoint are loaded; a sparse window's other steps have yet to be computed again.

    Attributes:
        planned_unix_secs: When it was known what comes from where; None if nobody noted it.
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
        nbytes: That this rank writes of it.
        layout_changes: How often the set of tensors was another one than before (``Layout.changes``).
        specs: The tensors of all ranks.
        compute_types: What kernels read of the parameters.
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
    """An optimizer step is done, and what it called for has begun.

    Attributes:
        record: Of the step.
        final_at: ``time.perf_counter`` of the moment when its state was final.
        loaded: A snapshot was under way during the step.
        measured: What the ranks measured.
        run_ledger: The session's; later calls of it change them.
        specs: Gives the tensors of all ranks.
    """

    record: StepRecord
    final_at: float
    loaded: bool
    measured: Measured
    run_ledger: RunLedger
    specs: Callable[[], Sequence[TensorSpec]]


@dataclass(frozen=True)
class StepReplayed:
    """A step of a sparse window was computed again, and nothing saved at it. For attributes see ``StepEnded``."""

    record: StepRecord
    run_ledger: RunLedger


@dataclass(frozen=True)
class TrainingEnded:
    """Training ended.

    Attributes:
        record: The newest, with all that the ranks had still to agree on.
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


def all_of(observers: Sequence[Observer]) -> Observer:
    """Returns one observer that sends every event to all of them."""

    def tell(event: SessionEvent) -> None:
        for observer in observers:
            observer(event)

    return tell
