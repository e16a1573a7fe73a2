"""The Megatron recipe without training: configs, data, scripts, and what its models weigh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hydra")
from hydra.core.global_hydra import GlobalHydra

from recipes.gpt_moe_megatron.config import DataConfig, ModelConfig, ParallelConfig, TrainerConfig
from recipes.gpt_moe_megatron.data import Feed, Synthetic, TokenFile, source
from recipes.gpt_moe_megatron.sizes import compose
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gpt_moe_megatron"
GPUS = {"MoEvement": 96, "MoEtion": 64}
SIZES = """
import json
from recipes.gpt_moe_megatron import counting, sizes
print(json.dumps({
    name: {"total": whole.total, "active": whole.active}
    for name in %r
    for whole in [counting.whole_model(sizes.compose([f"model={name}"]).model)]
}))
"""


def choices(group):
    return sorted(path.stem for path in (RECIPE / "conf" / group).glob("*.yaml"))


PAPERS = [name for name in choices("model") if name != "tiny"]


@pytest.fixture(autouse=True)
def _hydra():
    yield
    GlobalHydra.instance().clear()


def python(*args, interpreter=None):
    """Of a process of its own: counting imports Megatron-Core, for which names in torch are changed.

    interpreter: None for a fork of the server that has imported it.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [interpreter or warm.python(warm.MEGATRON), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- configs ---


@pytest.mark.parametrize("model", choices("model"))
def test_every_model_composes(model):
    found = compose([f"model={model}"]).model
    assert found.paper is None if model == "tiny" else found.paper.total > 1e9


@pytest.mark.parametrize("parallel", choices("parallel"))
def test_every_layout_composes_and_divides_the_processes(parallel):
    found = compose([f"parallel={parallel}"]).parallel
    assert found.data_parallel(found.ranks) == found.ranks // (found.tp * found.pp)


@pytest.mark.parametrize("override", ["trainer=gpu", "faults=seeded", "data=tokens", "data=synthetic"])
def test_every_other_choice_composes(override):
    run = compose([override, *(["data.path=x.bin"] if override == "data=tokens" else [])])
    assert run.model.layers == 4


@pytest.mark.parametrize("name", choices("experiment"))
def test_an_experiment_is_the_papers(name):
    run = compose([f"experiment={name}"])
    assert run.model == compose([f"model={name}"]).model
    gpus = GPUS[run.model.paper.name.split(",")[0]]
    assert run.parallel.ranks == gpus
    assert run.parallel.distributed_optimizer  # ZeRO stage 1
    assert run.trainer.microbatches(run.parallel.data_parallel(gpus)) >= 1
    assert run.trainer.global_batch == {96: 512, 64: 16}[gpus]
    if run.parallel.layout is None:
        assert run.model.layers % run.parallel.pp == 0
    assert run.model.experts % run.parallel.ep == 0


def test_every_model_of_a_paper_has_an_experiment():
    assert choices("experiment") == PAPERS


def test_the_librarys_groups_are_there():
    from hydra import compose as composed
    from hydra import initialize_config_dir

    from recipes.gpt_moe_megatron.train import checkpoint_settings

    kinds = set()
    with initialize_config_dir(str(RECIPE / "conf"), version_base="1.3"):
        for policy in ("dense", "moc", "moc_dynamic", "moevement", "checkfreq"):
            settings = checkpoint_settings(composed("train", [f"moe_ckpt/policy={policy}", "run_dir=here"]))
            kinds.add(type(settings["policy"]).__name__)
            assert settings["dirpath"] == "here/checkpoints"
        assert checkpoint_settings(composed("train", ["~moe_ckpt", "run_dir=here"])) is None
    assert kinds == {"Dense", "MoC", "MoEvement", "CheckFreq"}


def test_settings_are_arguments_of_attach():
    import inspect

    from hydra import compose as composed
    from hydra import initialize_config_dir

    from moe_ckpt import megatron
    from moe_ckpt.run.options import OptionValues, make_options
    from recipes.gpt_moe_megatron.train import checkpoint_settings

    def settings_of(*overrides):
        return checkpoint_settings(composed("train", ["run_dir=here", *overrides]))

    with initialize_config_dir(str(RECIPE / "conf"), version_base="1.3"):
        settings = settings_of()
        local = settings_of("moe_ckpt/memory=local", "moe_ckpt.host_memory_bytes=1GB")
        elsewhere = settings_of("moe_ckpt.dirpath=there", "moe_ckpt.timeout_secs=5")
    known = {*inspect.signature(megatron.attach).parameters, *OptionValues.__annotations__}
    assert set(settings) <= known
    for each in (settings, local, elsewhere):
        policy, dirpath = each.pop("policy"), each.pop("dirpath")
        options = make_options("megatron.attach", policy, dirpath, each, ())
        assert (options.memory is None) == (each is not local)
    assert (dirpath, options.timeout_secs) == ("there", 5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ParallelConfig(overlap=True), "distributed_optimizer"),
        (lambda: ParallelConfig(vpp=2), "pp=1"),
        (lambda: ParallelConfig(pp=2, ep=2, dp=2).data_parallel(4), "needs 8 processes"),
        (lambda: ParallelConfig(pp=2, ep=2).data_parallel(6), "a multiple of 4"),
        (lambda: TrainerConfig(micro_batch=4, global_batch=16).microbatches(8), "8 data-parallel ranks"),
        (lambda: TrainerConfig(precision="fp8"), "fp32, bf16, fp16"),
        (lambda: TrainerConfig(transformer_engine="yes"), "auto, always, never"),
        (lambda: DataConfig(name="tokens"), "data.path"),
        (lambda: DataConfig(name="wikitext"), "synthetic, tokens"),
        (lambda: replace(tiny(), top_k=9), "model.experts=8"),
        (lambda: replace(tiny(), heads=5), "model.hidden=64"),
        (lambda: replace(tiny(), dense_layers=1), "model.ffn"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def tiny():
    return ModelConfig(layers=4, hidden=64, heads=4, experts=8, top_k=2, expert_ffn=96, vocab=256, seq=64)


# --- data ---


def test_layouts_and_resumed_runs_read_the_same_samples():
    language = Synthetic(64, 8, seed=3)

    def iteration(ranks, microbatches, consumed):
        read = []
        for rank in range(ranks):
            feed = Feed(language, 2, microbatches, rank, ranks)
            read += [tuple(row) for inputs, _ in feed.iteration(consumed) for row in inputs.tolist()]
        return sorted(read)

    assert iteration(1, 8, 16) == iteration(2, 4, 16) == iteration(4, 2, 16)
    assert iteration(1, 8, 16) != iteration(1, 8, 0)
    assert len(set(iteration(1, 8, 0))) == 16


def test_labels_are_the_next_tokens_and_the_middle_of_the_pipeline_reads_nothing():
    inputs, labels = next(Feed(Synthetic(64, 8), 2, 1, 0, 1).iteration(0))
    assert inputs.shape == labels.shape == (2, 8)
    assert inputs[:, 1:].tolist() == labels[:, :-1].tolist()
    assert list(Feed(Synthetic(64, 8), 2, 3, 0, 1, needed=False).iteration(0)) == [None, None, None]


def test_a_token_file_is_read_window_by_window_in_an_order_of_each_epoch(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(41, dtype=np.uint16).tofile(path)
    samples = source(DataConfig("tokens", str(path)), vocab=41, seq=4, seed=0)
    assert isinstance(samples, TokenFile)
    epochs = [[tuple(row) for row in samples.rows(np.arange(first, first + 10))] for first in (0, 10)]
    whole = {tuple(range(at, at + 5)) for at in range(0, 40, 4)}
    assert set(epochs[0]) == set(epochs[1]) == whole
    assert epochs[0] != epochs[1]
    assert [tuple(r) for r in samples.rows(np.array([9, 10]))] == [epochs[0][9], epochs[1][0]]


def test_a_token_file_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(41, dtype=np.uint16).tofile(path)
    with pytest.raises(ValueError, match="one window of 65"):
        TokenFile(str(path), "uint16", 41, 64)
    with pytest.raises(ValueError, match=r"model\.vocab=40"):
        TokenFile(str(path), "uint16", 40, 4).rows(np.arange(10))


# --- sizes ---


@pytest.fixture(scope="module")
def counts():
    return json.loads(python("-c", SIZES % choices("model")))


@pytest.mark.parametrize("name", PAPERS)
def test_parameters_are_the_papers_within_two_percent(name, counts):
    paper = compose([f"model={name}"]).model.paper
    for figure in ("total", "active") if paper.matched == "both" else (paper.matched,):
        assert counts[name][figure] == pytest.approx(getattr(paper, figure), rel=0.02), figure


@pytest.mark.parametrize("name", choices("model"))
def test_parameters_are_those_of_the_formula(name, counts):
    m = compose([f"model={name}"]).model
    matrices, norm = (3 if m.gated else 2), m.hidden * (2 if m.norm == "LayerNorm" else 1)
    expert = matrices * m.hidden * m.expert_ffn
    dense = m.dense_layers * matrices * m.hidden * (m.ffn or 0)
    shared = m.moe_layers * matrices * m.hidden * (m.shared_expert_ffn or 0)
    embeddings = m.vocab * m.hidden * (1 if m.tied else 2) + (m.seq * m.hidden if m.position != "rope" else 0)
    rest = m.layers * (4 * m.hidden**2 + 2 * norm) + norm + m.moe_layers * m.experts * m.hidden
    rest += embeddings + dense + shared
    assert counts[name]["total"] == rest + m.moe_layers * m.experts * expert
    assert counts[name]["active"] == rest + m.moe_layers * m.top_k * expert


def test_sizes_of_a_papers_run():
    found = json.loads(
        python(str(RECIPE / "sizes.py"), "experiment=gpt_moe_7_3b_32e", "--bandwidth=0.35", "--k=4", "--json")
    )
    total, ranks = found["model"]["total"], found["ranks"]
    assert found["dense_bytes"] == 14 * total  # bf16 weight, fp32 master, two moments
    assert found["moc_bytes"] == 14 * (total - found["model"]["experts"] * 28 // 32)
    assert sum((s["dense"] + 8 * s["expert"]) for s in found["stages"]) == total
    sharded = sum((s["sharded"]["masters"] + s["sharded"]["moments"]) * ranks // 3 for s in found["stages"])
    assert sharded == pytest.approx(12 * total, rel=1e-3)
    window = found["moevement"]
    assert window["fits"]
    assert 1 < window["window"] == len(window["slot_bytes"])
    needed = window["bandwidth_by_window"]
    assert needed[str(window["window"])] <= 0.35e9 < needed[str(window["window"] - 1)]


def test_the_help_shows_an_example():
    assert "sizes.py experiment=" in python(str(RECIPE / "sizes.py"), "--help", interpreter=sys.executable)
