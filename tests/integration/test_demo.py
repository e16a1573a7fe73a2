"""The demo, shortened: real torchrun, real kills; its numbers checked against the files that the runs left."""

from __future__ import annotations

import html
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from recipes.demonstrating import MARKER, KillNews, Verdict, prepare
from recipes.gpt_moe_lightning import at_scale, demo
from recipes.gpt_moe_lightning.heat import draw_heat
from recipes.gpt_moe_lightning.recoveries import COLUMNS as RECOVERED
from recipes.gpt_moe_lightning.report import (
    HARMLESS_PLT,
    PLOTS,
    _fill,
    _scale_section,
    alternative,
    differences,
    heat_alternative,
    plt_text,
    render,
)
from recipes.gpt_moe_lightning.summary import (
    BEHIND,
    COLUMNS,
    ROWS,
    SENT,
    STORAGE_BEHIND,
    STORED,
    RunSummary,
    over_ranks,
    short_cells,
    summarise,
    table_cells,
)
from recipes.gpt_moe_lightning.timeline import AGAIN, DOWN, NEW, Span, draw_timeline, spans, timeline_alternative
from recipes.gpt_moe_lightning.verdicts import verdicts


def diary(run_dir: Path, rank: int, records: list[dict], torn: str = "") -> None:
    run_dir.mkdir(exist_ok=True)
    text = "".join("\n" + json.dumps({"time": at, **r}) + "\n" for at, r in enumerate(records)) + torn
    (run_dir / f"metrics.rank{rank}.jsonl").write_text(text)


def lines(start: int, stop: int, generation: int, loss: float) -> list[dict]:
    return [{"step": s, "train/loss": loss, "generation": generation} for s in range(start, stop + 1)]


def test_steps_computed_twice_are_counted_and_shown_once(tmp_path):
    records = [{"event": "process_start", "generation": 0}, *lines(1, 9, 0, 5.0)]
    records += [{"event": "process_start", "generation": 1}, {"event": "training", "from_step": 6, "generation": 1}]
    records += [*lines(7, 12, 1, 4.0), {"event": "finished", "val_loss": 3.5, "parameters": "abc", "generation": 1}]
    diary(tmp_path / "run", 0, records, torn='\n{"step": 13, "train/lo')
    run = summarise("x", tmp_path / "run")
    assert (run.steps, run.recomputed, run.restarts, run.restart_steps) == (12, 3, 1, [9])
    assert run.curve("train/loss") == (list(range(1, 13)), [5.0] * 6 + [4.0] * 6)
    assert (run.val_loss, run.parameters) == (3.5, "abc")


def test_bytes_add_up_over_ranks_and_the_slowest_rank_counts():
    def line(step: int, nbytes: int, stall: float, generation: int = 0) -> dict:
        return {"step": step, "generation": generation, "moe_ckpt/bytes": nbytes, "moe_ckpt/stall_ms": stall}

    merged = over_ranks([[line(1, 10, 2.0), line(2, 7, 1.0), line(2, 7, 1.0, 1)], [line(1, 5, 9.0), line(2, 1, 0.5)]])
    assert [(r["moe_ckpt/bytes"], r["moe_ckpt/stall_ms"]) for r in merged] == [(15, 9.0), (8, 1.0), (7, 1.0)]


def test_replayed_steps_are_told_apart_and_a_window_is_one_checkpoint(tmp_path):
    """Killed after step 5, with the window of 1 to 3 complete: 2 and 3 are replayed, 4 and 5 computed again."""

    def step(number: int, generation: int) -> list[dict]:
        saved = {"step": number, "moe_ckpt/bytes": 30.0 - number, "moe_ckpt/bytes_compute": 10.0,
                 "moe_ckpt/stall_ms": 4.0, "moe_ckpt/window_slot": (number - 1) % 3.0}  # fmt: skip
        return [
            {"step": number, "train/loss": 5.0 / number, "generation": generation},
            saved | {"generation": generation},
        ]

    def again(number: int) -> list[dict]:
        return [step(number, 1)[0], {"step": number, "moe_ckpt/replayed": 1.0, "generation": 1}]

    records = [{"event": "process_start", "generation": 0}, *(line for s in range(1, 6) for line in step(s, 0))]
    records += [{"event": "process_start", "generation": 1}, *again(2), *again(3)]
    records += [line for s in range(4, 7) for line in step(s, 1)]
    diary(tmp_path / "run", 0, records)
    diary(tmp_path / "run", 1, records)
    run = summarise("x", tmp_path / "run")
    assert (run.recomputed, run.replayed, run.checkpoints) == (4, 2, 3)
    saved = [1, 2, 3, 4, 5, 4, 5, 6]
    assert run.bytes_per_iteration == 2 * (30 - sum(saved) / 8)
    assert run.bytes_per_checkpoint == pytest.approx(run.bytes_per_iteration * 8 / 3)
    assert run.bytes_at_compute == 20
    assert run.stall_ms_mean == 4
    assert run.curve("moe_ckpt/bytes") == ([1, 2, 3, 4, 5, 6], [58, 56, 54, 52, 50, 48])
    assert run.losses == {number: {5.0 / number} for number in range(1, 7)}


