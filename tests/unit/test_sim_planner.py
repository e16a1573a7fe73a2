"""The planner: who is compared, who is refused and why, and the line that makes the recommended policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from moe_ckpt.errors import ConfigError
from moe_ckpt.memory.options import Memory
from moe_ckpt.policies import CheckFreq, Dense, Gemini, Guarded, MoC, MoEtion, MoEvement
from moe_ckpt_sim.cluster.cluster import Cluster, ClusterLayout, Parallel
from moe_ckpt_sim.cluster.costs import Costs
from moe_ckpt_sim.failures.failures import Poisson
from moe_ckpt_sim.planner.planner import memory_overrides, overrides, recommend, trainer_systems
from moe_ckpt_sim.planner.resources import use_of
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.run.scenario import Scenario
from moe_ckpt_sim.run.system import System
from moe_ckpt_sim.workload.load import ExpertLoad
from moe_ckpt_sim.workload.model import ModelSpec, Precision
from moe_ckpt_sim.workload.training import Batch, Iteration

MODEL = ModelSpec("small", layers=4, hidden=256, experts=8, top_k=2, expert_ffn=1024, vocab=1000).build()
LINKS = {"pcie_bytes_per_sec": 1e9, "nic_bytes_per_sec": 4e9, "storage_bytes_per_sec": 1e9}


def scenario(system: System | None = None, mtbf_secs: float = 600.0, **cluster) -> Scenario:
    layout = ClusterLayout(MODEL, Cluster("two", 2, 4, **{**LINKS, **cluster}), Parallel(2, 1, 4))
    return Scenario(
        layout,
        Precision(),
        Batch(64, 8),
        Iteration(1.0, 0.05),
        Poisson(mtbf_secs),
        system or System("dense", Dense(10)),
        ExpertLoad(drift_secs=3600),
        duration_secs=7200,
    )


def plan_of(given: Scenario, systems=None, **options):
    return recommend(given, systems or trainer_systems(given), seeds=1, **options)


def test_all_policies_of_the_trainer_are_compared():
    kinds = {type(system.policy) for system in trainer_systems(scenario())}
    assert kinds == {Dense, CheckFreq, MoC, MoEtion, MoEvement}
    assert all(system.in_trainer for system in trainer_systems(scenario()))


def test_the_best_comes_first_and_is_recommended():
    found = plan_of(scenario())
    ettrs = [one.ettr for one in found.candidates if not one.refused]
    assert ettrs == sorted(ettrs, reverse=True)
    assert found.recommended is not None
    assert found.recommended.ettr >= ettrs[0] - 0.005


def test_among_equals_the_exact_and_simple_one_is_recommended():
    fast = scenario(pcie_bytes_per_sec=1e12, storage_bytes_per_sec=1e12)
    found = plan_of(fast)
    assert {type(one.system.policy) for one in found.candidates[:3]} != {Dense}
    assert isinstance(found.recommended.system.policy, Dense)


def test_slow_storage_makes_partial_checkpoints_worth_their_lost_tokens():
    slow = scenario(storage_bytes_per_sec=5e6)
    found = plan_of(slow)
    assert not found.recommended.exact
    exact = [one.ettr for one in found.candidates if one.exact]
    assert found.recommended.ettr > max(exact) + 0.05


def test_what_only_the_simulator_has_is_never_recommended():
    slow = scenario(storage_bytes_per_sec=2e6)
    peers = System("peers", MoEvement(), durable="peers", replicas=1, rollback="localized")
    found = plan_of(slow, [*trainer_systems(slow), peers])
    assert found.best.system.name == "peers"
    assert found.recommended.system.in_trainer


def test_a_policy_that_loses_too_many_tokens_is_refused_with_both_numbers():
    slow = scenario(storage_bytes_per_sec=2e6)
    [one] = plan_of(slow, [System("moc", MoC(k=1))], most_plt=0.0001).candidates
    assert "0.01%" in one.refused
    assert f"{one.plt:.2%}" in one.refused


def test_host_memory_that_does_not_hold_the_buffers_is_named_with_what_is_needed():
    given = scenario(host_memory_bytes=1e6)
    [one] = plan_of(given, [System("dense", Dense(10))]).candidates
    assert "host memory" in one.refused
    assert "'two'" in one.refused
    assert plan_of(given, [System("dense", Dense(10))]).recommended is None


def test_a_policy_that_cannot_serve_the_model_is_refused_and_the_others_go_on():
    found = plan_of(scenario(), [System("moc", MoC(k=9)), System("dense", Dense(10))])
    refused = next(one for one in found.candidates if one.system.name == "moc")
    assert "k=9" in refused.refused
    assert refused.use is None
    assert found.recommended.system.name == "dense"


def test_a_run_that_never_advances_is_refused_with_the_verdict():
    given = replace(scenario(mtbf_secs=60.0), duration_secs=36_000.0)
    [one] = plan_of(given, [System("rare", Dense(100_000))]).candidates
    assert "does not advance" in one.refused


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"seeds": 1.5}])
def test_seeds_must_be_a_whole_number(wrong):
    with pytest.raises(ConfigError, match="seeds"):
        recommend(scenario(), [System("dense", Dense(10))], **wrong)


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ConfigError, match="no policy"):
        recommend(scenario(), [])


def test_partial_checkpoints_begin_no_more_often_than_they_can_be_written():
    slow = scenario(storage_bytes_per_sec=5e6)
    for system in trainer_systems(slow):
        if isinstance(system.policy, MoC):
            outcome = simulate(replace(slow, system=replace(system, policy=replace(system.policy, plt_budget=None))))
            assert use_of(replace(slow, system=system), outcome).utilisation["storage"] <= 1.0001
            assert system.policy.every_n_steps > 1


# --- resources ---


def test_the_roof_is_the_link_that_is_asked_for_more_than_it_has():
    for name, field in (("pcie", "pcie_bytes_per_sec"), ("storage", "storage_bytes_per_sec")):
        given = scenario(System("dense", Dense(1)), **{field: 1e6})
        assert use_of(given, simulate(given)).roof == name
    peers = scenario(System("near", Dense(1), durable="peers", replicas=1), nic_bytes_per_sec=1e6)
    assert use_of(peers, simulate(peers)).roof == "nic"
    free = scenario(System("dense", Dense(100)))
    assert use_of(free, simulate(free)).roof == "compute"


def test_what_snapshots_take_from_the_training_thread_is_a_roof_too():
    given = scenario(System("dense", Dense(10)))
    dragged = replace(given, iteration=replace(given.iteration, drag_secs_per_byte=1e-6))
    found = use_of(dragged, simulate(dragged))
    assert found.roof == "drag"
    assert found.drag == pytest.approx(found.copied_bytes * 1e-6 / given.iteration.secs)


def test_bytes_per_iteration_are_those_of_the_checkpoints():
    given = scenario(System("dense", Dense(10)), mtbf_secs=1e9)
    costs = Costs(given.layout, given.precision, given.iteration, given.system)
    use = use_of(given, simulate(given))
    assert use.stored_bytes == pytest.approx(costs.bytes_of.dense.total / 10, rel=0.01)
    assert use.copied_bytes == pytest.approx(costs.bytes_of.dense.rank / 10, rel=0.01)
    assert use.sent_bytes == 0
    assert use.host_bytes == 4 * 3 * costs.bytes_of.dense.rank


def test_memory_keeps_two_windows_of_its_own():
    """As many buffers as ``commit.room`` has, once they are more than three complete snapshots."""
    found = []
    for window in (2, 10):
        given = scenario(System("windows", MoEvement(window=window), durable="node"), mtbf_secs=1e9)
        outcome = simulate(given)
        assert outcome.window == window
        found.append((use_of(given, outcome).host_bytes, outcome))
    (short, two), (long, ten) = found
    assert short == pytest.approx(4 * 3 * two.heaviest_bytes)
    assert long == pytest.approx(4 * (3 + 2 * 9) * ten.rank_bytes_per_step)
    assert long > 4 * 3 * ten.heaviest_bytes


def test_peers_keep_a_checkpoint_and_the_one_that_comes_in_for_each_replica():
    given = scenario(System("near", Dense(10), durable="peers", replicas=1), mtbf_secs=1e9)
    costs = Costs(given.layout, given.precision, given.iteration, given.system)
    use = use_of(given, simulate(given))
    assert use.host_bytes == 4 * (3 + 2) * costs.bytes_of.dense.rank
    assert use.sent_bytes == pytest.approx(use.copied_bytes)
    assert use.stored_bytes == 0


# --- the line ---


@pytest.fixture
def app_memory(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "defaults: [{moe_ckpt: default}, _self_]\nhydra: {searchpath: ['pkg://moe_ckpt.conf']}\n"
    )

    def composed(line: str):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return instantiate(compose("config", [*line.split(), "moe_ckpt.store.dirpath=x"]).moe_ckpt.memory)

    return composed


@pytest.fixture
def app(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "defaults: [{moe_ckpt: default}, _self_]\nhydra: {searchpath: ['pkg://moe_ckpt.conf']}\n"
    )

    def composed(line: str):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return instantiate(compose("config", [*line.split(), "moe_ckpt.store.dirpath=x"]).moe_ckpt.policy)

    return composed


@pytest.mark.parametrize(
    "policy",
    [Dense(7), CheckFreq(max_overhead=0.01), MoC(k=4, every_n_steps=3, plt_budget=0.02), MoEtion(), MoEvement()],
    ids=lambda policy: type(policy).__name__,
)
def test_the_line_makes_the_very_policy(app, policy):
    assert app(overrides(policy)) == policy
    assert app(overrides(policy, vars(type(policy)()))) == policy


def test_settings_that_are_the_groups_own_are_left_out():
    assert overrides(Dense(), vars(Dense())) == "moe_ckpt/policy=dense"
    assert overrides(MoC(k=2), vars(MoC())) == "moe_ckpt/policy=moc moe_ckpt.policy.k=2"


def test_the_line_says_the_memory_too(app_memory):
    assert memory_overrides(System("dense", Dense())) == ""
    near = System("near", Gemini(2), "peers", 3, storage_every=10800.0)
    assert app_memory(memory_overrides(near)) == Memory(replicas=3, storage_every="3h")
    own = System("own", Dense(2), "node", storage_every=50)
    assert app_memory(memory_overrides(own)) == Memory(storage_every=50)


def test_a_policy_of_ones_own_has_no_line():
    with pytest.raises(ConfigError, match="Guarded"):
        overrides(Guarded(Dense()))
