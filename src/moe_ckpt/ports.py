"""Protocols between the layers. An adapter implements them; engine and recovery only know these.

``TrainingState`` hides everything particular to optimizers and sharding: lazily created state, integer
or tensor step counts, DTensors, capturable flags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from moe_ckpt.core.tokens import Counts


@dataclass(frozen=True)
class TensorMeta:
    """What must be known to create a tensor that does not exist yet (lazy optimizer state)."""

    dtype: str
    global_shape: tuple[int, ...]
    on_param_device: bool = True


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the training state as a whole, whichever ranks hold it.

    key, parameter, mixes_rows: as in ``StateTensor``.
    dtype: as named in headers (``format.dtypes``).
    """

    key: str
    parameter: str
    dtype: str
    global_shape: tuple[int, ...]
    mixes_rows: bool = False


@dataclass(frozen=True)
class StateTensor:
    """This rank's part of one tensor of the training state, as a live view: never a copy.

    key: ``model/<fqn>`` or ``optim/<optimizer index>/<fqn>/<state name>``.
    parameter: fqn of the parameter it belongs to.
    local: a local block, at ``offsets`` of a tensor of ``global_shape``. A rank may hold several blocks of one.
    replicated: True when all of this rank's peers (``core.placement``) hold this same block, so that one of them
    may write it for all; False when the framework shards it and this rank holds a part.
    duplicate: True when another rank holds this same part and writes it (HSDP): read into, never written.
    on_param_device: False for state kept on the CPU though its parameter is not.
    mixes_rows: True for a parameter whose optimizer lets its rows act on one another, or may do so: no row's update can
        be repeated without the state of all. Said of the parameter itself, not of its optimizer state.
    updated_here: False for a block of a parameter whose optimizer state only other ranks hold (Megatron's distributed
        optimizer): what is stored of that state is theirs to verify and to read.
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


class TrainingState(Protocol):
    """Hands out training state as live tensors, and takes it back.

    Between two optimizer steps the tensors of ``tensors()`` do not change: that is when the engine
    copies them in the background. ``plain()`` may change at any time, so it is copied at once.
    """

    def tensors(self) -> Sequence[StateTensor]:
        """This rank's parameters and optimizer state that exists now. Called at the start of every snapshot."""
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """What existed on all ranks together when ``tensors()`` was last called, alike on every rank, each tensor once.

        The very same object as before, as long as nothing of it has changed: that is how the engine tells. Called at
        every snapshot, so it must be quick then.
        """
        ...

    def plain(self) -> Mapping[str, Any]:
        """Everything else as a tree of plain data and tensors: buffers, param groups, scalar state.

        Keys ``buffers`` {fqn: tensor}, ``optimizers`` [{"param_groups": [...], "scalars": {...}}],
        ``extra_state`` {fqn: tree}.
        """
        ...

    def require_loadable(self, plain: Mapping[str, Any], keys: Collection[str]) -> None:
        """Raise unless ``load_plain(plain)`` can follow and optimizer state is of this run's optimizers.

        Called before a restore writes anything; changes nothing. plain: what ``plain()`` gave. keys: of the stored
        tensors.
        """
        ...

    def prepare(self, wanted: Mapping[str, TensorMeta]) -> None:
        """Make optimizer state exist exactly as named by ``wanted``: create what is missing, drop the rest.

        Called once before a restore writes into ``tensors()``.
        """
        ...

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Take back what ``plain()`` gave."""
        ...


class Communicator(Protocol):
    """The few collectives that checkpointing needs, on process groups of its own.

    ``agree``, ``broadcast`` and ``share`` are called by all ranks on the training thread in the same order;
    ``gather`` and ``announce`` by all ranks on their persist threads in the same order.
    All raise ``PeerLostError``, a ``RuntimeError``, when a peer is gone or the timeout passed.
    """

    rank: int
    world_size: int

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        """Element-wise sum of ``summed`` and maximum of ``largest`` over ranks, both int64."""
        ...

    def broadcast(self, payload: bytes) -> bytes:
        """Rank 0's payload, on every rank."""
        ...

    def share(self, payload: bytes, source: int) -> bytes:
        """Rank ``source``'s payload, on every rank; what the others give does not count."""
        ...

    def gather(self, payload: bytes) -> list[bytes] | None:
        """All ranks' payloads in rank order on rank 0; None elsewhere."""
        ...

    def announce(self, payload: bytes) -> bytes:
        """Rank 0's payload, on every rank, on the persist thread."""
        ...

    def close(self) -> None:
        """Give up the process groups. No other call follows."""
        ...
