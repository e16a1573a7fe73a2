"""Config groups and the recipe's command: everything composes, everything unknown is refused with the choices."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate

from moe_ckpt import conf
from moe_ckpt import conf as schema
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.cli.report import describe
from moe_ckpt.conf import SCHEMAS, StoreConfig
from moe_ckpt.core.cadence import StorageCadence
from moe_ckpt.memory.options import Memory
from moe_ckpt.policies import AnyOf, CheckFreq, Dense, Gemini, GradientLog, Guarded, MoC, MoEtion, MoEvement
from moe_ckpt.run.options import Options, OptionValues, Settings
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = Path(conf.__file__).parent


def choices(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.yaml"))


@pytest.fixture
def user_app(tmp_path):
    """A user's own config directory that only knows our search path. Returns a function that composes it."""
    (tmp_path / "config.yaml").write_text(
        "defaults: [{moe_ckpt: default}, _self_]\nhydra: {searchpath: ['pkg://moe_ckpt.conf']}\nlr: 0.1\n"
    )

    def composed(*overrides, name="config"):
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return compose(name, list(overrides))

    yield composed
    GlobalHydra.instance().clear()


@pytest.fixture
def run_conf():
    """Composes the repository's own run config."""

    def composed(*overrides):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose("train", ["name=test", *overrides])

    yield composed
    GlobalHydra.instance().clear()


def test_groups_are_those_that_are_documented():
    """Those of a training run; the simulator's are in test_sim_conf.py."""
    groups = {p.parent.relative_to(SHIPPED).as_posix(): choices(p.parent) for p in SHIPPED.rglob("*.yaml")}
    assert {name: listed for name, listed in groups.items() if not name.startswith("simulate")} == {
        "moe_ckpt": ["default"],
        "moe_ckpt/policy": [
            *("any_of", "checkfreq", "dense", "gemini", "gradient_log", "guarded"),
            *("moc", "moc_dynamic", "moetion", "moevement"),
        ],
        "moe_ckpt/memory": ["local", "off", "replicated"],
        "moe_ckpt/store": ["local", "remote"],
        "moe_ckpt/retention": ["milestones", "recent"],
        "callbacks": ["moe_ckpt"],
    }


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("moc", MoC()),
        ("dense", Dense()),
        ("checkfreq", CheckFreq()),
        ("gemini", Gemini()),
        ("moetion", MoEtion()),
        ("moevement", MoEvement()),
        ("gradient_log", GradientLog()),
    ],
    ids=lambda v: str(v),
)
def test_policies_build_with_the_defaults_of_their_classes(user_app, name, policy):
    assert instantiate(user_app(f"moe_ckpt/policy={name}").moe_ckpt.policy) == policy


def test_values_reach_the_policy(user_app):
    cfg = user_app("moe_ckpt/policy=moc", "moe_ckpt.policy.k=2", "moe_ckpt.policy.every_n_steps=5")
    assert instantiate(cfg.moe_ckpt.policy) == MoC(k=2, every_n_steps=5)


def test_two_levels_and_a_budget_reach_moc(user_app):
    def policy(*overrides):
        return instantiate(user_app("moe_ckpt/policy=moc", *overrides).moe_ckpt.policy)

    several = ("moe_ckpt.policy.selector=load_aware", "moe_ckpt.policy.snapshot_k=4")
    assert policy(*several, "moe_ckpt.policy.plt_budget=strict") == MoC(
        selector="load_aware", snapshot_k=4, plt_budget="strict"
    )
    assert policy("moe_ckpt.policy.plt_budget=0.02").budget == 0.02
    assert policy("moe_ckpt.policy.k=auto", "moe_ckpt.policy.snapshot_k=auto") == MoC(k="auto", snapshot_k="auto")
    with pytest.raises(InstantiationException, match=r"MoC\(k='two'\): k must be .* or 'auto'"):
        policy("moe_ckpt.policy.k=two")
    dynamic = instantiate(user_app("moe_ckpt/policy=moc_dynamic", "moe_ckpt.policy.k=2").moe_ckpt.policy)
    assert dynamic == MoC(k=2, selector="least_loss", plt_budget="default")


