"""``moe-ckpt plan``: what it prints, its exit codes, and what it asks for."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.run.options import Settings
from moe_ckpt_sim.commands.plan import COLUMNS, _scenario, memory_systems
from moe_ckpt_sim.conf.scenarios import scenario_of
from moe_ckpt_sim.conf.sweeps import combinations, composed
from moe_ckpt_sim.planner.planner import recommend, trainer_systems
from moe_ckpt_sim.planner.rates import Rate, Rates
from tests.unit.test_profile import PROFILE, encoded

QUICK = ("setup=moetion_2_9b", "failures.mtbf_secs=1800", "duration_secs=3600", "iteration.secs=6", "--seeds", "1")
LINUX = pytest.mark.skipif(not Path("/proc").is_dir(), reason="no directory in which nobody can make a file")


def call(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["plan", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[dict, Path]:
    """One plan, told as JSON, and its picture."""
    import contextlib
    import io

    picture = tmp_path_factory.mktemp("plan") / "roof.png"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["plan", *QUICK, "--json", "--plot", str(picture)]) == 0
    return json.loads(out.getvalue()), picture


def test_every_policy_is_told_with_its_figures(planned):
    facts, _ = planned
    names = {one["system"] for one in facts["candidates"]}
    assert {"dense", "checkfreq", "moetion", "moevement", "gemini", "moevement_peers"} <= names
    for one in facts["candidates"]:
        if one["use"]:
            assert set(one["use"]["utilisation"]) == {"compute", "pcie", "nic", "storage", "host_memory"}
            assert one["roof"] in one["use"]["utilisation"]
            assert 0 <= one["ettr"] <= 1


def test_the_recommended_policy_is_one_of_the_trainers_with_its_line(planned):
    facts, _ = planned
    chosen = next(one for one in facts["candidates"] if one["system"] == facts["recommended"])
    assert chosen["in_trainer"]
    assert facts["overrides"].startswith(f"moe_ckpt/policy={chosen['policy']['name']}")


def test_the_picture_is_written(planned):
    _, picture = planned
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_marks_what_is_for_pipelines_only(capsys):
    code, out, _ = call(capsys, *QUICK)
    assert code == 0
    assert all(word in out for column in COLUMNS for word in re.findall(r"\w+", column))
    assert max(map(len, out.splitlines())) <= 100
    assert "moevement_peers *" in out
    assert "* only the failed stage goes back" in out
    assert "recommended: " in out


def test_what_is_simulated_is_said_while_it_is(capsys):
    longer = [word.replace("duration_secs=3600", "duration_secs=36000") for word in QUICK]
    code, out, err = call(capsys, *longer, "--storage-only")
    assert code == 0
    first, *closer = err.splitlines()
    assert first == "simulating 8 policies, 3 h 00 min of 10 h 00 min"
    assert closer
    assert all(line.startswith("a closer look at moc_auto") for line in closer)
    assert "~ simulated for 3." in out
    assert re.search(r"^dense +~0\.", out, re.MULTILINE)
    assert re.search(r"^moc_auto +0\.", out, re.MULTILINE), "what is recommended was simulated to the end"


def test_a_run_that_never_fails_is_called_so(capsys):
    code, out, _ = call(capsys, "setup=tiny", "duration_secs=60", "failures=none", "-q")
    assert code == 0
    assert re.match(r"tiny: [\d,]+ parameters on 1 rank of laptop, .* per iteration,\s+no failures\n", out)


def test_trainer_only_leaves_it_out(capsys):
    code, out, err = call(capsys, "setup=tiny", "duration_secs=600", "--seeds", "1", "--trainer-only", "-q")
    assert (code, err) == (0, "")
    assert "failed stage" not in out


def test_what_is_recommended_in_memory_has_a_line_with_that_memory(capsys):
    longer = [word.replace("duration_secs=3600", "duration_secs=18000") for word in QUICK]
    code, out, _ = call(capsys, *longer, "cluster.storage_bytes_per_sec=1e9", "--trainer-only", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["recommended"] == "gemini"
    assert "moe_ckpt/memory=replicated moe_ckpt.memory.replicas=" in facts["overrides"]
    assert all(one["in_trainer"] for one in facts["candidates"])
    assert "moevement_peers" not in out


def test_all_candidates_are_simulated_as_their_line_starts_them():
    """The line says nothing of what a Trainer does when links are busy, so it does what it does by default."""
    [plain] = combinations(list(QUICK[:1]))
    scenario = scenario_of(composed(plain))
    candidates = [*trainer_systems(scenario), *memory_systems(scenario)]
    assert {one.when_busy for one in candidates} == {Settings().when_busy}
    assert {one.max_in_flight for one in candidates} == {Settings().max_in_flight}


def test_links_that_are_too_slow_for_windows_cost_copies_and_not_time():
    slow = ["setup=moevement_deepseek", "failures.mtbf_secs=1800", "duration_secs=7200"]
    [plain] = combinations([*slow, "cluster.nic_bytes_per_sec=1e9"])
    scenario = scenario_of(composed(plain))
    windows = [one for one in memory_systems(scenario) if one.name == "moevement_memory"]
    [found] = recommend(scenario, windows, seeds=1).candidates
    assert found.stall_secs < 0.1


def test_one_node_has_no_peers():
    [tiny] = combinations(["setup=tiny"])
    assert memory_systems(scenario_of(composed(tiny))) == []


@pytest.mark.usefixtures("warm_programs")
def test_measured_rates_are_shown_and_used(capsys, tmp_path, monkeypatch):
    from moe_ckpt_sim.planner import rates

    measure = rates.measure
    small = {"copy_bytes": 1 << 20, "network_bytes": 1 << 20, "file_bytes": 1 << 20, "repeats": 1}
    monkeypatch.setattr(rates, "measure", lambda directory, **known: measure(directory, **{**known, **small}))
    code, out, _ = call(capsys, "setup=tiny", "duration_secs=600", "--seeds", "1", "--measure", str(tmp_path), "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["cluster"]["pcie_bytes_per_sec"] == facts["rates"]["copy"]["bytes_per_sec"]
    assert facts["cluster"]["storage_bytes_per_sec"] == facts["rates"]["storage_write"]["bytes_per_sec"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_of_the_cluster_goes_before_what_is_measured(capsys, tmp_path, monkeypatch):
    """One machine tells nothing of the network between nodes, but how much its processes can send at most."""
    rate = Rate("", 1, 12e9, 12e9, 12e9, 1)
    monkeypatch.setattr("moe_ckpt_sim.planner.rates.measure", lambda *_, **__: Rates(rate, rate, rate, rate))
    short = (*QUICK, "--storage-only", "--json", "-q", "--measure", str(tmp_path))

    def clusters(*settings: str) -> dict:
        return json.loads(call(capsys, *short, *settings)[1])["cluster"]

    said = clusters("cluster.nic_bytes_per_sec=25e9", "cluster.storage_bytes_per_sec=3e9")
    assert (said["nic_bytes_per_sec"], said["storage_bytes_per_sec"]) == (25e9, 3e9)
    measured = clusters()
    assert measured["nic_bytes_per_sec"] == 40e9  # of four ranks 48e9, over the loopback
    assert (measured["pcie_bytes_per_sec"], measured["storage_bytes_per_sec"]) == (12e9, 16 * 12e9)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("failures.mtbf_secs=600,700",), "use moe-ckpt simulate for sweeps"),
        (("setup=nope",), "nope"),
        (("cluster.pcie_bytes_per_sec=0",), "pcie_bytes_per_sec"),
        (("failures.mtbf_secs=3",), "never advance"),
        (("--profile", "there_is_none.json"), "there_is_none.json"),
        (("--profile", __file__), f"--profile: {__file__}: "),
        (("setup=tiny", "--seeds", "0"), "seeds"),
        (("setup=tiny", "duration_secs=600", "--seeds", "1", "--trainer-only", "--plot", "roof.xyz"), "roof.xyz"),
        (("--config-dir", "not/there"), "not/there"),
        (("--plot", "not/there/roof.png"), "not/there"),
        (("--max-plt", "1.5"), "--max-plt 1.5: must be a portion"),
        (("--profile", "p.json", "policy=moc"), "policy: with --profile"),
        (("--profile", "p.json", "failures=weibull", "cluster=h100_128"), "cluster: with --profile"),
        (
            ("--profile", "p.json", "+cluster.foo=1"),
            "+cluster.foo=1: of a profiled cluster, these can be set: name, nodes",
        ),
        (("--profile", "p.json", "~cluster.nodes"), "~cluster.nodes: of a profiled cluster"),
        (("--profile", "p.json", "tokens_per_step=many"), "tokens_per_step=many: must be a whole number of at least 1"),
        (("tokens_per_step=9",), "with --profile; here set batch.sequences"),
        (("policy=moc",), "policy=moc: plan tries all policies, on storage and in memory; moe-ckpt simulate"),
        (("memory=replicated",), "memory=replicated: plan tries all"),
        (("setup=tiny", "policy.policy.window=3"), "policy.policy.window=3: plan tries all"),
        (("policy=moc,dense",), "plan tries all"),
        (("--max-plt", "nan"), "--max-plt nan"),
        (("--plot", "roof.eps"), "ends in one of .png, .svg, .pdf"),
        pytest.param(("--plot", "/proc/roof.png", "cluster.nodes=0"), "/proc/roof.png: cannot be written", marks=LINUX),
        (("--plot=",), "--plot= is empty"),
        (("--profile=",), "--profile= is empty"),
        (("--measure=",), "--measure= is empty"),
        (("--config-dir=",), "--config-dir= is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_said_in_one_line(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *argv)
    assert code == 2
    assert out == ""
    assert err.startswith("moe-ckpt plan: ")
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_of_a_profiled_cluster_single_fields_can_be_said(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(encoded(PROFILE))
    asked = ("--profile", str(path), "duration_secs=60", "failures.mtbf_secs=3000", "--trainer-only", "--json")
    before = json.loads(call(capsys, *asked)[1])["cluster"]
    after = json.loads(call(capsys, *asked, "cluster.detect_secs=7", "cluster.nic_bytes_per_sec=25e9")[1])["cluster"]
    assert after == {**before, "detect_secs": 7, "nic_bytes_per_sec": 25e9}
    assert before["detect_secs"] != 7


def test_a_profiled_run_is_described_in_words(capsys, tmp_path):
    (path := tmp_path / "p.json").write_bytes(encoded(PROFILE))
    asked = ("--profile", str(path), "duration_secs=60", "failures.mtbf_secs=3000", "--trainer-only")
    first = " ".join(call(capsys, *asked)[1].split())
    assert re.match(r"p\.json: [\d.,]+( B)? parameters on \d+ ranks of the cluster of p\.json, ", first)


def test_components_are_those_of_the_profiled_cluster(tmp_path):
    """Not those of the config's default."""
    (path := tmp_path / "p.json").write_bytes(encoded(PROFILE))
    given = ("failures=components", "cluster.nodes=512", "cluster.gpus_per_node=8")
    args = argparse.Namespace(profile=str(path), config_dir=None)
    assert _scenario(args, given).failures.mean_secs == pytest.approx(4.38 * 3600, rel=0.001)
    own = _scenario(args, given[:1])
    counts = {part.name: part.count for part in own.failures.parts}
    assert (counts["host"], counts["gpu"]) == (own.layout.cluster.nodes, own.layout.cluster.gpus) != (12, 96)


