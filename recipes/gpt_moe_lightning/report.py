"""The demo's report: one self-contained HTML file with curves and a word on how to read each."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.demonstrating import Verdict
from recipes.gpt_moe_lightning import at_scale, recoveries
from recipes.gpt_moe_lightning.at_scale import AtScale
from recipes.gpt_moe_lightning.heat import PANELS, draw_heat, partial_runs
from recipes.gpt_moe_lightning.summary import (
    BEHIND,
    COLUMNS,
    ROWS,
    SENT,
    STORAGE_BEHIND,
    STORED,
    Curve,
    RunSummary,
    short_cells,
    table_cells,
)
from recipes.gpt_moe_lightning.timeline import TIMELINE_TEXT, draw_timeline, timeline_alternative

# Colours that colour-blind readers can tell apart; widths that show a line under another one.
LINES = (
    {"color": "#aaaaaa", "linewidth": 5.0},
    {"color": "#0072B2", "linewidth": 2.2},
    {"color": "#D55E00", "linewidth": 1.2},
    {"color": "#009E73", "linewidth": 1.2},
    {"color": "#E69F00", "linewidth": 0.9},
    {"color": "#56B4E9", "linewidth": 0.9},
    {"color": "#000000", "linewidth": 0.9},
    {"color": "#AA3377", "linewidth": 0.9},
    {"color": "#994F00", "linewidth": 0.9},
)

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
img { width: 100%; height: auto; }
.yes::before { content: "\\2713\\00a0"; color: #007a3d; } .no::before { content: "\\2717\\00a0"; color: #b00020; }
ul { list-style: none; padding: 0; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Plot:
    """metric, scale: what the curves are, in ``unit``. explanation: in the report; may depend on what was measured.

    difference: a second panel shows by how much the runs differ from the first one, which never failed.
    """

    title: str
    unit: str
    metric: str
    scale: float
    explanation: Callable[[Sequence[RunSummary]], str]
    draw: Callable[[Any, RunSummary, Mapping[str, Any]], None]
    difference: bool = False


def _line(
    metric: str, scale: float = 1.0, drawstyle: str = "default"
) -> Callable[[Any, RunSummary, Mapping[str, Any]], None]:
    def draw(axes: Any, run: RunSummary, line: Mapping[str, Any]) -> None:
        steps, values = run.curve(metric)
        axes.plot(steps, [v * scale for v in values], label=run.title, drawstyle=drawstyle, **line)

    return draw


def _plt(axes: Any, run: RunSummary, line: Mapping[str, Any]) -> None:
    _line("moe_ckpt/plt", 100)(axes, run, line)
    steps, values = run.curve("moe_ckpt/plt_if_failed_now")
    axes.plot(steps, [100 * v for v in values], color=line["color"], linewidth=1, linestyle=":")


def _beside(metric: str, other: str, scale: float = 1.0) -> Callable[[Any, RunSummary, Mapping[str, Any]], None]:
    """Of runs with memory that outlives the processes, ``other`` as a dotted line beside ``metric``."""

    def draw(axes: Any, run: RunSummary, line: Mapping[str, Any]) -> None:
        _line(metric, scale)(axes, run, line)
        if run.memory_bytes:
            steps, values = run.curve(other)
            axes.plot(steps, [v * scale for v in values], color=line["color"], linewidth=1, linestyle=":")

    return draw


def _always(text: str) -> Callable[[Sequence[RunSummary]], str]:
    return lambda runs: text


HARMLESS_PLT = 0.04
"""Papers on partial expert checkpoints see no harm below 3.75 % (MoC-System), 5 % or 7 % of lost tokens."""


def plt_text(runs: Sequence[RunSummary]) -> str:
    """What the curves of lost tokens are, and how this run's compare with what papers call harmless."""
    worst = max(runs, key=lambda run: run.plt)
    kills = max(1, worst.kills)
    told = (
        "Solid: tokens that restored experts have really lost, as a share of all tokens routed so far. It jumps at a "
        "kill and then shrinks, since the total goes on growing. Dotted: what it would be if a process died right "
        "now. Dense and MoEvement lose no tokens: they compute the lost iterations again. Papers on partial expert "
        "checkpoints find model quality unharmed below about 4 to 7 %. "
    )
    if worst.plt <= HARMLESS_PLT:
        return told + f"Here at most {worst.plt:.2%} are lost in the end ({worst.title}), which is less."
    every = worst.steps / kills
    return told + (
        f"Here up to {worst.plt:.2%} are lost ({worst.title}), which is not below that: a process dies every "
        f"{every:.0f} iterations, so that there is something to see. With a failure every {every * 100:,.0f} "
        f"iterations the same kills would lose {worst.plt / 100:.2%}. plt_budget=0.0375 keeps a run within 3.75 %: it "
        "saves more experts at each checkpoint."
    )


