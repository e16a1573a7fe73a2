"""The interfaces that the driver calls: of the adapter (``Host``), and of guests.

The adapter provides its step and its plain state. Guests are features that a run may do without: an adapter makes one
if a policy or option asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

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
from moe_ckpt.run.agreement import Deferred, StepTokens, Updated
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
        """Returns the number of steps done."""

    def admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        """Raises if training cannot resume from this checkpoint (see ``recovery.executing.Admits``)."""

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        """Restores plain state, after the tensors. Random number generators may follow later.

        Returns:
            Hyperparameters that differ; and why the resumed run is inexact, None if it is exact.
        """

    def advance_counts(self, missed: Mapping[str, int]) -> None:
        """Advances step counts of optimizer state that was restored older. By default all parameters share one count.

        Args:
            missed: Parameter -> steps since its restored copy.
        """
        return

    def load_weights(self, path: str, comm: Communicator) -> LoadedWeights:
        """Loads the weights at ``path``, with which a new run begins."""

    def load_state(self, path: str, comm: Communicator, experts: Sequence[int]) -> tuple[Handover, Sequence[Change]]:
        """Loads the state of another host's run at ``path``, which this run continues. Arguments: ``load_handover``.

        Returns:
            The loaded state; and hyperparameters that differ.
        """
        raise RuntimeError("this adapter refuses state_from where it is set")

    def continue_finished(
        self, manifest: Manifest, finished: Finished, changes: Sequence[Change], plt: float
    ) -> tuple[bool, str]:
        """Decides whether a finished run that is started again goes on.

        Returns:
            Whether training goes on; and a text to append to the message about the resume.

        Raises:
            ConfigError: Training must not go on.
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
        """Counts an update that the loop has not counted yet, when training stops after it.

        Returns:
            Whether the adapter could; by default it cannot.
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
    """Turns errors of a foreign object's ``load_state_dict`` in the block into ``StoreError``, but not our own errors.

    Args:
        what: The object.
        path: Of the state file.
        advice: What to do, if not to restore the run's configuration.
    """
    try:
        yield
    except _REFUSALS as error:
        if isinstance(error, MoECheckpointError):
            raise
        raise state_refused(path, what, f"{type(error).__name__}: {error}".removesuffix(": "), advice) from error


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
            plain: This rank's plain state in the checkpoint; on another number of ranks, that of another rank.
            fault: The tokens that the loaded experts lack, as the session booked them.
            run_ledger: Gets the tokens to make up, ``deficit``.
            manifest: Of the checkpoint.
            reader: Of its store; None if storage does not have it.
        """

    def step_ends(self, tokens: Deferred[StepTokens], *, updated: Updated) -> Deferred[StepTokens]:
        """Returns ``tokens`` with those still to make up, if any rank has any. Before the plain state is captured.

        Args:
            tokens: Of this rank, in this step.
            updated: Whether weights changed, so that the tokens count.
        """

    def discard(self) -> None:
        """Discards the tokens counted since the last step, which led to no update."""

    def captured(self) -> Mapping[str, Any]:
        """Returns the boost's entries of this rank's plain state, also after ``close``."""

    def close(self) -> None:
        """Detaches from the routers. Safe to call twice."""


class GradientLogging(GradientRecord, Protocol):
    """Logs the gradients that optimizers consume, and repeats the updates of such a log after a failure."""

    def begin(self) -> None:
        """Begins to record updates."""

    def copies_written(self) -> None:
        """Notes that the optimizers have copied master weights into the model's weights."""

    def along(self, recovery: Recovery, opened: OpenedMemory) -> AlongLog:
        """Begins the return to a step of a log in memory, whatever the policy of this run.

        Args:
            recovery: The recovery under way.
            opened: The step.
        """

    def close(self) -> None:
        """Removes all hooks. Safe to call twice."""


class LocalizedRecovery(Protocol):
    """Lets only the ranks that lost something in a failure go back to an older step."""

    def open(self, session: CheckpointSession) -> None:
        """Begins to log messages between pipeline stages, once the session is open.

        Raises:
            ConfigError: There is no memory that outlives the process.
        """

    def attempt(self, recovery: Recovery, memory: MemoryCheckpoints) -> Callable[[str, Opener | None], Restored | None]:
        """See ``recovery.resume.InPart``."""

    def rejoin(self, joined: Restored) -> None:
        """Notes that only some ranks go back. The session goes on from ``joined`` when they have reached its step."""

    def step_computed(self) -> None:
        """Notes that this rank has computed a step of a replay again, before that counts as repeated.

        Raises:
            ReplayDivergedError: A message that was received the first time was not needed now.
        """

    def step_replayed(self, tokens: Deferred[StepTokens], *, last: bool) -> None:
        """Notes that this rank, which went back, has computed a step again.

        Args:
            tokens: Of this rank in that step.
            last: It was the last step to compute again.

        Raises:
            PeerLostError: Another rank is gone.
        """

    def diverged(self) -> None:
        """Notes that a step that this rank computed again differs: at the next start all ranks go back."""

    def write_log(self, secs: float) -> None:
        """Waits up to ``secs`` until the log of the newest step is written, when training stops."""


class SealingSurvivors(Protocol):
    """Seals the newest step in memory that outlives the process, when training stops at a failure."""

    def begin(self) -> None:
        """Begins to handle SIGTERM, when training begins."""

    def end(self) -> None:
        """Stops handling SIGTERM, when training is about to end."""

    def enter(self, moment: Moment) -> None:
        """Sets the moment of the iteration. On the training thread, which waits while another thread seals the step."""

    def joining(self, *, update: bool) -> AbstractContextManager[None]:
        """Encloses the join of the copy under way, after which weights may change.

        Args:
            update: The optimizer is about to change them.
        """

    def booking(self, *, ended: bool = True) -> AbstractContextManager[None]:
        """Encloses work of the session.

        Args:
            ended: A step is final after the block; else the block is between two steps.
        """

    def survive(self, why: str, patience_secs: float = 0.0) -> None:
        """Seals the newest step, once, when training stops. Never raises. On any thread.

        Args:
            why: Why training stops, for messages.
            patience_secs: The longest wait for a step that is under way on another thread.
        """
