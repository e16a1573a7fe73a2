"""The groups of the simulator: everything composes, models are those of the papers, errors name the field."""

from __future__ import annotations

from functools import cache

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException
from hydra.utils import instantiate

from moe_ckpt.core.cadence import StorageCadence
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.conf.scenarios import CONFIG_DIR, layout_of, scenario_of
from moe_ckpt_sim.workload.iteration import breakdown

GROUPS = sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir())


def choices(group):
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


SETUPS = choices("setup")


@cache
def _composed(*overrides):
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return compose("simulate", list(overrides))


@pytest.fixture
def composed():
    """Composes ``simulate`` with overrides. Nobody changes what it returns: composing takes longest here."""
    yield _composed
    GlobalHydra.instance().clear()


def test_the_groups_are_those_of_the_primary_config(composed):
    assert set(composed()) == {*GROUPS, "duration_secs", "seed"} - {"setup"}


def test_what_runs_without_a_word(composed):
    scenario = scenario_of(composed())
    assert scenario.layout.model.name == "deepseek_moe"
    assert scenario.system.name == "moevement_peers"
    assert (scenario.duration_secs, scenario.seed, scenario.tokens_per_step) == (43200, 0, 512 * 2048)


FREE = sorted(set(GROUPS) - {"setup", "parallel", "batch", "memory"})
"""Groups whose choices all go with one another on a layout that every model and cluster has room for."""
ROOM = ["parallel=single", "batch=tiny"]
NEEDED = {"given": ["iteration.secs=1.5"], "trace": ["failures.path=package:gcp_like_6h.csv"]}


@pytest.mark.parametrize("at", range(max(len(choices(group)) for group in FREE)))
def test_every_choice_makes_a_scenario(composed, at):
    """The n-th choice of all groups at once."""
    chosen = {group: choices(group)[at % len(choices(group))] for group in FREE}
    needed = [override for name in chosen.values() for override in NEEDED.get(name, [])]
    scenario = scenario_of(composed(*ROOM, *(f"{group}={name}" for group, name in chosen.items()), *needed))
    assert scenario.system.name == chosen["policy"]
    assert scenario.layout.cluster.name == chosen["cluster"]
    assert scenario.layout.model.name == chosen["model"]


@pytest.mark.parametrize("name", choices("parallel"))
def test_layouts_are_what_they_are_called(composed, name):
    parallel = instantiate(composed(f"parallel={name}").parallel)
    said = {part[:2]: int(part[2:]) for part in name.split("_") if name != "single"}
    assert {degree: getattr(parallel, degree) for degree in ("pp", "ep", "dp")} == {"pp": 1, "ep": 1, "dp": 1, **said}


GPUS = {"swin": 8, "32b": 512, "67b": 1536, "145b": 4096, "671b": 16384, "pec": 8, "tiny": 1}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_setup_fills_its_cluster(composed, setup):
    layout, last = layout_of(composed(f"setup={setup}")), setup.rpartition("_")[2]
    table7 = setup.startswith("moevement_fp")
    assert layout.parallel.ranks == GPUS.get(last, 64 if "moetion" in setup else 128 if table7 else 96)
    assert setup == "tiny" or layout.parallel.ranks == layout.cluster.gpus
    stages = set(layout.stage_of.values())
    assert stages == set(range(layout.parallel.pp))


@pytest.mark.parametrize(
    ("setup", "secs"),
    [
        ("moevement_llava", 1.75),
        ("moevement_gpt", 2.0),
        ("moevement_qwen", 2.1),
        ("moevement_deepseek", 2.7),
        ("moevement_fp16_fp16_fp16", 3.0),
        ("moevement_fp8_fp32_fp32", 2.3),
        ("moevement_fp8_fp16_fp32", 2.1),
        ("moevement_fp8_fp16_fp8fp16", 1.9),
        ("moevement_fp8_fp8_fp8fp16", 1.7),
    ],
)
def test_iterations_of_the_paper(composed, setup, secs):
    scenario = scenario_of(composed(f"setup={setup}"))
    iteration = scenario.iteration
    assert iteration.secs == secs
    assert 0 < iteration.update_secs < 0.01 * secs
    assert secs / 3 < iteration.stage_secs < secs  # 12 stages and 16 micro-batches idle for 11 of 27 slots
    estimated = breakdown(scenario.layout, scenario.batch, scenario.precision).secs
    assert 0.5 < estimated / secs < 2.2  # as the module says of itself