PLOTS = (
    Plot(
        "Training loss",
        "nats per byte",
        "train/loss",
        1.0,
        _always(
            "How well the model predicts the next byte: lower is better. The curves lie on one another, so the lower "
            "panel shows their difference to the run that never failed. A vertical line marks a kill. Dense comes back "
            "to an older iteration and computes the same numbers again, MoEvement those of its newest window: their "
            "difference is exactly 0. MoC comes back with some experts a few iterations old, so from the first kill "
            "on it differs by a little, to either side."
        ),
        _line("train/loss"),
        difference=True,
    ),
    Plot("Portion of lost tokens (PLT)", "% of all tokens", "moe_ckpt/plt", 100.0, plt_text, _plt),
    Plot(
        "Bytes written per iteration",
        "MB",
        STORED,
        1e-6,
        _always(
            "Dense writes everything in every tenth iteration and nothing between. MoC writes all that is not an "
            "expert, and one expert of each layer, in every iteration; only its very first checkpoint is a full one. "
            "MoEvement writes everything in the course of three iterations, and of what has its turn later the weights "
            "alone, so that these iterations can be computed again. All restart from the newest checkpoint. Gemini "
            "writes everything to memory and to a peer, and every twentieth checkpoint to storage. What counts at "
            "scale is the height of a bar: all of it must be copied beside one iteration, or training waits."
        ),
        _line(STORED, 1e-6, "steps-mid"),
    ),
    Plot(
        "Stall per iteration",
        "ms",
        "moe_ckpt/stall_ms",
        1.0,
        _always(
            "How long training stood still for the checkpoint. The copy of the state runs beside the next forward and "
            "backward pass, and the writing beside whatever follows; only what does not fit into that shows up here."
        ),
        _line("moe_ckpt/stall_ms"),
    ),
    Plot(
        "Iterations since the newest checkpoint",
        "iterations",
        BEHIND,
        1.0,
        _always(
            "How many iterations a kill at this moment would throw away: those since the newest checkpoint that all "
            "processes have, of MoC with some experts still older. Solid: in the nearest tier. With memory that "
            "outlives the processes that is memory, and the dotted line says how far storage is behind: what would be "
            "lost if all nodes failed at once."
        ),
        _beside(BEHIND, STORAGE_BEHIND),
    ),
    Plot(
        "In memory, and sent to peers",
        "MB",
        "moe_ckpt/memory_bytes",
        1e-6,
        _always(
            "Of the runs with memory that outlives the processes. Solid: what lies there, of all ranks together: up to "
            "three checkpoints of each rank, and as many copies of its peer's. Dotted: what was sent to peers during "
            "the iteration."
        ),
        _beside("moe_ckpt/memory_bytes", SENT, 1e-6),
    ),
)


HEAT_TITLE = "Which experts a failure would throw back"
HEAT_TEXT = (
    "One row per expert, time to the right. Left: how many iterations ago the expert was last saved. Right: how many "
    "tokens it has learnt from since, which is what it loses if a process dies then: a kill (dotted) where the colours "
    "are bright is a dear one. In turn, all experts age alike, whatever they are worth. By load, those with most "
    "unsaved tokens go first, so there are fewer bright spots on the right, and rarely used experts may wait longer, "
    "on the left. A colour means the same number for both runs."
)


