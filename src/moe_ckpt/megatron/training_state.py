"""The training state of Megatron model chunks and their optimizer, in tensors that do not depend on the layout.

Exactly the optimizer's parameters have optimizer state, so a run resumes only with the same ones. Whether one of them
requires gradients is state, too, which is restored: a script may let some rest during training.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ckpt.errors import ConfigError
from moe_ckpt.format.sealed import FixedStrings
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.interop import weights
from moe_ckpt.megatron import optimizers
from moe_ckpt.megatron.blocks import BlockPart, Placed, placed_blocks
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.megatron.inventory import LiveParameter, ModelInventory
from moe_ckpt.megatron.optimizers import MASTER, StateSlot, make_state, slots, state_tensors
from moe_ckpt.megatron.world import Block, HeldTensor, Holding, World, exchange, natural_sort_key
from moe_ckpt.modeling.module_state import Frozen, freeze
from moe_ckpt.modeling.optimizer_state import STEP
from moe_ckpt.modeling.watching import Entries, TensorAddresses
from moe_ckpt.ports import Communicator, Reading, StateTensor, TensorMeta, TensorSpec
from moe_ckpt.reading.index import split_key

FROZEN = "frozen"
"""Key in the plain state: names of all of the model's parameters that the optimizer does not have. The name of an
expert's parameter with ``*`` for its number stands for all experts of the layer."""
RESTING = "resting"
"""Key in the plain state: names of this rank's parameters that the optimizer has, and that require no gradient now."""
_SHOWN = 3
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Trained:
    """The parameters that this rank's optimizer has.

    Args:
        parameters: All of this rank's.
        updated: Those that the optimizer has.
        tensors: The model's, those of other ranks included.
    """

    def __init__(
        self,
        parameters: Iterable[LiveParameter],
        updated: Collection[nn.Parameter],
        tensors: Mapping[str, HeldTensor],
    ) -> None:
        self._updated = {live.parts[0].name: live.parameter for live in parameters if live.parameter in updated}
        self._resting = Frozen()
        self._tensors = tensors
        self._frozen = FixedStrings(_abridged([n for n, tensor in tensors.items() if not tensor.trained], tensors))

    def read(self) -> dict[str, Any]:
        """Returns entries of the plain state."""
        return {FROZEN: self._frozen, RESTING: self.resting()}

    def resting(self) -> FixedStrings:
        """Returns the names of the parameters that rest (``RESTING``)."""
        return self._resting.names(self._updated)

    def rest(self, names: Collection[str]) -> None:
        """Makes exactly these of the optimizer's parameters (``RESTING``) require no gradient."""
        freeze(self._updated, names)

    def require_same(self, plain: Mapping[str, Any]) -> None:
        """Raises ``ConfigError``, naming parameters, unless the run that wrote ``plain`` trained the same ones."""
        frozen = set(plain[FROZEN])
        here = {name for name, tensor in self._tensors.items() if tensor.trained}
        trained_then = {name for name in self._tensors if not frozen & {name, _of_all_experts(name)}}
        texts = [
            f"{_named(names)} {_be('was', names)} {then} in the run that wrote the checkpoint, and "
            f"{_be('is', names)} {now} now"
            for names, then, now in (
                (trained_then - here, "trained", "frozen"),
                (here - trained_then, "frozen", "trained"),
            )
            if names
        ]
        if texts:
            raise ConfigError(
                f"{'; '.join(texts)}. What is trained needs its optimizer state, so nothing was loaded. To continue "
                "that run, set requires_grad as it was before the optimizer is made. To train other parameters from "
                "its weights, set another dirpath, and set weights_from= to the store, a step directory or an exported "
                "file."
            )


def _of_all_experts(name: str) -> str:
    return _EXPERT.sub(".experts.*.", name)


def _abridged(names: Collection[str], every: Iterable[str]) -> list[str]:
    """Returns ``names``, abridged by ``_of_all_experts`` where they have all experts: each state file has them.

    Args:
        names: Some of ``every``.
        every: All names.
    """
    chosen, whole = set(names), Counter(map(_of_all_experts, every))
    whole.subtract(map(_of_all_experts, chosen))
    return list(dict.fromkeys(name if whole[short := _of_all_experts(name)] else short for name in names))


def _named(names: Collection[str]) -> str:
    first = sorted(names, key=natural_sort_key)[:_SHOWN]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return ", ".join(first) + more


def _be(verb: str, names: Collection[str]) -> str:
    return verb if len(names) == 1 else {"was": "were", "is": "are"}[verb]


