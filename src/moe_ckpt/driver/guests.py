"""Features that a run may do without, as the driver sees them. An adapter makes one where a policy or option asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.driver.states import Moment
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import GradientRecord
from moe_ckpt.reading.memory.memory_checkpoints import MemoryCheckpoints
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.recovery.executing import AlongLog, Opener, Recovery, Restored
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.run_ledger import RunLedger
from moe_ckpt.session.session import CheckpointSession

Plain = Mapping[str, Any]
"""A rank's plain state."""


class CapacityBoost(Protocol):
    """Gives experts that came back stale more tokens for a while."""

    def begin(
        self, plain: Plain, fault: FaultRecord, run_ledger: RunLedger, manifest: Manifest, reader: StoreReader | None
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

    def captured(self) -> Plain:
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
