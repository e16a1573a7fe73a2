"""The whole model, from what each rank holds of it: its operators, the holders of each block, and who writes it.

The ranks exchange this once, when training starts: first a digest of each rank (16 bytes), then one description for
each distinct digest. So the bytes grow with the number of different parts of the model, not of data-parallel copies.

Also this process's place in Megatron's parallel layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.operators import (
    Catalog,
    MoELayer,
    Operator,
    OperatorKind,
    Span,
    expert_id,
    gate_id,
    non_expert_id,
)
from moe_ckpt.core.placement import Placement
from moe_ckpt.errors import ConfigError, CoverageError, UnsupportedError
from moe_ckpt.format.sealed import with_tuples
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.collective import on_rank_zero

T = TypeVar("T")
Block = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, shape) in a whole tensor."""
Owner = tuple[str | None, int | str | None]
"""(MoE layer, expert) of an expert, (MoE layer, None) of a router, (None, group) of any other tensor."""

_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True)
class HeldTensor:
    """One rank's part of one whole tensor; all but ``blocks`` is equal on every rank that holds it.

    Attributes:
        trained: The optimizer updates it.
        master: Dtype of its master weights, None if it has none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owner: Owner
    trained: bool
    master: str | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Holding:
    """One rank's part of the model.

    Attributes:
        stage: Its rank in pipeline parallelism.
        layers: (name, E, k) of its MoE layers.
        expert_rank: Its rank in expert parallelism.
        updates: The optimizer updates something here.
    """

    stage: int
    layers: tuple[tuple[str, int, int], ...]
    tensors: tuple[HeldTensor, ...]
    expert_rank: int = 0
    updates: bool = True

    def encode(self) -> bytes:
        rows = [list(vars(tensor).values()) for tensor in self.tensors]
        return json.dumps([self.stage, self.layers, rows, self.expert_rank, self.updates]).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Holding:
        stage, layers, rows, expert_rank, updates = with_tuples(json.loads(raw))
        return cls(stage, layers, tuple(HeldTensor(*row) for row in rows), expert_rank, updates)


def exchange(holding: Holding, comm: Communicator) -> World:
    """Returns the holdings of all ranks, on every rank. A collective of the training thread."""
    raw = holding.encode()
    kinds: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(comm.everyone(hashlib.sha256(raw).digest()[:16])):
        kinds.setdefault(digest, []).append(rank)
    return merge([(tuple(ranks), Holding.decode(comm.broadcast(raw, ranks[0]))) for ranks in kinds.values()])


@dataclass(frozen=True)
class World:
    """Every tensor of the model with its holders; equal on every rank.

    Attributes:
        tensors: By name; ``blocks`` are those of all ranks.
        holders: (name, block) -> the ranks that hold it, ascending.
        layers: MoE layers by number.
        stages: Rank -> pipeline stage.
        expert_ranks: Rank -> rank in expert parallelism.
        idle: Ranks on which the optimizer updates nothing.
    """

    tensors: Mapping[str, HeldTensor]
    holders: Mapping[tuple[str, Block], tuple[int, ...]]
    layers: tuple[MoELayer, ...]
    stages: Mapping[int, int]
    expert_ranks: Mapping[int, int]
    idle: tuple[int, ...] = ()

    @cached_property
    def catalog(self) -> Catalog:
        """Raises ``CoverageError``, which names experts that no rank holds, tensors that are held in part, and tensors
        of one name that cannot be copies of one another."""
        self._require_whole()
        spans: dict[Owner, list[Span]] = {}
        for name, tensor in self.tensors.items():
            spans.setdefault(tensor.owner, []).append(Span(name))
        operators = [self._operator(owner, tuple(of_owner)) for owner, of_owner in spans.items()]
        operators.sort(key=lambda operator: natural_sort_key(operator.id))
        return Catalog(tuple(operators), self.layers, {t.name: t.shape for t in self.tensors.values()})

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """Returns MoE layer -> its number."""
        return {layer.name: layer.index for layer in self.layers}

    def _operator(self, owner: Owner, spans: tuple[Span, ...] = ()) -> Operator:
        moe, which = owner
        if moe is None:
            return Operator(non_expert_id(str(which)), OperatorKind.NON_EXPERT, spans)
        layer = self.numbers[moe]
        if which is None:
            return Operator(gate_id(layer), OperatorKind.GATE, spans, layer)
        return Operator(expert_id(layer, int(which)), OperatorKind.EXPERT, spans, layer, int(which))

    @cached_property
    def frozen_experts(self) -> npt.NDArray[np.bool_] | None:
        """Returns ``[L, E]`` experts of which the optimizer has no tensor, on any rank; None if there are none."""
        frozen = np.zeros(self.catalog.expert_places.shape, dtype=bool)
        frozen[tuple(self.catalog.all_experts.T)] = True
        for moe, expert in (tensor.owner for tensor in self.tensors.values() if tensor.trained):
            if moe is not None and expert is not None:
                frozen[self.numbers[moe], int(expert)] = False
        return frozen if frozen.any() else None

    def _require_whole(self) -> None:
        problems = []
        owners = {tensor.owner for tensor in self.tensors.values()}
        for layer in self.layers:
            lacking = [e for e in range(layer.experts) if (layer.name, e) not in owners]
            problems += [f"expert {e} of {layer.name} is on no rank" for e in lacking]
        for name, tensor in self.tensors.items():
            elements = sum(prod(shape) for _, shape in tensor.blocks)
            if elements != prod(tensor.shape):
                problems.append(
                    f"{name}: ranks hold {elements} of {prod(tensor.shape)} elements, or some of them twice"
                )
        problems += self._false_copies()
        if problems:
            raise CoverageError("what the ranks hold of the model", tuple(problems))

    def _false_copies(self) -> list[str]:
        """Returns a sentence on each tensor that has one name on ranks that nothing keeps equal.

        Data-parallel ranks hold copies, and stages share parameters outside of layers (tied embeddings). Two
        expert-parallel ranks with the same expert, or stages with the same layer, would both get back one of the two.
        """
        sentences: dict[str, str] = {}
        for name, tensor in self.tensors.items():
            moe, expert = tensor.owner
            ranks = self.holders_of(name)
            if moe is not None and expert is not None and len({self.expert_ranks[r] for r in ranks}) > 1:
                what = f"expert {expert} of {moe}"
                sentences[what] = f"{what} is on several expert-parallel ranks (global ranks {_listed(ranks)})"
            elif _LAYER.search(name) and len({self.stages[r] for r in ranks}) > 1:
                sentences[name] = f"{name} is on several pipeline stages (global ranks {_listed(ranks)})"
        return list(sentences.values())

    def require_updates(self) -> None:
        """Raises ``UnsupportedError`` if the optimizer updates something on some ranks only.

        A rank derives which state tensors exist from its own; without any, it would refuse those of other ranks.
        """
        if self.idle and len(self.idle) < len(self.stages):
            raise UnsupportedError(
                f"the optimizer updates nothing on ranks {_listed(self.idle)}: all parameters there are frozen, or the "
                "model is too small to be divided by the distributed optimizer. Leave some parameter of each pipeline "
                "stage trainable, or use fewer ranks."
            )

    def holders_of(self, name: str) -> tuple[int, ...]:
        """Returns the ranks that hold any block of a tensor, ascending."""
        return tuple(sorted({r for block in self.tensors[name].blocks for r in self.holders[name, block]}))

    def expert_writer(self, name: str, block: Block) -> int:
        """Returns the rank that writes an expert's block. Ranks that hold the same experts share them evenly."""
        ranks = self.holders[name, block]
        owner = self.tensors[name].owner
        return self._sharers[str(owner[0]), ranks][owner[1]]

    @cached_property
    def _sharers(self) -> Mapping[tuple[str, tuple[int, ...]], Mapping[Any, int]]:
        """(MoE layer, ranks that hold the same experts of it) -> expert -> the rank that writes it."""
        experts: dict[tuple[str, tuple[int, ...]], set[Any]] = {}
        for (name, _), ranks in self.holders.items():
            owner = self.tensors[name].owner
            if owner[0] is not None and owner[1] is not None:
                experts.setdefault((owner[0], ranks), set()).add(owner[1])
        return {
            (moe, ranks): {e: ranks[at * len(ranks) // len(members)] for at, e in enumerate(sorted(members))}
            for (moe, ranks), members in experts.items()
        }

    def placement(self, peers: Sequence[int], *, experts_apart: bool, expert_peers: Sequence[int] = ()) -> Placement:
        """Returns the placement; ``peers``, ``expert_peers`` and ``experts_apart`` are its own.

        Unless ``experts_apart``, a distributed optimizer divides each expert over its holders; the first is its owner.
        """
        owners = [[0] * layer.experts for layer in self.layers]
        stage_of: dict[str, int] = {}
        divided = 1
        for name, tensor in self.tensors.items():
            moe, expert = tensor.owner
            first = min(tensor.blocks)
            if moe is not None and expert is not None:
                every = self.holders_of(name)
                writers = [self.expert_writer(name, block) for block in tensor.blocks] if experts_apart else every
                owners[self.numbers[moe]][int(expert)] = writers[0]
                divided = max(divided, len(set(writers)))
            stage_of[self._operator(tensor.owner).id] = self.stages[self.holders[name, first][0]]
        order = sorted(set(self.stages.values()))
        ranks = tuple(sum(at == stage for at in self.stages.values()) for stage in order)
        places = {op: order.index(stage) for op, stage in stage_of.items()}
        owned = tuple(map(tuple, owners))
        return Placement(owned, tuple(peers), ranks, places, experts_apart, divided, expert_peers=tuple(expert_peers))


def merge(kinds: Sequence[tuple[tuple[int, ...], Holding]]) -> World:
    """Merges (ranks, what each of them holds), of all distinct holdings, into one world.

    Raises:
        ConfigError: Two ranks disagree on a tensor or a layer that both hold.
    """
    tensors: dict[str, HeldTensor] = {}
    holders: dict[tuple[str, Block], list[int]] = {}
    layers: dict[str, tuple[str, int, int]] = {}
    stages: dict[int, int] = {}
    expert_ranks: dict[int, int] = {}
    idle: list[int] = []
    for ranks, holding in kinds:
        idle += () if holding.updates else ranks
        stages.update(dict.fromkeys(ranks, holding.stage))
        expert_ranks.update(dict.fromkeys(ranks, holding.expert_rank))
        for layer in holding.layers:
            _agree(f"MoE layer {layer[0]}", layers.setdefault(layer[0], layer), layer, ranks)
        for tensor in holding.tensors:
            earlier = tensors.setdefault(tensor.name, tensor)
            _agree(f"tensor {tensor.name}", _facts(earlier), _facts(tensor), ranks)
            for block in tensor.blocks:
                holders.setdefault((tensor.name, block), []).extend(ranks)
    blocks: dict[str, list[Block]] = {}
    for name, block in holders:
        blocks.setdefault(name, []).append(block)
    ordered = [layers[name] for name in sorted(layers, key=natural_sort_key)]
    return World(
        tensors={
            name: replace(tensors[name], blocks=tuple(sorted(blocks[name])))
            for name in sorted(tensors, key=natural_sort_key)
        },
        holders={key: tuple(sorted(ranks)) for key, ranks in holders.items()},
        layers=tuple(MoELayer(index, name, experts, top_k) for index, (name, experts, top_k) in enumerate(ordered)),
        stages=stages,
        expert_ranks=expert_ranks,
        idle=tuple(sorted(idle)),
    )


def natural_sort_key(name: str) -> tuple[Any, ...]:
    """Returns a sort key by which layer 10 comes after layer 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name))


def _facts(tensor: HeldTensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.owner, tensor.trained, tensor.master


def _agree(what: str, earlier: Any, new: Any, ranks: Sequence[int]) -> None:
    if earlier != new:
        raise ConfigError(
            f"{what} is {new} on rank {ranks[0]}, but {earlier} on another: all ranks must build the same model"
        )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def require_groups() -> None:
    """Raises ``ConfigError`` unless processes and Megatron's groups are set up."""
    if not dist.is_initialized():
        raise ConfigError("moe_ckpt.megatron: torch.distributed is not initialized; call init_process_group first")
    state = megatron_core().parallel_state
    if not state.model_parallel_is_initialized():
        raise ConfigError(
            "moe_ckpt.megatron: Megatron's process groups do not exist; call "
            "megatron.core.parallel_state.initialize_model_parallel first"
        )
    tensor, expert_tensor = state.get_tensor_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
    if tensor > 1 and state.get_expert_model_parallel_world_size() == 1 and expert_tensor != tensor:
        raise UnsupportedError(
            f"tensor parallelism {tensor} with expert-tensor parallelism {expert_tensor} and no expert parallelism: "
            f"megatron-core {megatron_core().version} then reduces the gradients of experts over data-parallel ranks "
            "only, and their copies on tensor-parallel ranks become different models. Set "
            f"expert_tensor_parallel_size={tensor}, or expert_model_parallel_size above 1."
        )


def layout(chunks: Sequence[Any]) -> dict[str, int]:
    """Returns the degrees of parallelism by name; a sparse window is replayed on the same ones only."""
    state = megatron_core().parallel_state
    return {
        "tensor": state.get_tensor_model_parallel_world_size(),
        "pipeline": state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": len(chunks),
        "context": state.get_context_parallel_world_size(),
        "expert": state.get_expert_model_parallel_world_size(),
        "expert_tensor": state.get_expert_tensor_parallel_world_size(),
        "data": state.get_data_parallel_world_size(),
    }


def local_ranks(comm: Communicator) -> int:
    """Returns how many ranks this host has, by torchrun's variable, else (``srun``) by host name. A collective."""
    hosts = comm.everyone(socket.gethostname().encode())
    return int(os.environ.get("LOCAL_WORLD_SIZE", hosts.count(hosts[comm.rank])))


def is_rank_zero() -> bool:
    return dist.get_rank() == 0


def from_rank_zero(action: Callable[[], T], doing: str, timeout_secs: float = 600.0) -> T:
    """Returns the result of ``action`` on rank 0 (``on_rank_zero``), before there is a communicator. A collective."""
    comm = make_communicator(timeout_secs)
    try:
        return on_rank_zero(comm, action, doing)
    finally:
        comm.close()