def peers_run(run_dir: Path, *, storage: int = 0, end: dict | None = None) -> RunSummary:
    """Two ranks, killed after iteration 2, and after iteration 3 with the node of rank 1, which rank 0's restores."""

    def step(number: int, life: int, rank: int, memory_step: int, stored: float = 0.0) -> list[dict]:
        at = {"step": number, "generation": life, "time": 10.0 * number + 100 * life + rank}
        saved = {"moe_ckpt/bytes": 6e6, "moe_ckpt/stall_ms": 1.0, "moe_ckpt/to_storage": stored,
                 "moe_ckpt/memory_step": memory_step, "moe_ckpt/committed_step": 1, "moe_ckpt/lost_tokens": 0,
                 "moe_ckpt/memory_bytes": 2e7 + rank, "moe_ckpt/replica_lag_steps": rank,
                 "moe_ckpt/replica_sent_bytes": 6e6 * number + rank}  # fmt: skip
        return [at | {"train/loss": 5.0}, at | saved]

    def back(life: int, at: int, own: int, peers: int) -> list[dict]:
        return [
            {"event": "process_start", "generation": life},
            {"event": "restored", "step": at, "own": own, "peers": peers, "storage": storage, "generation": life},
        ]

    for rank in (0, 1):
        records = [*step(1, 0, rank, 1, 1.0), *step(2, 0, rank, 1)]
        records += [*back(1, 1, 12, 0), *step(2, 1, rank, 1), *step(3, 1, rank, 2)]
        records += [*back(2, 3, 0 if rank else 12, 12 if rank else 0), *step(4, 2, rank, 3)]
        diary(run_dir, rank, [*records, *([end] if end else [])])
    lines_of_kills = [
        {"step": 3, "rank": 0, "phase": "compute", "node": False},
        {"step": 4, "rank": 1, "phase": "compute", "node": True},
    ]
    (run_dir / "kills.jsonl").write_text("".join(json.dumps(kill) + "\n" for kill in lines_of_kills))
    return summarise("on peers", run_dir)


def test_what_came_back_from_where(tmp_path):
    run = peers_run(tmp_path / "run")
    assert len(RECOVERED) == len(run.recoveries[0].cells())
    assert [recovery.cells() for recovery in run.recoveries] == [
        ("3", "rank 0", "1", "24 B", "-", "-", "1", "100.0 s"),
        ("4", "rank 1 and its node", "3", "12 B", "12 B", "-", "0", "110.0 s"),
    ]
    (tmp_path / "run" / "metrics.rank1.jsonl").write_text("")  # it is starting still
    assert summarise("on peers", tmp_path / "run").recoveries == ()


def test_memory_is_shown_by_tier_and_of_all_ranks_together(tmp_path):
    run = peers_run(tmp_path / "run")
    assert run.curve(BEHIND) == ([1, 2, 3, 4], [0, 1, 1, 1]), "of a step computed twice the last"
    assert run.curve(STORAGE_BEHIND) == ([1, 2, 3, 4], [0, 1, 2, 3])
    assert run.curve(STORED) == ([1, 2, 3, 4], [12e6, 0, 0, 0])
    assert (run.memory_bytes, run.replica_lag_steps) == (4e7 + 1, 1)
    sent = [r[SENT] for r in run.records if SENT in r]
    assert sent == [12e6 + 1, 12e6, 24e6 + 1, 12e6, 48e6 + 1], "a life counts from nothing"
    cells = dict(zip((title for title, _ in ROWS), table_cells(run, run), strict=True))
    assert (cells["most in memory"], cells["copies behind, at most"], cells["nodes lost with them"]) == (
        "40.0 MB", "1", "1",
    )  # fmt: skip
    page = render([run], [], [])
    assert all(f"<td>{cell}</td>" in page for recovery in run.recoveries for cell in recovery.cells())
    behind, memory = (alternative(plot, [run]) for plot in PLOTS[-2:])
    assert "on peers: 0 to 1, in the end 1" in behind
    assert "on peers: 40 to 40" in memory
    figure = Figure()
    axes = _fill(figure, figure.add_gridspec(1, 1)[0], PLOTS[-2], [run])
    assert [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 4] == [[0, 1, 1, 1], [0, 1, 2, 3]]


