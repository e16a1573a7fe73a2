"""Protocols between the layers. An adapter implements them; engine and recovery only know these.

``TrainingState`` hides everything particular to optimizers and sharding: lazily created state, integer
or tensor step counts, DTensors, capturable flags.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt
    import torch

    from moe_ckpt.core.tokens import Counts


@dataclass(frozen=True)
class TensorMeta:
    """Describes a tensor that does not exist yet (lazy optimizer state) as far as creating it needs."""

    dtype: str
    global_shape: tuple[int, ...]
    on_param_device: bool = True


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the training state as a whole, whichever ranks hold it.

    Attributes:
        key, parameter, mixes_rows: As in ``StateTensor``.
        dtype: As named in headers (``format.shard``).
        gradient: Of a parameter, the type in which its optimizer consumes gradients; None where none updates it.
    """

    key: str
    parameter: str
    dtype: str
    global_shape: tuple[int, ...]
    mixes_rows: bool = False
    gradient: str | None = None


@dataclass(frozen=True)
class StateTensor:
    """This rank's part of one tensor of the training state, as a live view: never a copy.

    Attributes:
        key: ``model/<fqn>`` or ``optim/<optimizer index>/<fqn>/<state name>``.
        parameter: Fqn of the parameter it belongs to.
        local: A local block, at ``offsets`` of a tensor of ``global_shape``. A rank may hold several blocks of one.
        replicated: True when all of this rank's peers (``core.placement``) hold this same block, so that one of them
            may write it for all; False when the framework shards it and this rank holds a part.
        duplicate: True when another rank holds this same part and writes it (HSDP): read into, never written.
        writer: Of a duplicate, the rank that writes it, where this one knows.
        on_param_device: False for state kept on the CPU though its parameter is not.
        mixes_rows: True for a parameter whose optimizer lets its rows act on one another, or may do so: no row's update
            can be repeated without the state of all. Said of the parameter itself, not of its optimizer state.
        stored: Type in which it is saved, as named in headers, if another than its own, which loses nothing.
        updated_here: False for a block of a parameter whose optimizer state only other ranks hold (Megatron's
            distributed optimizer): what is stored of that state is theirs to verify and to read.
    """

    key: str
    parameter: str
    local: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    replicated: bool = True
    on_param_device: bool = True
    duplicate: bool = False
    mixes_rows: bool = False
    updated_here: bool = True
    writer: int | None = None
    stored: str | None = None

    def with_local(self, local: torch.Tensor) -> StateTensor:
        """Returns the same of another block in memory. ``dataclasses.replace`` takes 5 times as long."""
        other = object.__new__(StateTensor)
        other.__dict__.update(self.__dict__, local=local)
        return other


@dataclass(frozen=True, eq=False)
class Reading:
    """Names the tensors that are read next.

    Attributes:
        tensors: What ``TrainingState.tensors`` gave.
        places: Of those in it.
    """

    tensors: Sequence[StateTensor]
    places: npt.NDArray[np.int64]


