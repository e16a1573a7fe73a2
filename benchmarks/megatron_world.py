"""One rank of a Megatron run whose other ranks are only acted: model, optimizer, and a communicator that answers.

Process groups are torch's fake ones: they send nothing, and gathering returns what this rank gave, once per rank.
Tensors are tiny, so that time is spent on names, plans and layouts, not on bytes. Imports Megatron-Core by
``moe_ckpt.testing.megatron_cpu``, which changes torch for the life of the process: only for processes of their own.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.acting import ActedRank
from moe_ckpt.core.tokens import Counts
from moe_ckpt.megatron import checkpoint
from moe_ckpt.megatron.world import HeldTensor, Holding
from moe_ckpt.ports import Communicator
from recipes.gpt_moe_megatron.config import ModelConfig, ParallelConfig, TrainerConfig
from recipes.gpt_moe_megatron.model import DTYPES, join_groups, model_chunk, prepare_cpu, transformer_config

WIDTH = 8
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class Case:
    """A model of ``layers`` MoE layers of ``experts`` experts over ``ep`` ranks, and which of them this process is.

    precision: "fp32", or "bf16", which goes with the distributed optimizer here.
    """

    layers: int
    experts: int
    ep: int
    precision: str

    @property
    def rank(self) -> int:
        """Not 0, which alone commits, and has no peer to do it without."""
        return min(3, self.ep - 1)

    @property
    def name(self) -> str:
        return f"{self.layers} x {self.experts}"


@dataclass(frozen=True)
class Rank:
    """chunk: in Megatron's DDP."""

    chunk: Any
    optimizer: Any

    @property
    def model(self) -> Any:
        """The ``GPTModel`` itself."""
        inner = self.chunk.module
        return getattr(inner, "module", inner)


def build(case: Case) -> Rank:
    """Groups, model and optimizer after one step of it: its state exists."""
    prepare_cpu()
    torch.set_num_threads(1)
    from megatron.core import tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=case.rank, world_size=case.ep, store=FakeStore())
    parallel = ParallelConfig(ep=case.ep, distributed_optimizer=case.precision == "bf16")
    join_groups(parallel, gloo=False)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    model = ModelConfig(case.layers, WIDTH, 1, case.experts, 2, WIDTH, vocab=64, seq=16)
    trainer = TrainerConfig(precision=case.precision, transformer_engine="never")
    config = transformer_config(model, parallel, trainer, engine=False)
    chunk = _wrapped(model_chunk(model, config, engine=False), config, parallel, case.precision)
    rank = Rank(chunk, _optimizer(chunk, parallel, case.precision))
    rank.optimizer.step()  # without gradients, for the state that it makes
    chunk.train()
    return rank


def _wrapped(chunk: Any, config: Any, parallel: ParallelConfig, precision: str) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=parallel.distributed_optimizer
    )
    return DistributedDataParallel(config, settings, chunk if precision == "fp32" else Float16Module(config, chunk))


def _optimizer(chunk: Any, parallel: ParallelConfig, precision: str) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        params_dtype=DTYPES[precision],
        bf16=precision == "bf16",
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    return get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)


def route(rank: Rank) -> None:
    """Send a few tokens through every router, as a forward pass would: the hooks of a checkpoint count them."""
    from megatron.core.transformer.moe.router import TopKRouter

    with torch.no_grad():
        for module in rank.chunk.modules():
            if isinstance(module, TopKRouter):
                module(torch.randn(16, 1, WIDTH, dtype=module.weight.dtype))


_NO_ANSWER = b"{}"
"""What ranks other than the first give to ``reading.collective.on_rank_zero``."""


class ActedCommunicator(ActedRank):
    """``ports.Communicator`` of one rank that answers for all others: they hold other experts and do the same.

    Every snapshot is committed as soon as this rank has written its share. secs: time spent on acting, which a real
    rank would spend on waiting for its peers. received: bytes that peers told of what they hold.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.secs = 0.0
        self.sent = self.received = 0

    def agree(self, summed: Counts, largest: Counts) -> tuple[Counts, Counts]:
        with self._acting():
            return super().agree(summed, largest)

    def everyone(self, payload: bytes) -> list[bytes]:
        """Every rank holds something else, by its digest; of anything else all say the same."""
        ranks = range(self.world_size)
        return [rank.to_bytes(16, "big") if len(payload) == 16 and rank != self.rank else payload for rank in ranks]

    def swap(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        raise NotImplementedError("nothing is recovered here")

    def broadcast(self, payload: bytes, source: int = 0) -> bytes:
        """Says what rank 0 has opened: the run, and its first generation (``opening.open_store``); or what a rank
        holds."""
        if payload == _NO_ANSWER:
            return json.dumps({"result": ["0" * 32, 0]}).encode()
        if source == self.rank:
            self.sent += len(payload)
            return payload
        with self._acting():
            other = _held_by(Holding.decode(payload), source - self.rank).encode()
            self.received += len(other)
            return other

    def combine(self, columns: Sequence[bytes]) -> list[bytes] | None:
        return None

    def announce(self, payload: bytes) -> bytes:
        return self._first_rank_commits()

    @contextmanager
    def _acting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.secs += time.perf_counter() - began


@contextmanager
def acted_peers(case: Case) -> Iterator[ActedCommunicator]:
    """Whoever attaches meanwhile has its peers acted by the communicator that this gives."""
    acted = ActedCommunicator(case.rank, case.ep)

    def make(timeout_secs: float, *, late: bool = False) -> Communicator:
        return acted

    with patch.object(checkpoint, "make_communicator", make):
        yield acted


def _held_by(own: Holding, ranks_on: int) -> Holding:
    """What the rank ``ranks_on`` ranks further on holds: as many experts of each layer, others."""
    local: dict[str, set[int]] = {}
    for tensor in own.tensors:
        if tensor.owner[0] is not None and tensor.owner[1] is not None:
            local.setdefault(tensor.owner[0], set()).add(int(tensor.owner[1]))
    by = {layer: ranks_on * len(experts) for layer, experts in local.items()}
    tensors = tuple(_renamed(tensor, by) for tensor in own.tensors)
    return replace(own, tensors=tensors, expert_rank=own.expert_rank + ranks_on)


def _renamed(tensor: HeldTensor, by: dict[str, int]) -> HeldTensor:
    result = _EXPERT.fullmatch(tensor.name)
    layer, expert = tensor.owner
    if result is None or layer is None or expert is None:
        return tensor
    name = f"{result[1]}{int(result[2]) + by[layer]}{result[3]}"
    return replace(tensor, name=name, owner=(layer, int(expert) + by[layer]))


def medians(times: Sequence[float]) -> dict[str, float]:
    """JSON-ready milliseconds of times in seconds."""
    taken = np.asarray(times) * 1e3
    least, middle, most = (round(float(result), 3) for result in np.quantile(taken, (0, 0.5, 1)))
    return {"median": middle, "min": least, "max": most, "n": len(times)}
