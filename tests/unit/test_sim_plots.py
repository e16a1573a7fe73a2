"""Pictures of simulated runs: which there are, what they show, and the arithmetic behind goodput."""

from __future__ import annotations

import sys

import numpy as np
import pytest

pytest.importorskip("hydra")
pytest.importorskip("matplotlib")

from moe_ckpt.cli.main import main
from moe_ckpt_sim.commands.sim_plots import COLOURS, MOST_LINES, by_mtbf, figures, goodput, lasting_samples, panels
from moe_ckpt_sim.commands.sim_runs import PARTS, Result
from moe_ckpt_sim.conf.sweeps import Combination
from moe_ckpt_sim.run.scenario import Outcome, Sample, Spent


def outcome(system="moc", seed=0, useful=60.0, history=(), **values):
    rest = {"stall": 5.0, "lost": 20.0, "down": 10.0, "replay": 5.0}
    spent = Spent(useful=useful, **{**rest, "lost": 80.0 - useful})
    return Outcome(system, seed, spent, 60, 1.0, 2, history=tuple(history), **values)


def result(system="moc", mtbf=600.0, varied=None, useful=(60.0,), **values):
    outcomes = tuple(outcome(system, seed, one, **values) for seed, one in enumerate(useful))
    chosen = {"policy": system} if varied is None else varied
    return Result(Combination((), tuple(chosen.items())), mtbf, outcomes)


def swept():
    """Two systems by three MTBFs; later ones are better."""
    return [
        result(system, mtbf, {"failures.mtbf_secs": f"{mtbf:g}", "policy": system}, useful, history=HISTORY, k=k)
        for mtbf, useful in ((3600.0, (70.0, 74.0)), (600.0, (50.0, 40.0)), (1800.0, (60.0, 66.0)))
        for system, k in (("moc", 2), ("gemini", None))
    ]


HISTORY = (Sample(25.0, 20, 0, 0.0, 2), Sample(50.0, 30, 9, 0.03, 4), Sample(100.0, 80, 9, 0.01, 4))


# --- arithmetic ---


def test_goodput_is_what_each_interval_gained_over_what_it_could_have():
    edges, portions = goodput(outcome(history=HISTORY), 4)
    assert edges.tolist() == [0, 25, 50, 75, 100]
    # 20 iterations of 1 s in 25 s, 10 in 25 s, then 50 in 50 s
    assert portions == pytest.approx([0.8, 0.4, 1.0, 1.0])
    _, whole = goodput(outcome(history=HISTORY), 1)
    assert whole == pytest.approx([0.8])


def test_what_is_undone_later_counts_nowhere():
    undone = (Sample(25.0, 20), Sample(50.0, 45), Sample(75.0, 10), Sample(100.0, 30))
    assert [one.at_secs for one in lasting_samples(undone)] == [75.0, 100.0]
    _, portions = goodput(outcome(history=undone), 4)
    assert portions == pytest.approx([10 / 75, 10 / 75, 10 / 75, 0.8])
    assert (np.asarray(portions) >= 0).all()


def test_a_run_that_never_got_anywhere():
    _, portions = goodput(outcome(history=(Sample(10.0, 0), Sample(10.0, 0))), 2)
    assert portions.tolist() == [0, 0]


# --- which pictures ---


def test_lines_over_the_mtbf_differ_in_nothing_else():
    lines = by_mtbf([*swept(), result("moc", None)])
    assert list(lines) == ["moc", "gemini"]
    assert [[one.mtbf_secs for one in points] for points in lines.values()] == [[600, 1800, 3600]] * 2
    apart = by_mtbf([result(varied={"policy.policy.k": k, "failures.mtbf_secs": "600"}) for k in ("1", "2")])
    assert list(apart) == ["moc, policy.policy.k=1", "moc, policy.policy.k=2"]


def test_pictures_over_time_are_one_for_what_was_varied_beside_the_policy():
    found = panels(swept())
    assert list(found) == [f"failures.mtbf_secs={mtbf}" for mtbf in (3600, 600, 1800)]
    assert [one.first.system for one in found["failures.mtbf_secs=600"]] == ["moc", "gemini"]
    assert list(panels([result(varied={"cluster.name": "a/../b c"})])) == ["cluster.name=a_.._b_c"]


