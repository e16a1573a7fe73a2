"""Settings that cannot be: errors that name the field and both culprits. Runs that never advance: a verdict, soon."""

from __future__ import annotations

import re
from dataclasses import replace
from time import thread_time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import AnyOf, CheckFreq, Dense, Gemini, MoC, MoEtion, MoEvement
from moe_ckpt_sim.cluster.cluster import Parallel
from moe_ckpt_sim.failures.failures import Components, FailureEvent, Poisson, Weibull
from moe_ckpt_sim.failures.traces import Trace
from moe_ckpt_sim.run.failing import FUTILE_FAILURES
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.iteration import estimate
from moe_ckpt_sim.workload.load import ExpertLoad
from moe_ckpt_sim.workload.model import Precision
from moe_ckpt_sim.workload.training import Batch, Iteration
from tests.sim.builders import CLUSTER, SPEC, layout, scenario, trace

NOT_RATES = (0, 0.0, -1.0, float("nan"), float("inf"), True, "1e9", None)
RATES = (
    "pcie_bytes_per_sec",
    "nic_bytes_per_sec",
    "nvlink_bytes_per_sec",
    "storage_bytes_per_sec",
    "flops_per_sec",
    "host_memory_bytes",
    "nic_share",
    "mfu",
)


@pytest.mark.parametrize("value", NOT_RATES, ids=repr)
@pytest.mark.parametrize("name", RATES)
def test_rates(name, value):
    with pytest.raises(ConfigError, match=rf"Cluster 'toy'\({name}={re.escape(repr(value))}\).*{name} must be"):
        replace(CLUSTER, **{name: value})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "15"], ids=repr)
