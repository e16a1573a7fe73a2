"""Results of the report on the papers as plain data, and from there as tables, markdown and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """How the report shows a long table: a line for what differs in ``by``, a cell for each value of ``across``.

    Attributes:
        by: Columns that begin a line.
        across: Column whose values become columns.
        shown: Columns whose values a cell has; the others are in the JSON only.
        only: Values of ``across`` that are shown, as they are formatted; all if empty.
    """

    by: tuple[str, ...]
    across: str
    shown: tuple[str, ...]
    only: tuple[str, ...] = ()


LAYOUTS: dict[tuple[str, int], Spread | tuple[str, ...] | None] = {
    ("windows", 0): ("model", "paper", "Algorithm 1", "needs GB/s", "library"),
    ("windows", 1): ("model", "paper", "Algorithm 1", "needs GB/s", "library"),
    ("dense", 0): None,
    ("inside", 0): None,
    ("overheads", 0): ("model", "CheckFreq, paper", "CheckFreq, ours", "MoC, paper s", "MoC, ours s"),
    ("table3", 0): ("system", "closed form, off by (mean)", "simulated, off by (mean)", "largest", "at"),
    ("table3", 1): Spread(("model", "system"), "MTBF", ("paper", "simulated"), ("2H", "10M")),
    ("figure10", 0): ("system", "MoEvement's over it: paper", "ours"),
    ("figure10", 1): None,
    ("figure11", 0): Spread(("bandwidth", "MTBF"), "model", ("Gemini, ours", "MoEvement, ours")),
    ("figure13", 0): ("model", "sparse, paper", "sparse, ours", "all, paper", "all, ours"),
    ("figure13", 1): ("model", "freeze, replay time saved", "reorder, replay time saved"),
    ("figure16", 0): Spread(("system",), "S", ("paper", "ours"), ("0.00", "0.99")),
    ("moetion", 0): ("what", "paper GB", "ours GB"),
    ("moetion", 1): None,
    ("moetion_time", 0): None,
    ("moetion_time", 1): Spread(("system",), "model", ("paper s", "ours s")),
    ("moetion_time", 2): None,
    ("moetion_time", 3): Spread(("system",), "model", ("paper s", "simulated s")),
    ("moetion_time", 4): None,
    ("moetion_time", 5): Spread(("with",), "model", ("paper s", "ours s")),
    ("moetion_time", 6): None,
    ("pec", 0): None,
    ("loss_over_k", 1): None,
    ("two_levels", 0): None,
    ("known", 0): None,
}
"""(part, number of the table) -> the columns that the report shows, or how it spreads them; None: in the JSON only.

Tables that are not here are shown whole.
"""


def table(title: str, columns: Sequence[str], formats: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """formats: of ``format()``, one per column; what is None is shown as a dash."""
    for row in rows:
        if not len(row) == len(columns) == len(formats):
            raise ValueError(f"{title}: {len(columns)} columns, {len(formats)} formats, a row of {len(row)}")
    return {"title": title, "columns": list(columns), "formats": list(formats), "rows": [list(row) for row in rows]}


def part(
    title: str,
    what: str,
    tables: Sequence[dict[str, Any]],
    notes: Sequence[str],
    picture: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One section. picture: ``name``, ``kind`` ("lines" or "bars"), axes, and ``series``: label -> points."""
    results = {"title": title, "what": what, "tables": list(tables), "notes": list(notes)}
    return results if picture is None else {**results, "picture": dict(picture)}


def lines(
    name: str, x: str, y: str, series: Mapping[str, Sequence[tuple[float, float]]], **more: Any
) -> dict[str, Any]:
    """For ``part``. A label with " (paper)" is drawn dashed, in the colour of the one without."""
    points = {label: [list(point) for point in group] for label, group in series.items()}
    return {"name": name, "kind": "lines", "x": x, "y": y, "series": points, **more}