def test_the_command_line_wins_over_a_setup(composed):
    scenario = scenario_of(composed("setup=moevement_deepseek", "iteration=estimated", "precision=fp32", "seed=7"))
    assert scenario.iteration.secs != 2.7
    assert scenario.precision.compute_bytes == 4
    assert scenario.seed == 7


# Models --------------------------------------------------------------------------------------------------------------


def model(composed, name, *overrides):
    spec = instantiate(composed(f"model={name}", *overrides).model)
    return spec, spec.build()


@pytest.mark.parametrize("name", sorted(set(choices("model")) - {"tiny"}))
def test_models_are_those_of_the_papers(composed, name):
    spec, found = model(composed, name)
    paper = spec.paper
    assert paper.matched in ("total", "both")
    assert found.total == pytest.approx(paper.total, rel=0.02)
    if paper.matched == "both":
        assert found.active == pytest.approx(paper.active, rel=0.02)
    assert spec.name == name


@pytest.mark.parametrize(
    ("name", "layers", "moe_layers", "experts", "top_k"),
    [
        ("moe_llava", 32, 16, 4, 2),
        ("gpt_moe", 12, 12, 32, 6),
        ("qwen_moe", 24, 24, 64, 8),
        ("deepseek_moe", 28, 27, 64, 8),
        ("deepseek_671b", 61, 58, 256, 8),
        ("moe_gpt_1_6b_64e", 24, 24, 64, 1),
        ("moe_gpt_2_9b_16e", 24, 24, 16, 1),
        ("moe_gpt_3_8b_8e", 32, 32, 8, 1),
        ("gpt2_moe_small", 12, 6, 8, 1),
    ],
)
def test_shapes_that_the_papers_name(composed, name, layers, moe_layers, experts, top_k):
    spec, _ = model(composed, name)
    assert (spec.layers, len(spec.moe_layers), spec.experts, spec.top_k) == (layers, moe_layers, experts, top_k)


def test_swin_has_the_layers_of_table_2(composed):
    spec, found = model(composed, "swinv2_moe")
    assert (spec.depths, spec.num_heads) == ([2, 2, 18, 2], [3, 6, 12, 24])
    assert (len(found.catalog.layers), {layer.experts for layer in found.catalog.layers}) == (10, {8})


@pytest.mark.parametrize(
    ("name", "total", "active", "experts"),
    [
        ("deepseek_moe", 16375728128, 3295791104, 14948499456),
        ("qwen_moe", 14315784192, 2689173504, 13287555072),
        ("gpt_moe", 7292857344, 1588079616, 7021264896),
        ("moe_gpt_1_6b_64e", 58864877824, 1590608128, 58183385088),
        ("moe_gpt_2_9b_16e", 30059304960, 2880215040, 28991029248),
        ("moe_gpt_3_8b_8e", 46447469568, 8396743680, 43486543872),
    ],
)
def test_models_have_as_many_parameters_as_megatron_gives_them(composed, name, total, active, experts):
    """What ``recipes/gpt_moe_megatron/sizes.py`` counts on the modules themselves. LayerNorm's biases, which a spec
    without biases leaves out, are the only difference."""
    spec, found = model(composed, name)
    biases = 0 if spec.gated else (2 * spec.layers + 1) * spec.hidden
    assert (found.total, found.active, found.expert_total) == (total - biases, active - biases, experts)


@pytest.mark.parametrize(("name", "total"), [("tiny", 2688512), ("gpt2_moe_small", 322818816)])
def test_models_have_as_many_parameters_as_the_lightning_recipe_gives_them(composed, name, total):
    assert model(composed, name)[1].total == total


def test_deepseek_v3_has_its_published_size(composed):
    assert round(model(composed, "deepseek_671b")[1].total / 1e9, 2) == 671.03