def test_several_policies_are_put_together_by_name(user_app):
    def policy(*overrides):
        return instantiate(user_app("moe_ckpt/policy=any_of", *overrides).moe_ckpt.policy)

    assert policy() == AnyOf([MoC(), Dense(100)])
    values = ("moe_ckpt.policy.policies.often.k=2", "moe_ckpt.policy.policies.rarely.every_n_steps=7")
    assert policy(*values) == AnyOf([MoC(k=2), Dense(7)])
    own = "+moe_ckpt.policy.policies.mine={_target_: moe_ckpt.policies.MoEtion, experts: 2}"
    assert policy("moe_ckpt/policy@moe_ckpt.policy.policies.often=moetion", own) == AnyOf(
        [MoEtion(), Dense(100), MoEtion(experts=2)]
    )
    with pytest.raises(InstantiationException, match=r"MoEvement cannot be combined with other"):
        policy("moe_ckpt/policy@moe_ckpt.policy.policies.often=moevement")


def test_a_window_reaches_moevement(user_app):
    own = ("moe_ckpt.policy.window=3", "moe_ckpt.policy.order=round_robin")
    policy = instantiate(user_app("moe_ckpt/policy=moevement", *own).moe_ckpt.policy)
    assert policy == MoEvement(window=3, order="round_robin")
    with pytest.raises(InstantiationException, match=r"order='nope'\): no such order; choose from .*'hard_count'"):
        instantiate(user_app("moe_ckpt/policy=moevement", "moe_ckpt.policy.order=nope").moe_ckpt.policy)


def test_what_moetion_saves_is_set_by_value(user_app):
    policy = instantiate(user_app("moe_ckpt/policy=moetion", "moe_ckpt.policy.experts=2").moe_ckpt.policy)
    assert policy == MoEtion(experts=2)
    for boost in (0.25, None):
        own = f"moe_ckpt.policy.capacity_boost={'null' if boost is None else boost}"
        assert instantiate(user_app("moe_ckpt/policy=moetion", own).moe_ckpt.policy) == MoEtion(capacity_boost=boost)


@pytest.mark.parametrize("budget", ["2", "-1", "0", "foo", "nan"])
def test_a_budget_that_is_none_is_refused_with_the_choices_by_value_too(user_app, budget):
    for policy, own in (("moc", "plt_budget"), ("guarded", "budget")):
        cfg = user_app(f"moe_ckpt/policy={policy}", "moe_ckpt.store.dirpath=x", f"moe_ckpt.policy.{own}={budget}")
        with pytest.raises(InstantiationException, match=rf"budget='?{budget}'?: .*between 0 and 1.*'default'"):
            instantiate(cfg.moe_ckpt)


@pytest.mark.parametrize("kind", [Dense, CheckFreq, Gemini, MoC, MoEtion, MoEvement, GradientLog])
def test_the_yaml_of_a_policy_says_its_options_and_defaults(user_app, kind):
    name = "gradient_log" if kind is GradientLog else kind.__name__.lower()
    node = user_app(f"moe_ckpt/policy={name}").moe_ckpt.policy
    assert {key: value for key, value in node.items() if key != "_target_"} == {f.name: f.default for f in fields(kind)}
    written = (Path(schema.__file__).parent / "moe_ckpt" / "policy" / f"{name}.yaml").read_text()
    assert all(re.search(rf"(?m)^{option.name}:", written) for option in fields(kind)), "for who reads it"


def test_memory_takes_what_its_class_takes(user_app, tmp_path):
    for every in ("auto", "10min", 60, 60.5):
        for group in ("local", "replicated"):
            override = f"moe_ckpt.memory.storage_every={every}"
            cfg = user_app(f"moe_ckpt/memory={group}", override, f"moe_ckpt.dirpath={tmp_path}")
            assert instantiate(cfg.moe_ckpt.memory).cadence == StorageCadence(every)
    assert instantiate(user_app("moe_ckpt/memory=local").moe_ckpt.memory) == Memory()


def test_the_guard_is_a_policy_around_another(user_app, tmp_path):
    store, guarded = f"moe_ckpt.store.dirpath={tmp_path}", "moe_ckpt/policy=guarded"
    own = ("moe_ckpt.policy.budget=0.03", "moe_ckpt.policy.policy.k=2")
    assert instantiate(user_app(guarded, *own, store).moe_ckpt).policy == Guarded(MoC(k=2), 0.03)
    own = ("moe_ckpt.policy.budget=null", "moe_ckpt.policy.mlt_budget=loose")
    other = "moe_ckpt/policy@moe_ckpt.policy.policy=moetion"
    assert instantiate(user_app(guarded, other, *own, store).moe_ckpt).policy == Guarded(
        MoEtion(), None, mlt_budget="loose"
    )
    assert instantiate(user_app(store).moe_ckpt).policy == CheckFreq() == MoECheckpoint(dirpath=tmp_path).policy


