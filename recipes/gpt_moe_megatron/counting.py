"""Parameters of a model and of each rank, counted on Megatron-Core's own modules without memory for them.

The modules are built on torch's meta device, in a world that is only acted (torch's fake process group): one rank at a
time, as that rank of a cluster would build them. Changes names in torch for the life of the process; no GPU is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span, expert_id, gate_id, non_expert_id
from moe_ckpt.core.window import OperatorBytes
from recipes.gpt_moe_megatron.config import ModelConfig, ParallelConfig, TrainerConfig
from recipes.gpt_moe_megatron.model import join_groups, model_chunk, prepare_cpu, transformer_config

if TYPE_CHECKING:
    from moe_ckpt.megatron.world import Owner

GRADIENT_BYTES = 4
ADAM_BYTES = 8
"""Two fp32 moments per parameter."""


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of weights, and of the fp32 masters beside them."""

    weight: int
    master: int

    @classmethod
    def of(cls, name: str) -> Precision:
        return cls(4, 0) if name == "fp32" else cls(2, 4)

    @property
    def full(self) -> int:
        """What a checkpoint holds of a parameter: weight, master and moments."""
        return self.weight + self.master + ADAM_BYTES


@dataclass(frozen=True)
class WholeModel:
    """elements: parameters of each operator of the catalog. trained: of the whole model."""

    catalog: Catalog
    elements: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.elements.values())

    @property
    def active(self) -> int:
        """Parameters that one token uses, embeddings included."""
        per_layer = {op.layer: self.elements[op.id] for op in self.catalog.experts}
        idle = sum((x.experts - (x.top_k or 0)) * per_layer[x.index] for x in self.catalog.layers)
        return self.total - idle

    @property
    def experts(self) -> int:
        return sum(self.elements[op.id] for op in self.catalog.experts)

    def sizes(self, precision: Precision) -> dict[str, OperatorBytes]:
        return {op: OperatorBytes(n * precision.full, n * precision.weight) for op, n in self.elements.items()}


@dataclass(frozen=True)
class RankCount:
    """Parameters that a rank of one pipeline stage holds: of experts, and all others.

    dense_copies, expert_copies: ranks that hold the same ones, over which the distributed optimizer deals their state.
    """

    stage: int
    dense: int
    expert: int
    dense_copies: int
    expert_copies: int

    def state_bytes(self, precision: Precision, distributed: bool) -> StateBytes:
        """distributed: masters and moments are dealt out evenly. (Megatron deals its padded buffers, in one piece each:
        what a rank gets differs from that by the padding.)"""
        dense, expert = self.dense, self.expert
        if distributed:
            dense, expert = -(-dense // self.dense_copies), -(-expert // self.expert_copies)
        held = self.dense + self.expert
        return StateBytes(
            weights=held * precision.weight,
            gradients=held * GRADIENT_BYTES,
            masters=(dense + expert) * precision.master,
            moments=(dense + expert) * ADAM_BYTES,
        )


@dataclass(frozen=True)
class StateBytes:
    weights: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def whole_model(model: ModelConfig) -> WholeModel:
    """The model as one rank would hold it, in the operators that ``moe_ckpt.megatron`` makes of it."""
    from moe_ckpt.megatron.inventory import take_inventory

    with acted_world(ParallelConfig(), 0):
        chunks = _chunks(model, ParallelConfig())
        inventory = take_inventory(chunks)
        layers = tuple(MoELayer(i, x.name, x.experts, x.top_k) for i, x in enumerate(inventory.layers))
        numbers = {layer.name: layer.index for layer in layers}
        elements: dict[str, int] = {}
        results: dict[str, Operator] = {}
        for live in inventory.parameters:
            for part, owner in zip(live.parts, live.owners, strict=True):
                operator = _operator(owner, numbers)
                results.setdefault(operator.id, operator)
                elements[operator.id] = elements.get(operator.id, 0) + part.stop - part.start
    # Policies ask for ids, kinds and layers only: one made-up parameter stands for each operator.
    return WholeModel(Catalog(tuple(results.values()), layers, dict.fromkeys(results, (1,))), elements)


def _operator(owner: Owner, numbers: Mapping[str, int]) -> Operator:
    moe, inner = owner
    if moe is None:
        name = non_expert_id(str(inner))
        return Operator(name, OperatorKind.NON_EXPERT, (Span(name),))
    layer = numbers[moe]
    if inner is None:
        return Operator(gate_id(layer), OperatorKind.GATE, (Span(gate_id(layer)),), layer)
    expert = int(inner)
    name = expert_id(layer, expert)
    return Operator(name, OperatorKind.EXPERT, (Span(name),), layer, expert)


def rank_counts(model: ModelConfig, parallel: ParallelConfig) -> list[RankCount]:
    """Of each pipeline stage, on its first rank; all ranks of a stage hold equally much."""
    per_stage = parallel.ranks // parallel.pp
    return [rank_count(model, parallel, stage * per_stage) for stage in range(parallel.pp)]


def rank_count(model: ModelConfig, parallel: ParallelConfig, rank: int) -> RankCount:
    """Of one rank of a cluster of ``parallel.ranks``."""
    with acted_world(parallel, rank):
        from megatron.core import parallel_state as state

        dense = expert = 0
        for chunk in _chunks(model, parallel):
            for name, parameter in chunk.named_parameters():
                if ".experts." in name:
                    expert += parameter.numel()
                else:
                    dense += parameter.numel()
        copies = state.get_data_parallel_world_size(), state.get_expert_data_parallel_world_size()
    return RankCount(rank // (parallel.ranks // parallel.pp), dense, expert, *copies)


def _chunks(model: ModelConfig, parallel: ParallelConfig) -> Sequence[torch.nn.Module]:
    plain = TrainerConfig(transformer_engine="never", options={"perform_initialization": False})
    config = transformer_config(model, parallel, plain, engine=False)
    stages: list[int | None] = [None] if parallel.vpp is None else list(range(parallel.vpp))
    with torch.device("meta"):
        return [model_chunk(model, config, False, stage) for stage in stages]


@contextmanager
def acted_world(parallel: ParallelConfig, rank: int) -> Iterator[None]:
    """Process groups as ``rank`` of ``parallel.ranks`` has them; nothing can be sent. What is built lies on "meta"."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch has looked: sizes are the same with and without a GPU
    prepare_cpu()
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=parallel.ranks, store=FakeStore())
    device = torch.cuda.current_device
    torch.cuda.current_device = lambda: "meta"  # type: ignore[assignment,return-value]  # Megatron takes any device
    try:
        join_groups(parallel, gloo=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield
    finally:
        torch.cuda.current_device = device
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