@pytest.mark.parametrize(("experts", "nbytes"), [(8, 467), (32, 1820)])
def test_the_3_8b_series_has_the_papers_sizes(composed, experts, nbytes):
    """GB of a dense checkpoint, 10 bytes per parameter: MoEtion's 46.7 B (section 7.1), and what section 7.4 prints."""
    cfg = composed("setup=moetion_3_8b", f"model.experts={experts}")
    found, precision = layout_of(cfg).model, instantiate(cfg.precision)
    dense = sum(size.full for size in found.sizes(precision).values()) / 1e9
    assert found.name == f"moe_gpt_3_8b_{experts}e"
    assert dense == pytest.approx(nbytes, rel=0.03)


def test_moetions_dense_checkpoint_has_587_gb(composed):
    cfg = composed("setup=moetion_1_6b")
    sizes = layout_of(cfg).model.sizes(instantiate(cfg.precision))
    assert sum(size.full for size in sizes.values()) / 1e9 == pytest.approx(587, rel=0.005)


@pytest.mark.parametrize(
    ("name", "compute", "full"),
    [
        ("fp16_fp32", 2, 12),
        ("fp32", 4, 12),
        ("fp16_fp16_fp16", 2, 6),
        ("fp8_fp32_fp32", 1, 12),
        ("fp8_fp16_fp32", 1, 10),
        ("fp8_fp16_fp8fp16", 1, 5),
        ("fp8_fp8_fp8fp16", 1, 4),
        ("zero1_10", 2, 10),
    ],
)
def test_bytes_per_parameter(composed, name, compute, full):
    precision = instantiate(composed(f"precision={name}").precision)
    assert (precision.compute_bytes, precision.full_bytes) == (compute, full)


# Clusters, systems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "per_node", "nic_gbps", "host_gb"),
    [
        ("a100_96", 96, 8, 80, 880),
        ("a100_64", 64, 4, 320, 880),
        ("h100_128", 128, 8, 200, 2100),
        ("gpus_512", 512, 8, 80, 880),
        ("gpus_1536", 1536, 8, 80, 880),
        ("gpus_4096", 4096, 8, 80, 880),
        ("gpus_16384", 16384, 8, 80, 880),
    ],
)
def test_clusters_of_the_papers(composed, name, gpus, per_node, nic_gbps, host_gb):
    cluster = instantiate(composed(f"cluster={name}").cluster)
    assert (cluster.name, cluster.gpus, cluster.gpus_per_node) == (name, gpus, per_node)
    assert cluster.nic_bytes_per_sec == nic_gbps * 1e9 / 8
    assert cluster.host_memory_bytes == host_gb * 1e9


@pytest.mark.parametrize(
    ("name", "freeze", "order", "rollback"),
    [
        ("moevement_peers_sparse", False, "round_robin", "global"),
        ("moevement_peers_freeze", True, "round_robin", "global"),
        ("moevement_peers_reorder", True, "hard_count", "global"),
        ("moevement_peers", True, "hard_count", "localized"),
    ],
)
def test_the_ablation_adds_one_technique_at_a_time(composed, name, freeze, order, rollback):
    system = instantiate(composed(f"policy={name}").policy)
    assert (system.freeze, system.policy.order, system.rollback) == (freeze, order, rollback)
    assert (system.name, system.durable, system.replicas) == (name, "peers", 2)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        *((name, True) for name in ("moevement", "moc", "moetion", "dense", "checkfreq")),
        *((name, True) for name in ("gemini", "moc_peers", "moetion_peers")),
        *((name, True) for name in ("gradient_log", "gradient_log_peers")),
        ("moevement_peers", False),  # only the failed stage goes back
    ],
)
def test_what_a_trainer_can_run_today(composed, name, here):
    assert instantiate(composed(f"policy={name}").policy).in_trainer == here


@pytest.mark.parametrize(("model", "k"), [("moe_llava", 1), ("gpt_moe", 4), ("deepseek_moe", 8), ("deepseek_671b", 32)])
def test_moc_saves_an_eighth_of_the_experts(composed, model, k):
    assert scenario_of(composed(*ROOM, "policy=moc", f"model={model}")).system.policy.k == k


