"""The process that ``commit_scale.py`` starts for each case: rank 0 and another rank, all policies, JSON to a file."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import sys
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.commit_world import ActedPeers, Others, State, Traffic, persist_cpu, recorded
from benchmarks.failing import Failures
from benchmarks.report import write_json
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies import Dense, MoC, MoEtion, MoEvement
from moe_ckpt.policies.base import Policy
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock

WINDOW = 4
_TIMEOUT_SECS = 600.0


def policy_of(name: str, experts: int) -> Policy:
    policies: Mapping[str, Policy] = {
        "moc": MoC(k=1),
        "moetion": MoEtion(experts=max(1, experts // 6)),
        "moevement": MoEvement(window=WINDOW),
        "dense": Dense(),
    }
    return policies[name]


def main(argv: list[str]) -> int:
    """argv: the order as JSON."""
    order = json.loads(argv[0])
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    state, ranks = State(order["layers"], order["experts"]), order["ranks"]
    others, failed = Others(state, ranks), Failures()
    gc.collect()
    gc.freeze()
    results: dict[str, Any] = {"rows": [], "failed": failed.reasons}
    for name in order["policies"]:
        for role, rank in (("rank 0", 0), ("another rank", ranks // 2)):
            print(f"> {name}, {role}", flush=True)
            with failed.of(f"{name}, {role}"):
                row = _commits(state, others, policy_of(name, order["experts"]), rank, order)
                results["rows"].append({"policy": name, "role": role, **row})
            write_json(Path(order["out"]), results)
    return 0


def _commits(state: State, others: Others, policy: Policy, rank: int, order: dict[str, Any]) -> dict[str, Any]:
    """Commits of one rank, one after the other, each waited for; the first ones are not counted."""
    root = Path(order["home"]) / "store"
    plans: deque[SnapshotPlan] = deque()
    comm = ActedPeers(rank, order["ranks"], others, plans, root)
    storage = LocalStorage(root)
    run = RunContext(
        storage=storage,
        policy=recorded(policy, plans),
        catalog=state.catalog,
        state=state,
        comm=comm,
        settings=Settings(when_busy="wait", timeout_secs=_TIMEOUT_SECS),
        placement=everywhere(state.catalog.layers, comm.world_size),
        lock=StoreLock(storage, "a run"),
    )
    session = CheckpointSession(run)
    tokens = StepTokens(np.ones((order["layers"], order["experts"]), dtype=np.int64))
    cpu: list[float] = []
    traffic: list[dict[str, int]] = []
    try:
        session.open()
        session.begin_run(state.plain)
        for step in range(1, order["warm"] + order["steps"] + 1):
            comm.traffic, acted, before = Traffic(), comm.acting, persist_cpu()
            record = session.after_update(step, Deferred(lambda: tokens), state.plain, updated=False)
            ended = session.drain(step)
            if not record.begun or not ended[-1].committed:
                raise RuntimeError(f"step {step} was not committed: {ended[-1].cause if ended else 'not begun'}")
            if step > order["warm"]:
                cpu.append(persist_cpu() - before - (comm.acting - acted))
                traffic.append(asdict(comm.traffic))
    finally:
        session.close(10.0)
        shutil.rmtree(root, ignore_errors=True)
    return {
        "cpu_ms": round(median(cpu) * 1e3, 2),
        "most_cpu_ms": round(max(cpu) * 1e3, 2),
        "n": len(cpu),
        "cpu_secs": cpu,
        **{name: median(item[name] for item in traffic) for name in traffic[0]},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
