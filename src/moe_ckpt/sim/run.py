"""The simulation of one run, driven by the library's own policy.

Between two events a run repeats itself: the policy sees the same pattern of ages, unsaved tokens and snapshots under
way that it saw a round before, and decides the same. So rounds are stepped through once, and then moved ahead in time
all at once (``stepping.Stepper``). That gives the same outcome to the last bit, since time is in whole parts
(``sim.clock``). It is an approximation where a policy goes by the whole run so far: under a PLT budget, and where
experts that were not saved for long go first, by the run's own mean interval (load_aware, least_loss, MoEtion); there
one lost token in a thousand was seen to differ.

The work grows with failures, changes of load and the length of a round, not with iterations or GPUs. So there is no
event queue here (simpy was considered): it would spend its time on what repeats, and what is left between two failures
are a dozen additions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_ckpt.sim.clock import on_clock
from moe_ckpt.sim.costs import Costs
from moe_ckpt.sim.failing import FUTILE_FAILURES, Failing, Spares
from moe_ckpt.sim.intervals import with_interval
from moe_ckpt.sim.recovery import Recoveries
from moe_ckpt.sim.scenario import Outcome, Sample, Scenario, Spent
from moe_ckpt.sim.stepping import State, Stepper

Progress = Callable[[float], None]
"""Told the portion of the run that is done."""


def simulate(scenario: Scenario, progress: Progress | None = None) -> Outcome:
    """What comes of a run. The same scenario gives the same outcome; failures and loads do not depend on the system.

    progress: called at every failure, and when the load changes.

    Raises:
        ConfigError: the policy cannot serve the model, copies are to be kept on more other nodes than there are, or an
            interval is asked of a formula that has none here.
    """
    scenario.require_peers()
    return _Run(with_interval(scenario, simulate)).outcome(progress)


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        layout, cluster = scenario.layout, scenario.layout.cluster
        seeds = np.random.SeedSequence(scenario.seed).spawn(2)
        failures, loads = (np.random.Generator(np.random.PCG64(seed)) for seed in seeds)
        self._costs = Costs(layout, scenario.precision, scenario.iteration, scenario.system)
        recoveries = Recoveries(self._costs, scenario.batch.micro_batches(layout.parallel.dp))
        assignments = scenario.tokens_per_step * layout.model.top_k
        self._stepper = Stepper(self._costs, scenario.load, assignments, loads, scenario.stepwise)
        joins = scenario.failures.tells_joins
        spares = Spares(cluster.spare_nodes, None if joins else cluster.repair_secs, joins)
        events = scenario.failures.events(failures, layout.nodes)
        self._failing = Failing(self._costs, recoveries, events, spares)
        self._history: list[Sample] = []
        self._verdict = ""

    def outcome(self, progress: Progress | None) -> Outcome:
        end, state = on_clock(self._scenario.duration_secs), self._stepper.state

        def tick() -> None:
            if progress is not None:
                progress(min(1.0, state.now / end))

        kept, futile = 0, 0
        while state.now < end and not self._verdict:
            self._stepper.train(min(self._failing.next_secs, end), tick)
            if state.halt is not None:
                self._verdict = f"the policy ended training after {state.now:.0f} s: {state.halt}"
            if state.now >= end or self._verdict:
                break
            self._failing.recover(state, end)
            self._stepper.interrupted()
            self._sample(state)
            before, kept = kept, 0 if state.track.newest is None else state.track.newest.step
            futile = 0 if kept > before else futile + 1
            if futile >= FUTILE_FAILURES or self._failing.hopeless:
                self._verdict = self._futile(state, max(futile, FUTILE_FAILURES))
            tick()
        self._sample(state)
        return self._told(state)

    def _sample(self, state: State) -> None:
        tokens = state.track.books.tokens
        window = None if state.window is None else state.window.size
        saved = state.saved_bytes / max(self._costs.dense.total, 1)
        self._history.append(Sample(state.now, state.step, tokens.lost_tokens, tokens.plt, state.k, window, saved))

    def _futile(self, state: State, failures: int) -> str:
        return (
            f"training does not advance: {failures} failures in a row undid all that was trained since step "
            f"{state.step}; the run was given up after {state.now:.0f} s"
        )

    def _told(self, state: State) -> Outcome:
        scenario, tokens = self._scenario, state.track.books.tokens
        useful = state.step * self._costs.iteration.secs
        trained = max(1, state.step + round(state.lost / self._costs.iteration.secs))
        if not self._verdict and self._failing.stranded:
            self._verdict = "no spare node was left, and none was repaired or joined in time: the run stands still"
        if not self._verdict and state.step == 0:
            self._verdict = "training does not advance: at the end not one iteration was left"
        spent = Spent(useful, state.stall, state.lost, state.down, state.idle, state.retrieve, state.replay)
        return Outcome(
            system=scenario.system.name,
            seed=scenario.seed,
            spent=spent,
            steps=state.step,
            iteration_secs=scenario.iteration.secs,
            failures=self._failing.failures,
            fallbacks=self._failing.fallbacks,
            advances=not self._verdict,
            verdict=self._verdict,
            interval=None if scenario.system.sparse else state.interval,
            window=None if state.window is None else state.window.size,
            k=state.k,
            mean_stall_secs=state.stall / trained,
            rank_bytes_per_step=state.rank_bytes / trained,
            total_bytes_per_step=state.total_bytes / trained,
            heaviest_bytes=state.heaviest_bytes,
            lost_tokens=tokens.lost_tokens,
            plt=tokens.plt,
            reorders=state.reorders,
            history=tuple(self._history),
            plans=state.plans,
            settings={"policy": scenario.system.policy.describe()},
        )