@pytest.mark.parametrize(
    ("overrides", "durable", "replicas", "cadence"),
    [
        (["policy=dense"], "storage", 2, None),
        (["policy=gemini"], "peers", 2, StorageCadence(10800.0)),
        (["policy=gemini_daly", "memory=of_policy"], "peers", 2, StorageCadence(10800.0)),
        (["policy=moc_peers", "memory=off"], "storage", 2, None),
        (["memory=local"], "node", 2, StorageCadence(1)),
        (["memory=replicated"], "peers", 1, StorageCadence(1)),
        (["memory=replicated", "memory.replicas=3"], "peers", 3, StorageCadence(1)),
        (["memory=replicated", "memory.storage_every=10min"], "peers", 1, StorageCadence(600.0)),
        (["memory=local", "memory.storage_every=9"], "node", 2, StorageCadence(9)),
        (["memory=local", "memory.storage_every=auto"], "node", 2, StorageCadence("auto")),
    ],
)
def test_where_checkpoints_lie(composed, overrides, durable, replicas, cadence):
    system = scenario_of(composed("policy=moevement", *overrides)).system
    assert (system.durable, system.replicas, system.cadence) == (durable, replicas, cadence)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
def test_an_unknown_choice_lists_the_choices(composed, group):
    with pytest.raises(MissingConfigException) as caught:
        composed(f"{group}=nonesuch")
    assert all(name in str(caught.value) for name in choices(group))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.nic_bytes_per_sec=0"], "Cluster 'a100_96'.*nic_bytes_per_sec must be a finite number above 0"),
        (["policy=moc", "policy.policy.k=0"], "k.*must be a whole number of at least 1"),
        (["policy=moc", "policy.policy.k=65"], "65.*64|64.*65"),
        (["policy=dense", "policy.rollback=localized"], "System 'dense'.rollback='localized'"),
        (["memory=off"], "System 'moevement_peers'.rollback='localized', durable='storage'"),
        (["memory=local", "policy=gemini"], "System 'gemini'.durable='node', replicas=0.: Gemini is for"),
        (["memory=local", "memory.storage_every=0"], "System 'moevement_peers': storage_every=0: must"),
        (["failures.process_share=0.7", "failures.domain_share=0.4"], "Poisson.process_share=0.7, domain_share=0.4."),
        (["failures.mtbf_secs=10"], "a mean of 10 s between failures is below the 15 s"),
        (["failures.mtbf_secs=-1"], r"Poisson\(mtbf_secs=-1\)"),
        (["iteration=given"], "^iteration.secs must be given: iteration.secs=...$"),
        (["failures=trace"], "^failures.path must be given"),
        (
            ["+model.width=3"],
            "^model.width: moe_ckpt_sim.workload.model.ModelSpec has no such parameter; it has name, layers",
        ),
        (["parallel.dp=3"], "needs 288 ranks, but Cluster 'a100_96' has 96 GPUs"),
        (["parallel.pp=1", "parallel.dp=12"], "Batch.*does not divide over 12 pipelines"),
        (["seed=-1"], "seed must be a whole number of at least 0"),
        (["duration_secs=0"], "duration_secs must be"),
        (["load.skewness=1"], "skewness must be below 1"),
        (["model.top_k=65"], "top_k must not exceed experts"),
        (["model._target_=moe_ckpt_sim.nonesuch.X"], "model: .*nonesuch"),
        (
            ["model._target_=moe_ckpt_sim.workload.training.Batch"],
            r"^model\.\w+: moe_ckpt_sim.workload.training.Batch has no such",
        ),
        (["policy=moc", "policy.policy.k=${model.nonesuch}"], "policy.policy.k: .*nonesuch"),
        (["~precision"], "precision: nothing with a _target_"),
        (["batch._target_=builtins.dict"], "batch: builtins.dict made a dict, not a Batch"),
    ],
)
def test_an_error_names_the_field(composed, overrides, said):
    with pytest.raises(ConfigError, match=said):
        scenario_of(composed(*overrides))