class TrainingState(Protocol):
    """Hands out training state as live tensors, and takes it back.

    Between two optimizer steps the tensors of ``tensors()`` do not change: that is when the engine
    copies them in the background. ``plain()`` may change at any time, so it is copied at once.
    """

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> Sequence[StateTensor]:
        """This rank's parameters and optimizer state that exists now. Called at the start of every snapshot.

        The very same object as before, as long as the tensors exist, belong together and lie in memory as they did. So
        whoever has prepared something for them compares one object. A repeated call must be quick: it may compare, at
        the speed of built-in functions, but not describe.

        Args:
            of: Those that are read next: the others exist all the same, but where they lie may not have been looked at,
                unless they are of the same parameters. None if all are read, as they are where ``of`` is about other
                tensors than there are now.
            listed: The last call was of this very moment, so that which tensors there are need not be looked at again.
        """

    def specs(self) -> Sequence[TensorSpec]:
        """Lists the tensors of all ranks when ``tensors()`` was last called, alike on every rank, each tensor once.

        The very same object as before, as long as nothing of it has changed: that is how the engine tells. Another
        ``tensors()`` may well have the same ``specs()``. Called at every snapshot, so it must be quick then.
        """

    def plain(self, *, described: bool = False) -> Mapping[str, Any]:
        """Everything else as a tree of plain data and tensors: buffers, param groups, scalar state.

        Args:
            described: ``tensors()`` was called just before, so that what there is need not be looked for again.
                (Looking takes the training thread 20 ms for 25 000 modules.)

        Keys ``buffers`` {fqn: tensor}, ``optimizers`` [{"param_groups": [...], "scalars": {...}}],
        ``extra_state`` {fqn: tree}, and where there are any ``aliases`` {further name: name} of what is shared, and
        ``unsliced``, what no slice can hold (``format.contents``). Long lists that stay the same (names of parameters)
        are ``format.sealed.FixedStrings``, so that they are encoded once. Called at every snapshot: of the parameters
        it may compare, as ``tensors()``, what they are, but not describe them.
        """

    @property
    def buffers(self) -> Collection[str]:
        """Returns names of buffers in the plain state that under another layout other ranks may hold."""

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """Raise unless ``load_plain(plain)`` can follow and optimizer state is of this run's optimizers.

        Called before a restore writes anything; changes nothing.

        Args:
            plain: What ``plain()`` gave.
        """

    def prepare(self, stored: Mapping[str, TensorMeta]) -> None:
        """Make optimizer state exist exactly as named by ``stored``: create what is missing, drop the rest.

        Called once before a restore writes into ``tensors()``.
        """

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Take back what ``plain()`` gave."""


@dataclass(frozen=True)
class StepGradients:
    """Holds the gradients that the optimizers of this rank consumed in one step.

    Attributes:
        tensors: Live gradients; key ``grad/<optimizer index>/<fqn>``, the rest as of the block that was updated.
        plain: The updates, and the step counts after them, as a tree of plain data and tensors.
        changed: Names of parameters that something else has written to, as ``GradientRecord.edited`` tells.
    """

    tensors: Sequence[StateTensor]
    plain: Mapping[str, Any]
    changed: tuple[str, ...]


class GradientRecord(Protocol):
    """Remembers what optimizers consume, for a policy that logs gradients. For the training thread only."""

    def step(self, tensors: Sequence[StateTensor]) -> StepGradients:
        """Returns the gradients consumed since ``forget``, by updates that have been made.

        Args:
            tensors: Of ``TrainingState``.
        """

    def edited(self, step: int) -> bool:
        """Returns whether something else than an optimizer has written to what ``step``, which ends, updated.

        To weights, optimizer state or consumed gradients, since ``forget``. The step does not follow from gradients
        then, which is said to the user.
        """

    def forget(self) -> None:
        """The step was taken in: what it consumed is kept only by whoever copies it."""


class GatedTransfer(Protocol):
    """One copy, or one send, that goes chunk by chunk, when it may. On one thread.

    Attributes:
        held_secs: How long it was held back so far.
        chunk_nbytes: The most that go at a time.
    """

    held_secs: float
    chunk_nbytes: int

    def admit(self, nbytes: int) -> torch.cuda.Event | None:
        """Return when that many more bytes may go.

        Returns:
            What a device must wait for before they do.
        """

    def moved(self, secs: float) -> None:
        """Takes in how long a copy took, but for the time that it was held back."""


class TransferGate(Protocol):
    """Holds copies and sends back until they disturb training least.

    Attributes:
        bubble_nbytes: That went while this rank was idle.
        beside_nbytes: That went beside compute.
    """

    @property
    def bubble_nbytes(self) -> int: ...

    @property
    def beside_nbytes(self) -> int: ...

    def step_begins(self) -> None:
        """An iteration begins, of which nothing was computed yet. Harmless when it has begun."""

    def update_begins(self) -> None:
        """The update is next: what is still to be copied goes now."""

    def release(self) -> None:
        """Training waits, or ends: nothing is held back until the next iteration begins."""

    def copy(self, nbytes: int) -> GatedTransfer:
        """Returns the transfer of a copy, which must end before the next update."""

    def send(self, nbytes: int, bytes_per_sec: float | None, most_secs: float) -> GatedTransfer:
        """Returns the transfer of a send, which should end within an iteration's time.

        Args:
            bytes_per_sec: As measured; None: not yet.
            most_secs: Longest that is held back.
        """


class Communicator(Protocol):
    """The few collectives that checkpointing needs, on process groups of its own.

    ``agree``, ``start_agreement`` and ``broadcast`` are called by all ranks on the training thread in the same order;
    ``combine`` and ``announce`` by all ranks on their persist threads in the same order.
    All raise ``PeerLostError``, a ``RuntimeError``, when a peer is gone or the timeout passed.
    """

    rank: int
    world_size: int
    agrees_late: bool
    """Agreements take messages, or wait for a device: what one started at the end of a step says is used at the end of
    the next."""

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        """Element-wise sum of ``summed`` and maximum of ``largest`` over ranks, both int64."""

    def start_agreement(self, summed: Callable[[], Counts], largest: Counts) -> Future[tuple[Counts, Counts]]:
        """The same in the background, of arrays of the same shapes on all ranks: nobody waits before ``result()``.

        Args:
            summed: Gives the array, and may wait for a device: called on another thread if agreements are late.
            largest: The array.
        """

    def broadcast(self, payload: bytes, source: int = 0) -> bytes:
        """Rank ``source``'s payload, on every rank; what the others give does not count."""

    def combine(self, columns: Sequence[bytes]) -> list[bytes] | None:
        """All ranks' columns on rank 0, each joined in rank order; None elsewhere. All give as many."""

    def announce(self, payload: bytes) -> bytes:
        """Rank 0's payload, on every rank, on the persist thread."""

    def everyone(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, on every rank, in O(log R) messages of each. On the training thread, by all."""

    def swap(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Send uint8 tensors to ranks, and fill others with what ranks send, in order. On the training thread.

        By those that send or receive something; others may. What rank r gives to rank s must have the sizes that s
        expects of r, and each rank must take part in what concerns it in the same order.
        """

    def enter(self, generation: int) -> None:
        """From here on every message belongs to this life of the run, and one of another life is refused."""

    def abort(self, cause: str) -> None:
        """Nobody waits for peers any more: calls under way and later ones raise ``PeerLostError``. On any thread."""

    def close(self) -> None:
        """Give up the process groups. No other call follows."""