@pytest.mark.parametrize("name", ["recent", "milestones"])
def test_retention_builds(user_app, name):
    retention = importlib.import_module("moe_ckpt.ledger.retention")
    cfg = user_app(f"moe_ckpt/retention={name}")
    assert isinstance(instantiate(cfg.moe_ckpt.retention), retention.RetentionPolicy)
    assert {f.name for f in fields(SCHEMAS["retention"])} - {"_target_"} == {
        f.name for f in fields(retention.RetentionPolicy)
    }


def test_remote_store_wants_a_place(user_app):
    with pytest.raises(InstantiationException, match=r"moe_ckpt\.dirpath must be given: .*s3://"):
        instantiate(user_app("moe_ckpt/store=remote").moe_ckpt)
    for own in ("moe_ckpt.dirpath", "moe_ckpt.store.dirpath"):
        callback = instantiate(user_app("moe_ckpt/store=remote", f"{own}=memory://b/x").moe_ckpt)
        assert callback.dirpath == "memory://b/x"
    assert user_app("moe_ckpt/store=remote", "moe_ckpt.store.dirpath=s3://b/x").moe_ckpt.store.dirpath == "s3://b/x"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("moe_ckpt/policy=nope", ["nope", "checkfreq", "dense", "moc", "Available options"]),
        ("moe_ckpt/store=nope", ["nope", "local", "remote"]),
        ("moe_ckpt.policy.kk=3", ["moe_ckpt.policy.kk", "CheckFreqConfig"]),
        ("moe_ckpt.policy.max_overhead=two", ["two", "Float", "moe_ckpt.policy.max_overhead"]),
        ("moe_ckpt.policy.snapshot_k=[3]", ["snapshot_k"]),
        ("moe_ckpt.dirpth=x", ["dirpth", "CheckpointConfig"]),
    ],
)
def test_unknown_names_and_wrong_types_are_refused_with_what_there_is(user_app, override, words):
    with pytest.raises(ConfigCompositionException) as caught:
        user_app(override)
    text = f"{caught.value} {caught.value.__cause__}"
    assert [w for w in words if w not in text] == []


def test_template_style_callbacks_dict(user_app, tmp_path):
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "default.yaml").write_text("model_summary:\n  _target_: builtins.dict\n")
    (tmp_path / "template.yaml").write_text(
        "defaults: [{callbacks: [default, moe_ckpt]}, _self_]\nhydra: {searchpath: ['pkg://moe_ckpt.conf']}\n"
    )
    cfg = user_app(name="template")
    assert sorted(cfg.callbacks) == ["model_summary", "moe_ckpt"]
    assert cfg.callbacks.moe_ckpt._target_ == "moe_ckpt.conf.build_callback"
    cfg = user_app("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=7", "moe_ckpt.dirpath=x", name="template")
    assert instantiate(cfg.callbacks.moe_ckpt.policy) == Dense(every_n_steps=7)
    assert cfg.callbacks.moe_ckpt.dirpath == "x"
    assert sorted(cfg) == ["callbacks", "moe_ckpt"]


TEMPLATE = {
    "configs/train.yaml": """\
# @package _global_
defaults: [_self_, {callbacks: default}, {trainer: default}, {paths: default}, {hydra: default}, {experiment: null},
  {optional local: default}]
task_name: train
seed: 1
""",
    "configs/callbacks/default.yaml": "defaults: [model_summary, _self_]\nmodel_summary: {max_depth: 1}\n",
    "configs/callbacks/model_summary.yaml": (
        "model_summary: {_target_: lightning.pytorch.callbacks.ModelSummary, max_depth: -1}\n"
    ),
    "configs/trainer/default.yaml": (
        "_target_: lightning.pytorch.Trainer\ndefault_root_dir: ${paths.output_dir}\naccelerator: cpu\nmax_steps: 3\n"
        "logger: false\nenable_progress_bar: false\n"
    ),
    "configs/paths/default.yaml": "root_dir: .\noutput_dir: ${hydra:runtime.output_dir}\n",
    "configs/hydra/default.yaml": "run: {dir: 'logs/${task_name}'}\n",
    "configs/experiment/exact.yaml": """\
# @package _global_
defaults: [{override /callbacks: [default, moe_ckpt]}, {override /moe_ckpt/policy: dense}]
moe_ckpt: {policy: {every_n_steps: 2}, dirpath: exact}
""",
    "train.py": """\
import hydra
from lightning.pytorch import seed_everything
from omegaconf import DictConfig
from torch.utils.data import DataLoader
from tests.support.tiny_moe import TinyMoE, loader


def instantiate_callbacks(callbacks):
    return [
        hydra.utils.instantiate(conf)
        for conf in callbacks.values()
        if isinstance(conf, DictConfig) and "_target_" in conf
    ]


@hydra.main(version_base="1.3", config_path="configs", config_name="train.yaml")
def main(cfg):
    seed_everything(cfg.seed)
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=instantiate_callbacks(cfg.callbacks))
    trainer.fit(TinyMoE(), loader())


main()
""",
}
"""As lightning-hydra-template is laid out: callbacks in a dict, put together from files of a group."""


