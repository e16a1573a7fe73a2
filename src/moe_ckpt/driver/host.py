"""What the driver sees of others: the adapter, which provides its step and its plain state, and guests, which are
features that a run may do without. An adapter makes one where a policy or option asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.driver.changes import Change
from moe_ckpt.driver.states import Moment
from moe_ckpt.errors import ConfigError, MoECheckpointError, state_refused
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.run_records import Finished
from moe_ckpt.interop.handover import Handover
from moe_ckpt.interop.weights import LoadedWeights
from moe_ckpt.ports import Communicator, GradientRecord
from moe_ckpt.reading.memory.memory_checkpoints import MemoryCheckpoints
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.recovery.executing import AlongLog, Opener, Recovery, Restored
from moe_ckpt.recovery.replay import Repeated
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.run_ledger import RunLedger
from moe_ckpt.session.session import CheckpointSession

_REFUSALS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError)


class Stateful(Protocol):
    """An object that is saved beside model and optimizers: a scheduler, a data loader, a gradient scaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class End(NamedTuple):
    """End of training; see ``format.run_records.Finished``."""

    reason: str
    limits: Mapping[str, int] = {}
    callbacks: Mapping[str, Any] = {}


class Host(Protocol):
    """Interface that an adapter provides. Called alike on all ranks, on the training thread.

    Attributes:
        unit: What the framework calls a step.
    """

    unit: str = "step"

    @property
    def step(self) -> int:
        """Steps done."""

    def admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        """Raises if training cannot resume from this checkpoint (see ``recovery.executing.Admits``)."""

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        """Restores plain state, after the tensors. Random number generators may follow later.

        Returns:
            Hyperparameters that differ; and why the resumed run is inexact, if it is.
        """

    def advance_counts(self, missed: Mapping[str, int]) -> None:
        """Experts came back older: step counts of their optimizer state go on. By default all have one count.

        Args:
            missed: Parameter -> steps since.
        """
        return

    def load_weights(self, path: str, comm: Communicator) -> LoadedWeights:
        """Loads the weights at ``path``, which a new run begins with."""

    def load_state(self, path: str, comm: Communicator, experts: Sequence[int]) -> tuple[Handover, Sequence[Change]]:
        """Loads the state at ``path`` of another host's run, which this one continues. Arguments: ``load_handover``.

        Returns:
            What was loaded; and hyperparameters that differ.
        """
        raise RuntimeError("this adapter refuses state_from where it is set")

    def go_on_from_end(
        self, manifest: Manifest, finished: Finished, changes: Sequence[Change], plt: float
    ) -> tuple[bool, str]:
        """Decides on the start of a finished run.

        Returns:
            Whether training goes on; and what to add to the message about the resume.

        Raises:
            ConfigError: It must not go on.
        """

    def repeated(self, before: Mapping[str, Any], recorded: Mapping[str, Any]) -> Iterable[Repeated]:
        """Returns the parts of the plain state that a replayed step must repeat (see ``recovery.replay``)."""

    def capture(self, *, described: bool = False) -> Mapping[str, Any]:
        """Returns this rank's plain state.

        Args:
            described: As of ``ports.TrainingState.plain``.
        """

    def end(self) -> End | None:
        """Returns how training ended; None if the next start continues it. Called on rank 0."""

    def count_update(self) -> bool:
        """Training stops after an update that the loop has not counted: counts it as the loop would have.

        Returns:
            Whether it could; by default it cannot.
        """
        return False


def require_framework(plain: Mapping[str, Any], framework: str, path: str) -> None:
    """Raises ``ConfigError`` if the plain state at ``path`` is of another framework than this adapter's."""
    if plain.get("framework") != framework.lower():
        raise ConfigError(
            f"{path} was written by {plain.get('framework')!r}, not by {framework}, so its loops cannot be resumed "
            "here. Choose another dirpath and set state_from= to this store, which takes the state of model and "
            "optimizers over (from and to Megatron weights_from=, the weights)"
        )


@contextmanager
def loading_state(what: str, path: str, advice: str = "") -> Iterator[None]:
    """The block calls ``load_state_dict`` of a foreign object: its errors become ``StoreError``. Ours pass.

    Args:
        what: Whose state it is.
        path: Of the state file.
        advice: What to do, if not to restore the run's configuration.
    """
    try:
        yield
    except _REFUSALS as error:
        if isinstance(error, MoECheckpointError):
            raise
        raise state_refused(path, what, f"{type(error).__name__}: {error}", advice) from error


