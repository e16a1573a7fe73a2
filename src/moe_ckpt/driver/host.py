"""What an adapter provides to the driver: its step, its plain state, and decisions that depend on its framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from moe_ckpt.driver.changes import Change
from moe_ckpt.errors import ConfigError, MoECheckpointError, UnsupportedError, state_refused
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.run_records import Finished
from moe_ckpt.interop.handover import Handover
from moe_ckpt.interop.weights import LoadedWeights
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.executing import Restored
from moe_ckpt.recovery.replay import Repeated

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

        Raises:
            UnsupportedError: This host's optimizers have state of another form.
        """
        raise UnsupportedError(
            f"state_from={path!r}: optimizers keep state of another form here than under Lightning, transformers, "
            "torchtitan and in PyTorch loops. Set weights_from= to begin from weights alone"
        )

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
