"""``moe-ckpt simulate``: sweeps by Hydra's grammar, the table, JSON that is the same everywhere, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("hydra")

from moe_ckpt.cli.main import main
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.commands import sim_runs
from moe_ckpt_sim.commands.sim_runs import PARTS, results_of
from moe_ckpt_sim.commands.sim_table import duration, one_facts, one_table, sweep_table
from moe_ckpt_sim.conf.sweeps import choices, combinations, composed

SMALL = ["setup=tiny", "iteration=given", "iteration.secs=10", "duration_secs=7200", "failures.mtbf_secs=900"]
STORED = [*SMALL, "policy=moc", "policy.durable=storage"]
"""Lost tokens and a K, on one node without peers."""
STUCK = ["setup=tiny", "policy=dense", "iteration=given", "iteration.secs=300"]
"""With a failure every minute no iteration is ever finished."""


def call(capsys, *argv):
    code = main(["simulate", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def facts(capsys, *argv):
    code, out, _ = call(capsys, *argv, "--json")
    assert code == 0
    return json.loads(out)["runs"]


def results(*overrides, seeds=1, workers=1):
    return results_of(overrides, None, seeds, workers, lambda done, total: None)


# --- sweeps ---


def varied(*overrides):
    return [dict(one.varied) for one in combinations(overrides)]


@pytest.mark.slow
def test_what_memory_is_worth_on_the_papers_cluster():
    """MoEvement on storage alone writes more than storage takes; in the memory of peers nearly no time is lost."""
    given = ("setup=moevement_deepseek", "failures.mtbf_secs=1800", "policy=moevement")
    off, local, replicated = (one.first for one in results(*given, "memory=off,local,replicated"))
    assert off.ettr == pytest.approx(0.39, abs=0.005)
    assert replicated.ettr == pytest.approx(0.99, abs=0.005)
    assert off.ettr < local.ettr < replicated.ettr
    assert (local.recovered["storage"], replicated.recovered["peer"]) == (22, 22)


def test_where_a_run_came_back_from_is_said(capsys):
    given = (*SMALL, "policy=dense", "memory=local", "failures.process_share=0.5")
    (run,) = facts(capsys, *given)
    found = run["outcomes"][0]["recovered"]
    assert found["host"] > 0
    assert found["storage"] > 0
    _, out, _ = call(capsys, *given)
    said = f"recovered from own memory {found['host']}, peers 0, storage {found['storage']};"
    assert said in " ".join(out.split())
    assert "recovered" not in call(capsys, *SMALL, "policy=dense")[1]


def test_a_plain_line_is_one_combination():
    (alone,) = combinations(["policy=moc", "seed=3"])
    assert (alone.overrides, alone.varied, alone.name) == (("policy=moc", "seed=3"), (), "")
    assert composed(alone).seed == 3


def test_comma_lists_make_all_combinations_the_last_one_fastest():
    found = varied("failures.mtbf_secs=600,1800", "seed=1", "policy=moc,dense")
    assert found == [
        {"failures.mtbf_secs": mtbf, "policy": policy} for mtbf in ("600", "1800") for policy in ("moc", "dense")
    ]
    first = combinations(["failures.mtbf_secs=600,1800", "seed=1", "policy=moc,dense"])[0]
    assert first.overrides == ("failures.mtbf_secs=600", "seed=1", "policy=moc")
    assert first.name == "failures.mtbf_secs=600, policy=moc"


def test_hydras_other_sweeps():
    assert [one["seed"] for one in varied("seed=range(2,8,3)")] == ["2", "5"]
    assert [one["seed"] for one in varied("seed=choice(4,1)")] == ["4", "1"]
    assert [one["policy"] for one in varied("policy=glob(gemini*)")] == ["gemini", "gemini_daly", "gemini_young"]


def test_a_list_is_no_sweep_and_quotes_are_not_part_of_a_value():
    assert varied("+cluster.a=[1,2]") == [{}]
    assert varied("cluster.name='a','b c'") == [{"cluster.name": "a"}, {"cluster.name": "b c"}]
    assert composed(combinations(["cluster.name='a','b c'"])[1]).cluster.name == "b c"


def test_a_dropped_group_is_passed_on():
    assert "load" not in composed(combinations(["~load"])[0])


def test_what_can_be_chosen(capsys):
    assert "moevement" in choices()["policy"]
    code, out, _ = call(capsys, "--list")
    assert code == 0
    assert "failures:\n    components, gcp_like_6h" in out
    code, out, _ = call(capsys, "--list", "policy")
    assert "moc_peers\n    MoC-System (ASPLOS '25)" in out
    code, _, err = call(capsys, "--list", "polici")
    assert code == 2
    assert "no such group; there are batch, cluster" in err


# --- what is told ---


def test_json_says_where_the_time_went(capsys):
    (run,) = facts(capsys, *STORED, "--seeds", 2)
    assert run["varied"] == {}
    assert run["overrides"] == STORED
    assert run["mtbf_secs"] == 900
    assert [one["seed"] for one in run["outcomes"]] == [0, 1]
    for one in run["outcomes"]:
        assert sum(one["spent"].values()) == pytest.approx(7200)
        assert one["failures"] > 2
        assert one["plt"] > 0
        assert [s["at_secs"] for s in one["history"]] == sorted(s["at_secs"] for s in one["history"])
    ettr = [one["ettr"] for one in run["outcomes"]]
    assert ettr[0] != ettr[1]
    assert run["ettr"] == {"mean": pytest.approx(sum(ettr) / 2), "min": min(ettr), "max": max(ettr)}


def test_seeds_begin_with_the_one_that_is_set(capsys):
    (run,) = facts(capsys, *SMALL, "seed=7", "policy=dense", "--seeds", 2)
    assert [one["seed"] for one in run["outcomes"]] == [7, 8]
    (alone,) = facts(capsys, *SMALL, "seed=8", "policy=dense")
    assert alone["outcomes"] == run["outcomes"][1:]


def test_a_sweep_is_a_row_per_combination(capsys):
    code, out, err = call(capsys, *SMALL, "policy=dense,moc", "policy.durable=storage", "load.drift=0,0.5")
    assert code == 0
    assert err == ""
    rows = [line.split() for line in out.splitlines() if line.lstrip().startswith(("dense", "moc"))]
    assert [row[:2] for row in rows] == [["dense", "0"], ["dense", "0.5"], ["moc", "0"], ["moc", "0.5"]]
    (dense, *_), (_, _, moc, _) = rows, rows
    assert dense[-5:] == ["it.", "-", "0.00%", "0.0", "ms"]
    assert float(moc[-4]) >= 1
    assert float(moc[-3].rstrip("%")) > 0


def test_columns_of_the_table_and_shares_are_those_of_the_outcomes():
    (result,) = results(*STORED, seeds=2)
    columns, [row] = sweep_table([result])
    cells = dict(zip(columns, row, strict=True))
    spent = [one.spent for one in result.outcomes]
    for part in ("stall", "lost", "down", "retrieve", "replay"):
        assert cells.get(part, "0.0%") == f"{sum(getattr(one, part) / one.total for one in spent) / 2:.1%}"
    assert "idle" not in cells
    assert cells["failures"].count("to") == 1
    least, most = sorted(f"{one.ettr:.3f}" for one in result.outcomes)
    assert cells["ETTR"].endswith(f"({least} to {most})")
    _, rows = one_table(result)
    assert [row[0] for row in rows] == [part for part in PARTS if part != "idle"]
    assert sum(float(row[2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.4)
    assert "2 seeds" in one_facts(result)
    assert f"K = {cells['K']};" in one_facts(result)
    assert cells["K"] != "-"


def test_time_without_a_spare_gets_a_column():
    found = results(*SMALL, "policy=dense", "cluster.spare_nodes=0", "cluster.repair_secs=300")
    columns, [row] = sweep_table(found)
    assert float(row[columns.index("idle")].rstrip("%")) > 1


@pytest.mark.parametrize(
    ("secs", "text"),
    [(2.5, "2.5 s"), (75, "1 min 15 s"), (3600, "1 h 00 min"), (7199.9, "2 h 00 min"), (43200, "12 h 00 min")],
)
def test_durations(secs, text):
    assert duration(secs) == text


def test_json_to_a_file_beside_the_table_and_quiet(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    code, out, _ = call(capsys, *SMALL, "policy=dense", f"--json={path}")
    assert code == 0
    assert "ETTR" in out
    written = path.read_text()
    code, out, _ = call(capsys, *SMALL, "policy=dense", "--json")
    assert out == written
    assert call(capsys, *SMALL, "policy=dense", "--quiet") == (0, "", "")


def test_a_setting_after_json_is_no_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, *SMALL, "--json", "policy=dense")
    assert code == 0
    assert json.loads(out)["runs"][0]["outcomes"][0]["system"] == "dense"
    assert not list(tmp_path.iterdir())


def test_progress_reaches_every_run_and_never_goes_back():
    told = []
    sweep = [*SMALL, "policy=dense,moc", "policy.durable=storage"]
    results_of(sweep, None, 2, 1, lambda done, total: told.append((done, total)))
    done = [one for one, _ in told]
    assert {total for _, total in told} == {4}
    assert done == sorted(done)
    assert {1, 2, 3, 4} <= set(done)
    assert any(one % 1 for one in done)


@pytest.mark.slow
def test_multirun_changes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = [*SMALL, "policy=dense,moc", "policy.durable=storage"]
    assert call(capsys, "-m", *sweep, "--json") == call(capsys, *sweep, "--json")
    assert not list(tmp_path.iterdir())


# --- the same everywhere ---


def bytes_of(*argv, hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moe_ckpt.cli.main", "simulate", *argv, "--json"]
    return subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def test_same_bytes_whatever_the_hash_seed_and_the_workers():
    sweep = [*SMALL, "policy=moc,moevement", "policy.durable=storage", "--seeds", "2"]
    once = bytes_of(*sweep, hash_seed=1)
    assert len(json.loads(once)["runs"]) == 2
    assert bytes_of(*sweep, "--workers", "2", hash_seed=2) == once


def test_known_numbers(capsys):
    """Of one small run, as they were when this was written: another machine must find the same."""
    (run,) = facts(capsys, *STORED)
    (one,) = run["outcomes"]
    assert one["spent"] == GOLDEN["spent"]
    assert {key: one[key] for key in GOLDEN} == GOLDEN


GOLDEN = {
    "spent": {
        "useful": 7120.0,
        "stall": 0.0,
        "lost": 49.7787739,
        "down": 30.0,
        "idle": 0.0,
        "retrieve": 0.221226141,
        "replay": 0.0,
    },
    "ettr": 0.988888889,
    "steps": 712,
    "failures": 6,
    "interval": 1,
    "k": 1,
    "lost_tokens": 35614,
    "plt": 0.0244236635,
}


def test_torch_is_not_needed():
    code = "import sys, moe_ckpt_sim.commands.sim_runs, moe_ckpt.policies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- when it does not advance, and bad input ---


def test_a_run_that_does_not_advance_ends_with_that_verdict(capsys):
    code, out, err = call(capsys, *STUCK, "failures.mtbf_secs=60")
    assert code == 1
    assert "ETTR 0.000" in out
    assert "dense: training does not advance" in err
    code, out, err = call(capsys, *STUCK, "failures.mtbf_secs=60,6000")
    assert code == 0
    assert err.startswith("dense, failures.mtbf_secs=60: training does not advance")
    assert len(err.splitlines()) == 1


BAD = {
    "policy=geminni": "policy=geminni: no such choice; there are checkfreq, dense,",
    "polcy=moc": "polcy: no such setting",
    "seed=1=2": "'seed=1=2' is no setting such as group=choice or key=value",
    "seed=interval(1,3)": "say which values to try: a comma list",
    "failures.mtbf_secs=0": "mtbf_secs must be a finite number above 0",
    "failures.mtbf_secs=600,1": "with failures.mtbf_secs=1: failures: a mean of 1 s between failures is below",
    "failures=trace": "failures.path must be given",
    "--config-dir=nowhere": "--config-dir nowhere: no such directory",
    "cluster.nodes=0": "nodes",
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_one_line(capsys, argument):
    code, out, err = call(capsys, argument)
    assert (code, out) == (2, "")
    assert err.startswith("moe-ckpt simulate: ")
    assert BAD[argument] in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_what_only_the_simulation_finds_out_is_one_line_too(capsys, workers):
    argv = [*SMALL[:-1], "failures=none", "policy=dense", "policy.interval=policy,young", "--workers", workers]
    code, _, err = call(capsys, *argv)
    assert code == 2
    assert "with policy.interval=young: System 'dense'(interval='young') needs a mean time" in err
    assert len(err.splitlines()) == 1


def test_all_is_checked_before_anything_is_simulated(capsys, monkeypatch):
    monkeypatch.setattr(sim_runs, "simulate", lambda *_: pytest.fail("simulated"))
    code, _, err = call(capsys, *SMALL, "policy=dense,moc", "parallel.pp=1,99")
    assert code == 2
    assert "with policy=dense, parallel.pp=99" in err


def test_peers_that_are_not_there_are_found_out_before_that_too(capsys, monkeypatch):
    monkeypatch.setattr(sim_runs, "simulate", lambda *_: pytest.fail("simulated"))
    code, _, err = call(capsys, *SMALL, "policy=dense,gemini")
    assert code == 2
    assert "with policy=gemini: System 'gemini'(durable='peers', replicas=2)" in err


@pytest.mark.parametrize("seeds", ["0", "1.5", "two"])
def test_counts(capsys, seeds):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--seeds", seeds])
    assert ended.value.code == 2
    assert "no whole number of at least 1" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, *SMALL, "policy=dense", f"--json={tmp_path}/file/out.json")
    assert code == 2
    assert "cannot be written" in err


def test_without_hydra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra", None)
    code, _, err = call(capsys)
    assert code == 2
    assert "needs the package 'hydra-core'" in err
    assert "moe_ckpt[hydra]" in err


# --- groups of one's own ---

POLICY = """\
from dataclasses import dataclass
from moe_ckpt.policies import Dense