class MegatronTrainingState:
    """``ports.TrainingState`` of one rank. To construct it is a collective of the training thread.

    A parameter gives one tensor per operator in it. The range that the distributed optimizer updates on this rank is
    written by this rank, weights included. Other ranks' shares of the weights may still be under way when training
    goes on (``overlap_param_gather``), so they are only read into. State that no optimizer shards is written by one of
    its holders: dense state by all data-parallel ranks together, an expert by its owner.

    Args:
        inventory: Of this rank's chunks.
        optimizer: Megatron's; None if only weights and buffers will be loaded.
        comm: Of all ranks.

    Raises:
        ConfigError: The optimizer updates parameters that are not in the inventory; or ranks hold different models.
        CoverageError: The ranks together do not hold the model.

    Attributes:
        world: What all ranks hold.
        dense_peers: Ranks that share this rank's dense parameters by data parallelism, ascending.
        expert_peers: Ranks that share its experts, ascending.
        trained: The parameters that the optimizer has.
    """

    def __init__(self, inventory: ModelInventory, optimizer: Any, comm: Communicator) -> None:
        self._inventory, self._optimizer, self._comm = inventory, optimizer, comm
        self._slots = slots(optimizer) if optimizer is not None else {}
        self._tensors: tuple[StateTensor, ...] = ()
        self._states: tuple[tuple[str, str], ...] = ()
        self._prepared = False
        self._views: _ShardViews | None = None
        self._specs: tuple[TensorSpec, ...] = ()
        self._specs_of: tuple[tuple[str, str], ...] | None = None
        for name, buffer in inventory.buffers.items():
            dtype_name(buffer.dtype, f"buffer {name}")
        unknown = set(self._slots) - {live.parameter for live in inventory.parameters} - inventory.unread
        if unknown:
            shapes = sorted(tuple(p.shape) for p in unknown)[:3]
            raise ConfigError(
                f"the optimizer updates {len(unknown)} parameters (of shapes {shapes}) that are in none of the model "
                "chunks: give the chunks that it was made from"
            )
        groups = megatron_core().parallel_state
        stage, expert_rank = groups.get_pipeline_model_parallel_rank(), groups.get_expert_model_parallel_rank()
        self.world = exchange(self.holding(int(stage), int(expert_rank)), comm)
        self.world.catalog  # noqa: B018  the proof comes before anything else
        peers = groups.get_data_parallel_group(with_context_parallel=True), groups.get_expert_data_parallel_group()
        self.dense_peers, self.expert_peers = (tuple(sorted(dist.get_process_group_ranks(group))) for group in peers)
        self.trained = Trained(inventory.parameters, self._slots.keys(), self.world.tensors)

    def holding(self, stage: int, expert_rank: int) -> Holding:
        """Returns what this rank holds, for the other ranks. Arguments: see ``Holding``."""
        layers = tuple((layer.name, layer.experts, layer.top_k) for layer in self._inventory.layers)
        tensors: dict[str, HeldTensor] = {}
        for live in self._inventory.parameters:
            for tensor in self._held(live):
                earlier = tensors.get(tensor.name)
                # A tied embedding is two parameters of one name where both its ends are on this rank.
                tensors[tensor.name] = tensor if earlier is None or tensor.trained else earlier
        updates = any(slot.updated is not None for slot in self._slots.values())
        return Holding(stage, layers, tuple(tensors.values()), expert_rank, updates)

    def _held(self, live: LiveParameter) -> Iterator[HeldTensor]:
        slot = self._slots.get(live.parameter)
        dtype = dtype_name(live.parameter.dtype, f"parameter {live.parts[0].name}")
        master = dtype_name(torch.float32) if slot is not None and dtype in ("BF16", "F16") else None
        for part, owner in zip(live.parts, live.owners, strict=True):
            blocks = sorted({(placed.offsets, placed.shape) for placed in placed_blocks(part, part.start, part.stop)})
            yield HeldTensor(part.name, dtype, part.global_shape, owner, slot is not None, master, blocks=tuple(blocks))

    @property
    def shards(self) -> bool:
        """Returns whether a distributed optimizer divides the state over ranks."""
        return any(slot.range is not None for slot in self._slots.values())

    @property
    def buffers(self) -> Set[str]:
        """See ``ports.TrainingState``: pipeline stages hold those of their layers."""
        return self._inventory.buffers.keys()

    def _exact_buffers(self) -> Mapping[str, torch.Tensor]:
        """Returns the buffers, in the types into which values can be written without rounding.

        ``Float16Module`` makes an expert bias 16 bits wide, and the router's first forward pass fp32 again. Values that
        are loaded in between would be rounded, so Megatron's own loading does the same as this (router.py:665).
        """
        for layer in self._inventory.layers:
            getattr(layer.router, "_maintain_float32_expert_bias", lambda: None)()
        return self._inventory.buffers

    def load_weights(self, source: str | os.PathLike[str], *, strict: bool = True) -> weights.LoadedWeights:
        """Loads weights into the model, and sets master weights from them. Raises as ``interop.weights.load_weights``.

        Args:
            source: A store, a step directory, or safetensors files.
            strict: False lets tensors be missing on either side.
        """
        loaded = weights.load_weights(source, self, self._comm, self._exact_buffers(), strict=strict)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()
        return loaded

    # --- ports.TrainingState ---

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> tuple[StateTensor, ...]:
        if self._views is None or not self._views.same(of, listed=listed):
            self._tensors = tuple(tensor for live in self._inventory.parameters for tensor in self._of(live))
            self._views = _ShardViews(self._inventory.parameters, self._slots, self._tensors)
            self._states = self._state_names()
        self._prepared = False
        return self._tensors

    def specs(self) -> Sequence[TensorSpec]:
        if self._views is None or self._prepared:
            self.tensors()
        names = self._states
        if names != self._specs_of:
            self._specs_of = names
            self._specs = tuple(_specs(self.world, names))
        return self._specs

    def plain(self, *, described: bool = False) -> dict[str, Any]:
        return {
            "buffers": dict(self._inventory.buffers),
            "optimizer": optimizers.read_plain(self._optimizer),
            "optimizer_classes": optimizers.read_classes(self._optimizer),
            **self.trained.read(),
        }

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """See ``ports.TrainingState``. ``load_plain`` compares the buffers.

        Raises:
            ConfigError: The optimizer is of another class, or has other parameters.
        """
        optimizers.require_same_kind(self._optimizer, plain)
        self.trained.require_same(plain)

    def prepare(self, stored: Mapping[str, TensorMeta]) -> None:
        """Gives all trained parameters the same kinds of state, also parameters that ``stored`` does not have now."""
        self._prepared = True
        states = ((split_key(key).state, meta.dtype) for key, meta in stored.items())
        dtypes = {state: dtype for state, dtype in states if state is not None and state != MASTER}
        for slot in self._slots.values():
            make_state(slot, dtypes)

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Loads the plain state; everything is checked before anything is changed.

        Raises:
            ConfigError: A buffer of this model is not in the checkpoint, or has another shape.
        """
        stored = plain["buffers"]
        for name, buffer in self._inventory.buffers.items():
            if name not in stored or tuple(stored[name].shape) != tuple(buffer.shape):
                difference = f"has shape {tuple(stored[name].shape)}" if name in stored else "is not"
                raise ConfigError(f"buffer {name} of shape {tuple(buffer.shape)} {difference} in the checkpoint")
        with torch.no_grad():
            for name, buffer in self._exact_buffers().items():
                buffer.copy_(stored[name])
        optimizers.write_plain(self._optimizer, plain["optimizer"])

    # --- parts ---

    def _state_names(self) -> tuple[tuple[str, str], ...]:
        """Returns (state name, dtype) of the inner optimizers' tensors now; the same for all parameters."""
        for live in self._inventory.parameters:
            slot = self._slots.get(live.parameter)
            if slot is not None and slot.updated is not None and slot.state:
                tensors = state_tensors(slot, live.parts[0].name)
                named = ((name, f"optimizer state {name!r}", value.dtype) for name, value in tensors)
                return tuple(sorted((name, dtype_name(dtype, of)) for name, of, dtype in named))
        return ()

    def _of(self, live: LiveParameter) -> Iterator[StateTensor]:
        slot = self._slots.get(live.parameter)
        weights = live.parameter.detach().view(-1)
        for part in live.parts:
            if slot is not None and slot.range is not None:
                yield from self._sharded(live, part, slot, weights)
                continue
            states = [] if slot is None else list(_optimizer_tensors(slot, part.name))
            for placed in placed_blocks(part, part.start, part.stop):
                replicated, writer = self._written(part.name, (placed.offsets, placed.shape), live.is_expert)
                flags = {"replicated": replicated, "duplicate": writer is not None, "writer": writer}
                for key, flat in [(f"model/{part.name}", weights), *states]:
                    yield _tensor(key, part, placed, flat[part.start :], **flags)

    def _sharded(
        self, live: LiveParameter, part: BlockPart, slot: StateSlot, weights: torch.Tensor
    ) -> Iterator[StateTensor]:
        """Yields tensors of a parameter in a distributed optimizer: this rank writes the range that it updates."""
        start, stop = slot.range or (0, 0)
        group = self.expert_peers if live.is_expert else self.dense_peers
        # The block that tensor parallelism gives this rank. Other blocks are written by the ranks that hold them.
        block = next((placed.offsets, placed.shape) for placed in placed_blocks(part, part.start, part.stop))
        writes = slot.writes and self.world.holders[part.name, block][0] in group
        for writer, low, high in _divided(slot, start, stop, weights.numel()):
            updated_here = (low, high) == (start, stop)
            group_writer = writer if writes and writer in group else None
            for placed in placed_blocks(part, low, high):
                flags = {"replicated": False, "duplicate": not (updated_here and writes), "updated_here": updated_here}
                yield _tensor(f"model/{part.name}", part, placed, weights[low:], **flags, writer=group_writer)
        for key, flat in _optimizer_tensors(slot, part.name):
            for placed in placed_blocks(part, start, stop):
                yield _tensor(key, part, placed, flat, replicated=False, duplicate=not writes)

    def _written(self, name: str, block: Block, is_expert: bool) -> tuple[bool, int | None]:
        """Returns (replicated, the other rank that writes it or None) of a block that no optimizer shards."""
        holders = self.world.holders[name, block]
        if not is_expert and holders[0] in self.dense_peers and set(self.dense_peers) <= set(holders):
            return True, None
        writer = self.world.expert_writer(name, block) if is_expert else holders[0]
        return False, None if writer == self._comm.rank else writer


