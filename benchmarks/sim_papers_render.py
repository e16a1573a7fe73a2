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
    """

    by: tuple[str, ...]
    across: str
    shown: tuple[str, ...]


SPREAD = {
    ("table3", "ETTR, 12 hours"): Spread(("model", "system"), "MTBF", ("paper", "closed form", "simulated")),
    ("figure16", "ETTR, 6 hours"): Spread(("system",), "S", ("paper", "ours")),
    ("moetion_time", "Figure 5: stall per iteration, a checkpoint at each"): Spread(
        ("system",), "model", ("paper s", "ours s")
    ),
    ("moetion_time", "Figure 6: checkpoints in 100 iterations without stalls"): Spread(
        ("system",), "model", ("paper", "ours")
    ),
    ("moetion_time", "Figure 7: wasted work per failure"): Spread(
        ("system",), "model", ("paper s", "formula s", "simulated s")
    ),
    ("moetion_time", "Figure 10: a checkpoint beside compute"): Spread(("with",), "model", ("paper s", "ours s")),
    ("two_levels", "PLT after one failure of one of two nodes, K = 1 on storage"): Spread(
        ("a checkpoint every",), "snapshot K", ("PLT", "of that at snapshot K = 1")
    ),
}
"""(part, title) of tables that are shown so."""


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
        "Made by `python benchmarks/sim_papers.py --write` from its own JSON; nothing here is written by hand. "
        "MoEvement is NSDI '26, MoEtion its first version (arXiv 2412.15411 v1), PEC arXiv 2408.04307. Every table has "
        "the paper's figure and ours; the notes below it give the reasons for differences. Long tables have several "
        "figures in a cell; intervals, K, W, stalls and lost tokens of each run are in "
        "[sim_papers.json](../benchmarks/results/sim_papers.json). Four reasons recur:",
        "1. **Inputs that no paper prints**: copy bandwidth, iteration time, skewness, failure trace. They are "
        "calibrated once (first table) or assumed in the configs, and nothing is fitted cell by cell. At the links' "
        "nominal rates nearly nothing would stall; the papers do not say what limits theirs.\n"
        "2. **The papers' own columns disagree** ([Table 3 against itself](#table-3-against-itself)), so a part of "
        "some differences is theirs.\n"
        "3. **The library counts bytes on the busiest rank**, where the papers' formulas treat all operators and all "
        "ranks as equal.\n"
        "4. **The simulator counts what closed forms leave out**: work that was not yet saved at a failure, the "
        "iteration that it cuts off, and loading.",
    ]
    for name, result in parts.items():
        text += [f"## {result['title']}", result["what"]]
        for one in result["tables"]:
            how = SPREAD.get((name, one["title"]))
            item = "" if how is None else f": {' / '.join(how.shown)}"
            text += [f"**{one['title']}{item}**"] if one["title"] else []
            text.append(_markdown_table(one) if how is None else spread(one, how))
        if "picture" in result:
            text.append(f"![{result['title']}]({images}/{result['picture']['name']}.png)")
        text += ["\n".join(f"- {note}" for note in result["notes"])] if result["notes"] else []
    return "\n\n".join(text) + "\n"


def _markdown_table(one: Mapping[str, Any]) -> str:
    rule = ["---" if form == "" else "--:" for form in one["formats"]]
    rows = [[shown(v, f) for v, f in zip(row, one["formats"], strict=True)] for row in one["rows"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [one["columns"], rule, *rows])


def spread(one: Mapping[str, Any], how: Spread) -> str:
    """A long table with a cell for each value of a column; what is not printed by the paper is a dash."""
    at = one["columns"].index
    values = list(dict.fromkeys(row[at(how.across)] for row in one["rows"]))
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in one["rows"]:
        texts = [shown(value, form) for value, form in zip(row, one["formats"], strict=True)]
        key = tuple(texts[at(name)] for name in how.by)
        lines.setdefault(key, {})[row[at(how.across)]] = " / ".join(texts[at(name)] for name in how.shown)
    form = one["formats"][at(how.across)]
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