def test_only_what_there_is_to_show():
    drawn = figures(swept())
    names = [f"_failures.mtbf_secs={mtbf}" for mtbf in (3600, 600, 1800)]
    over_time = {f"{kind}{name}" for kind in ("goodput", "lost_tokens") for name in names}
    assert set(drawn) == {"where_time_went", "ettr_over_mtbf", *over_time}
    assert set(figures([result("dense", history=HISTORY)])) == {"where_time_went", "goodput"}
    assert "lost_tokens" in figures([result("dense", history=HISTORY, lost_tokens=1)])


# --- what they show ---


def test_ettr_over_mtbf_has_means_and_ranges():
    (ax,) = figures(swept())["ettr_over_mtbf"].axes
    moc, gemini = ax.get_lines()
    assert (moc.get_label(), gemini.get_label()) == ("moc", "gemini")
    assert moc.get_xdata().tolist() == [600, 1800, 3600]
    assert moc.get_ydata() == pytest.approx([0.45, 0.63, 0.72])
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.40)
    assert band[:, 1].max() == pytest.approx(0.74)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10 min", "30 min", "60 min"]


def test_bars_are_the_shares_of_the_time():
    results = [result("moc"), result("gemini", useful=(40.0, 50.0))]
    (ax,) = figures(results)["where_time_went"].axes
    drawn = {bars.get_label(): [bar.get_width() for bar in bars] for bars in ax.containers}
    assert drawn["useful"] == pytest.approx([0.60, 0.45])
    assert drawn["lost"] == pytest.approx([0.20, 0.35])
    assert "idle" not in drawn
    assert sum(np.array(one) for one in drawn.values()) == pytest.approx([1.0, 1.0])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["moc", "gemini"]
    assert list(COLOURS) == list(PARTS)


def test_lost_tokens_and_k_over_time():
    above, below = figures([result("moc", history=HISTORY, k=4)])["lost_tokens"].axes
    assert above.get_lines()[0].get_ydata() == pytest.approx([0, 0, 3, 1])
    assert above.get_lines()[0].get_xdata()[0] == 0
    assert below.get_lines()[0].get_ydata().tolist() == [2, 4, 4]


def test_too_many_lines_are_left_out_and_that_is_said():
    many = [result(f"s{at}", history=HISTORY) for at in range(MOST_LINES + 3)]
    above, _ = figures(many)["goodput"].axes
    assert len(above.get_lines()) == MOST_LINES
    assert "3 more not drawn" in above.get_title()


SMALL = ["setup=tiny", "policy=dense", "iteration=given", "iteration.secs=10", "duration_secs=7200"]


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_files(tmp_path, capsys, suffix, begins):
    argv = [*SMALL, "failures.mtbf_secs=600,1800", "--plot", f"{tmp_path}/a/b", "--plot-format", suffix]
    assert main(["simulate", *argv]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()}
    assert set(files) == {
        f"{name}.{suffix}"
        for name in (
            "where_time_went",
            "ettr_over_mtbf",
            "goodput_failures.mtbf_secs=600",
            "goodput_failures.mtbf_secs=1800",
        )
    }
    assert all(content.startswith(begins) and len(content) > 5_000 for content in files.values())
    out = capsys.readouterr().out
    assert all(name in out for name in files)


def test_json_stays_json_when_pictures_are_drawn(tmp_path, capsys):
    assert main(["simulate", *SMALL, "--plot", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    assert (tmp_path / "goodput.png").is_file()


def test_where_nothing_can_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["simulate", *SMALL, "--plot", f"{tmp_path}/file"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_simulated_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("moe_ckpt_sim.commands.sim_runs.simulate", lambda *_: pytest.fail("simulated"))
    assert main(["simulate", *SMALL, "--plot", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "needs the package 'matplotlib'" in err
    assert "moe_ckpt[plot]" in err
