"""Settings that ask for what is not there, and mistakes in groups of one's own: one line, with what there is."""

from __future__ import annotations

import pytest

pytest.importorskip("hydra")

from moe_ckpt.cli.main import main
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.commands.plan import memory_systems
from moe_ckpt_sim.conf.scenarios import scenario_of
from moe_ckpt_sim.conf.sweeps import combinations, composed
from moe_ckpt_sim.planner.planner import trainer_systems


def error_of(capsys, *argv):
    code = main(["simulate", "setup=tiny", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert err.startswith("moe-ckpt simulate: ")
    assert "To append" not in err
    assert "__init__" not in err
    return err.removeprefix("moe-ckpt simulate: ").strip()


THERE_ARE = (
    "there are the groups batch, cluster, failures, iteration, load, memory, model, parallel, policy, precision, setup"
)
SAID = {
    "cluster=null": "cluster=null: no such choice; there are a100_64, a100_96",
    "failures=null,none": "failures=null: no such choice; there are components",
    "policy=": "policy=: no such choice; there are checkfreq, dense",
    "policy=glob(zzz*)": "policy=glob(zzz*): nothing fits; there are checkfreq, dense",
    "+foo=1": f"+foo=1: nothing reads 'foo'; {THERE_ARE} and the settings duration_secs, seed",
    "++foo.bar=1": f"++foo.bar=1: nothing reads 'foo.bar'; {THERE_ARE}",
    "policy@x=moc": f"policy@x=moc: nothing reads 'x'; {THERE_ARE}",
    "foo=1": f"foo: no such setting; {THERE_ARE}",
    "mtbf_secs=600": f"mtbf_secs: no such setting; did you mean failures.mtbf_secs=600? {THERE_ARE}",
    "failures.mtbf=3": "failures.mtbf: no such setting; did you mean failures.mtbf_secs=3? failures has mtbf_secs",
    "polcy.durable=peers": "did you mean policy.durable=peers?",
    "setpu=tiny": "setpu: no such setting; did you mean setup=tiny?",
    "policy.policy.k=3": "policy.policy.k: no such setting; policy.policy has window, order",
    "seed.x=3": "seed.x: seed is one value and has no x",
    "seed=null": "seed must be given: seed=...",
    "~duration_secs": "duration_secs must be given: duration_secs=...",
    "~cluster.nodes": "cluster.nodes must be given: cluster.nodes=...",
    "+cluster.foo=1": "cluster.foo: moe_ckpt_sim.cluster.cluster.Cluster has no such parameter; it has name, nodes",
    "+policy.policy.k=1": "policy.policy.k: moe_ckpt.policies.MoEvement has no such parameter; it has window",
    "cluster={a: 1}": "'cluster': Key 'a' is not in struct",
    **{
        f"{key}=1": f"{key}=1: Hydra's own settings have no effect here"
        for key in ("hydra.foo", "+hydra.foo", "++hydra.run.dir", "hydra.run.dir", "hydra.verbose", "hydra/launcher")
    },
    "hydra.run.dir=a,b": "hydra.run.dir=a,b: Hydra's own settings have no effect here",
    "hydra.searchpath=[file:///tmp]": "use --config-dir for your own groups",
    "~hydra.run": "~hydra.run: Hydra's own settings have no effect here",
    "+load@hydra.run=even": "Hydra's own settings have no effect here",
}


@pytest.mark.parametrize("override", SAID)
def test_what_is_not_there(capsys, override):
    assert SAID[override] in error_of(capsys, override)


def test_of_a_sweep_the_combination_is_named(capsys):
    said = error_of(capsys, "policy=moc,dense", "policy.durable=storage", "policy.policy.k=1")
    assert said == "with policy=dense: policy.policy.k: no such setting; policy.policy has every_n_steps"


def model_of(*overrides):
    return [composed(one).model.name for one in combinations(overrides)]


def test_a_setup_of_null_is_none():
    (default,) = model_of()
    (tiny,) = model_of("setup=tiny")
    assert tiny != default
    assert model_of("setup=null") == model_of("setup=tiny", "setup=null") == [default]
    assert model_of("setup=null,tiny") == [default, tiny]
    assert model_of("setup=null", "setup=tiny") == [tiny]


# --- groups of one's own ---

CODE = """\
from dataclasses import dataclass
from moe_ckpt_sim.cluster.cluster import Cluster

class Wrong:
    def __init__(self, of):
        raise {"type": TypeError, "value": ValueError, "key": KeyError}[of]("of\\nours")

class Chained:
    def __init__(self):
        try:
            {}["inner"]
        except KeyError as error:
            raise ValueError("outer") from error

@dataclass(frozen=True)
class Ours(Cluster):
    racks: int = 1
"""
FILES = {
    "cluster/open.yaml": b"bad: [\n",
    "cluster/binary.yaml": b"\xff\xfe\n",
    "cluster/nul.yaml": b"a: \x00\n",
    "cluster/defaults.yaml": b"defaults: {a: b}\n",
    "cluster/nowhere.yaml": b"_target_: my_sim_code.Nowhere\n",
    "cluster/broken.yaml": b"_target_: my_broken_sim_code.Any\n",
    "cluster/chained.yaml": b"_target_: my_sim_code.Chained\n",
    "cluster/wrong.yaml": b"_target_: my_sim_code.Wrong\nof: value\n",
    "cluster/ours.yaml": b"defaults: [laptop, _self_]\n_target_: my_sim_code.Ours\n",
    "racks/many.yaml": b"# @package cluster\nracks: 3\n",
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_sim_code.py").write_text(CODE)
    (tmp_path / "my_broken_sim_code.py").write_text("def (\n")
    for name, content in FILES.items():
        (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / name).write_bytes(content)
    return tmp_path / "conf"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("cluster=open", 'open.yaml", line 2'),
        ("cluster=binary", "'utf-8' codec can't decode"),
        ("cluster=nul", "nul.yaml"),
        ("cluster=defaults", "'cluster/defaults', defaults must be a list"),
        ("cluster=nowhere", "cluster: ModuleNotFoundError: No module named 'my_sim_code.Nowhere'"),
        ("cluster=broken", "cluster: SyntaxError: invalid syntax (my_broken_sim_code.py, line 1)"),
        ("cluster=chained", "cluster: ValueError: outer"),
        ("cluster=[wrong]", "cluster: ValueError: of ours"),
        ("cluster.of=type", "cluster: TypeError: of ours"),
        ("cluster.of=key", "cluster: KeyError: 'of\\nours'"),
    ],
)
def test_mistakes_of_ones_own_are_one_line(mine, capsys, choice, said):
    first = "cluster=wrong" if choice.startswith("cluster.") else "seed=0"
    assert said in error_of(capsys, "--config-dir", mine, first, choice)


def test_what_ones_own_class_takes_can_be_added(mine, capsys):
    asked = ("--config-dir", str(mine), "policy=dense", "duration_secs=60", "-q")
    for added in ("+cluster.racks=2", "+racks=many"):
        assert main(["simulate", "setup=tiny", "cluster=ours", added, *asked]) == 0, capsys.readouterr().err
    assert "cluster.racks: moe_ckpt_sim.cluster.cluster.Cluster has no" in error_of(capsys, *asked, "+racks=many")
    assert "cluster.rooms: my_sim_code.Ours has no" in error_of(capsys, *asked, "cluster=ours", "+cluster.rooms=2")


def test_an_unknown_place_is_refused_before_composing():
    with pytest.raises(ConfigError, match="nothing reads 'racks'"):
        combinations(["+racks=many"])


# --- names that policies had ---


def test_one_name_is_one_thing_in_the_simulator_and_the_planner():
    """A name without an ending is the Trainer's policy: with its own defaults, on storage."""
    [asked] = combinations(["setup=moevement_deepseek"])
    scenario = scenario_of(composed(asked))
    planned = {one.name: one for one in (*trainer_systems(scenario), *memory_systems(scenario))}
    for name in ("checkfreq", "moetion", "moevement", "gemini", "moetion_peers", "moevement_peers"):
        [asked] = combinations(["setup=moevement_deepseek", f"policy={name}"])
        system = scenario_of(composed(asked)).system
        mine = planned[name]
        assert (system.durable, system.rollback, type(system.policy)) == (
            mine.durable,
            mine.rollback,
            type(mine.policy),
        )