def bars(name: str, y: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """For ``part``: one group per model, one bar of each series in it."""
    return {
        "name": name,
        "kind": "bars",
        "y": y,
        "groups": list(groups),
        "series": {k: list(v) for k, v in series.items()},
    }


def shown(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_part(console: Console, results: Mapping[str, Any]) -> None:
    console.rule(results["title"], align="left")
    for one in results["tables"]:
        grid = Table(title=one["title"], title_justify="left")
        for column, form in zip(one["columns"], one["formats"], strict=True):
            grid.add_column(column, justify="left" if form == "" and column in ("model", "system", "what") else "right")
        for row in one["rows"]:
            grid.add_row(*(shown(value, form) for value, form in zip(row, one["formats"], strict=True)))
        console.print(grid)
    for note in results["notes"]:
        console.print(f"- {note}", markup=False, highlight=False)
    console.print()


def markdown(parts: Mapping[str, Mapping[str, Any]], images: str) -> str:
    """The whole report. images: where pictures are, as seen from it."""
    text = [
        "# The simulator against the papers",
        "The figures of MoEvement (NSDI '26), of its first version MoEtion (arXiv 2412.15411 v1) and of PEC (arXiv "
        "2408.04307) beside the simulator's, with reasons for differences. What that says of a simulation, in short: "
        "[simulator.md](simulator.md#how-close-it-is). `python benchmarks/sim_papers.py --write` makes this page from "
        "[sim_papers.json](../benchmarks/results/sim_papers.json), which has more figures than are shown here. Four "
        "reasons recur:",
        "1. **Inputs that no paper prints**: copy bandwidth, iteration time, skewness, failure trace. They are "
        "calibrated once (first table) or assumed in the configs; nothing is fitted cell by cell. At the links' "
        "nominal rates nearly nothing would stall.\n"
        "2. **The papers' own columns disagree** ([Table 3 against itself](#table-3-against-itself)).\n"
        "3. **The library counts bytes on the busiest rank**, where the papers' formulas treat all operators and all "
        "ranks as equal.\n"
        "4. **The simulator counts what closed forms leave out**: work that was not yet saved at a failure, the "
        "iteration that it cuts off, and loading.",
    ]
    for name, result in parts.items():
        text += [f"## {result['title']}", result["what"]]
        for at, one in enumerate(result["tables"]):
            text += _laid_out(one, LAYOUTS.get((name, at), tuple(one["columns"])))
        if "picture" in result:
            text.append(f"![{result['title']}]({images}/{result['picture']['name']}.png)")
        text += ["\n".join(f"- {note}" for note in result["notes"])] if result["notes"] else []
    return "\n\n".join(text) + "\n"


def _laid_out(one: Mapping[str, Any], how: Spread | tuple[str, ...] | None) -> list[str]:
    """Title and table; nothing for one that is in the JSON only."""
    if how is None:
        return []
    if isinstance(how, Spread):
        return [f"**{one['title']}: {' / '.join(how.shown)}**", spread(one, how)]
    return [f"**{one['title']}**"] * bool(one["title"]) + [_markdown_table(one, how)]


def _markdown_table(one: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Some of its columns; of several with one name, the first."""
    at = list(range(len(one["columns"]))) if list(columns) == one["columns"] else [*map(one["columns"].index, columns)]
    rule = ["---" if one["formats"][i] == "" else "--:" for i in at]
    rows = [[shown(row[i], one["formats"][i]) for i in at] for row in one["rows"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [[one["columns"][i] for i in at], rule, *rows])


def spread(one: Mapping[str, Any], how: Spread) -> str:
    """A long table with a cell for each value of a column; what is not printed by the paper is a dash."""
    at = one["columns"].index
    form = one["formats"][at(how.across)]
    every = dict.fromkeys(row[at(how.across)] for row in one["rows"])
    values = [value for value in every if not how.only or shown(value, form) in how.only]
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in one["rows"]:
        texts = [shown(value, form) for value, form in zip(row, one["formats"], strict=True)]
        key = tuple(texts[at(name)] for name in how.by)
        lines.setdefault(key, {})[row[at(how.across)]] = " / ".join(texts[at(name)] for name in how.shown)
    heads = [*how.by, *(f"{how.across} {shown(value, form)}" for value in values)]
    rule = ["---"] * len(how.by) + ["--:"] * len(values)
    rows = [[*key, *(cells.get(value, "-") for value in values)] for key, cells in lines.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """The part's picture, if it has one."""
    picture = results.get("picture")
    if picture is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    if picture["kind"] == "bars":
        _bars(axes, picture)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    else:
        _lines(axes, picture)
        axes.legend(fontsize=8)
    axes.set_ylabel(picture["y"])
    axes.set_title(results["title"])
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / f"{picture['name']}.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def _lines(axes: Any, requested: Mapping[str, Any]) -> None:
    colours: dict[str, str] = {}
    for label, points in requested["series"].items():
        base = label.removesuffix(" (paper)")
        style = "--" if base != label else "-"
        drawn = axes.plot(
            *zip(*points, strict=True), style, marker="o", markersize=3, label=label, color=colours.get(base)
        )
        colours.setdefault(base, drawn[0].get_color())
    axes.set_xlabel(requested["x"])
    if requested.get("log"):
        axes.set_xscale("log")
    if "ticks" in requested:
        axes.set_xticks([at for at, _ in requested["ticks"]], [name for _, name in requested["ticks"]])
        axes.minorticks_off()


def _bars(axes: Any, requested: Mapping[str, Any]) -> None:
    width = 0.8 / len(requested["series"])
    for at, (label, values) in enumerate(requested["series"].items()):
        places = [group + (at + 0.5) * width - 0.4 for group in range(len(requested["groups"]))]
        axes.bar(places, [value or 0.0 for value in values], width, label=label)
    axes.set_xticks(range(len(requested["groups"])), requested["groups"])
