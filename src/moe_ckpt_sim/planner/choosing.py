"""Chooses the system to recommend, and the systems to simulate longer until the choice is certain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from moe_ckpt.policies import CheckFreq, Dense, Gemini, GradientLog, MoC, MoEtion, MoEvement
from moe_ckpt.policies.base import Policy, needs_of
from moe_ckpt_sim.planner.racing import Runner
from moe_ckpt_sim.run.system import DURABLE, System

CLOSE = 0.005
"""ETTRs this close count as equal. Then systems that lose no tokens come first, then those without memory, then the
simpler ones."""

KINDS: tuple[type, ...] = (Dense, CheckFreq, Gemini, MoC, MoEtion, MoEvement, GradientLog)
"""The policies to compare, the simplest first. Each is in the config group under the name in its description."""

OPEN = "not known yet"
"""The reason against a system while it is not certain whether it can be used."""


@dataclass(frozen=True)
class Leg:
    """The part of the runs that is simulated next.

    Attributes:
        number: 1 for the first leg.
        systems: Names of the systems.
        secs: Simulated time at its end; None: the end of the run.
    """

    number: int
    systems: tuple[str, ...]
    secs: float | None


Tell = Callable[[Leg, float], None]
"""A callback that gets a leg and how many of its systems are done, the portion of a running one included."""


def exact(policy: Policy) -> bool:
    """Returns whether the policy loses no tokens by design."""
    return not needs_of(policy).partial


def preference(system: System) -> tuple[bool, int, int]:
    """A sort key for systems of equal ETTR: exact ones first, then least memory, then simplest."""
    simple = next((number for number, kind in enumerate(KINDS) if isinstance(system.policy, kind)), len(KINDS))
    return not exact(system.policy), DURABLE.index(system.durable), simple


def best(usable: Sequence[Runner]) -> Runner | None:
    """The preferred system among those whose ETTR is close to the best."""
    if not usable:
        return None
    top = max(one.ettr for one in usable)
    close = [one for one in usable if one.ettr >= top - CLOSE]
    return min(close, key=lambda one: (*preference(one.system), -one.ettr))


def why_not(runner: Runner, most_plt: float) -> str:
    """The reason that a system cannot be used; empty if it can, ``OPEN`` while that is not certain."""
    outcomes = runner.outcomes
    stuck = [one for one in outcomes if not one.advances]
    if stuck:
        return stuck[0].verdict
    use, cluster = runner.use, runner.scenario.layout.cluster
    if use.utilisation["host_memory"] > 1:
        return (
            f"needs {use.host_bytes / 1e9:,.0f} GB of host memory on a node, and Cluster {cluster.name!r} has "
            f"{cluster.host_memory_bytes / 1e9:,.0f} GB for it"
        )
    if not runner.done and not exact(runner.system.policy):
        if runner.lost.high <= most_plt:
            return ""
        if runner.lost.low <= most_plt or runner.system.needs.lost_tokens:
            return OPEN  # a budget makes a policy lose less later on
    plt = max(one.plt for one in outcomes)
    return f"loses {plt:.2%} of all tokens, more than {most_plt:.2%}" if plt > most_plt else ""


class Choice:
    """The choice of the best runner, which is certain before all runners are simulated to the end."""

    def __init__(self, runners: Sequence[Runner], most_plt: float) -> None:
        self._runners, self._most_plt = runners, most_plt

    @property
    def leader(self) -> Runner | None:
        """The best of the runners that were simulated longest; None if none of them can be used."""
        possible = [one for one in self._runners if why_not(one, self._most_plt) in ("", OPEN)]
        furthest = max((one.leg for one in possible), default=0)
        longest = [one for one in possible if one.leg == furthest]
        # The leader is simulated to the end, so it need not be certain now that it can be used.
        likely = [one for one in longest if one.done or max(x.plt for x in one.outcomes) <= self._most_plt]
        return best(likely or longest)

    def open(self) -> list[Runner]:
        """The runners to simulate longer: the leader, and those that could still displace it."""
        usable = {one: why_not(one, self._most_plt) for one in self._runners}
        possible = [one for one, reason in usable.items() if reason in ("", OPEN)]
        leader = self.leader
        if leader is None:
            return [one for one in possible if not one.done]
        sure = [one for one, reason in usable.items() if not reason or one is leader]
        unsure = [one for one in possible if one is not leader and not self._settled(leader, one, sure)]
        return [one for one in (leader, *unsure) if not one.done]

    def _settled(self, leader: Runner, other: Runner, sure: Collection[Runner]) -> bool:
        """Returns whether ``other`` can no longer change the choice. sure: runners that can be used, and the leader."""
        if leader.done and other.done:
            return True
        mine, its = preference(leader.system), preference(other.system)
        if its < mine:
            return any(one.ahead_of(other).low >= CLOSE for one in sure if one is not other)
        return leader.ahead_of(other).low >= (0.0 if its == mine else -CLOSE)


def race(runners: Sequence[Runner], most_plt: float, tell: Tell | None = None) -> tuple[Choice, Choice]:
    """Simulate until two choices are certain: among the systems that a Trainer can run, and among all systems."""
    choices = Choice([one for one in runners if one.system.in_trainer], most_plt), Choice(runners, most_plt)
    waiting = list(runners)
    while waiting:
        behind = min(one.leg for one in waiting)
        now = [one for one in waiting if one.leg == behind]
        alone = len(now) == 1 and len(waiting) == 1
        _advance(now, now[0].legs if alone else behind + 1, tell)
        waiting = list(dict.fromkeys(one for choice in choices for one in choice.open()))
    return choices


def _advance(runners: Sequence[Runner], leg: int, tell: Tell | None) -> None:
    current = Leg(leg, tuple(one.system.name for one in runners), runners[0].secs_of(leg))
    for number, runner in enumerate(runners):

        def progress(portion: float, done: int = number) -> None:
            if tell is not None:
                tell(current, done + portion)

        runner.advance(leg, progress)
        progress(1.0)