def test_an_app_laid_out_as_the_template_takes_the_settings_of_every_other_app(tmp_path):
    """Its own entry point, in processes of their own: callbacks by name, settings by value and by an experiment."""
    for name, text in TEMPLATE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    search = "hydra.searchpath=[pkg://moe_ckpt.conf]"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

    def app(*args, python=sys.executable):
        command = [python, "train.py", search, *args]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    app("callbacks=[default,moe_ckpt]", "moe_ckpt/policy=moc", "moe_ckpt.policy.k=2", "moe_ckpt.dirpath=mine")
    policies = {name: describe(tmp_path / name)["steps"][0]["policy"] for name in ("mine",)}
    app("experiment=exact", python=warm.python())
    policies["exact"] = describe(tmp_path / "exact")["steps"][0]["policy"]
    assert (policies["mine"]["name"], policies["mine"]["k"]) == ("moc", 2)
    assert (policies["exact"]["name"], policies["exact"]["every_n_steps"]) == ("dense", 2)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("moe_ckpt.max_overhead=0.1", "moe_ckpt.policy.max_overhead=0.1"),
        ("moe_ckpt.dirpaht=x", "moe_ckpt.dirpath=x"),
        ("moe_ckpt.keep_last=3", "moe_ckpt.retention.keep_last=3"),
        ("modle.experts=4", "model.experts=4"),
    ],
)
def test_the_recipe_says_where_a_key_is(override, meant):
    from recipes.gpt_moe_lightning.hints import nearest_key

    hint = nearest_key([override, "moe_ckpt/policy=checkfreq"], ROOT / "conf")
    assert hint == f"{override.partition('=')[0]}: no such setting; did you mean {meant}?"
    of_another = nearest_key(["moe_ckpt.k=2", "moe_ckpt/policy=moc"], ROOT / "conf")
    assert of_another.endswith("did you mean moe_ckpt.policy.k=2?")
    for nothing in (meant, "moe_ckpt.zzz=2", "moe_ckpt.policy.max_overhead.x=1"):
        assert nearest_key([nothing, "moe_ckpt/policy=checkfreq"], ROOT / "conf") == ""


def test_the_recipes_command_trains_every_job_of_a_multirun_and_hints_at_keys(tmp_path, monkeypatch, capsys):
    from recipes.gpt_moe_lightning import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "main", lambda cfg: print("GO", cfg.moe_ckpt.policy._target_, cfg.run_dir))
    monkeypatch.setattr(sys, "argv", ["train", "-m", "moe_ckpt/policy=dense,moc", "run_dir=here"])
    try:
        train.command()
        monkeypatch.setattr(sys, "argv", ["train", "moe_ckpt.k=2", "moe_ckpt/policy=moc"])
        with pytest.raises(SystemExit):
            train.command()
    finally:
        GlobalHydra.instance().clear()
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("GO")]
    assert lines == ["GO moe_ckpt.policies.Dense here", "GO moe_ckpt.policies.MoC here"]
    assert err.endswith("moe_ckpt.k: no such setting; did you mean moe_ckpt.policy.k=2?\n")


def test_adoption_without_editing_a_config(user_app, tmp_path):
    (tmp_path / "bare.yaml").write_text("lr: 0.1\nhydra: {searchpath: ['pkg://moe_ckpt.conf']}\n")
    cfg = user_app("+moe_ckpt=default", "moe_ckpt/policy=dense", name="bare")
    assert cfg.moe_ckpt.policy._target_ == "moe_ckpt.policies.Dense"


