"""The demo's report: one self-contained HTML file with curves and a word on how to read each."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.gpt_moe_lightning.heat import PANELS, draw_heat, partial_runs
from recipes.gpt_moe_lightning.summary import ROWS, RunSummary, Verdict, table_cells

# Colours that colour-blind readers can tell apart; widths that show a line under another one.
LINES = (
    {"color": "#aaaaaa", "linewidth": 5.0},
    {"color": "#0072B2", "linewidth": 2.2},
    {"color": "#D55E00", "linewidth": 1.2},
    {"color": "#009E73", "linewidth": 1.2},
    {"color": "#AA3377", "linewidth": 0.9},
)

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
td small { display: block; color: #777; }
img { width: 100%; height: auto; }
.yes::before { content: "\\2713\\00a0"; color: #007a3d; } .no::before { content: "\\2717\\00a0"; color: #b00020; }
ul { list-style: none; padding: 0; }
"""


@dataclass(frozen=True)
class Plot:
    title: str
    unit: str
    explanation: str
    draw: Callable[[Any, RunSummary, Mapping[str, Any]], None]


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


PLOTS = (
    Plot(
        "Training loss",
        "nats per byte",
        "How well the model predicts the next byte: lower is better. A vertical line marks a kill. Dense comes back "
        "to an older iteration and computes the same numbers again, so its curve lies exactly on that of the run that "
        "never failed. So does MoEvement's, which computes the iterations of its newest window again. MoC comes back "
        "with some experts a few iterations old, so after the first kill its curves may leave the others by a little, "
        "and then run beside them.",
        _line("train/loss"),
    ),
    Plot(
        "Portion of lost tokens (PLT)",
        "% of all tokens",
        "Solid: tokens that restored experts have really lost, as a share of all tokens routed so far. It jumps at a "
        "kill and then shrinks, since the total goes on growing. Dotted: what it would be if a process died right "
        "now. Papers on partial expert checkpoints find model quality unharmed below about 4 to 7 %. Dense and "
        "MoEvement lose no tokens: they compute the lost iterations again.",
        _plt,
    ),
    Plot(
        "Bytes written per iteration",
        "MB",
        "Dense writes everything in every tenth iteration and nothing between. MoC writes all that is not an expert, "
        "and one expert of each layer, in every iteration; only its very first checkpoint is a full one. MoEvement "
        "writes everything in the course of three iterations, and of what has its turn later the weights alone, so "
        "that these iterations can be computed again. All restart from the newest checkpoint, so writing often "
        "is what keeps the repeated work small.",
        _line("moe_ckpt/bytes", 1e-6, "steps-mid"),
    ),
    Plot(
        "Stall per iteration",
        "ms",
        "How long training stood still for the checkpoint. The copy of the state runs beside the next forward and "
        "backward pass, and the writing beside whatever follows; only what does not fit into that shows up here.",
        _line("moe_ckpt/stall_ms"),
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


def draw(plot: Plot, runs: Sequence[RunSummary]) -> bytes:
    """A PNG of one plot with one line per run, and a mark at each kill."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), dpi=110, layout="constrained")
    _fill(figure.add_subplot(), plot, runs)
    return _png(figure)


def overview(runs: Sequence[RunSummary]) -> bytes:
    """A PNG of all plots in one picture, without the explanations; below them the unsaved tokens of each expert."""
    from matplotlib.figure import Figure

    partial = partial_runs(runs)
    heights = (7.6, 2.9 * len(partial)) if partial else (7.6,)
    figure = Figure(figsize=(14, sum(heights)), dpi=90, layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, plot in zip(parts[0].subplots(2, 2).flat, PLOTS, strict=True):
        _fill(axes, plot, runs)
        axes.get_legend().remove()
        axes.set_title(plot.title, loc="left", fontsize=11, pad=16)
    parts[0].legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    if partial:
        draw_heat(parts[1], runs, PANELS)
    return _png(figure)


def _fill(axes: Any, plot: Plot, runs: Sequence[RunSummary]) -> None:
    for run, line in zip(runs, LINES, strict=False):
        plot.draw(axes, run, line)
    for step in runs[1].restart_steps if len(runs) > 1 else ():  # all failing runs have the same kills
        axes.axvline(step, color="#888888", linewidth=1, zorder=0)
        axes.annotate("kill", (step, 1), xycoords=("data", "axes fraction"), ha="center", color="#666666", fontsize=9)
    axes.set(xlabel="iteration", ylabel=plot.unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=5, loc="lower right", bbox_to_anchor=(1, 1.03))


def _png(figure: Any) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def render(runs: Sequence[RunSummary], checks: Sequence[Verdict], facts: Sequence[str]) -> str:
    """The whole page. Pictures are embedded: the file can be mailed."""
    head = "".join(f"<th>{html.escape(run.title)}</th>" for run in runs)
    columns = [table_cells(run, runs[0]) for run in runs]
    rows = "".join(
        f"<tr><td>{html.escape(title)}<small>{html.escape(note)}</small></td>"
        + "".join(f"<td>{html.escape(column[i])}</td>" for column in columns)
        + "</tr>"
        for i, (title, note) in enumerate(ROWS)
    )
    verdicts = "".join(
        f'<li class="{"yes" if check.passed else "no"}">{html.escape(check.sentence)}</li>' for check in checks
    )
    plots = "".join(_section(plot.title, plot.explanation, draw(plot, runs)) for plot in PLOTS)
    if partial_runs(runs):
        plots += _section(HEAT_TITLE, HEAT_TEXT, heat(runs))
    notes = "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>moe_ckpt demo</title>'
        f"<style>{STYLE}</style></head><body><h1>A Mixture-of-Experts run, killed and killed again</h1>"
        "<p>The same training run five times: never failing; failing, with a full checkpoint now and then (Dense); "
        "failing at the same iterations, with a partial checkpoint at every iteration (MoC), once with the experts "
        "in turn, once with those that have most to lose; and with a checkpoint spread over every three iterations "
        "(MoEvement), which brings back the exact state.</p>"
        f"<ul>{verdicts}</ul><table><tr><th></th>{head}</tr>{rows}</table>{plots}"
        f"<h2>How it was run</h2><ul>{notes}</ul></body></html>\n"
    )


def _section(title: str, explanation: str, png: bytes) -> str:
    return (
        f"<h2>{html.escape(title)}</h2><p>{html.escape(explanation)}</p>"
        f'<img alt="{html.escape(title)} per iteration" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    )


def write_report(path: Path, runs: Sequence[RunSummary], checks: Sequence[Verdict], facts: Sequence[str]) -> Path:
    """Write the page to ``path`` and all curves in one picture beside it, with the suffix ``.png``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, checks, facts), encoding="utf-8")
    path.with_suffix(".png").write_bytes(overview(runs))
    return path