YES = [True] * 6


@pytest.mark.parametrize(
    ("name", "change", "kills", "passed"),
    [
        ("dense", {}, 2, YES),
        ("dense", {"parameters": "b"}, 2, [True, False, *YES[2:]]),
        ("dense", {"train/loss": 5.1}, 2, [True, False, *YES[2:]]),
        ("windows", {"parameters": "b"}, 2, [*YES[:3], False, *YES[4:]]),
        ("windows", {"train/loss": 5.1}, 2, [*YES[:3], False, *YES[4:]]),
        ("windows", {"first/loss": 5.1}, 2, [*YES[:3], False, *YES[4:]]),  # right only when computed again
        ("windows", {"val_loss": 3.6}, 2, [*YES[:3], False, *YES[4:]]),
        ("windows", {"lost": 1}, 2, [*YES[:3], False, *YES[4:]]),
        ("windows", {}, 1, [False, *YES[1:]]),
        ("moc", {"val_loss": None}, 2, [False, True, False, *YES[3:]]),
        ("peers", {"parameters": "b"}, 2, [*YES[:4], False, True]),
        ("peers", {"storage": 1}, 2, [*YES[:5], False]),
    ],
)
def test_the_verdict_tells_a_difference(tmp_path, name, change, kills, passed):
    ends = {each: {"parameters": "a", "val_loss": 3.5, "train/loss": 5.0} for each in ("never", "dense", "windows")}
    ends |= {"moc": ends["never"] | {"parameters": "c", "lost": 200}, "peers": dict(ends["never"])}
    ends[name] |= change
    runs = {}
    for each, end in ends.items():
        finished = {"event": "finished", "val_loss": end["val_loss"], "parameters": end["parameters"]}
        if each == "peers":
            runs[each] = peers_run(tmp_path / each, storage=end.get("storage", 0), end=finished)
            continue
        first = lines(2, 2, 0, end["first/loss"]) if "first/loss" in end else []
        lost = end.get("lost", 0)
        last = {"step": 3, "moe_ckpt/lost_tokens": lost, "moe_ckpt/plt": lost / 1e4}
        diary(tmp_path / each, 0, [*first, *lines(1, 4, 0, end["train/loss"]), last, finished])
        (tmp_path / each / "kills.jsonl").write_text('{"step": 1}\n' * kills)
        runs[each] = summarise(each, tmp_path / each)
    failing = [(runs[each], each != "moc") for each in ("dense", "moc", "windows", "peers")]
    checks = list(verdicts(runs["never"], failing, kills=2))
    assert [check.passed for check in checks] == passed
    assert "200 tokens lost and counted (2.00%)" in checks[2].sentence
    row = dict(zip(COLUMNS, short_cells(runs[name], runs["never"]), strict=True))
    assert row["same\nbits"] == (
        "no" if set(change) & {"parameters", "train/loss", "first/loss", "val_loss"} else "yes"
    )


def test_only_no_difference_at_all_reads_as_0(tmp_path):
    cells = []
    for name, val_loss in (("never", 3.5), ("same", 3.5), ("near", 3.5 + 2**-40), ("off", 3.4), ("dead", None)):
        diary(tmp_path / name, 0, [{"event": "finished", "val_loss": val_loss}])
        run = summarise(name, tmp_path / name)
        cells.append(dict(zip((title for title, _ in ROWS), table_cells(run, summarise("n", tmp_path / "never")),
                              strict=True))["its difference"])  # fmt: skip
    assert cells == ["0", "0", "+9.1e-13", "-0.1000", "unknown"]