@dataclass(frozen=True)
class Rarely(Dense):
    every_n_steps: int = 77
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_config_dir_adds_groups_and_code_beside_it(tmp_path, capsys, workers):
    mine = tmp_path / "it's mine" / "conf"
    (mine / "cluster").mkdir(parents=True)
    (mine / "policy").mkdir()
    (mine / "cluster" / "ours.yaml").write_text("# Ours.\ndefaults: [laptop, _self_]\nname: ours\nrestart_secs: 50\n")
    (mine / "policy" / "rarely.yaml").write_text(
        "_target_: moe_ckpt_sim.run.system.System\nname: rarely\npolicy: {_target_: my_rare_policies.Rarely}\n"
    )
    (mine.parent / "my_rare_policies.py").write_text(POLICY)
    path = list(sys.path)
    argv = [*SMALL, "cluster=ours", "policy=dense,rarely", "--config-dir", mine, "--workers", workers]
    dense, rarely = facts(capsys, *argv)
    assert sys.path == path
    sys.modules.pop("my_rare_policies", None)
    assert "hydra.searchpath" not in str(rarely["overrides"])
    assert rarely["outcomes"][0]["interval"] == 77
    assert dense["outcomes"][0]["spent"]["down"] == 50 * dense["outcomes"][0]["failures"]
    code, out, _ = call(capsys, "--list", "cluster", "--config-dir", mine)
    assert "ours\n    Ours." in out
    code, _, err = call(capsys, "cluster=theirs", "--config-dir", mine)
    assert code == 2
    assert "laptop, ours" in err


def test_unknown_choice_raises_a_config_error():
    with pytest.raises(ConfigError, match="no such choice"):
        composed(combinations(["model=nothing"])[0])
