"""Input and output of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import MOST_WHOLE, above_zero, at_least, not_none, whole
from moe_ckpt_sim.cluster.clock import MOST_SECS
from moe_ckpt_sim.cluster.cluster import ClusterLayout
from moe_ckpt_sim.failures.failures import Failures
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.load import ExpertLoad
from moe_ckpt_sim.workload.model import Precision
from moe_ckpt_sim.workload.training import Batch, Iteration

LEAST_ITERATION_SECS = 1e-6
"""Shorter iterations would be lost in the rounding of ``cluster.clock``."""
MOST_DRIFTS = 1_000_000
"""Most changes of a load in one run; more would take too long to simulate."""


@dataclass(frozen=True)
class Scenario:
    """One run to simulate. The same scenario gives the same outcome, on any machine.

    tokens_per_step: tokens that one iteration trains, before top-k.

    Attributes:
        stepwise: Step through every round of a run that repeats itself, for checks: it takes longer, with the same
            outcome.
    """

    layout: ClusterLayout
    precision: Precision
    batch: Batch
    iteration: Iteration
    failures: Failures
    system: System
    load: ExpertLoad = field(default_factory=ExpertLoad)
    duration_secs: float = 12 * 3600.0
    seed: int = 0
    stepwise: bool = False

    def __post_init__(self) -> None:
        above_zero("Scenario", duration_secs=self.duration_secs)
        if self.duration_secs > MOST_SECS:
            raise ConfigError(
                f"Scenario(duration_secs={self.duration_secs!r}): a run of over {MOST_SECS:.0f} s (388 days) cannot be "
                "simulated exactly; simulate a part of it"
            )
        at_least("Scenario: Iteration", LEAST_ITERATION_SECS, secs=self.iteration.secs)
        whole("Scenario", 0, seed=self.seed)
        self._require_few()
        mean, cluster = self.failures.mean_secs, self.layout.cluster
        restarts = not_none(restart_secs=cluster.restart_secs, in_place_secs=cluster.in_place_secs)
        quicker = min(restarts, key=restarts.__getitem__)
        down = cluster.detect_secs + restarts[quicker]
        if mean is not None and mean <= down:
            raise ConfigError(
                f"failures: a mean of {mean:g} s between failures is below the {down:g} s that Cluster "
                f"{cluster.name!r} needs to notice one and to restart (detect_secs + {quicker}): training would "
                "never advance"
            )
        self.system.policy.check(self.layout.model.catalog)

    def _require_few(self) -> None:
        assigned, load = self.tokens_per_step * self.layout.model.top_k, self.load
        if assigned > MOST_WHOLE:
            raise ConfigError(
                f"Batch(sequences={self.batch.sequences}): of {self.layout.model.seq} tokens each, to "
                f"{self.layout.model.top_k} experts each, are {assigned} in one step, and only {MOST_WHOLE} "
                "can be counted; use fewer sequences"
            )
        if load.drifts and self.duration_secs / load.drift_secs > MOST_DRIFTS:
            raise ConfigError(
                f"ExpertLoad(drift_secs={load.drift_secs!r}): in {self.duration_secs:g} s (duration_secs) the load "
                f"would drift over {MOST_DRIFTS} times, and policies plan anew each time; use a longer drift_secs"
            )

    def require_peers(self) -> None:
        """Check that there are enough peers. Simulations call it; other uses of a scenario do not need it.

        Raises:
            ConfigError: there are too few nodes or domains for the system's copies.
        """
        system, nodes, cluster = self.system, self.layout.nodes, self.layout.cluster
        if system.durable == "peers" and system.replicas >= nodes:
            fewer = f"replicas of at most {nodes - 1}, " if nodes > 1 else ""
            raise ConfigError(
                f"System {system.name!r}(durable='peers', replicas={system.replicas}): peers are other nodes, and the "
                f"ranks are on {nodes} of Cluster {cluster.name!r}; use {fewer}more nodes, or durable: storage "
                "(with rollback: global)"
            )
        if system.durable == "peers":
            self.layout.placed(system.replicas)

    @property
    def tokens_per_step(self) -> int:
        return self.batch.sequences * self.layout.model.seq


@dataclass(frozen=True)
class Spent:
    """The uses of a run's time, in seconds. They add up to its duration.

    Attributes:
        useful: Iterations that were not lost later, each counted once and without stalls.
        stall: Waits for checkpointing and slowdowns by it, those of lost iterations included.
        lost: Iterations that a failure undid, and partial iterations.
        down: From failures to restarted ranks, without waits for spares.
        idle: Waiting for a spare.
        retrieve: Loading state.
        replay: Computing windows again, by all stages or by one.
    """

    useful: float = 0.0
    stall: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    idle: float = 0.0
    retrieve: float = 0.0
    replay: float = 0.0

    @property
    def total(self) -> float:
        return self.useful + self.stall + self.lost + self.down + self.idle + self.retrieve + self.replay

    @property
    def recovery(self) -> float:
        """Total recovery time, as the papers define it: all but useful time and stalls."""
        return self.total - self.useful - self.stall


@dataclass(frozen=True)
class Sample:
    """The state of a run at one moment, taken after each recovery and at the end.

    Attributes:
        useful_steps: Iterations done and not undone so far.
        plt: Portion of lost tokens so far.
        k: Experts per layer and checkpoint; None for policies without K.
        window: W.
        saved_fraction: Bytes of the newest checkpoint or window's largest slot, over those of a dense one.
    """

    at_secs: float
    useful_steps: int
    lost_tokens: int = 0
    plt: float = 0.0
    k: int | None = None
    window: int | None = None
    saved_fraction: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run.

    Attributes:
        ettr: Useful time over all time.
        steps: Iterations done at the end.
        iteration_secs: Time of an iteration without stalls.
        advances: False if training does not advance or was cut off; ``verdict`` says why.
        interval: Iterations between the newest checkpoints; None for windows.
        window: W of the newest window.
        mean_stall_secs: Mean stall per iteration.
        rank_bytes_per_step, total_bytes_per_step: Mean bytes of snapshots per iteration, on the rank that has most and
            on all ranks.
        sent_bytes_per_step: Mean bytes per iteration that leave that rank, for one copy.
        heaviest_bytes: Most bytes of one snapshot on one rank.
        logged_bytes_per_step, log_bytes: Bytes of the upstream log on the rank that logs most: per iteration, and in
            host memory if it reaches back as far as a recovery may.
        fallbacks: Recoveries that could not return to the newest checkpoint.
        recovered: Recoveries by the farthest tier that some rank loaded from: "host" (its own memory), "peer" or
            "storage".
        steps_again: Rank-iterations that recoveries computed a second time: those that a failure undid, and those that
            make a window dense. Only recoveries that ended count.
        lost_tokens, plt: Lost tokens and their portion, over all failures.
        reorders: Windows in another order than the one before.
        plans: Calls of the policy. They measure the simulation's own work and predict nothing.
    """

    system: str
    seed: int
    spent: Spent
    steps: int
    iteration_secs: float
    failures: int
    fallbacks: int = 0
    recovered: Mapping[str, int] = field(default_factory=dict)
    steps_again: int = 0
    advances: bool = True
    verdict: str = ""
    interval: int | None = None
    window: int | None = None
    k: int | None = None
    mean_stall_secs: float = 0.0
    rank_bytes_per_step: float = 0.0
    total_bytes_per_step: float = 0.0
    sent_bytes_per_step: float = 0.0
    heaviest_bytes: int = 0
    logged_bytes_per_step: float = 0.0
    log_bytes: float = 0.0
    lost_tokens: int = 0
    plt: float = 0.0
    reorders: int = 0
    history: tuple[Sample, ...] = field(default=(), repr=False)
    plans: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def ettr(self) -> float:
        return self.spent.useful / self.spent.total if self.spent.total else 0.0

    def to_dict(self, history: bool = True) -> dict[str, Any]:
        """Returns plain data, with floats rounded to 9 significant digits, so that all machines write the same text."""
        plain = {**asdict(self), "ettr": self.ettr}
        if not history:
            del plain["history"]
        rounded: dict[str, Any] = _rounded(plain)
        return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return value
