"""Small scenarios with numbers that can be checked by hand: one byte per parameter, rates in bytes per second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_ckpt.policies import Dense, MoEvement
from moe_ckpt.policies.base import Policy
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.failures.failures import FailureEvent, Failures, NoFailures
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.run.scenario import Outcome, Scenario
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.load import ExpertLoad
from moe_ckpt_sim.workload.model import ModelSpec, Precision
from moe_ckpt_sim.workload.training import Batch, Iteration

SPEC = ModelSpec("toy", layers=4, hidden=16, experts=8, top_k=2, expert_ffn=32, vocab=64, seq=8)
MODEL = SPEC.build()
PRECISION = Precision(compute_bytes=1, master_bytes=2, optimizer_bytes=4)
EVEN = ExpertLoad(skewness=0.0, drift=0.0)

CLUSTER = Cluster(
    "toy",
    nodes=4,
    gpus_per_node=2,
    pcie_bytes_per_sec=200e3,
    nic_bytes_per_sec=100e3,
    storage_bytes_per_sec=400e3,
    detect_secs=1.0,
    restart_secs=4.0,
)
"""Eight GPUs. All state of the toy model, about 280 kB, is copied in 0.2 to 0.3 s and stored in 0.7 s."""


def layout(parallel: Parallel | None = None, **cluster: Any) -> ClusterLayout:
    return ClusterLayout(MODEL, replace(CLUSTER, **cluster), parallel or Parallel(pp=4, dp=1, ep=2))


def scenario(
    policy: Policy | None = None,
    *,
    failures: Failures | None = None,
    parallel: Parallel | None = None,
    cluster: dict[str, Any] | None = None,
    system: dict[str, Any] | None = None,
    secs: float = 1.0,
    update_secs: float = 0.1,
    **settings: Any,
) -> Scenario:
    """``settings`` are fields of ``Scenario``."""
    given = {"load": EVEN, "duration_secs": 3600.0, "batch": Batch(sequences=64, micro_sequences=4), **settings}
    return Scenario(
        layout=layout(parallel, **(cluster or {})),
        precision=PRECISION,
        iteration=given.pop("iteration", Iteration(secs=secs, update_secs=update_secs)),
        failures=failures or NoFailures(),
        system=System("tried", policy or Dense(every_n_steps=10), **(system or {})),
        **given,
    )


LOCAL = {"durable": "peers", "replicas": 3, "rollback": "localized", "storage_every": 300.0}


def sparse(window: int | None = 4, **given: Any) -> Scenario:
    """MoEvement with replicas on peers and localized rollback."""
    given.setdefault("system", LOCAL)
    return scenario(MoEvement(window=window), **given)


def trace(*events: tuple[float, int] | tuple[float, int, bool]) -> Trace:
    """Of (seconds, node) or (seconds, node, joins)."""
    return Trace(recorded=tuple(FailureEvent(*event) for event in events))


def predicted(outcome: Outcome) -> dict[str, Any]:
    """All that is predicted, to the last bit: not the simulation's own work, nor what was asked of it."""
    told = {name: getattr(outcome, name) for name in outcome.__dataclass_fields__}
    return {name: value for name, value in told.items() if name not in ("plans", "settings", "system")}
