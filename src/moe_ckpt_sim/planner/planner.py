"""Recommends a policy and its settings: every candidate is simulated on the same failures, and the best one chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from statistics import fmean
from typing import Any

from moe_ckpt.errors import ConfigError, MoECheckpointError
from moe_ckpt.policies import CheckFreq, Dense, MoC, MoEtion, MoEvement
from moe_ckpt.policies.base import Policy
from moe_ckpt_sim.checks import portion, whole
from moe_ckpt_sim.planner.choosing import KINDS, OPEN, Tell, exact, race, why_not
from moe_ckpt_sim.planner.intervals import usual
from moe_ckpt_sim.planner.racing import Runner
from moe_ckpt_sim.planner.resources import Use
from moe_ckpt_sim.run.scenario import Outcome, Scenario
from moe_ckpt_sim.run.system import System


@dataclass(frozen=True)
class Candidate:
    """One system with its settings and its predicted figures, which are means over the seeds.

    Attributes:
        margin: Margin of ``ettr`` with 99 % confidence, if the system was not simulated to the end. ``ettr`` is then
            that of a system that was, plus the difference between the two.
        simulated_secs: Simulated time of all seeds together.
        refused: Reason that it cannot be used here; empty if it can.
        use: None if it could not be simulated.
    """

    system: System
    ettr: float = 0.0
    margin: float = 0.0
    simulated_secs: float = 0.0
    stall_secs: float = 0.0
    plt: float = 0.0
    outcome: Outcome | None = None
    use: Use | None = None
    refused: str = ""

    @property
    def exact(self) -> bool:
        """True if the policy loses no tokens by design."""
        return exact(self.system.policy)


@dataclass(frozen=True)
class Plan:
    """The result of ``recommend``.

    Attributes:
        candidates: All candidates, best first.
        recommended: None if none can be used.
        best: The best candidate, even if only the simulator has it.
    """

    candidates: tuple[Candidate, ...]
    recommended: Candidate | None
    best: Candidate | None


def trainer_systems(scenario: Scenario, most_plt: float = 0.05) -> list[System]:
    """The systems on storage that a Trainer can run, with settings that fit the scenario.

    Args:
        most_plt: As in ``recommend``; it is MoC's budget unless nothing or everything may be lost.
    """
    portion("plan", most_plt=most_plt)
    budget = most_plt if 0 < most_plt < 1 else None
    layers = scenario.layout.model.catalog.layers
    least = min(layer.experts for layer in layers)
    ks = sorted({max(1, least // part) for part in (8, 4, 2)})
    rule = "oracle" if scenario.failures.mean_secs is None else "daly"
    return [
        replace(_skipping("dense", Dense()), interval=rule),
        _skipping("checkfreq", CheckFreq()),
        *(_fitting(scenario, _skipping(f"moc_k{k}", MoC(k=k, plt_budget=budget))) for k in ks),
        _fitting(scenario, _skipping("moc_auto", MoC(k="auto", snapshot_k="auto", plt_budget=budget))),
        _skipping("moetion", MoEtion()),
        _skipping("moevement", MoEvement()),
    ]


def _skipping(name: str, policy: Policy) -> System:
    """A system that skips a checkpoint when no buffer is free, as a Trainer does by default."""
    return System(name, policy, when_busy="skip")


def _fitting(scenario: Scenario, system: System) -> System:
    """The system with the smallest interval at which a usual checkpoint is done before the next one begins."""
    one = usual(replace(scenario, system=system))
    secs = max(one.copy_secs, one.move_secs)
    fitting: Any = replace(system.policy, every_n_steps=max(1, ceil(secs / scenario.iteration.secs)))  # type: ignore[type-var]
    return replace(system, policy=fitting)


def recommend(
    scenario: Scenario,
    systems: Sequence[System],
    *,
    seeds: int = 3,
    most_plt: float = 0.05,
    tell: Tell | None = None,
) -> Plan:
    """Simulate every system on the failures of ``scenario`` and of the seeds after its own, and choose the best.

    All are simulated for a part of the time; only those that could still be chosen are continued.

    Args:
        scenario: The setting; its system is ignored.
        most_plt: Portion of tokens that may be lost.

    Raises:
        ConfigError: no systems, or invalid settings.
    """
    whole("plan", seeds=seeds)
    portion("plan", most_plt=most_plt)
    if not systems:
        raise ConfigError("plan: no policy to compare")
    runners, candidates = [], []
    for system in systems:
        try:
            runners.append(Runner(scenario, system, seeds))
        except MoECheckpointError as error:
            candidates.append(Candidate(system, refused=str(error)))
    in_trainer, of_all = race(runners, most_plt, tell)
    for runner in runners:
        leader = in_trainer.leader if runner.system.in_trainer else of_all.leader
        candidates.append(_candidate(runner, leader or of_all.leader, most_plt))
    ranked = sorted(candidates, key=lambda one: (bool(one.refused), -one.ettr))
    return Plan(tuple(ranked), *(_of(ranked, choice.leader) for choice in (in_trainer, of_all)))


def _of(candidates: Sequence[Candidate], runner: Runner | None) -> Candidate | None:
    return next((one for one in candidates if runner is not None and one.system is runner.system), None)


def _candidate(runner: Runner, leader: Runner | None, most_plt: float) -> Candidate:
    """The candidate of a runner, compared with a ``leader`` that was simulated to the end on the same failures."""
    outcomes, ettr, margin = runner.outcomes, runner.ettr, 0.0
    if not runner.done and leader is not None:
        ahead = runner.ahead_of(leader)
        if isfinite(ahead.margin):
            ettr, margin = leader.ettr + ahead.mean, ahead.margin
    reason = why_not(runner, most_plt)
    return Candidate(
        runner.system,
        max(0.0, ettr),
        margin,
        runner.simulated_secs,
        fmean(one.mean_stall_secs for one in outcomes),
        max(one.plt for one in outcomes),
        outcomes[0],
        runner.use,
        "" if reason == OPEN else reason,
    )


def memory_overrides(system: System) -> str:
    """The Hydra overrides that put checkpoints into the system's memory, for an app with ``moe_ckpt/memory``."""
    if system.durable == "storage":
        return ""
    settings = ["moe_ckpt/memory=local"]
    if system.durable == "peers":
        settings = ["moe_ckpt/memory=replicated", f"moe_ckpt.memory.replicas={system.replicas}"]
    every = system.storage_every
    if every is not None:
        if isinstance(every, float) and every % 3600 == 0:
            every = f"{every / 3600:g}h"
        settings.append(f"moe_ckpt.memory.storage_every={every}")
    return " ".join(settings)


def overrides(policy: Policy, defaults: Mapping[str, Any] | None = None) -> str:
    """The Hydra overrides that choose ``policy``, for an app with the group ``moe_ckpt/policy``.

    Args:
        defaults: Default settings of the group; settings that equal them are left out.

    Raises:
        ConfigError: the policy is in no config group.
    """
    if type(policy) not in KINDS:
        raise ConfigError(f"{type(policy).__name__} is in no config group of moe_ckpt/policy")
    settings = [f"moe_ckpt/policy={policy.describe()['name']}"]
    for name, value in vars(policy).items():
        if defaults is None or defaults.get(name, ...) != value:
            settings.append(f"moe_ckpt.policy.{name}={'null' if value is None else value}")
    return " ".join(settings)
