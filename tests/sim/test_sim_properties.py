"""What must hold whatever the numbers: more failures do not help, wider links do not harm."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moe_ckpt.policies import CheckFreq, Dense, MoC, MoEvement
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.sync import SyncDense
from moe_ckpt_sim.workload.load import ExpertLoad
from tests.sim.builders import LOCAL, predicted, scenario, sparse, trace

FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SYSTEMS = {
    "dense": (Dense(10), {}),
    "dense, far apart": (Dense(50), {}),
    "moc": (MoC(k=2, every_n_steps=5), {}),
    "moevement": (MoEvement(window=4), {"system": {"durable": "peers"}}),
    "moevement localized": (MoEvement(window=4), {"system": LOCAL}),
}


def failing(times):
    """Node after node, each back at once."""
    events = []
    for at, secs in enumerate(times):
        events += [(secs, at % 4), (secs, at % 4, True)]
    return trace(*events) if events else None


MOMENTS = st.lists(st.integers(0, 999_999).map(lambda n: n / 1000), max_size=7, unique=True).map(sorted)


@FEW
@given(times=MOMENTS, extra=st.integers(0, 999_999).map(lambda n: n / 1000), every=st.sampled_from([5, 10, 37]))
def test_one_failure_more_never_helps_dense_checkpoints(times, extra, every):
    """On the very same failures and one more, no more steps: at any time the run with fewer failures is as far and what
    it has committed is as new. (It takes that the link is free before the next checkpoint, and that loading takes no
    longer than an interval: to begin a run anew may be faster than to load its first step.)
    """
    assume(extra not in times)
    fewer = simulate(scenario(Dense(every), failures=failing(times), duration_secs=1000.0))
    more = simulate(scenario(Dense(every), failures=failing(sorted([*times, extra])), duration_secs=1000.0))
    assert more.steps <= fewer.steps
    assert more.failures == fewer.failures + 1


@pytest.mark.parametrize("name", SYSTEMS)
def test_half_the_mtbf_never_raises_the_mean(name):
    """A seed's failures come at half their times then. For one seed alone the ETTR may rise all the same: a failure may
    come just after a commit instead of just before it. By no more than all failures could undo."""
    policy, given_settings = SYSTEMS[name]
    every = getattr(policy, "every_n_steps", 8)
    means, before = [], []
    for mtbf in (1600.0, 800.0, 400.0, 200.0, 100.0):
        told = [simulate(scenario(policy, failures=Poisson(mtbf), seed=seed, **given_settings)) for seed in range(8)]
        means.append(fmean(one.ettr for one in told))
        for one, former in zip(told, before or told, strict=True):
            assert one.failures >= former.failures
            assert one.ettr <= former.ettr + (former.failures * (every + 10.0) + 1) / 3600.0
        before = told
    assert means == sorted(means, reverse=True)
    assert means[0] - means[-1] > 0.03


def test_one_seed_may_do_better_with_more_failures():
    """Why the property above is one of means: two failures just after a commit undo less than one just before it."""
    rare, often = (simulate(scenario(Dense(50), failures=Poisson(mtbf), seed=84)) for mtbf in (4000.0, 2000.0))
    assert often.failures >= rare.failures >= 1
    assert often.ettr > rare.ettr


@FEW
@given(st.integers(0, 2**31), st.sampled_from(sorted(SYSTEMS)))
def test_a_seed_gives_the_same_run_again(seed, name):
    policy, given_settings = SYSTEMS[name]
    tried = scenario(
        policy,
        failures=Poisson(120.0),
        seed=seed,
        duration_secs=600.0,
        load=ExpertLoad(0.3, 0.2, 100.0),
        **given_settings,
    )
    assert predicted(simulate(tried)) == predicted(simulate(tried))
    assert simulate(tried).to_dict() == simulate(tried).to_dict()


WITH = {
    "policy": st.sampled_from(
        [
            Dense(2),
            SyncDense(5),
            MoC(k=3, every_n_steps=2),
            MoC(k=1),
            MoEvement(),
            MoEvement(window=5),
            CheckFreq(),
        ]
    ),
    "durable": st.sampled_from(["storage", "node", "peers"]),
    "stored": st.sampled_from([70.0, 1, 13, 33.3, "auto"]),
    "busy": st.sampled_from(["wait", "skip"]),
    "buffers": st.sampled_from([1, 2, 4]),
    "rates": st.tuples(*[st.integers(10_000, 1_000_000)] * 3),
    "mtbf": st.sampled_from([20.0, 60.0, 400.0]),
    "secs": st.sampled_from([0.7, 1.0, 1.3]),
}


@FEW
@given(**WITH)
def test_rounds_moved_ahead_are_rounds_stepped_through(policy, durable, stored, busy, buffers, rates, mtbf, secs):
    """To the last bit, whatever the links, and where snapshots are out of step with iterations."""
    cluster = dict(zip(("pcie_bytes_per_sec", "nic_bytes_per_sec", "storage_bytes_per_sec"), rates, strict=True))
    system = {"durable": durable, "when_busy": busy, "max_in_flight": buffers}
    system["storage_every"] = stored
    tried = scenario(
        policy,
        failures=Poisson(mtbf, process_share=0.4, domain_share=0.2, domain_nodes=2),
        secs=secs,
        cluster=cluster,
        system=system,
        duration_secs=300.0,
        load=ExpertLoad(0.3),
    )
    assert predicted(simulate(tried)) == predicted(simulate(replace(tried, stepwise=True)))


def test_another_seed_gives_another_run():
    told = [simulate(scenario(failures=Poisson(120.0), seed=seed)) for seed in range(5)]
    assert len({one.spent for one in told}) == 5


def test_the_failures_of_a_seed_do_not_depend_on_the_system():
    told = [simulate(scenario(policy, failures=Poisson(200.0), seed=3, **given)) for policy, given in SYSTEMS.values()]
    assert len({one.failures for one in told}) == 1


# --- what falls and grows with what ---


@FEW
@given(st.lists(st.floats(1e4, 1e7), min_size=2, max_size=4), st.sampled_from(["nic", "pcie"]))
def test_windows_get_no_longer_with_bandwidth(rates, link):
    found = []
    for rate in sorted(rates):
        cluster = {"nic_bytes_per_sec": 1e9, "pcie_bytes_per_sec": 1e9, f"{link}_bytes_per_sec": rate}
        found.append(simulate(sparse(None, cluster=cluster, duration_secs=60.0)).window)
    assert found == sorted(found, reverse=True)
    assert found[-1] >= 1


def test_windows_are_as_long_as_it_takes():
    rates = (2e4, 4e4, 8e4, 1.6e5, 1e7)
    found = [simulate(sparse(None, cluster={"nic_bytes_per_sec": rate}, duration_secs=60.0)).window for rate in rates]
    assert found[-1] == 1
    assert found[0] > found[2] > 1


@pytest.mark.parametrize("cluster", ["pcie_bytes_per_sec", "storage_bytes_per_sec"])
def test_wider_links_never_cost_time(cluster):
    found = [
        simulate(scenario(SyncDense(2), failures=Poisson(1e3), cluster={cluster: rate})).ettr
        for rate in (2e4, 2e5, 2e6, 2e7)
    ]
    assert found == sorted(found)


def test_more_lost_tokens_never_lower_k():
    """In a run: K at each failure, with rising losses, until tokens routed since make room."""
    policy = MoC(k=1, plt_budget=0.01)
    calm, rough = (
        simulate(scenario(policy, failures=Poisson(mtbf), load=ExpertLoad(0.2, 0.0), duration_secs=1500.0))
        for mtbf in (700.0, 50.0)
    )
    assert max(one.k or 0 for one in rough.history) >= max(one.k or 0 for one in calm.history)
    assert rough.lost_tokens > calm.lost_tokens


@pytest.mark.parametrize(("low", "high"), [(0.005, 0.02), (0.02, 0.08)])
def test_a_wider_budget_saves_no_more_bytes(low, high):
    strict, loose = (
        simulate(scenario(MoC(k=1, plt_budget=budget), failures=Poisson(60.0), duration_secs=1500.0))
        for budget in (low, high)
    )
    assert strict.total_bytes_per_step >= loose.total_bytes_per_step
    assert strict.plt <= low


def test_more_experts_cost_more_bytes_and_lose_fewer_tokens():
    told = [simulate(scenario(MoC(k=k), failures=Poisson(100.0))) for k in (1, 2, 4, 8)]
    assert [one.total_bytes_per_step for one in told] == sorted(one.total_bytes_per_step for one in told)
    assert [one.plt for one in told] == sorted((one.plt for one in told), reverse=True)
    assert told[-1].plt == 0 < told[0].plt