def expert_lines() -> list[dict]:
    """Two layers of three experts; the step after a kill at 3 is computed again, and its table counts."""

    def table(step: int, ages: list, generation: int = 0) -> dict:
        unsaved = [[100 * max(age, 0) for age in row] for row in ages]
        return {"event": "experts", "step": step, "ages": ages, "unsaved": unsaved, "generation": generation}

    return [
        {"event": "process_start", "generation": 0},
        table(1, [[-1, -1, -1], [-1, -1, -1]]),
        *lines(2, 2, 0, 5.0),
        table(2, [[0, 1, 1], [1, 0, 1]]),
        table(3, [[9, 9, 9], [9, 9, 9]]),
        {"event": "process_start", "generation": 1},
        table(3, [[1, 0, 2], [0, 1, 2]], 1),
        {"step": 3, "generation": 1, "moe_ckpt/k": 1.0, "moe_ckpt/oldest_expert_steps": 2.0, "moe_ckpt/skewness": 0.25},
        table(4, [[2, 1, 4], [1, 2, 0]], 1),
        {"step": 4, "generation": 1, "moe_ckpt/k": 2.0, "moe_ckpt/oldest_expert_steps": 4.0, "moe_ckpt/skewness": 0.75},
    ]


@pytest.fixture
def run_with_experts(tmp_path):
    diary(tmp_path / "experts", 0, expert_lines())
    return summarise("MoC", tmp_path / "experts")


def test_tables_of_experts_come_back_from_the_diary(run_with_experts):
    steps, ages = run_with_experts.tables("ages")
    assert steps == [1, 2, 3, 4]
    assert ages[2].tolist() == [[1, 0, 2], [0, 1, 2]]
    cells = dict(zip((title for title, _ in ROWS), table_cells(run_with_experts, run_with_experts), strict=True))
    assert cells["experts per layer"] == "1 then 2"
    assert cells["oldest expert, iterations"] == "4"
    assert cells["skewness of load"] == "0.500"


def test_heat_maps_as_a_picture_show_the_same_numbers(run_with_experts):
    figure = Figure()
    draw_heat(figure, [run_with_experts])
    ages, unsaved = (axes for axes in figure.axes if axes.images)
    shown = ages.images[0].get_array()
    assert shown.filled(-1).T.reshape(4, 2, 3).tolist() == run_with_experts.tables("ages")[1].tolist()
    assert unsaved.images[0].get_clim() == (0, 400)
    assert ages.images[0].get_extent()[:2] == [0.5, 4.5]
    assert [line.get_xdata()[0] for line in ages.lines if line.get_linestyle() == ":"] == [2]  # the kill


def test_report_is_one_file_that_loads_nothing(tmp_path, run_with_experts):
    diary(tmp_path / "r", 0, [{**r, "moe_ckpt/bytes": 1e6, "moe_ckpt/stall_ms": 3.0} for r in lines(1, 5, 0, 2.0)])
    run, scaled = summarise("a <b> run", tmp_path / "r"), at_scale.AtScale("Dense", "every iteration", 0.9, 0.1, 0.0)
    page = render([run, run, run, run_with_experts], [Verdict(False, "NOT equal & so on")], ["fact"], [scaled])
    assert page.count('src="data:image/png;base64,') == 8
    assert render([run, run], [], [], [scaled]).count('src="data:image/png;base64,') == 7  # no heat maps of nothing
    assert page.index("<img") < page.index("<table"), "the picture comes first"
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "a &lt;b&gt; run" in page
    assert "NOT equal &amp; so on" in page
    assert all(cell in page for cell in table_cells(run, run))


@pytest.fixture
def five_runs(tmp_path):
    """Never failing, Dense and MoEvement alike, MoC 0.25 above after the kill at step 3, with lost tokens."""

    def run(title: str, above: float, plt: float, kills: int) -> RunSummary:
        directory = tmp_path / title
        directory.mkdir()
        saved = {"moe_ckpt/bytes": 2e6, "moe_ckpt/stall_ms": 4.0}
        records = [{"event": "process_start", "generation": 0}, *lines(1, 3, 0, 5.0)]
        records += [{"event": "process_start", "generation": 1}] * bool(kills)
        records += [line | saved for line in lines(3, 6, bool(kills), 4.0 + above)]
        records += [{"step": 6, "moe_ckpt/plt": plt}]
        diary(directory, 0, records)
        (directory / "kills.jsonl").write_text('{"step": 4, "rank": 1, "phase": "compute"}\n' * kills)
        return summarise(title, directory)

    ends = {"never failing": (0.0, 0.0, 0), "Dense": (0.0, 0.0, 1), "MoC": (0.25, 0.076, 1), "MoEvement": (0.0, 0.0, 1)}
    return [run(title, *end) for title, end in ends.items()]