def heat(runs: Sequence[RunSummary]) -> bytes:
    """A PNG of the heat maps of ages and unsaved tokens, one row of pictures per run that saves some experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4 * len(partial_runs(runs))), dpi=110, layout="constrained")
    draw_heat(figure, runs)
    return _png(figure)


def timeline(runs: Sequence[RunSummary]) -> bytes:
    """A PNG of what the time of each run was spent on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.1 + 0.55 * len(runs)), dpi=110, layout="constrained")
    draw_timeline(figure.add_subplot(), runs)
    return _png(figure)


def draw(plot: Plot, runs: Sequence[RunSummary]) -> bytes:
    """A PNG of one plot with one line per run, and a mark at each kill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4 if plot.difference else 3.8), dpi=110, layout="constrained")
    _fill(figure, figure.add_gridspec(1, 1)[0], plot, runs)
    return _png(figure)


def _fill(figure: Any, position: Any, plot: Plot, runs: Sequence[RunSummary]) -> Any:
    """Draw the plot where ``place``, of a grid, says; the axes with the curves."""
    if not plot.difference:
        axes = figure.add_subplot(position)
        lowest = axes
    else:
        upper, lower = position.subgridspec(2, 1, height_ratios=(1.5, 1), hspace=0.05)
        axes = figure.add_subplot(upper)
        axes.tick_params(labelbottom=False)
        lowest = figure.add_subplot(lower, sharex=axes)
        _fill_differences(lowest, plot, runs)
    for run, line in zip(runs, LINES, strict=False):
        plot.draw(axes, run, line)
    for panel in {axes, lowest}:
        for step in kills_of(runs):
            panel.axvline(step, color="#888888", linewidth=1, zorder=0)
        panel.spines[["top", "right"]].set_visible(False)
    for step in kills_of(runs):
        at = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        axes.annotate("kill", (step, 1), color="#666666", fontsize=9, **at)
    axes.set_ylabel(plot.unit)
    lowest.set_xlabel("iteration")
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=5, loc="outside upper right")
    return axes


def _fill_differences(axes: Any, plot: Plot, runs: Sequence[RunSummary]) -> None:
    for run, line in list(zip(runs, LINES, strict=False))[1:]:
        steps, away = differences(run, runs[0], plot.metric)
        axes.plot(steps, away, label=run.title, **line)
    axes.axhline(0, color="#aaaaaa", linewidth=0.8, zorder=0)
    axes.set_ylabel("difference to\nnever failing")


def differences(run: RunSummary, baseline: RunSummary, metric: str) -> Curve:
    """Steps that both did, and by how much ``run`` is above."""
    ours, theirs = (dict(zip(*item.curve(metric), strict=True)) for item in (run, baseline))
    steps = sorted(ours.keys() & theirs.keys())
    return steps, [ours[step] - theirs[step] for step in steps]


def kills_of(runs: Sequence[RunSummary]) -> list[int]:
    """All failing runs have the same kills: those of the first that failed."""
    return next((run.restart_steps for run in runs if run.restart_steps), [])


def alternative(plot: Plot, runs: Sequence[RunSummary]) -> str:
    """What the picture shows, for those who do not see it."""
    steps = max((run.steps for run in runs), default=0)
    kills = ", ".join(map(str, kills_of(runs)))
    text = f"{plot.title} ({plot.unit}) over iterations 1 to {steps}, a line per run"
    text += f", kills after iterations {kills}. " if kills else ". "
    for run in runs:
        values = [value * plot.scale for value in run.curve(plot.metric)[1]]
        if values:
            text += f"{run.title}: {min(values):.4g} to {max(values):.4g}, in the end {values[-1]:.4g}. "
    if plot.difference:
        away = [(run.title, [abs(v) for v in differences(run, runs[0], plot.metric)[1]]) for run in runs[1:]]
        most = ", ".join(f"{title} {max(item):.2g}" if any(item) else f"{title} 0" for title, item in away if item)
        text += f"Lower panel, largest difference to {runs[0].title}: {most}."
    return text.strip()


def heat_alternative(runs: Sequence[RunSummary]) -> str:
    """Likewise of the heat maps."""
    tops = [
        f"{run.title}: at most " + " and ".join(f"{int(run.tables(p.name)[1].max()):,} {p.title}" for p in PANELS)
        for run in partial_runs(runs)
    ]
    return f"Heat maps, a row per expert and a column per iteration, two for each run. {'. '.join(tops)}."


def _png(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def render(
    runs: Sequence[RunSummary], checks: Sequence[Verdict], facts: Sequence[str], scale: Sequence[AtScale] = ()
) -> str:
    """The whole page. Pictures are embedded: the file can be mailed. Heat maps, which take a while, come with the
    simulation."""
    verdicts = "".join(
        f'<li class="{"yes" if check.passed else "no"}">{html.escape(check.sentence)}</li>' for check in checks
    )
    short = _table(COLUMNS, (short_cells(run, runs[0]) for run in runs))
    plots = "".join(
        _section(plot.title, plot.explanation(runs), draw(plot, runs), alternative(plot, runs)) for plot in PLOTS
    )
    if scale and partial_runs(runs):
        plots += _section(HEAT_TITLE, HEAT_TEXT, heat(runs), heat_alternative(runs))
    columns = [table_cells(run, runs[0]) for run in runs]
    rows = ((f"{title}: {note}", *(column[i] for column in columns)) for i, (title, note) in enumerate(ROWS))
    every = _table(["", *(run.title for run in runs)], rows)
    notes = "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>moe_ckpt demo</title>'
        f"<style>{STYLE}</style></head><body><h1>A Mixture-of-Experts run, killed and killed again</h1>"
        f"<p>{html.escape(TIMELINE_TEXT)}</p>{_image(timeline(runs), timeline_alternative(runs))}"
        f"<ul>{verdicts}</ul>{short}{plots}{_recoveries_section(runs)}"
        f"{_scale_section(scale) if scale else ''}<h2>All numbers</h2>{every}"
        f"<h2>How it was run</h2><ul>{notes}</ul></body></html>\n"
    )


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _recoveries_section(runs: Sequence[RunSummary]) -> str:
    """Of the runs whose checkpoints lie in memory, a row for each kill."""
    in_memory = [run for run in runs if run.memory_bytes]
    tables = [
        f"<h3>{html.escape(run.title)}</h3>" + _table(recoveries.COLUMNS, (kill.cells() for kill in run.recoveries))
        for run in in_memory
    ]
    text = f"<h2>{recoveries.TITLE}</h2><p>{html.escape(recoveries.TEXT)}</p>"
    return text + "".join(tables) if tables else ""


def _scale_section(scale: Sequence[AtScale]) -> str:
    table = _table(at_scale.COLUMNS, (row.cells() for row in scale)) if scale else ""
    return (
        f"<h2>Which policy is best?</h2><p>{html.escape(at_scale.sentence(scale))}</p>{table}"
        f"<p>{html.escape(at_scale.PLAN)}</p>"
    )


def _section(title: str, explanation: str, png: bytes, alternative: str) -> str:
    return f"<h2>{html.escape(title)}</h2><p>{html.escape(explanation)}</p>{_image(png, alternative)}"


def _image(png: bytes, alternative: str) -> str:
    return f'<img alt="{html.escape(alternative)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def write_report(
    path: Path,
    runs: Sequence[RunSummary],
    checks: Sequence[Verdict],
    facts: Sequence[str],
    scale: Sequence[AtScale] = (),
) -> Path:
    """Write the page to ``path`` and its first picture beside it, with the suffix ``.png``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, checks, facts, scale), encoding="utf-8")
    path.with_suffix(".png").write_bytes(timeline(runs))
    return path