class _ShardViews:
    """The live objects that views were made of, to find changes quickly: once or twice per step."""

    def __init__(
        self,
        parameters: Sequence[LiveParameter],
        slots: Mapping[nn.Parameter, StateSlot],
        tensors: Sequence[StateTensor],
    ) -> None:
        used = [slot for live in parameters if (slot := slots.get(live.parameter)) and slot.updated is not None]
        inner = [leaf.optimizer for leaf in {id(slot.leaf): slot.leaf for slot in used}.values()]
        self._states = [(optimizer, optimizer.state) for optimizer in inner]
        self._held = Entries([state for _, state in self._states])
        self._entries = Entries([slot.state for slot in used], torch.Tensor)
        named = (
            (part.name, tensor)
            for live in parameters
            for tensor in _viewed(live.parameter, slots.get(live.parameter))
            for part in live.parts
        )
        self._memory = TensorAddresses(named, tensors)

    def same(self, of: Reading | None, *, listed: bool) -> bool:
        """Returns False after optimizer state was added, removed or loaded, or memory was moved.

        Args:
            of: As of ``ports.TrainingState.tensors``.
            listed: Likewise.
        """
        if not listed and not all(optimizer.state is state for optimizer, state in self._states):
            return False
        if not listed and not (self._held.same() and self._entries.same()):
            return False
        return self._memory.same(of)