# --- guests ---


class CapacityBoost(Protocol):
    """Gives experts that came back stale more tokens for a while."""

    def begin(
        self,
        plain: Mapping[str, Any],
        fault: FaultRecord,
        run_ledger: RunLedger,
        manifest: Manifest,
        reader: StoreReader | None,
    ) -> None:
        """Continues the boosts of a checkpoint, and begins those of experts that came back stale.

        A collective of all ranks, after the checkpoint was booked.

        Args:
            plain: This rank's plain state in the checkpoint, or the one that stands in for it.
            fault: What the session booked: tokens that the loaded experts lack.
            run_ledger: Gets the tokens to make up, ``deficit``.
            manifest: Of the checkpoint.
            reader: Of its store; None if storage does not have it.
        """

    def step_ends(self, tokens: Deferred[StepTokens], *, applied: bool) -> Deferred[StepTokens]:
        """Returns ``tokens`` with those still to make up, if any rank has any. Before the plain state is captured.

        Args:
            tokens: Of this rank, in this step.
            applied: They count: the update was made.
        """

    def discard(self) -> None:
        """Discards the tokens counted since the last step, which led to no update."""

    def captured(self) -> Mapping[str, Any]:
        """Returns what belongs into this rank's plain state, also after ``close``."""

    def close(self) -> None:
        """Detaches from the routers. Safe to call twice."""


class GradientLogging(GradientRecord, Protocol):
    """Logs the gradients that optimizers consume, and repeats the updates of such a log after a failure."""

    def begin(self) -> None:
        """Training begins: from here on updates are recorded."""

    def copies_written(self) -> None:
        """Notes that the weights which follow those that optimizers update are as they should be."""

    def along(self, recovery: Recovery, opened: OpenedMemory, catalog: Catalog) -> AlongLog:
        """Begins the return to a step of a log in memory, whatever the policy of this run.

        Args:
            recovery: What returns.
            opened: The step.
            catalog: Of the whole model.
        """

    def close(self) -> None:
        """Removes all hooks. Safe to call twice."""


class LocalizedRecovery(Protocol):
    """Lets only those ranks go back after a failure that lost something."""

    def open(self, session: CheckpointSession) -> None:
        """Begins to log what crosses boundaries, once the session is open.

        Raises:
            ConfigError: There is no memory that outlives the process.
        """

    def attempt(self, recovery: Recovery, memory: MemoryCheckpoints) -> Callable[[str, Opener | None], Restored | None]:
        """See ``recovery.resume.InPart``."""

    def rejoin(self, joined: Restored) -> None:
        """Only some ranks go back. The session goes on from ``joined`` when they have come to its step."""

    def step_replayed(self, tokens: Deferred[StepTokens], *, last: bool) -> None:
        """A rank that goes back has computed a step again.

        Args:
            tokens: Of this rank in that step.
            last: It was the last one.

        Raises:
            PeerLostError: Another rank is gone.
        """

    def diverged(self) -> None:
        """A step that this rank computed again is not what it was: at the next start all ranks go back."""

    def write_log(self, secs: float) -> None:
        """Training stops: waits up to ``secs`` until the log of the newest step is written."""


class SealingSurvivors(Protocol):
    """Seals the newest step in memory that outlives the process, when training stops at a failure."""

    def begin(self) -> None:
        """Training begins: handles SIGTERM from here on."""

    def end(self) -> None:
        """Training is over, or about to be: leaves SIGTERM to others."""

    def enter(self, moment: Moment) -> None:
        """The iteration comes to ``moment``. On the training thread, which waits while another one seals the step."""

    def joining(self, *, update: bool) -> AbstractContextManager[None]:
        """The block joins the copy under way; after it, weights may change.

        Args:
            update: The optimizer is about to change them.
        """

    def booking(self, *, ended: bool = True) -> AbstractContextManager[None]:
        """The session is at work in the block.

        Args:
            ended: A step is final with it; else it is between two steps.
        """

    def survive(self, why: str, patience_secs: float = 0.0) -> None:
        """Training stops: seals the newest step, once. Never raises. On any thread.

        Args:
            why: For messages.
            patience_secs: The longest wait for a step that is under way on another thread.
        """
