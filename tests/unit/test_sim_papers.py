"""The report of the simulator against the papers: one cell of each table is what is committed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean

import pytest

pytest.importorskip("hydra")
pytest.importorskip("rich")

from benchmarks import sim_papers
from benchmarks import sim_papers_ablation as ablation
from benchmarks import sim_papers_data as data
from benchmarks import sim_papers_ettr as ettr
from benchmarks import sim_papers_figures as figures
from benchmarks import sim_papers_moetion as moetion
from benchmarks import sim_papers_pec as pec
from benchmarks import sim_papers_render as render
from benchmarks import sim_papers_scaling as scaling
from benchmarks import sim_papers_sizes as sizes
from benchmarks import sim_papers_windows as windows
from benchmarks.report import RESULTS
from moe_ckpt_sim.run.run import simulate

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / sim_papers.JSON).read_text())
GPT = data.TABLE_3[1]


def kept(part, table, *start):
    """The committed row that begins so."""
    rows = KEPT[part]["tables"][table]["rows"]
    return next(row for row in rows if row[: len(start)] == list(start))


def quiet(_):
    """Nobody watches."""


def same(ours, theirs):
    assert not sim_papers.differences({"": json.loads(json.dumps(sim_papers._rounded(ours)))}, {"": theirs})


# --- what is calibrated ---


def test_each_constant_is_one_number_for_all_cells_and_is_listed():
    listed = [row[1] for row in data.constants().listed()]
    assert [row[1] for row in KEPT["calibrated"]["tables"][0]["rows"]] == pytest.approx(listed)
    assert set(listed) >= {data.constants().a100_rate, data.constants().restart_secs, data.constants().moc_budget}


def test_iteration_times_are_those_that_printed_pairs_allow():
    assert data.TABLE_3[0].iteration_range == pytest.approx((1.588, 1.933), abs=1e-3)  # 0.14 s, 8 %
    assert data.TABLE_3[3].iteration_range == pytest.approx((2.6, 3.0), abs=1e-3)  # 0.07 s, 2 %; 0.22 s, 8 %
    for model in data.TABLE_3:
        low, high = model.iteration_range
        assert low <= data.counted(model.setup).iteration_secs <= high


def test_bandwidths_are_in_the_range_that_gives_the_windows_they_are_calibrated_on():
    known = data.constants()
    assert known.a100_range[0] < known.a100_rate < known.a100_range[1]
    for row in data.TABLE_7:
        found = data.counted(row.setup).window(known.h100_rate * 1e9).size
        assert (found == row.window) == (row.setup not in data.CONTRADICTING)


def test_no_bandwidth_gives_the_window_that_contradicts():
    with pytest.raises(ValueError, match="no one bandwidth"):
        data.shared_rate({"moevement_fp8_fp32_fp32": 6, "moevement_gpt": 9})


def test_a_line_through_two_ettrs_has_overhead_and_loss():
    flat, lost = data.extrapolated(GPT, 3)
    for mtbf in ("2H", "10M"):
        assert 1 / ((1 + flat) * (1 + lost / data.MTBF_SECS[mtbf])) == pytest.approx(GPT.ettr[mtbf][3])


# --- one cell of each table, as committed ---


def test_a_window():
    same(
        windows.row(GPT.setup, GPT.name, 3, data.constants().a100_rate, GPT.iteration_range),
        kept("windows", 0, GPT.name),
    )


def test_dense_overheads_come_of_one_bandwidth():
    made = windows.dense(quiet)
    same(made, KEPT["dense"])
    assert all(abs(row[-1]) < 0.02 for row in made["tables"][0]["rows"])


def test_table_3_against_itself():
    same(windows.inside(quiet), KEPT["inside"])


@pytest.mark.parametrize(("system", "mtbf"), [(0, "2H"), (3, "2H")])
def test_an_ettr_of_table_3(system, mtbf):
    name = data.SYSTEMS[system]
    row = ettr.row(GPT, system, mtbf)
    same(row, kept("table3", 1, GPT.name, name, mtbf))
    assert row[3] == GPT.ettr[mtbf][system]


def test_checkfreq_stalls_as_long_as_the_paper_says():
    found = ettr.simulated(GPT, 0, "2H")
    assert found.mean_stall_secs == pytest.approx(GPT.overhead[0], rel=0.02)
    assert found.interval == GPT.interval


def test_the_trace_is_that_of_figure_10():
    found = data.run(
        figures.DEEPSEEK, "CheckFreq", "failures=gcp_like_6h", "duration_secs=21600", "cluster.spare_nodes=null"
    )
    row = kept("figure10", 0, "CheckFreq")
    assert found.steps * 512 / 21600 == pytest.approx(row[1])
    assert (found.interval, found.failures) == (row[5], row[6])


def test_a_bar_of_figure_11():
    made = scaling.cell("32b", "one pipeline", 600)
    same(made, kept("figure11", 0, "32B", "10 min", "one pipeline"))


def test_a_bar_of_figure_13():
    name = data.TABLE_3[0].name
    assert ablation.ablation("moevement_llava", "moevement_peers")[0] == pytest.approx(kept("figure13", 0, name)[5])


def test_a_point_of_figure_16():
    found = data.run(figures.DEEPSEEK, "CheckFreq", "failures.mtbf_secs=600", "load=even", "duration_secs=21600")
    assert found.ettr == pytest.approx(kept("figure16", 0, "CheckFreq", 0.0)[3])


def test_pec_and_known_answers():
    for name, make in (("pec", sizes.pec), ("known", sizes.known)):
        same(make(quiet), KEPT[name])
    assert all(abs(row[4]) < 0.5 for row in KEPT["known"]["tables"][0]["rows"] if row[4] is not None)


def test_a_stall_of_figure_5_and_the_wasted_work_of_figure_7():
    first = moetion.CASES[0]
    found = moetion.run_at_rate(first, "gemini", 1, "failures=none", "duration_secs=7200")
    stall = found.spent.total / found.steps - first.iteration_secs
    same(stall, kept("moetion_time", 1, "1.6B-64E", "Gemini")[4])
    row = kept("moetion_time", 3, "1.6B-64E", "CheckFreq")
    same(moetion.wasted_secs(first, "CheckFreq", moetion.CHECKFREQ_EVERY), row[3])
    assert abs(row[4]) < 1  # T is what makes these equal, with the sizes of 10 bytes per parameter
    for case in moetion.CASES:
        often, rarely = (kept("moetion_time", 3, case.name, name) for name in (moetion.HIGH_FREQ, moetion.NO_STALL))
        added = (moetion.without_stall(case) - 1) / 2 * case.iteration_secs
        same(often[3] + added, rarely[3])
    assert (often[2], rarely[2]) == (27.4, 25.7), "as the paper prints them for the last model"


def test_each_of_moetions_techniques_makes_a_checkpoint_shorter():
    for case in moetion.CASES:
        ours = [row[3] for row in KEPT["moetion_time"]["tables"][5]["rows"] if row[0] == case.name]
        same(moetion.ablated(case), ours)
        assert all(before > after for before, after in itertools.pairwise(ours))


def test_training_stalls_below_the_rates_that_the_table_gives():
    """Of the last table: the simulator, a tenth above and a tenth below."""
    case = moetion.CASES[2]
    dense = kept("moetion_time", 6, case.name, "estimated")[3]
    for factor, stalls in ((1.1, False), (0.9, True)):
        each = factor * dense * 1e9 / case.scenario.layout.parallel.ranks
        chosen = [f"setup={case.setup}", "policy=gemini", "policy.policy.every_n_steps=1", "policy.interval=policy"]
        found = simulate(
            data.scenario(*chosen, f"cluster.pcie_bytes_per_sec={each!r}", "failures=none", "duration_secs=600")
        )
        assert (found.mean_stall_secs > 0.01) is stalls


def test_a_point_of_pecs_figure_7():
    plt = fmean(pec.lost_portion(4, 4, seed) for seed in range(pec.SEEDS))
    same(plt, kept("two_levels", 0, 4, 4)[2])
    for every in pec.EVERY:
        row = [row[2] for row in KEPT["two_levels"]["tables"][0]["rows"] if row[0] == every]
        assert row == sorted(row, reverse=True)


def test_figure_2_is_of_the_runs_that_are_kept():
    same(pec.loss_over_k(quiet), KEPT["loss_over_k"])
    chance = json.loads((RESULTS / pec.RESULT).read_text())["chance"]
    assert KEPT["loss_over_k"]["tables"][1]["rows"][0][2] < chance


# --- what the report is for: orders, as committed ---


def _differ(one, other):
    """Of two systems, each (paper, ours): the paper has them in one order, and we in the other."""
    return (one[0] - other[0]) * (one[1] - other[1]) < 0


def test_what_the_papers_claim_holds_in_what_is_committed():
    of = {tuple(row[:3]): row[6] for row in KEPT["table3"]["tables"][1]["rows"]}
    for (model, system, mtbf), value in of.items():
        assert value <= of[model, "MoEvement", mtbf], (model, system, mtbf)
    cells = {(model, mtbf): {} for model, _, mtbf in of}
    for model, system, mtbf, paper, _, _, ours, *_ in KEPT["table3"]["tables"][1]["rows"]:
        cells[model, mtbf][system] = paper, ours
    swapped = [
        {frozenset(pair) for pair in itertools.combinations(each, 2) if _differ(*(each[system] for system in pair))}
        for each in cells.values()
    ]
    assert all("MoC" in pair for pairs in swapped for pair in pairs)
    alike = sum(not pairs for pairs in swapped)
    said = f"in all {len(cells)} cells (model and MTBF); all four systems are in the paper's order in {alike}, and"
    assert said in " ".join((ROOT / "docs" / "simulator.md").read_text().split())
    goodput = {row[0]: row[1] for row in KEPT["figure10"]["tables"][0]["rows"]}
    assert goodput["MoEvement"] > goodput["Gemini"] > goodput["CheckFreq"] > goodput["MoC"]
    assert all(row[9] == "yes" for row in KEPT["figure13"]["tables"][0]["rows"])
    llava = kept("figure13", 1, "MoE-LLaVa")
    assert all(row[4] >= llava[4] for row in KEPT["figure13"]["tables"][1]["rows"])


def test_the_report_is_made_from_the_json_alone():
    assert list(KEPT) == list(sim_papers.PARTS)
    assert (ROOT / sim_papers.REPORT).read_text() == render.markdown(KEPT, sim_papers.IMAGES.name)
    for part in KEPT.values():
        if "picture" in part:
            assert (ROOT / sim_papers.IMAGES / f"{part['picture']['name']}.png").stat().st_size > 10_000


def test_notes_are_made_from_the_tables_that_are_kept():
    of = {part: [table["rows"] for table in KEPT[part]["tables"]] for part in KEPT}
    wide = data.scenario("setup=moetion_3_8b", "model.experts=32", "policy=dense").layout.model
    for part, notes in (
        ("table3", ettr.notes_3(of["table3"][1])),
        ("figure10", figures.notes_10(of["figure10"][0], 3)),
        ("figure11", scaling.notes_11(of["figure11"][0])),
        ("figure13", ablation.notes_13(of["figure13"][0])),
        ("figure16", figures.notes_16(of["figure16"][0])),
        ("moetion", sizes.notes_moetion(wide, of["moetion"][1])),
        ("moetion_time", moetion.notes_time()),
    ):
        assert notes == KEPT[part]["notes"], part


def test_a_difference_to_what_is_committed_is_named():
    other = json.loads(json.dumps(KEPT["known"]))
    other["tables"][0]["rows"][0][3] += 1
    [found] = sim_papers.differences({"known": other}, KEPT)
    assert found.startswith("known.tables[0].rows[0][3]: ")


def test_writing_keeps_parts_that_were_not_made(tmp_path):
    sim_papers.write({"known": KEPT["known"]}, tmp_path)
    sim_papers.write({"pec": KEPT["pec"]}, tmp_path)
    assert list(json.loads((tmp_path / sim_papers.JSON).read_text())) == ["pec", "known"]


@pytest.mark.slow
def test_all_of_it_comes_out_as_committed():
    assert sim_papers.main(["--check"]) == 0
