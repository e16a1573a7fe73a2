"""The process that ``memory_tiers.py`` starts for each rank: a node of its own, around tensors that nobody trains."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks import end
from benchmarks.synthetic import StillState, synthetic
from moe_ckpt import Memory
from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.placement import everywhere
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.slot import Slot, read_header
from moe_ckpt.peers.messages import SealedSlot
from moe_ckpt.peers.wire import CHUNK_NBYTES
from moe_ckpt.policies import Dense
from moe_ckpt.ports import StateTensor
from moe_ckpt.reading.memory.slot_storage import SlotStorage
from moe_ckpt.recovery.executing import StorageSource
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock

RANKS = 2
"""Unless the order says otherwise."""
STEPS = 4
"""Of the life that is killed: the first is on storage, all are in memory."""
_LAYERS, _EXPERTS, _WARM = 6, 12, 4
_TIMEOUT_SECS = 60.0
STAGER = "stager"
SENT, LOOPBACK = "a verified copy", "bare bytes over loopback"


class Shard(StillState):
    """What a session asks of a training state: this rank's rows of every stack of experts, and all of the rest."""

    def __init__(self, rank: int, mib: int, ranks: int = RANKS) -> None:
        mine = _EXPERTS // ranks
        with torch.device("meta"):
            whole = synthetic(_LAYERS, _EXPERTS, (mib << 20) // (3 * 4 * _LAYERS * mine))
        super().__init__(whole.catalog, [_rows(tensor, rank * mine, mine) for tensor in whole.tensors()])

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
        run = RunContext(
            storage=self.storage,
            policy=Dense(),
            catalog=state.catalog,
            state=state,
            comm=self.comm,
            settings=Settings(
                retention=RetentionPolicy(keep_last=1),
                when_busy="wait",
                timeout_secs=_TIMEOUT_SECS,
                local_ranks=dist.get_world_size(),
                memory=None if memory is None else Memory(directory=node, **memory),
            ),
            placement=everywhere(state.catalog.layers, self.comm.world_size),
            lock=StoreLock(self.storage, "a run"),
        )
        self.session = CheckpointSession(run)
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
        replicator = self.session.tier.replicator
        while replicator is not None and replicator.in_flight:
            time.sleep(0.001)
        if replicator is not None and replicator.lag_steps:
            raise RuntimeError("peers refused copies: this machine has no memory for them; choose a smaller --mib")

    def end(self) -> None:
        """Leave nothing behind."""
        self.session.finish(self.step, self.state.plain, save_last=False)


class Stager:
    """torch.distributed.checkpoint's own copies on peers (``_ReplicationStager``), into files on the same tmpfs."""

    def __init__(self, root: Path, state: Shard) -> None:
        from torch.distributed.checkpoint.staging import _ReplicationStager  # takes long, and the others do without

        self.state, self.step = state, 0
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("there is no process group")
        self._stager = _ReplicationStager(group, storage_dir=str(root / f"dcp_{dist.get_rank()}"))

    def train(self, compute_secs: float) -> tuple[float, bool]:
        """As ``Life.train``."""
        _compute(compute_secs)
        self.step += 1
        self.state.update(self.step)
        began = time.perf_counter()
        self._stager.stage({tensor.key: tensor.local for tensor in self.state.tensors()})
        return time.perf_counter() - began, False

    def wait(self) -> None:
        """It has no background."""

    def end(self) -> None:
        """Leave nothing behind."""
        self._stager.close()


def _compute(secs: float) -> None:
    """The work of an accelerator, and a barrier that stands for the reduction of gradients."""
    time.sleep(secs)
    dist.barrier()


def _forget_peak() -> None:
    """What other ways took at their largest does not come again: a rank refuses copies where that has no room."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def stalls(order: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Each way of saving in turn: stall and CPU seconds of this process, per iteration."""
    state = Shard(rank, order["mib"], order["ranks"])
    secs, count = order["compute_secs"], order["iterations"]
    dist.barrier()
    root = Path(order["root"])
    before = time.process_time()
    for step in range(count):
        _compute(secs)
        state.update(step)
    idle = {"stall_secs": 0.0, "cpu_secs": (time.process_time() - before) / count, "to_storage": 0}
    results = {order["idle"]: idle}
    for name, memory in order["ways"]:
        _forget_peak()
        run = Stager(root, state) if memory == STAGER else Life(root, state, memory)
        for _ in range(_WARM):
            run.train(secs)
        run.wait()
        before = time.process_time()
        records = [run.train(secs) for _ in range(count)]
        run.wait()
        results[name] = {
            "stall_secs": median(stall for stall, _ in records),
            "cpu_secs": (time.process_time() - before) / count,
            "to_storage": sum(to_storage for _, to_storage in records),
        }
        run.end()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
            root.mkdir()
        dist.barrier()
    return results


def first_life(order: Mapping[str, Any], rank: int) -> None:
    """Every step is in memory, here and on the peer, and the first on storage; then the process dies."""
    life = Life(Path(order["root"]), Shard(rank, order["mib"]), order["memory"])
    life.session.training_begins()
    for _ in range(STEPS):
        life.train(0.0)
        life.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def second_life(order: Mapping[str, Any], rank: int, marks: list[float]) -> dict[str, Any]:
    """Comes back. marks: Of the clock that all processes of the machine share; more are added."""
    state = Shard(rank, order["mib"], order["ranks"])
    for tensor in state.tensors():
        tensor.local.zero_()
    parts = {
        "transfer": spent_in(SlotStorage, "fetch"),
        "verify": spent_in(StorageSource, "verify"),
        "load": spent_in(StorageSource, "prepare_and_write"),
    }
    marks.append(time.monotonic())
    life = Life(Path(order["root"]), state, order["memory"])
    marks.append(time.monotonic())
    restored = resume_newest(life.storage, life.comm, state, life.session.tier)
    if restored is None:
        raise RuntimeError("nothing was found")
    life.session.resume_from(restored.manifest, **restored.going_on)
    life.session.training_begins()
    marks.append(time.monotonic())
    life.step = restored.manifest.step
    life.train(0.0)
    marks.append(time.monotonic())
    state.require(life.step)
    life.end()
    return {"marks": marks, "step": restored.manifest.step, "parts": {name: sum(secs) for name, secs in parts.items()}}


def spent_in(owner: type, name: str) -> list[float]:
    """Returns where from now on the seconds of each call of a method are noted."""
    results: list[float] = []
    method = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*args, **kwargs)
        finally:
            results.append(time.monotonic() - began)

    setattr(owner, name, timed)
    return results


