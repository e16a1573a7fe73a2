"""The simulation of one run, driven by the library's own policy.

Between two events a run repeats itself: the policy sees the same pattern of ages, unsaved tokens and snapshots under
way as one round before, and decides the same. So a round is stepped through once, and then many rounds are skipped at
once (``stepping.Stepper``). The outcome is the same to the last bit, since time is in whole parts (``cluster.clock``).
It is an approximation for policies that use the whole run so far: under a PLT budget, and if experts that were not
saved for long come first, by the run's own mean interval (load_aware, least_loss, MoEtion). In tests one lost token in
a thousand differed.

The work grows with failures, changes of load and the length of a round, not with iterations or GPUs. Hence there is no
event queue (simpy was considered): it would step through all repeated rounds, while the code here needs a dozen
additions between two failures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import inf

import numpy as np

from moe_ckpt_sim.cluster.clock import on_clock
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.planner.intervals import with_interval
from moe_ckpt_sim.run.failing import FUTILE_FAILURES, Failing, SpareNodes
from moe_ckpt_sim.run.recovery import Recoveries
from moe_ckpt_sim.run.scenario import Outcome, Sample, Scenario, Spent
from moe_ckpt_sim.run.state import SimulatedState
from moe_ckpt_sim.run.stepping import Stepper

Progress = Callable[[float], None]
"""A callback that gets the portion of the run that is done."""

_ROUNDING = 1e-9
"""Tolerance for a portion of time."""


def simulate(scenario: Scenario, progress: Progress | None = None) -> Outcome:
    """Simulate a run. The same scenario gives the same outcome; failures and loads do not depend on the system.

    Args:
        progress: Called at every failure, and when the load changes.

    Raises:
        ConfigError: the policy cannot serve the model, there are too few nodes for the copies, or the rule for the
            interval needs a mean time between failures that the failures do not have.
    """
    scenario.require_peers()
    run = Run(with_interval(scenario, ettr_of))
    run.advance(inf, progress)
    return run.outcome()


def ettr_of(scenario: Scenario, least: float = 0.0) -> float:
    """Returns the ETTR of a run, or a figure from it to ``least`` as soon as it is certain to stay below ``least``."""
    run = Run(scenario)
    run.advance(inf, least=least)
    return run.outcome().ettr if run.done else run.most_ettr


class Run:
    """One run, which can be simulated in parts.

    It stops only after a repaired failure, so the parts do not change the outcome.
    """

    def __init__(self, scenario: Scenario) -> None:
        """Set up the run. scenario: its policy chooses its own interval (``intervals.with_interval``)."""
        self._scenario = scenario
        layout, cluster = scenario.layout, scenario.layout.cluster
        seeds = np.random.SeedSequence(scenario.seed).spawn(2)
        failures, loads = (np.random.Generator(np.random.PCG64(seed)) for seed in seeds)
        self._costs = Costs(layout, scenario.precision, scenario.iteration, scenario.system)
        recoveries = Recoveries(self._costs, scenario.batch.micro_batches(layout.parallel.dp))
        assignments = scenario.tokens_per_step * layout.model.top_k
        self._stepper = Stepper(self._costs, scenario.load, assignments, loads, scenario.stepwise)
        joins = scenario.failures.tells_joins
        spares = SpareNodes(cluster.spare_nodes, None if joins else cluster.repair_secs, joins)
        events = scenario.failures.events(failures, layout.nodes)
        self._failing = Failing(self._costs, recoveries, events, spares)
        self._end = on_clock(scenario.duration_secs)
        self._history: list[Sample] = []
        self._verdict = ""
        self._last_step = self._futile = 0
        self.done = False

    @property
    def now_secs(self) -> float:
        return self._stepper.state.now

    @property
    def most_ettr(self) -> float:
        """The greatest ETTR that the run can reach, without failures or stalls from now on."""
        state = self._stepper.state
        return 1.0 - (state.now - state.step * self._costs.iteration.secs) / self._end

    def advance(self, until_secs: float, progress: Progress | None = None, least: float = 0.0) -> None:
        """Simulate to the first repaired failure at or after ``until_secs``, or to the end.

        Args:
            least: Stop early once the ETTR can no longer reach it.
        """
        state, end = self._stepper.state, self._end

        def tick() -> None:
            if progress is not None:
                progress(min(1.0, state.now / end))

        while not self.done and state.now < until_secs and self.most_ettr > least - _ROUNDING:
            self._stepper.train(min(self._failing.next_secs, end), tick)
            if state.now < end:
                self._recover(state)
                tick()
            if state.now >= end or self._verdict:
                self._finish(state)

    def _recover(self, state: SimulatedState) -> None:
        self._failing.recover(state, self._end)
        self._stepper.interrupted()
        self._sample(state)
        before, self._last_step = self._last_step, state.step
        self._futile = 0 if self._last_step > before else self._futile + 1
        if self._futile >= FUTILE_FAILURES or self._failing.hopeless:
            self._verdict = self._why_futile(state, max(self._futile, FUTILE_FAILURES))

    def _finish(self, state: SimulatedState) -> None:
        self._sample(state)
        self.done = True
        if not self._verdict and self._failing.stranded:
            self._verdict = "no spare node was left, and none was repaired or joined in time: the run stands still"
        if not self._verdict and state.step == 0:
            self._verdict = "training does not advance: at the end not one iteration was left"

    def _sample(self, state: SimulatedState) -> None:
        tokens = state.track.run_ledger.tokens
        window = state.round_steps if state.window is None else state.window.size
        saved = state.saved.newest / max(self._costs.bytes_of.dense.total, 1)
        self._history.append(Sample(state.now, state.step, tokens.lost_tokens, tokens.plt, state.k, window, saved))

    def _why_futile(self, state: SimulatedState, failures: int) -> str:
        return (
            f"training does not advance: {failures} failures in a row undid all that was trained since step "
            f"{state.step}; the run was given up after {state.now:.0f} s"
        )

    def outcome(self) -> Outcome:
        """Returns the outcome of the run so far."""
        scenario, state = self._scenario, self._stepper.state
        tokens = state.track.run_ledger.tokens
        useful = state.step * self._costs.iteration.secs
        trained = max(1, state.step + round(state.secs.lost / self._costs.iteration.secs))
        spent, log = Spent(useful, **asdict(state.secs)), self._costs.log
        return Outcome(
            system=scenario.system.name,
            seed=scenario.seed,
            spent=spent,
            steps=state.step,
            iteration_secs=scenario.iteration.secs,
            failures=state.failures,
            fallbacks=self._failing.fallbacks,
            recovered={tier.value: count for tier, count in self._failing.recovered.items()},
            steps_again=self._failing.steps_again,
            advances=not self._verdict,
            verdict=self._verdict,
            interval=None if scenario.system.sparse or state.round_steps else state.interval,
            window=state.round_steps if state.window is None else state.window.size,
            k=state.k,
            mean_stall_secs=state.secs.stall / trained,
            rank_bytes_per_step=state.saved.rank / trained,
            total_bytes_per_step=state.saved.total / trained,
            sent_bytes_per_step=state.saved.sent / trained,
            heaviest_bytes=state.saved.heaviest,
            logged_bytes_per_step=log.step_bytes,
            log_bytes=log.held_bytes(None if state.window is None else state.window.size),
            lost_tokens=tokens.lost_tokens,
            plt=tokens.plt,
            reorders=state.reorders,
            history=tuple(self._history),
            plans=state.plans,
            settings={"policy": scenario.system.policy.describe()},
        )