def test_the_picture_of_the_time_has_what_a_kill_cost(tmp_path):
    """Killed after iteration 3, back at 1: 2 and 3 are computed again, from the sixth second on."""
    began = {"event": "training", "from_step": 0, "time": 100.0, "generation": 0}
    again = {"event": "training", "from_step": 1, "time": 106.0, "generation": 1}
    first = [line | {"time": 100.0 + line["step"]} for line in lines(1, 3, 0, 5.0)]
    second = [line | {"time": 105.0 + line["step"]} for line in lines(2, 4, 1, 5.0)]
    diary(tmp_path / "never", 0, [began, *first, {"event": "finished", "parameters": "a", "val_loss": 3.0}])
    diary(tmp_path / "dense", 0, [began, *first, again, *second])
    never, dense = (summarise(name, tmp_path / name) for name in ("never", "dense"))
    assert spans(dense) == [Span(NEW, 0, 3), Span(DOWN, 3, 6), Span(AGAIN, 6, 8), Span(NEW, 8, 9)]
    axes = Figure().add_subplot()
    draw_timeline(axes, [never, dense])
    assert sorted((bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width() and bar.get_y() > 0.5) == [
        (0, 3), (3, 3), (6, 2), (8, 1),
    ]  # fmt: skip
    assert [list(line.get_xdata()) for line in axes.lines if list(line.get_ydata()) == [1]] == [[3]], "the kill"
    told = timeline_alternative([never, dense])
    assert told.endswith("never: no kill; dense: 2 iterations again, no token lost, other bits.")


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
def test_no_legend_is_cropped(five_runs, plot):
    wide = [replace(five_runs[-1], title=each.title) for each in demo.SCENARIOS]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    _fill(figure, figure.add_gridspec(1, 1)[0], plot, wide)
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1


def test_the_short_table_fits_80_columns(run_with_experts, tmp_path):
    console = Console(width=80, file=StringIO())
    wide = replace(peers_run(tmp_path / "run"), title="MoC k=1 by load")
    demo.print_table(console, [run_with_experts, wide])
    *header, _, second, _ = console.file.getvalue().splitlines()
    assert "…" not in console.file.getvalue()
    assert len(header) == 3, "an empty line, and two of titles: each run has one line"
    assert second.split()[:5] == ["MoC", "k=1", "by", "load", "2"]


DOC = demo.ROOT / "docs" / "demo.md"


def documented() -> list[str]:
    """The lines of the demo's output that the page shows."""
    return DOC.read_text().split("```text\n")[1].split("```")[0].splitlines()


def without_measured(line: str) -> str:
    """A line without numbers that differ from machine to machine; words, and how they are spaced, do not matter."""
    return " ".join(re.sub(r"[\d.,]+ ?(?:%|[kM]?B|m?s\b)?", "#", line).split())


def test_the_page_shows_the_output_of_this_demo():
    """Its table has the runs of the default demo, and what is said of the picture is what the table says."""
    table = documented()
    assert max(map(len, table)) <= 80
    _, header, *rows = table[: len(demo.Settings().scenarios) + 2]
    assert header.split() == [title.split("\n")[-1] for title in COLUMNS if title]
    assert [line for line in table if line.startswith("NO")] == []
    pictures = [
        re.search(r"!\[([^]]*)]\([^)]*demo.png\)", path.read_text())[1] for path in (DOC, demo.ROOT / "README.md")
    ]
    for scenario, row in zip(demo.Settings().scenarios, rows, strict=True):
        assert row.startswith(scenario.title)
        kills, *cells = row.removeprefix(scenario.title).split()
        if not scenario.failing:
            continue
        again, lost, same = cells[2], cells[3], cells[-1]
        assert (int(kills), same == "yes", lost == "0") == (demo.Settings.kills, scenario.exact, scenario.exact)
        cost = f"{scenario.title}: {again} iterations again, {'no token' if lost == '0' else lost + ' of tokens'} lost"
        assert all(cost in each for each in pictures)


def test_losses_that_lie_on_one_another_have_their_differences_in_a_panel_of_their_own(five_runs):
    baseline, dense, moc, _ = five_runs
    assert differences(dense, baseline, "train/loss") == ([1, 2, 3, 4, 5, 6], [0.0] * 6)
    assert differences(moc, baseline, "train/loss") == ([1, 2, 3, 4, 5, 6], [0.0, 0.0, 0.25, 0.25, 0.25, 0.25])
    figure = Figure()
    _fill(figure, figure.add_gridspec(1, 1)[0], PLOTS[0], five_runs)
    losses, away = figure.axes
    curves = {line.get_label(): list(line.get_ydata()) for line in away.lines}
    assert [curves[run.title] for run in five_runs[1:]] == [[0.0] * 6, [0.0] * 2 + [0.25] * 4, [0.0] * 6]
    assert baseline.title not in curves
    assert {line.get_label() for line in losses.lines} >= {run.title for run in five_runs}
    marks = [[list(line.get_xdata()) for line in axes.lines].count([3, 3]) for axes in (losses, away)]
    assert marks == [1, 1], "the kill"


def test_alternative_texts_say_what_each_picture_shows(five_runs, run_with_experts):
    texts = [alternative(plot, five_runs) for plot in PLOTS]
    assert len(set(texts)) == len(PLOTS)
    assert all(text.startswith(plot.title) and plot.unit in text for text, plot in zip(texts, PLOTS, strict=True))
    assert all("kills after iterations 3." in text for text in texts)
    assert "MoC: 4.25 to 5, in the end 4.25" in texts[0]
    assert "largest difference to never failing: Dense 0, MoC 0.25, MoEvement 0." in texts[0]
    assert "MoC: 7.6 to 7.6" in texts[1]  # in the unit of the picture
    assert "Dense: 2 to 2" in texts[2]
    heat = heat_alternative([run_with_experts])
    assert "MoC: at most 4 iterations since saved and 400 unsaved tokens" in heat
    page = render([*five_runs, run_with_experts], [], [], [at_scale.AtScale("Dense", "", 0.9, 0.1, 0.0)])
    for text in (*texts[2:], heat):
        assert html.escape(text)[:60] in page


def test_the_words_on_lost_tokens_fit_the_numbers(five_runs):
    baseline, _, moc, _ = five_runs
    above = plt_text(five_runs)
    assert "up to 7.60% are lost (MoC), which is not below that: a process dies every 6 iterations" in above
    assert "With a failure every 600 iterations the same kills would lose 0.08%" in above
    assert "at most 0.00% are lost" in plt_text([baseline])
    assert moc.plt > HARMLESS_PLT


def test_the_report_does_not_leave_the_choice_of_a_policy_to_the_toy(five_runs):
    spent = {"useful": 80.0, "stall": 0.0, "lost": 12.0, "down": 5.0, "idle": 0.0, "retrieve": 2.0, "replay": 1.0}
    common = {"spent": spent, "plt": 0.0, "k": None, "window": None, "interval": 15}
    partial, windows = {"system": "moc_peers", "k": 8, "interval": 1}, {"system": "moevement_peers", "window": 2}
    outcomes = [{"system": "dense"}, partial, windows]
    runs = [{"ettr": {"mean": 0.8}, "outcomes": [common | outcome]} for outcome in outcomes]
    rows = at_scale.read({"runs": runs})
    assert [row.cells() for row in rows] == [
        ("Dense, on storage", "every 15 iterations", "80.0%", "13.0%", "0.00%"),
        ("MoC, in the memory of two peers", "every iteration, 8 experts per layer", "80.0%", "13.0%", "0.00%"),
        ("MoEvement, in the memory of two peers", "in parts, over 2 iterations", "80.0%", "13.0%", "0.00%"),
    ]
    page = _scale_section(rows)
    assert "cannot be seen at this size" in page
    assert "<td>in parts, over 2 iterations</td>" in page
    assert "moe-ckpt plan" in page
    assert "could not be run" in _scale_section([])


@pytest.mark.slow
def test_the_simulation_shows_what_the_toy_cannot():
    rows = at_scale.simulate()
    dense, moc, windows = rows
    page = DOC.read_text().split("## On a large cluster")[1]
    assert all(" | ".join(row.cells()) in page for row in rows)
    assert dense.useful + 0.1 < min(moc.useful, windows.useful)
    assert dense.redone > 10 * max(moc.redone, windows.redone)
    assert dense.plt == windows.plt == 0 < moc.plt < HARMLESS_PLT


def test_each_kill_is_said_once_and_that_it_was_meant(tmp_path):
    news = KillNews()
    assert news.lines(tmp_path) == []
    kills = tmp_path / "kills.jsonl"
    kills.write_text('{"step": 4, "rank": 1, "phase": "compute"}\n{"step": 9, "ra')
    (line,) = news.lines(tmp_path)
    assert line.startswith("rank 1 was killed on purpose in iteration 4 (kill -9); torchrun")
    lost = '{"step": 9, "rank": 0, "phase": "compute", "node": true}\n'
    kills.write_text('{"step": 4, "rank": 1, "phase": "compute"}\n' + lost)
    [line] = news.lines(tmp_path)
    assert line.startswith("rank 0 was killed on purpose in iteration 9 (kill -9), and the memory of its node deleted;")
    assert news.lines(tmp_path) == []


def test_the_demo_empties_only_what_it_made(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="--out"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    prepare(tmp_path / "own")
    (tmp_path / "own" / "x").touch()
    prepare(tmp_path / "own")
    assert [p.name for p in (tmp_path / "own").iterdir()] == [MARKER]


def test_sigterm_ends_the_processes_of_a_demo_and_removes_its_directory(tmp_path):
    script = (
        "import subprocess, sys, tempfile\n"
        "from recipes.demonstrating import ended, stopped_by_sigterm\n"
        f"with stopped_by_sigterm(), tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "    with ended(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])) as process:\n"
        "        print(process.pid, flush=True)\n"
        "        process.wait()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=demo.ROOT, stdout=subprocess.PIPE, text=True) as running:
        child = int(running.stdout.readline())
        assert list(tmp_path.iterdir())
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_survives_its_kills_and_says_so(tmp_path, capsys):
    out = tmp_path / "demo"
    code = demo.main(["--all", "--steps", "26", "--out", str(out), "trainer.val_batches=2"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    runs = {each.title: summarise(each.title, out / each.name) for each in demo.SCENARIOS}
    assert [run.kills for run in runs.values()] == [0] + [2] * 8
    assert all(run.steps == 26 for run in runs.values())
    never, dense = runs["never failing"], runs["Dense every 10"]
    windows, peers = runs["MoEvement W=3"], runs["Gemini on peers"]
    for each in demo.SCENARIOS:
        if each.exact:
            assert runs[each.title].same_as(never)
            assert runs[each.title].lost_tokens == 0
    # At most two complete windows, less the step that each begins with, for each kill; the first may come before the
    # first of them is complete.
    assert 0 < windows.replayed < windows.recomputed <= 2 * (2 * 3)
    assert windows.replayed % 2 == 0
    assert {int(size) for size in windows.curve("moe_ckpt/window_size")[1]} == {3}
    assert windows.bytes_at_compute > 0
    assert [(each.killed.node, each.storage) for each in peers.recoveries] == [(False, 0), (True, 0)]
    process, node = peers.recoveries
    assert (process.own, process.peers) == (2 * node.own, 0), "both ranks"
    assert node.own == node.peers, "the rank that is left, and the one that is new"
    assert node.own == pytest.approx(peers.bytes_per_checkpoint, rel=1e-3), "a checkpoint has random numbers besides"
    assert max(peers.curve(BEHIND)[1]) < max(peers.curve(STORAGE_BEHIND)[1])
    assert 0.4 < windows.bytes_per_iteration / dense.bytes_per_checkpoint < 0.5  # 12 and 4 bytes, W = 3
    for name in ("MoC k=1 in turn", "MoC k=1 by load"):
        run = runs[name]
        assert run.lost_tokens > 0
        assert run.recomputed < dense.recomputed
        assert run.experts_per_layer == [1]
        steps, ages = run.tables("ages")
        assert steps == list(range(1, 27))
        oldest = dict(zip(*run.curve("moe_ckpt/oldest_expert_steps"), strict=True))
        assert [max(0, int(table.max())) for table in ages] == [oldest[step] for step in steps]  # -1: none saved yet
    assert "bit for bit" in (out / "report.html").read_text()
    assert printed.count("killed on purpose in iteration") == 16
    assert printed.count("and the memory of its node deleted") == 1
    assert printed.count("back at iteration") == 16
    assert list(demo.TMPFS.glob("moe_ckpt_demo_*")) == []
    assert "cannot be seen at this size" in " ".join(printed.split())
    assert (out / "report.png").stat().st_size > 10_000
    said = {without_measured(line) for line in printed.splitlines()}
    assert [line for line in documented() if line.startswith("yes") and without_measured(line) not in said] == []
