"""The process that ``memory_tiers.py`` starts for each rank: a node of its own, around tensors that nobody trains."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.synthetic import synthetic
from moe_ckpt import Memory
from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.engine.agreement import StepTokens
from moe_ckpt.engine.comm import make_communicator
from moe_ckpt.engine.deferred import Deferred
from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.engine.settings import Settings
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.policies import Dense
from moe_ckpt.ports import StateTensor, TensorMeta, TensorSpec
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.storage import LocalStorage

RANKS = 2
STEPS = 4
"""Of the life that is killed: the first is on storage, all are in memory."""
_LAYERS, _EXPERTS, _WARM = 6, 8, 4
_TIMEOUT_SECS = 60.0


class Shard:
    """What a session asks of a training state: this rank's rows of every stack of experts, and all of the rest."""

    def __init__(self, rank: int, mib: int) -> None:
        mine = _EXPERTS // RANKS
        with torch.device("meta"):
            whole = synthetic(_LAYERS, _EXPERTS, (mib << 20) // (3 * 4 * _LAYERS * mine))
        self.catalog = whole.catalog
        self._tensors = tuple(_rows(each, rank * mine, mine) for each in whole.tensors())
        self._specs = specs_of(self._tensors)

    def update(self, step: int) -> None:
        """One element of each tensor tells the step, the others do not change: no compute that hides a copy's cost."""
        for tensor in self._tensors:
            tensor.local.view(-1)[0] = step

    def require(self, step: int) -> None:
        """Raises ``RuntimeError`` unless every element is what it was at that step."""
        for tensor in self._tensors:
            values = tensor.local.view(-1)
            if values[0] != step or not bool((values[1:] == 1).all()):
                raise RuntimeError(f"{tensor.key} is not that of step {step}")

    def tensors(self, of: Collection[str] | None = None, *, listed: bool = False) -> Sequence[StateTensor]:
        return self._tensors

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def plain(self, *, described: bool = False) -> Mapping[str, Any]:
        return {}

    def prepare(self, wanted: Mapping[str, TensorMeta]) -> None:
        """They exist already."""

    def require_loadable(self, plain: Mapping[str, Any], keys: Collection[str]) -> None:
        """There is nothing else."""

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Likewise."""


def _rows(tensor: StateTensor, first: int, count: int) -> StateTensor:
    shape = tensor.global_shape
    if not tensor.parameter.endswith(".experts"):
        return replace(tensor, local=torch.ones(shape))
    return replace(tensor, local=torch.ones(count, *shape[1:]), offsets=(first, 0), replicated=False)


class Life:
    """A session of this rank.

    memory: arguments of ``Memory``; None for private memory.
    """

    def __init__(self, root: Path, state: Shard, memory: Mapping[str, Any] | None) -> None:
        self.state, self.step = state, 0
        self.storage = LocalStorage(root / "store")
        self.comm = make_communicator(_TIMEOUT_SECS)
        self._tokens = StepTokens(np.ones((_LAYERS, _EXPERTS), dtype=np.int64))
        node = root / f"node_{dist.get_rank()}"
        if memory is not None:
            node.mkdir(parents=True, exist_ok=True)
        self.session = CheckpointSession(
            storage=self.storage,
            policy=Dense(),
            catalog=state.catalog,
            state=state,
            comm=self.comm,
            settings=Settings(
                retention=RetentionPolicy(keep_last=1),
                when_busy="wait",
                timeout_secs=_TIMEOUT_SECS,
                local_ranks=RANKS,
                memory=None if memory is None else Memory(directory=node, **memory),
            ),
        )
        self.session.open()

    def train(self, compute_secs: float) -> tuple[float, bool]:
        """One iteration. Returns seconds of stall, and whether its checkpoint goes to storage."""
        _compute(compute_secs)
        self.session.before_update()
        self.step += 1
        self.state.update(self.step)
        record = self.session.after_update(self.step, Deferred(lambda: self._tokens), self.state.plain)
        if not record.begun:
            raise RuntimeError(f"no checkpoint of step {self.step}")
        return record.stall_secs, record.to_storage

    def wait(self) -> None:
        """Until nothing is copied, written or sent any more."""
        self.session.drain(self.step)
        replicator = self.session.tier.replicator if isinstance(self.session.tier, MemoryTier) else None
        while replicator is not None and replicator.lag_steps:
            time.sleep(0.001)


def _compute(secs: float) -> None:
    """The work of an accelerator, and a barrier that stands for the reduction of gradients."""
    time.sleep(secs)
    dist.barrier()


def stalls(order: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Each way of saving in turn: stall and CPU seconds of this process, per iteration."""
    state, secs, count = Shard(rank, order["mib"]), order["compute_secs"], order["iterations"]
    dist.barrier()
    root = Path(order["root"])
    before = time.process_time()
    for step in range(count):
        _compute(secs)
        state.update(step)
    idle = {"stall_secs": 0.0, "cpu_secs": (time.process_time() - before) / count, "to_storage": 0}
    found = {order["idle"]: idle}
    for name, memory in order["ways"]:
        life = Life(root, state, memory)
        for _ in range(_WARM):
            life.train(secs)
        life.wait()
        before = time.process_time()
        records = [life.train(secs) for _ in range(count)]
        life.wait()
        found[name] = {
            "stall_secs": median(stall for stall, _ in records),
            "cpu_secs": (time.process_time() - before) / count,
            "to_storage": sum(to_storage for _, to_storage in records),
        }
        life.session.finish(life.step, state.plain, save_last=False)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
            root.mkdir()
        dist.barrier()
    return found


def first_life(order: Mapping[str, Any], rank: int) -> None:
    """Every step is in memory, here and on the peer, and the first on storage; then the process dies."""
    life = Life(Path(order["root"]), Shard(rank, order["mib"]), order["memory"])
    for _ in range(STEPS):
        life.train(0.0)
        life.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def second_life(order: Mapping[str, Any], rank: int, marks: list[float]) -> dict[str, Any]:
    """Comes back. marks: Of the clock that all processes of the machine share; more are added."""
    state = Shard(rank, order["mib"])
    for tensor in state.tensors():
        tensor.local.zero_()
    marks.append(time.monotonic())
    life = Life(Path(order["root"]), state, order["memory"])
    marks.append(time.monotonic())
    restored = resume_newest(life.storage, life.comm, state, life.session.tier)
    if restored is None:
        raise RuntimeError("nothing was found")
    life.session.resume_from(restored.manifest, **restored.going_on)
    marks.append(time.monotonic())
    state.require(restored.manifest.step)
    life.session.finish(restored.manifest.step, state.plain, save_last=False)
    return {"marks": marks, "step": restored.manifest.step}


def main(argv: list[str]) -> int:
    """argv: the order as JSON, and the rank."""
    marks = [time.monotonic()]
    order, rank = json.loads(argv[0]), int(argv[1])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{order['meet']}", rank=rank, world_size=RANKS)
    if order["job"] == "first":
        first_life(order, rank)
    found = stalls(order, rank) if order["job"] == "stalls" else second_life(order, rank, marks)
    Path(f"{order['out']}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