def test_a_users_app_needs_no_import_of_ours(tmp_path):
    """The search path alone must bring the schemas, in a fresh process."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text(
        "defaults: [{moe_ckpt: default}, _self_]\nhydra: {searchpath: ['pkg://moe_ckpt.conf'], run: {dir: .}}\n"
    )
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='app')\n"
        "def main(cfg): print('POLICY', cfg.moe_ckpt.policy, 'IN', cfg.moe_ckpt.store.dirpath)\n"
        "main()\n"
    )

    def app(*args):
        return subprocess.run(
            [sys.executable, "app.py", *args], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )

    jobs = app("-m", "moe_ckpt/policy=dense,moc,checkfreq", "hydra.sweep.dir=sweep")
    assert jobs.stdout.count("POLICY") == 3, jobs.stderr
    stores = [line.rsplit(" IN ", 1)[1] for line in jobs.stdout.splitlines() if "POLICY" in line]
    assert stores == [f"checkpoints/moe_ckpt.policy={name}" for name in ("dense", "moc", "checkfreq")]
    assert app("moe_ckpt/policy=dense").stdout.endswith(" IN checkpoints\n"), "a single run's stays, whatever it sets"
    wrong = app("moe_ckpt.policy.max_overhead=two")
    assert wrong.returncode == 1
    assert "could not be converted to Float" in wrong.stderr


@pytest.mark.parametrize("group", ["model", "data", "trainer", "faults", "experiment"])
def test_every_run_config_composes_into_its_types(run_conf, group):
    from recipes.gpt_moe_lightning.train import run_config

    names = choices(ROOT / "conf" / group)
    assert names
    for name in names:
        config = run_config(run_conf(f"{group}={name}"))
        assert config.run_dir == "runs/test"


def test_checkpoints_go_below_the_run_directory_and_not_into_hydras(run_conf):
    cfg = run_conf("run_dir=/data/x", "moe_ckpt/policy=dense")
    assert cfg.moe_ckpt.store.dirpath == "/data/x/checkpoints"
    assert "now" not in (ROOT / "conf" / "train.yaml").read_text()


def test_paper_sizes_in_the_config_are_those_of_the_model_test(run_conf):
    from recipes.gpt_moe_lightning.train import run_config
    from tests.unit.test_recipe_model import PEC_SMALL, parameters

    config = run_config(run_conf("experiment=pec_paper"))
    assert parameters(config.model) == parameters(PEC_SMALL) == 322_818_816


def test_the_whole_callback_builds(run_conf, tmp_path):
    from moe_ckpt.callbacks import MoECheckpoint

    cfg = run_conf(f"run_dir={tmp_path}", "moe_ckpt/policy=moc", "moe_ckpt.policy.k=2")
    callback = instantiate(cfg.moe_ckpt)
    assert isinstance(callback, MoECheckpoint)
    known = {f.name for f in fields(Options)} | set(inspect.signature(MoECheckpoint).parameters)
    described = {f.name for f in fields(SCHEMAS["checkpoint"])} | {f.name for f in fields(SCHEMAS["store"])}
    assert described - {"_target_", "store"} <= known
    automatic = {"max_in_flight", "pinned", "local_ranks"}
    assert {f.name for f in fields(Options)} - automatic == {"policy", "dirpath", *OptionValues.__annotations__}
    assert StoreConfig().timeout_secs == Settings().timeout_secs
    assert known - described == automatic | {"options"}  # every setting of users can be set in a config


@pytest.mark.parametrize("nbytes", ["8e9", "8000000000", "8GB"])
def test_bytes_are_said_as_in_python(run_conf, nbytes):
    cfg = run_conf(
        "moe_ckpt/memory=local",
        f"moe_ckpt.memory.upstream_bytes={nbytes}",
        f"moe_ckpt.host_memory_bytes={nbytes}",
    )
    memory = instantiate(cfg.moe_ckpt.memory)
    assert memory.upstream_bytes == 8 * 10**9
    assert Settings(host_memory_bytes=cfg.moe_ckpt.host_memory_bytes).host_memory_bytes == 8 * 10**9


def test_the_package_of_configs_imports_without_hydra():
    code = (
        "import sys; sys.modules['hydra'] = None; sys.modules['hydra.core.config_store'] = None\n"
        "import moe_ckpt.conf; assert moe_ckpt.conf.register() is False"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