def _viewed(parameter: nn.Parameter, slot: StateSlot | None) -> Iterator[torch.Tensor]:
    """Yields the tensors that a parameter's views are of."""
    yield parameter
    if slot is not None and slot.updated is not None:
        yield slot.updated
        yield from (value for key, value in slot.state.items() if key != STEP and isinstance(value, torch.Tensor))


def _divided(slot: StateSlot, start: int, stop: int, end: int) -> Iterator[tuple[int | None, int, int]]:
    """Yields (rank, first, last) of ranges that tile a parameter, one of which is updated here.

    The rank is another one that updates the range, if it is known and its weights are here; else None.
    """
    others = sorted((low, high, rank) for rank, low, high in slot.gathered)
    for low, high in ((0, start), (start, stop), (stop, end)):
        inside = [(rank, first, last) for first, last, rank in others if low <= first and last <= high]
        if (low, high) != (start, stop) and sum(last - first for _, first, last in inside) == high - low:
            yield from inside
        else:
            yield None, low, high


def _optimizer_tensors(slot: StateSlot, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (key, flat tensor) of master weights and of the state that exists now."""
    if slot.master is not None:
        yield f"optim/0/{name}/{MASTER}", slot.master.detach().view(-1)
    for state, value in state_tensors(slot, name):
        yield f"optim/0/{name}/{state}", value.view(-1)


def _tensor(key: str, part: BlockPart, placed: Placed, flat: torch.Tensor, **flags: Any) -> StateTensor:
    """Returns the view of one block.

    Args:
        key: Of the tensor.
        part: The one that the block is in.
        placed: The block.
        flat: Memory; ``placed.first`` is a position in it.
        **flags: Further fields of ``StateTensor``.
    """
    return StateTensor(key, part.name, placed.view(flat), placed.offsets, part.global_shape, **flags)


def _specs(world: World, states: Sequence[tuple[str, str]]) -> Iterator[TensorSpec]:
    """Yields the specs of all tensors. ``states``: (name, dtype) of the inner optimizers' tensors."""
    for name, tensor in world.tensors.items():
        # Megatron widens main gradients to the type of what its optimizer updates.
        gradient = (tensor.master or tensor.dtype) if tensor.trained else None
        yield TensorSpec(f"model/{name}", name, tensor.dtype, tensor.shape, gradient=gradient)
        if not tensor.trained:
            continue
        if tensor.master is not None:
            yield TensorSpec(f"optim/0/{name}/{MASTER}", name, tensor.master, tensor.shape)
        for state, dtype in states:
            yield TensorSpec(f"optim/0/{name}/{state}", name, dtype, tensor.shape)