@pytest.mark.parametrize("name", ["detect_secs", "restart_secs", "repair_secs", "alpha_secs"])
def test_waits(name, value):
    with pytest.raises(ConfigError, match=name):
        replace(CLUSTER, **{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", float("nan"), None, 10**30], ids=repr)
@pytest.mark.parametrize("name", ["nodes", "gpus_per_node"])
def test_counts(name, value):
    with pytest.raises(ConfigError, match=name):
        replace(CLUSTER, **{name: value})


@pytest.mark.parametrize("value", [0, -3.0, float("nan"), float("inf"), True, "3600"], ids=repr)
def test_lengths_of_a_run(value):
    with pytest.raises(ConfigError, match="duration_secs"):
        scenario(duration_secs=value)
    with pytest.raises(ConfigError, match="mtbf_secs"):
        Poisson(value)


def test_runs_too_long_or_iterations_too_short_to_be_exact():
    with pytest.raises(ConfigError, match=r"duration_secs=40000000.0.*388 days"):
        scenario(duration_secs=4e7)
    with pytest.raises(ConfigError, match=r"Iteration\(secs=1e-09\)"):
        scenario(secs=1e-9, update_secs=0.0)


@pytest.mark.parametrize("seed", [-1, 0.5, True, "0"])
def test_seeds(seed):
    with pytest.raises(ConfigError, match="seed"):
        scenario(seed=seed)


def test_an_mtbf_below_the_restart_time():
    with pytest.raises(
        ConfigError, match=r"mean of 4 s between failures .* 5 s that Cluster 'toy'.*detect_secs \+ restart"
    ):
        scenario(failures=Poisson(4.0))
    with pytest.raises(ConfigError, match="never advance"):
        scenario(failures=Weibull(5.0))


def test_more_experts_than_there_are():
    with pytest.raises(ConfigError, match=r"MoC\(k=9\): layer .* has only 8 experts"):
        scenario(MoC(k=9))
    with pytest.raises(ConfigError, match=r"snapshot_k=9"):
        scenario(MoC(k=2, snapshot_k=9))
    with pytest.raises(ConfigError, match=r"top_k=9, experts=8"):
        replace(SPEC, top_k=9)


def test_more_slots_than_operators():
    count = len(SPEC.build().catalog.operators)
    with pytest.raises(ConfigError, match=rf"window={count + 1}.*only {count} operators"):
        scenario(MoEvement(window=count + 1))


def test_localized_rollback_needs_windows():
    with pytest.raises(ConfigError, match=r"'tried'\(rollback='localized'\).*use rollback: global"):
        scenario(Dense(1), system={"rollback": "localized"})


@pytest.mark.parametrize("rule", ["young", "daly"])
def test_a_formula_needs_a_mean(rule):
    for failures in (trace((5.0, 0)), None):
        tried = scenario(Dense(1), failures=failures, system={"interval": rule})
        with pytest.raises(ConfigError, match=rf"interval='{rule}'.*mean time between failures.*use interval: oracle"):
            simulate(tried)
    with pytest.raises(ConfigError, match="CheckFreq has no every_n_steps"):
        scenario(CheckFreq(), system={"interval": rule})


@pytest.mark.parametrize(
    ("given_settings", "name"),
    [
        ({"durable": "memory"}, "durable"),
        ({"rollback": "none"}, "rollback"),
        ({"interval": "optimal"}, "interval"),
        ({"when_busy": "fail"}, "when_busy"),
        ({"replicas": 0}, "replicas"),
        ({"max_in_flight": True}, "max_in_flight"),
        ({"storage_every": -1.0}, "storage_every"),
        ({"storage_every": 0.0}, "storage_every"),
        ({"max_overhead": 2.0}, "max_overhead"),
        ({"max_overhead": 0}, "max_overhead"),
        ({"freeze": "perhaps"}, "freeze='perhaps'.*true or false"),
    ],
)
def test_systems(given_settings, name):
    with pytest.raises(ConfigError, match=name):
        System("tried", Dense(1), **given_settings)


@pytest.mark.parametrize("policy", [Gemini(), AnyOf([Dense(9), Gemini(5)])])
def test_a_policy_for_the_memory_of_peers_does_not_run_on_storage(policy):
    with pytest.raises(ConfigError, match=r"durable='storage', replicas=0\): .* memory of at least 1 peers; use dur"):
        System("tried", policy)
    System("tried", policy, "peers", 1)


@pytest.mark.parametrize(("nodes", "replicas", "said"), [(1, 1, "use more nodes"), (4, 4, "replicas of at most 3")])
def test_more_copies_on_other_nodes_than_there_are(nodes, replicas, said):
    """A scenario may be made, for whoever asks for its other parts only."""
    cluster = {"nodes": nodes, "gpus_per_node": 8 // nodes}
    tried = scenario(Dense(1), cluster=cluster, system={"durable": "peers", "replicas": replicas})
    with pytest.raises(ConfigError, match=rf"'tried'\(.*replicas={replicas}\).*ranks are on {nodes} of.*'toy'.*{said}"):
        simulate(tried)


def test_localized_rollback_loads_from_peers():
    with pytest.raises(ConfigError, match=r"rollback='localized', durable='storage'.*use durable: peers"):
        scenario(MoEvement(window=2), system={"rollback": "localized"})


def test_numbers_that_nothing_can_be_computed_with():
    for value in (1e300, 1e-300):
        with pytest.raises(ConfigError, match=r"mtbf_secs must be between"):
            Poisson(value)
    with pytest.raises(ConfigError, match=r"sequences=\d+\).*can be counted; use fewer sequences"):
        scenario(batch=Batch(4 * 2**48, 4))
    with pytest.raises(ConfigError, match=r"would have \d+ parameters"):
        replace(SPEC, vocab=2**50).build()
    with pytest.raises(ConfigError, match=r"flops_per_sec=1e-28.*would never end"):
        estimate(layout(flops_per_sec=1e-28), Batch(64, 4), Precision())


def test_experts_that_do_not_divide_over_the_ranks():
    with pytest.raises(ConfigError, match=r"ep=3\): layers.0 of model 'toy' has 8 experts, which do not divide"):
        layout(Parallel(ep=3))
    assert layout(Parallel(ep=4)).placement


def test_a_load_that_drifts_all_the_time():
    with pytest.raises(ConfigError, match=r"drift_secs=1e-06\): in 3600 s \(duration_secs\).*use a longer drift_secs"):
        scenario(load=ExpertLoad(0.3, 0.1, 1e-6))
    assert scenario(load=ExpertLoad(0.3, 0.0, 1e-6))


@pytest.mark.parametrize("table", [None, 3, "gpu", {}])
def test_a_table_that_is_none(table):
    with pytest.raises(ConfigError, match=r"Components\(table="):
        Components(table)


@pytest.mark.parametrize("given_settings", [{"path": 3}, {"repeat": "maybe", "recorded": (FailureEvent(1.0, 0),)}])
def test_a_trace_of_the_wrong_type(given_settings):
    with pytest.raises(ConfigError, match=r"Trace\((path=3|repeat='maybe')\)"):
        Trace(**given_settings)


def test_a_system_without_a_policy():
    with pytest.raises(ConfigError, match="not a policy"):
        System("tried", "dense")


def test_more_ranks_than_gpus_and_more_stages_than_layers():
    with pytest.raises(ConfigError, match=r"pp=4, dp=2, ep=2\) needs 16 ranks.*'toy' has 8 GPUs \(4 nodes\)"):
        layout(Parallel(pp=4, dp=2, ep=2))
    with pytest.raises(ConfigError, match=r"pp=4, vpp=2.*only 4 layers"):
        layout(Parallel(pp=4, vpp=2))


def test_a_batch_that_does_not_divide():
    tried = scenario(parallel=Parallel(pp=1, dp=3), batch=Batch(64, 4))
    with pytest.raises(ConfigError, match=r"sequences=64, micro_sequences=4.*3 pipelines \(Parallel dp\)"):
        simulate(tried)


def test_an_update_as_long_as_the_iteration():
    with pytest.raises(ConfigError, match=r"secs=1, update_secs=1.*below secs"):
        Iteration(1.0, 1.0)


def test_a_trace_out_of_order_and_one_of_nodes_that_are_not_there():
    with pytest.raises(ConfigError, match=r"event 2 .*time 10.0 is before 20.0"):
        Trace(recorded=(FailureEvent(20.0, 0), FailureEvent(10.0, 1)))
    with pytest.raises(ConfigError, match=r"node 4, but training runs on 4 nodes"):
        simulate(scenario(failures=trace((5.0, 4))))


# --- runs that never advance ---

FUTILE = {
    "an interval far longer than the MTBF": scenario(Dense(100_000), failures=Poisson(60.0), duration_secs=1e7),
    "a copy longer than the run": scenario(
        Dense(1), failures=Poisson(60.0), cluster={"pcie_bytes_per_sec": 0.01}, duration_secs=1e7
    ),
    "a commit longer than the MTBF": scenario(
        MoC(k=1), failures=Poisson(30.0), cluster={"storage_bytes_per_sec": 100.0}, duration_secs=1e7
    ),
    "iterations longer than the MTBF": scenario(Dense(1), failures=Poisson(30.0), secs=1000.0, duration_secs=1e7),
    "loading longer than the MTBF": scenario(
        MoEvement(window=2),
        failures=Poisson(10.0),
        system={"durable": "peers"},
        cluster={"nic_bytes_per_sec": 2000.0, "restart_secs": 0.0},
        duration_secs=1e7,
    ),
    "no spare left": scenario(
        Dense(1), failures=Poisson(60.0), cluster={"spare_nodes": 2, "repair_secs": None}, duration_secs=1e7
    ),
}


@pytest.mark.parametrize("name", FUTILE)
def test_a_run_that_never_advances_ends_soon_with_that_verdict(name):
    began = thread_time()
    told = simulate(FUTILE[name])
    assert thread_time() - began < 2
    assert not told.advances
    assert "not advance" in told.verdict or "stands still" in told.verdict
    assert told.failures <= 3 * FUTILE_FAILURES
    assert told.spent.total <= 1e7
    assert told.ettr < 0.05


def test_a_recovery_that_never_ends_is_given_up():
    """A copy of the state is there, but loading it takes 40 times the MTBF."""
    events = [(100.0 + 10 * at, at % 3 + 1, False) for at in range(300)]
    back = [(at + 5.0, node, True) for at, node, _ in events]
    told = simulate(
        scenario(
            Dense(10), failures=trace(*sorted(events + back)), cluster={"storage_bytes_per_sec": 3e3}, duration_secs=1e6
        )
    )
    assert (told.failures, told.advances) == (FUTILE_FAILURES, False)


def test_a_run_that_lost_much_at_once_is_not_given_up():
    """Back at the very beginning at 60 000 s, it needs more failures than that to be where it was, and gets on."""
    events = [(60_000.0, 0, False), (60_000.0, 2, False)]
    for at in range(150):
        events += [(60_100.0 + 100 * at, 1, False), (60_150.0 + 100 * at, 1, True)]
    tried = scenario(
        Dense(5), failures=trace(*events), system={"durable": "peers", "replicas": 1}, duration_secs=76_000.0
    )
    told = simulate(tried)
    assert told.fallbacks == 1
    assert told.advances
    assert told.steps > 10_000


ANY = st.floats(min_value=0.05, max_value=1e7)
POLICIES = st.one_of(
    st.builds(Dense, every_n_steps=st.sampled_from([1, 3, 1000, 10**9])),
    st.just(CheckFreq()),
    st.builds(
        MoC, k=st.sampled_from([1, 8]), plt_budget=st.sampled_from([None, 0.01]), every_n_steps=st.sampled_from([1, 50])
    ),
    st.builds(MoEvement, window=st.sampled_from([None, 1, 5])),
    st.just(MoEtion(every_n_steps=5)),
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_the_numbers_a_run_ends_and_sums_up(data):
    def draw(strategy):
        return data.draw(strategy)

    policy = draw(POLICIES)
    durable = draw(st.sampled_from(["storage", "node", "peers"]))
    local = durable == "peers" and isinstance(policy, MoEvement) and draw(st.booleans())
    restart = draw(st.sampled_from([0.0, 4.0, 500.0]))
    mtbf = draw(st.one_of(st.floats(restart + 1.5, restart + 50), st.floats(restart + 50, 1e6)))
    tried = scenario(
        policy,
        failures=draw(st.sampled_from([Poisson(mtbf, process_share=0.5), Weibull(mtbf, 0.5, domain_share=0.2)])),
        seed=draw(st.integers(0, 5)),
        secs=draw(st.sampled_from([0.3, 1.0, 7.1, 4000.0])),
        update_secs=0.01,
        duration_secs=draw(st.sampled_from([0.001, 1.0, 5000.3])),
        system={
            "durable": durable,
            "rollback": "localized" if local else "global",
            "when_busy": draw(st.sampled_from(["wait", "skip"])),
            "max_in_flight": draw(st.sampled_from([1, 2, 5])),
            "replicas": draw(st.sampled_from([1, 2, 3])),
            "storage_every": draw(st.sampled_from([None, 0.01, 100.0, 1, 30, "auto"])),
        },
        cluster={
            "pcie_bytes_per_sec": draw(ANY),
            "nic_bytes_per_sec": draw(ANY),
            "storage_bytes_per_sec": draw(ANY),
            "restart_secs": restart,
            "spare_nodes": draw(st.sampled_from([None, 0, 3])),
            "repair_secs": draw(st.sampled_from([None, 0.0, 200.0])),
        },
        load=draw(st.sampled_from([ExpertLoad(0.0), ExpertLoad(0.9, 1.0, 50.0)])),
    )
    began = thread_time()
    told = simulate(tried)
    assert thread_time() - began < 10
    assert min(vars(told.spent).values()) >= 0
    assert 0 <= told.ettr <= 1
    if told.advances:
        assert told.spent.total == pytest.approx(tried.duration_secs, rel=1e-9, abs=1e-7)
    assert told.spent.total <= tried.duration_secs * (1 + 1e-9) + 1e-7
    assert told.verdict or told.steps > 0
    assert told.spent.useful == pytest.approx(told.steps * told.iteration_secs, rel=1e-7)
