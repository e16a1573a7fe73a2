"""Where tables, pictures and JSON of ``moe-ckpt simulate`` go: checked first, names of files, no blanks at ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from moe_ckpt.cli.main import main
from moe_ckpt_sim.commands.sim_plots import LONGEST_NAME, goodput_over_time, lost_tokens_over_time, panels
from moe_ckpt_sim.commands.sim_runs import Result
from moe_ckpt_sim.commands.sim_table import sweep_table
from moe_ckpt_sim.conf.sweeps import Combination
from moe_ckpt_sim.run.scenario import Outcome, Sample, Spent

SMALL = ["setup=tiny", "policy=dense", "iteration=given", "iteration.secs=10", "duration_secs=600"]
LINUX = pytest.mark.skipif(not Path("/proc").is_dir(), reason="no directory in which nobody can make a file")


def result(varied=(), history=(), spent=None, **values):
    known = Outcome("moc", 0, spent or Spent(useful=60.0, lost=40.0), 60, 1.0, 2, history=tuple(history), **values)
    return Result(Combination((), tuple(varied)), 600.0, (known,))


# --- targets ---


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--plot=", "--plot= is empty"),
        ("--json=", "--json= is empty"),
        ("--config-dir=", "--config-dir= is empty"),
        ("--json=.", "--json .: is a directory"),
        ("--json=file/out.json", "--json file/out.json: cannot be written"),
        ("--plot=file", "--plot file: cannot be written"),
        pytest.param("--plot=/proc/x/y", "--plot /proc/x/y: cannot be written", marks=LINUX),
        pytest.param("--json=/proc/x", "--json /proc/x: cannot be written", marks=LINUX),
    ],
)
def test_where_nothing_can_be_written_nothing_is_simulated(tmp_path, capsys, monkeypatch, option, said):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr("moe_ckpt_sim.commands.sim_runs.simulate", lambda *_: pytest.fail("simulated"))
    assert main(["simulate", *SMALL, option]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_wrong_settings_leave_no_directory_behind(tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    argv = ["cluster.nodes=0", "--plot", f"{there}/a/b", f"--json={tmp_path}/c/out.json"]
    assert main(["simulate", *SMALL, *argv]) == 2
    assert "nodes" in capsys.readouterr().err
    assert [*tmp_path.rglob("*")] == [there]


# --- names of pictures ---


def test_settings_that_look_alike_in_a_name_have_pictures_of_their_own():
    found = panels([result([("model.name", name)]) for name in ("a/b", "a_b", "A_b", "a/b")])
    assert {name: len(members) for name, members in found.items()} == {
        "model.name=a_b": 2,
        "model.name=a_b_2": 1,
        "model.name=A_b_3": 1,
    }


@pytest.mark.filterwarnings("ignore:constrained_layout")
def test_a_long_setting_is_cut(tmp_path):
    long = "x" * 400
    argv = [*SMALL[:-1], "duration_secs=60", f"cluster.name={long}a,{long}b", "--plot", str(tmp_path), "-q"]
    assert main(["simulate", *argv]) == 0
    stem = f"cluster.name={long}"[:LONGEST_NAME]
    assert {path.name for path in tmp_path.glob("goodput*")} == {f"goodput_{stem}.png", f"goodput_{stem}_2.png"}


# --- over time ---


def test_lines_over_time_begin_where_the_run_does():
    one = result(history=(Sample(3600.0, 20, 9, 0.03, 2), Sample(7200.0, 30, 9, 0.02, 4)), k=4)
    above, _ = lost_tokens_over_time([one]).axes
    assert list(zip(*above.get_lines()[0].get_data(), strict=True)) == [(0, 0), (1, 3), (2, 2)]
    _, below = goodput_over_time([one]).axes
    assert list(zip(*below.get_lines()[0].get_data(), strict=True)) == [(0, 0), (1, 20), (2, 30)]


# --- tables ---


def test_columns_that_say_nothing_are_left_out():
    columns, [row] = sweep_table([result(plt=0.0)])
    assert columns == ["system", "ETTR", "lost", "failures", "every", "PLT", "stall/iteration"]
    assert row[:3] == ["moc", "0.600", "40.0%"]
    busy = result(spent=Spent(useful=90.0, replay=10.0), k=3)
    columns, rows = sweep_table([result(), busy])
    assert columns[2:4] == ["lost", "replay"]
    assert [row[columns.index("K")] for row in rows] == ["-", "3"]


@pytest.mark.usefixtures("warm_programs")  # test_cli_simulate.py starts fresh interpreters
@pytest.mark.parametrize("settings", [[], ["seed=1,2"]])
def test_no_line_of_a_pipe_ends_in_blanks(settings):
    command = [sys.executable, "-m", "moe_ckpt.cli.main", "simulate", *SMALL, *settings]
    lines = subprocess.run(command, capture_output=True, check=True, text=True, encoding="utf-8").stdout.splitlines()
    assert len(lines) > 3
    assert lines == [line.rstrip() for line in lines]
