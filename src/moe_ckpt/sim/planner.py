"""Which policy, with which settings: every candidate simulated on the same failures, and the best one named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import Any

from moe_ckpt.errors import ConfigError, MoECheckpointError
from moe_ckpt.policies import CheckFreq, Dense, MoC, MoEtion, MoEvement
from moe_ckpt.policies.base import Policy
from moe_ckpt.sim.checks import portion, whole
from moe_ckpt.sim.intervals import usual, with_interval
from moe_ckpt.sim.resources import Use, use_of
from moe_ckpt.sim.run import simulate
from moe_ckpt.sim.scenario import Outcome, Scenario
from moe_ckpt.sim.system import System

CLOSE = 0.005
"""ETTR this close counts as alike: then what loses no tokens goes first, and among these the simpler policy."""

_KINDS: tuple[type, ...] = (Dense, CheckFreq, MoC, MoEtion, MoEvement)
"""What is compared, the simplest first. Each is in the config group of the name that it describes itself by."""

Progress = Callable[[int, int], None]
"""Told how many simulations are done, of how many."""


@dataclass(frozen=True)
class Candidate:
    """One system with its settings, and what it is predicted to do. Figures are means over the seeds.

    refused: why it cannot be used here; empty if it can. use: None where it could not even be simulated.
    """

    system: System
    ettr: float = 0.0
    stall_secs: float = 0.0
    plt: float = 0.0
    outcome: Outcome | None = None
    use: Use | None = None
    refused: str = ""

    @property
    def exact(self) -> bool:
        """Whether it loses no tokens by design."""
        return not isinstance(self.system.policy, (MoC, MoEtion))


@dataclass(frozen=True)
class Plan:
    """What ``recommend`` found. candidates: best first. recommended: None where none can be used.

    best: of all, also of those that only the simulator has.
    """

    candidates: tuple[Candidate, ...]
    recommended: Candidate | None
    best: Candidate | None


def trainer_systems(scenario: Scenario, most_plt: float = 0.05) -> list[System]:
    """What a Trainer can run today, with settings that fit the scenario: all on storage, rolled back as a whole.

    most_plt: as in ``recommend``; MoC's budget, which it does without where nothing or everything may be lost.
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
        _skipping("moetion", MoEtion()),
        replace(_skipping("moevement", MoEvement()), freeze=False),
    ]


def _skipping(name: str, policy: Policy) -> System:
    """As a Trainer's engine has it by default."""
    return System(name, policy, when_busy="skip")


def _fitting(scenario: Scenario, system: System) -> System:
    """With the smallest interval at which a usual checkpoint is copied and written before the next one begins."""
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
    progress: Progress | None = None,
) -> Plan:
    """Simulate every system on the failures of ``scenario`` and of the seeds after its own, and choose.

    scenario: its own system does not matter. most_plt: portion of tokens that may be lost.

    Raises:
        ConfigError: no systems, or settings that make no sense.
    """
    whole("plan", seeds=seeds)
    portion("plan", most_plt=most_plt)
    if not systems:
        raise ConfigError("plan: no policy to compare")
    found = []
    for number, system in enumerate(systems):
        found.append(_candidate(scenario, system, seeds, most_plt))
        if progress is not None:
            progress(number + 1, len(systems))
    ranked = sorted(found, key=lambda one: (bool(one.refused), -one.ettr))
    usable = [one for one in ranked if not one.refused]
    return Plan(tuple(ranked), _best([one for one in usable if one.system.in_trainer]), _best(usable))


def _best(usable: Sequence[Candidate]) -> Candidate | None:
    if not usable:
        return None
    close = [one for one in usable if one.ettr >= usable[0].ettr - CLOSE]
    return min(close, key=lambda one: (not one.exact, _complexity(one.system.policy), -one.ettr))


def _complexity(policy: Policy) -> int:
    return next((number for number, kind in enumerate(_KINDS) if isinstance(policy, kind)), len(_KINDS))


def _candidate(scenario: Scenario, system: System, seeds: int, most_plt: float) -> Candidate:
    try:
        chosen = with_interval(replace(scenario, system=system), simulate)
        outcomes = [simulate(replace(chosen, seed=scenario.seed + number)) for number in range(seeds)]
    except MoECheckpointError as error:
        return Candidate(system, refused=str(error))
    first, use = outcomes[0], use_of(chosen, outcomes[0])
    made = Candidate(
        chosen.system,
        fmean(one.ettr for one in outcomes),
        fmean(one.mean_stall_secs for one in outcomes),
        max(one.plt for one in outcomes),
        first,
        use,
    )
    return replace(made, refused=_why_not(made, scenario, outcomes, most_plt))


def _why_not(made: Candidate, scenario: Scenario, outcomes: Sequence[Outcome], most_plt: float) -> str:
    stuck = [one for one in outcomes if not one.advances]
    if stuck:
        return stuck[0].verdict
    if made.use is not None and made.use.utilisation["host_memory"] > 1:
        return (
            f"needs {made.use.host_bytes / 1e9:,.0f} GB of host memory on a node, and Cluster "
            f"{scenario.layout.cluster.name!r} has {scenario.layout.cluster.host_memory_bytes / 1e9:,.0f} GB for it"
        )
    if made.plt > most_plt:
        return f"loses {made.plt:.2%} of all tokens, more than {most_plt:.2%}"
    return ""


def overrides(policy: Policy, defaults: Mapping[str, Any] | None = None) -> str:
    """The Hydra overrides that make ``policy`` in an app with the group ``moe_ckpt/policy``.

    defaults: settings that need not be said, since the group's own are the same.

    Raises:
        ConfigError: the policy is in no config group.
    """
    if type(policy) not in _KINDS:
        raise ConfigError(f"{type(policy).__name__} is in no config group of moe_ckpt/policy")
    said = [f"moe_ckpt/policy={policy.describe()['name']}"]
    for name, value in vars(policy).items():
        if defaults is None or defaults.get(name, ...) != value:
            said.append(f"moe_ckpt.policy.{name}={'null' if value is None else value}")
    return " ".join(said)
