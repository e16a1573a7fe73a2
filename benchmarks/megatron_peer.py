"""What Megatron-Core's own checkpointing asks of the training thread of one rank before its asynchronous part begins.

That is, as in ``save_checkpoint`` of Megatron-LM: ``model.sharded_state_dict()``, ``optimizer.sharded_state_dict()``
and ``dist_checkpointing.save(..., async_sharded_save=True)`` until it returns its ``AsyncRequest``, which is then
dropped. In it are the translation to torch's sharded tensors, validation as far as a rank other than 0 takes part, the
local plan, pickling it for rank 0, and resolving each item.

Left out, all of it in the peer's favour: gathering goes nowhere (torch's fake group), so there is no waiting; what
gathering returns is this rank's own part once per rank; rank 0's work (global plan, metadata, sharding integrity) is
not this rank's; the common state is not compared with rank 0's; staging to host memory, and forking or feeding the
writer, which come after the request is returned. Ours is measured up to and with the start of the copy.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.failing import Failures
from benchmarks.megatron_world import Case, Rank, medians

WARM_UP = 2
"""Saves that are not counted: a cached structure is used from the third on."""


@dataclass(frozen=True)
class Way:
    """How to call it.

    constant: the options of ``--ckpt-assume-constant-structure``: cached plans and metadata, no validation.
    singleton: ``singleton_local_shards``: each expert under a key of its own instead of one grid of layers and experts.
    parallel: ``--ckpt-fully-parallel-save``. Gathered metadata being this rank's own, it deals itself a part only of
        what it would write.
    sharding: of the distributed optimizer: "dp_reshardable" may change the number of data-parallel ranks only,
        "fully_reshardable" any layout, as ours.
    """

    constant: bool = False
    singleton: bool = False
    parallel: bool = False
    sharding: str = "dp_reshardable"


def ways(precision: str) -> dict[str, Way]:
    results = {
        "default": Way(),
        "constant structure": Way(constant=True),
        "constant structure, fully parallel": Way(constant=True, parallel=True),
        "constant structure, one key per expert": Way(constant=True, singleton=True),
    }
    if precision == "bf16":
        results["as the last, any layout"] = Way(constant=True, singleton=True, sharding="fully_reshardable")
    return results


def measure(
    case: Case, rank: Rank, saves: int, most_secs: float, home: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Way -> milliseconds, or why there are none. At least one save is counted, at most ``saves`` or ``most_secs``."""
    results: dict[str, Any] = {}
    _agree_on_common_state()
    for name, way in ways(case.precision).items():
        tell(f"peer: {name}")
        failures, directory = Failures(), home / f"peer_{len(results)}"
        with failures.of(name):
            results[name] = _saves(case, rank, way, saves, most_secs, directory)
        for why in failures.reasons.values():
            results[name] = {"not_run": why}
            shutil.rmtree(directory, ignore_errors=True)
        gc.collect()
    return results


def _saves(case: Case, rank: Rank, way: Way, saves: int, most_secs: float, directory: Path) -> dict[str, Any]:
    strategy = _strategy(way)
    times: list[tuple[float, float, float]] = []
    cpu: list[float] = []
    began = time.perf_counter()
    for number in range(WARM_UP + saves):
        directory.mkdir(parents=True)
        gc.collect()
        before = time.thread_time()
        taken = _save(rank, way, strategy, directory, first=number == 0)
        if number >= WARM_UP:
            times.append(taken)
            cpu.append(time.thread_time() - before)
        shutil.rmtree(directory)
        if times and time.perf_counter() - began > most_secs:
            break
    model, optimizer, saving = (list(pair) for pair in zip(*times, strict=True))
    return {
        "wall_ms": medians([sum(taken) for taken in times]),
        "cpu_ms": medians(cpu),
        "parts_ms": {
            "model.sharded_state_dict": medians(model)["median"],
            "optimizer.sharded_state_dict": medians(optimizer)["median"],
            "save(async_sharded_save=True)": medians(saving)["median"],
        },
    }


def _save(rank: Rank, way: Way, strategy: Any, directory: Path, *, first: bool) -> tuple[float, float, float]:
    """Seconds of the three calls."""
    from megatron.core import dist_checkpointing

    metadata = {
        "distrib_optim_sharding_type": way.sharding,
        "singleton_local_shards": way.singleton,
        "chained_optim_avoid_prefix": True,
    }
    began = time.perf_counter()
    state: dict[str, Any] = {"model": rank.model.sharded_state_dict(metadata=metadata)}
    described = time.perf_counter()
    state["optimizer"] = rank.optimizer.sharded_state_dict(state, metadata=metadata)
    both = time.perf_counter()
    dist_checkpointing.save(
        state,
        str(directory),
        strategy,
        validate_access_integrity=first or not way.constant,
        async_sharded_save=True,
        content_metadata=metadata,
    )
    return described - began, both - described, time.perf_counter() - both


def _strategy(way: Way) -> Any:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=way.constant)
    if not way.parallel:
        return strategy
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=way.constant)


def _agree_on_common_state() -> None:
    """Rank 0's common state cannot arrive, so none is compared with it."""
    from megatron.core.dist_checkpointing import validation

    if dist.get_backend() != "fake":
        raise RuntimeError("this process is a rank of a real run")
    validation._validate_common_state_dict = lambda common_state_dict: None