def test_tokens_that_a_profile_does_not_tell_can_be_said(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_bytes(encoded(replace(PROFILE, lives=tuple(replace(life, assignments=0) for life in PROFILE.lives))))
    asked = ("--profile", str(path), "duration_secs=60", "failures.mtbf_secs=3000", "--trainer-only", "-q")
    code, _, err = call(capsys, *asked)
    assert code == 2
    assert "Give tokens_per_step" in err
    assert call(capsys, *asked, "tokens_per_step=256")[::2] == (0, "")


def test_settings_are_read_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_ckpt_sim.planner.rates.measure", lambda *_, **__: pytest.fail("measured"))
    code, _, err = call(capsys, "setup=tiny", "cluster.nodes=0", "--measure", str(tmp_path))
    assert code == 2
    assert "nodes" in err


def test_where_no_policy_can_be_used_the_exit_code_is_1(capsys):
    code, out, _ = call(
        capsys, "setup=tiny", "cluster.host_memory_bytes=1000", "duration_secs=600", "--seeds", "1", "--trainer-only"
    )
    assert code == 1
    assert "cannot be used" in out
    assert "No policy can be used" in out


def test_without_hydra_the_extra_is_named(capsys, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("hydra", "moe_ckpt_sim.conf.scen", "moe_ckpt_sim.conf.sweep"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hydra", None)
    code, _, err = call(capsys, "setup=tiny")
    assert code == 2
    assert "hydra" in err
    assert "pip install" in err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_docs_show_what_is_printed(capsys, monkeypatch):
    """The whole table of the simulator's page, and the column of memory in the page on sizes."""
    docs = Path(__file__).parents[2] / "docs"
    [shown] = re.findall(
        r"^\$ moe-ckpt (plan setup=moevement_deepseek .*?)\n```", (docs / "simulator.md").read_text(), re.M | re.S
    )
    command, _, printed = shown.partition("\n")
    sizing = (docs / "sizing.md").read_text()
    assert f"`moe-ckpt {command}`" in sizing
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = call(capsys, *command.split()[1:])
    assert printed.split() == out.split()
    told = dict(re.findall(r"^(\w+)(?: \*)? .* ([\d.]+) GiB +[\d.]+ \w+ +[\d.]+ \w+  \w+$", out, re.M))
    table = sizing.partition("`plan`, column `host memory` |")[2].partition("\n\n")[0]
    column = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \|$", table, re.M)
    assert [memory for _, memory in column] == [
        told[name] for name in ("dense", "gemini", "moevement_memory", "moevement_peers", "gradient_log_peers")
    ]
    assert all(float(rule) == pytest.approx(float(memory), rel=0.01) for rule, memory in column)