def sends(order: Mapping[str, Any], rank: int) -> dict[str, list[float]]:
    """Seconds in which what rank 0 saves at a step gets to rank 1: as a verified copy, and as bare bytes."""
    life = Life(Path(order["root"]), Shard(rank, order["mib"], order["ranks"]), order["memory"])
    for _ in range(3):
        life.train(0.0)
        life.wait()
    tier = life.session.tier
    if tier.replicator is None:
        raise RuntimeError("no copies on peers")
    share = _newest_share(tier.files.path, rank)
    plain = _Loopback(rank, share.memory)
    results: dict[str, list[float]] = {SENT: [], LOOPBACK: []}
    for number in range(order["rounds"] + 1):
        tier.replicator.store.mirrored(10_000 + number, {})  # nothing of it is taken from the holder's own tensors
        dist.barrier()
        began = time.monotonic()
        if rank == 0:
            tier.replicator.submit(10_000 + number, share).result()
        results[SENT].append(time.monotonic() - began)
        dist.barrier()
        tier.replicator.store.release_except({10_001 + number})
        dist.barrier()
        began = time.monotonic()
        plain.move()
        results[LOOPBACK].append(time.monotonic() - began)
    plain.close()
    life.end()
    return {name: secs[1:] for name, secs in results.items()}  # the first one meets cold pages


def _newest_share(directory: Path, rank: int) -> SealedSlot:
    """What this rank saved last."""
    slots = [Slot.open(path.with_suffix("")) for path in directory.glob("*.head")]
    slot, header = max((slot for slot in slots if slot[1].rank == rank), key=lambda item: item[1].step)
    end = max(part.begin + entry.end for part in header.parts for entry in header.slices(part, "a slot"))
    return SealedSlot(header.step, slot.memory[:end], read_header(slot.path))


class _Loopback:
    """As many bytes from rank 0 to rank 1 through a plain socket, in calls of 16 MiB, with an answer of one byte."""

    def __init__(self, rank: int, memory: torch.Tensor) -> None:
        self._is_source = rank == 0
        listener = socket.create_server(("127.0.0.1", 0))
        entries: list[Any] = [None, None]
        dist.all_gather_object(entries, (memory.numel(), listener.getsockname()[1]))
        (nbytes, _), (_, port) = entries
        self._view = memory.numpy().data if rank == 0 else memoryview(bytearray(nbytes))
        self._socket = socket.create_connection(("127.0.0.1", port)) if rank == 0 else listener.accept()[0]
        listener.close()

    def move(self) -> None:
        for begin in range(0, len(self._view), CHUNK_NBYTES):
            chunk = self._view[begin : begin + CHUNK_NBYTES]
            if self._is_source:
                self._socket.sendall(chunk)
            else:
                self._socket.recv_into(chunk, len(chunk), socket.MSG_WAITALL)
        if self._is_source:
            self._socket.recv(1)
        else:
            self._socket.sendall(b"!")

    def close(self) -> None:
        self._socket.close()


def main(argv: list[str]) -> int:
    """argv: the order as JSON, and the rank."""
    marks = [time.monotonic()]
    order, rank = json.loads(argv[0]), int(argv[1])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{order['meet']}", rank=rank, world_size=order["ranks"])
    if order["job"] == "first":
        first_life(order, rank)
    job = order["job"]
    results = (
        {"stalls": stalls, "sends": sends}[job](order, rank) if job != "second" else second_life(order, rank, marks)
    )
    return end(order, rank, results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
