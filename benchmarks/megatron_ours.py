"""What ``moe_ckpt.megatron`` asks of one rank's training thread: ``after_step`` until it returns, and ``attach``."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.acting import wait_until_written
from benchmarks.megatron_world import ActedCommunicator, Case, Rank, acted_peers, medians, route
from benchmarks.stopwatch import Stopwatch, Watched
from moe_ckpt.commit import pipeline
from moe_ckpt.commit.persisting import SnapshotThread
from moe_ckpt.commit.room import Room
from moe_ckpt.core.operators import Catalog
from moe_ckpt.megatron import checkpoint, training_state
from moe_ckpt.megatron.host import MegatronHost
from moe_ckpt.megatron.routing import RouterCounter
from moe_ckpt.megatron.training_state import MegatronTrainingState
from moe_ckpt.megatron.world import World
from moe_ckpt.policies.base import Policy
from moe_ckpt.policies.dense import Dense
from moe_ckpt.policies.moc import MoC
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.run.planning import LiveState
from moe_ckpt.run.run_ledger import RunLedger
from moe_ckpt.session import session
from moe_ckpt.session.bookkeeping import Bookkeeper
from moe_ckpt.slices import compiling, copying, snapshot

WARM_UP = 4
"""Steps that are not counted: the first checkpoint is dense, and buffers come into being."""

POLICIES: dict[str, Policy] = {
    "MoC, K=1, sequential": MoC(k=1),
    "MoC, K=1, load_aware": MoC(k=1, selector="load_aware"),
    "MoEvement, W=3": MoEvement(window=3),
    "Dense": Dense(),
}


def watched(policy: Policy) -> list[Watched]:
    """What ``after_step`` does, in the order of the table."""
    running = session.CheckpointSession
    return [
        ("count tokens", RouterCounter, "take"),
        ("agree (acted)", Bookkeeper, "send"),
        ("books", RunLedger, "routed"),
        ("books", Bookkeeper, "book"),
        ("books", RunLedger, "context"),
        ("books", RunLedger, "begun"),
        ("books", running, "completed"),
        ("operators' bytes", LiveState, "weigh"),
        ("policy", type(policy), "plan"),
        ("plain state", MegatronHost, "capture"),
        ("plain state", snapshot, "side_tensors"),
        ("tensors, specs", MegatronTrainingState, "tensors"),
        ("tensors, specs", MegatronTrainingState, "specs"),
        ("compiled plan", compiling.PlanCompiler, "compile"),
        ("copy at once", pipeline, "copy_at_once"),
        ("buffer", Room, "find"),
        ("start copy", copying.Copier, "start"),
        ("hand on", SnapshotThread, "submit"),
    ]


ATTACH: list[Watched] = [
    ("inventory", checkpoint, "take_inventory"),
    ("holding", MegatronTrainingState, "holding"),
    ("exchange, merge", training_state, "exchange"),
    ("catalog", Catalog, "__post_init__"),
    ("placement", World, "placement"),
    ("session", session.CheckpointSession, "open"),
]


def measure(case: Case, rank: Rank, steps: int, home: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """JSON-ready: "policies" and "attach", milliseconds."""
    results: dict[str, Any] = {"policies": {}, "attach": {}}
    for name, policy in POLICIES.items():
        tell(name)
        with _attached(case, rank, policy, home / "ours", results["attach"]) as ours:
            results["policies"][name] = _steps(rank, ours, steps)
            results["local_operators"] = len(ours.session._snapshots.pipeline.compiler._local.local_rows)
            results["operators"] = len(ours.session.catalog.operators)
    return results


@contextmanager
def _attached(
    case: Case, rank: Rank, policy: Policy, directory: Path, summary: dict[str, Any]
) -> Iterator[checkpoint.MegatronCheckpoint]:
    """Attached, with times and bytes of the quickest ``attach`` so far in ``told``."""
    watch = Stopwatch()
    try:
        with acted_peers(case) as comm, watch.watching(ATTACH):
            began = time.perf_counter()
            ours = checkpoint.attach(rank.chunk, rank.optimizer, policy=policy, dirpath=directory, resume="never")
            took = time.perf_counter() - began - comm.secs
        try:
            ours.resume()
            ours.begin_training()
            _note(summary, took, watch.take(), comm)
            yield ours
        finally:
            ours.close(60.0)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _note(summary: dict[str, Any], took: float, parts: dict[str, float], comm: ActedCommunicator) -> None:
    if took * 1e3 >= summary.get("total_ms", float("inf")):
        return
    parts["exchange, merge"] -= comm.secs
    parts["rest"] = took - sum(parts.values())
    digests = 16 * comm.world_size
    summary.update(
        total_ms=round(took * 1e3, 2),
        parts_ms={label: round(secs * 1e3, 2) for label, secs in parts.items()},
        told_bytes=comm.sent,
        received_bytes=comm.received + digests,
    )


def _steps(rank: Rank, ours: checkpoint.MegatronCheckpoint, steps: int) -> dict[str, Any]:
    """Wall and processor time of the training thread in ``after_step``; then the same, taken apart, once more."""
    wall, cpu, apart = [], [], []
    pieces = []
    watch = Stopwatch()
    for iteration in range(1, WARM_UP + 2 * steps + 1):
        route(rank)
        ours.before_step()
        gc.collect()
        if iteration <= WARM_UP + steps:
            took = _step(ours, iteration)
            if iteration > WARM_UP:
                wall.append(took[0])
                cpu.append(took[1])
                pieces.append(_slices(ours))
        else:
            with watch.watching(watched(ours.policy)):
                total, _ = _step(ours, iteration)
            parts = watch.take()
            parts.pop("agree (acted)")
            apart.append(parts | {"rest": total - sum(parts.values())})
        wait_until_written(ours.session)
    labels = list(dict.fromkeys(label for parts in apart for label in parts))
    return {
        "wall_ms": medians(wall),
        "cpu_ms": medians(cpu),
        "slices": round(sum(pieces) / len(pieces)),
        "parts_ms": {label: medians([parts.get(label, 0.0) for parts in apart])["median"] for label in labels},
    }


def _step(ours: checkpoint.MegatronCheckpoint, iteration: int) -> tuple[float, float]:
    """(wall, processor) seconds of one ``after_step``, without what it took to act the peers."""
    before = time.thread_time()
    began = time.perf_counter()
    record = ours.after_step(iteration, updated=False)
    took = time.perf_counter() - began
    used = time.thread_time() - before
    if not record.begun:
        raise RuntimeError(f"step {iteration}: no checkpoint was begun")
    return took - record.agree_secs, used - record.agree_secs


def _slices(ours: checkpoint.MegatronCheckpoint) -> int:
    """Of the snapshot that was begun just now, small plain state included."""
    snapshot = ours.session._snapshots.newest
    return 0 if snapshot is None else sum(len(part.slices) for parts in snapshot.plan.buffers for _, part in parts)
