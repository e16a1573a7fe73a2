"""Pictures of simulated runs: ETTR against MTBF, where time went, goodput over time, lost tokens and K over time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.errors import MissingPackageError
from moe_ckpt_sim.commands.sim_runs import PARTS, Result
from moe_ckpt_sim.run.scenario import Outcome, Sample

COLOURS = {
    "useful": "#2f7d4f",
    "stall": "#e0a030",
    "lost": "#c2403a",
    "down": "#8a8a8a",
    "idle": "#c9c9c9",
    "retrieve": "#6f5aa8",
    "replay": "#3a7fc2",
}
INTERVALS = 36
"""Parts of a run over which goodput is averaged: ten minutes each in six hours."""
MOST_LINES = 10
"""Lines in one plot over time; further ones are left out, and the title says so."""
LONGEST_NAME = 150
"""Letters in a file name that say what was varied; file systems allow 255 with prefix and suffix."""


def require_matplotlib() -> None:
    """Raise ``MissingPackageError`` if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("matplotlib", "moe-ckpt simulate --plot", "plot") from error


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Draw the plots that the results have data for: file name without suffix -> figure.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require_matplotlib()
    drawn = {"where_time_went": where_time_went(results)}
    lines = by_mtbf(results)
    if any(len(points) > 1 for points in lines.values()):
        drawn["ettr_over_mtbf"] = ettr_over_mtbf(lines)
    for name, members in panels(results).items():
        end = f"_{name}" if name else ""
        drawn[f"goodput{end}"] = goodput_over_time(members)
        if any(one.first.lost_tokens or one.first.k is not None for one in members):
            drawn[f"lost_tokens{end}"] = lost_tokens_over_time(members)
    return drawn


# --- which results go together ---


def by_mtbf(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results that differ only in their MTBF into lines, sorted by MTBF."""
    lines: dict[str, list[Result]] = {}
    for one in results:
        if one.mtbf_secs is not None:
            rest = [f"{key}={value}" for key, value in one.combination.varied if key not in ("policy", *_MTBF_KEYS)]
            lines.setdefault(", ".join((one.first.system, *rest)), []).append(one)
    return {name: sorted(points, key=lambda one: one.mtbf_secs or 0.0) for name, points in lines.items()}


_MTBF_KEYS = ("failures", "failures.mtbf_secs")


def panels(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results that differ only in their policy, one plot over time for each group, under its file name."""
    members: dict[tuple[str, ...], list[Result]] = {}
    for one in results:
        rest = [f"{key}={value}" for key, value in one.combination.varied if not key.startswith("policy")]
        members.setdefault(tuple(rest), []).append(one)
    names = _file_names(["_".join(rest) for rest in members])
    return dict(zip(names, members.values(), strict=True))


def _file_names(texts: Iterable[str]) -> list[str]:
    """Make file names that any file system accepts, not too long and distinct even if case is ignored."""
    names: list[str] = []
    for text in texts:
        name = stem = re.sub(r"[^A-Za-z0-9.=_-]+", "_", text)[:LONGEST_NAME]
        number = 1
        while name.lower() in map(str.lower, names):
            number += 1
            name = f"{stem}_{number}"
        names.append(name)
    return names


# --- arithmetic ---


def goodput(outcome: Outcome, intervals: int = INTERVALS) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Compute the goodput over time: (edges of equal intervals in seconds [n + 1], goodput in each [n]).

    Goodput is the iterations that an interval gained for good, over those of as much time without failures and stalls.
    Progress is sampled at repaired failures and taken as even in between. Iterations that are lost later do not count.
    """
    samples = lasting_samples(outcome.history)
    at = np.array([0.0, *(one.at_secs for one in samples)])
    steps = np.array([0.0, *(float(one.useful_steps) for one in samples)])
    edges = np.linspace(0.0, at[-1], intervals + 1)
    gained = np.diff(np.interp(edges, at, steps))
    width = at[-1] / intervals
    return edges, gained * outcome.iteration_secs / width if width else np.zeros(intervals)


def lasting_samples(history: Sequence[Sample]) -> list[Sample]:
    """The samples whose iterations no later failure undid, in order of time."""
    samples: list[Sample] = []
    for sample in history:
        while samples and samples[-1].useful_steps > sample.useful_steps:
            samples.pop()
        if not samples or sample.at_secs > samples[-1].at_secs:
            samples.append(sample)
    return samples


# --- drawing ---


def _figure(width: float, height: float) -> Any:
    """Make a figure without pyplot, which would use a window system and stay open."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def where_time_went(results: Sequence[Result]) -> Any:
    """Draw a bar per result, stacked by ``PARTS``."""
    figure = _figure(9.0, 1.6 + 0.36 * len(results))
    ax = figure.subplots()
    names, starts = [one.name for one in results], np.zeros(len(results))
    rows = np.arange(len(results))
    for part in PARTS:
        shares = np.array([one.share(part) for one in results])
        if shares.any():
            ax.barh(rows, shares, left=starts, color=COLOURS[part], label=part, height=0.7)
        starts += shares
    for row, one in enumerate(results):
        text = f"{one.over_seeds(lambda outcome: outcome.ettr).mean:.3f}"
        ax.text(0.01, row, text, va="center", color="white", fontsize=8)
    ax.set_yticks(rows, names, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="portion of time", title="Where time went; the number is the ETTR")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def ettr_over_mtbf(lines: Mapping[str, Sequence[Result]]) -> Any:
    """Draw a line per system and setting, with the range over the seeds."""
    figure = _figure(7.0, 4.5)
    ax = figure.subplots()
    ticks = sorted({one.mtbf_secs for points in lines.values() for one in points if one.mtbf_secs})
    for name, points in lines.items():
        secs = [one.mtbf_secs for one in points]
        spans = [one.over_seeds(lambda outcome: outcome.ettr) for one in points]
        (line,) = ax.plot(secs, [one.mean for one in spans], marker="o", markersize=4, label=name)
        ax.fill_between(
            secs, [one.least for one in spans], [one.most for one in spans], color=line.get_color(), alpha=0.15
        )
    ax.set_xscale("log")
    ax.set_xticks(ticks, [_time(secs) for secs in ticks])
    ax.minorticks_off()
    ax.set(xlabel="mean time between failures", ylabel="ETTR", title="Effective training time")
    _finish(ax)
    return figure


def goodput_over_time(results: Sequence[Result]) -> Any:
    """Draw goodput in intervals above and iterations done below, of each result's first seed. Dots are failures."""
    figure = _figure(9.0, 6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    for one in results[:MOST_LINES]:
        edges, portions = goodput(one.first)
        (line,) = above.step(edges / 3600, [*portions, portions[-1]], where="post", label=one.name, linewidth=1.2)
        hours, steps = _over_time(one.first, "useful_steps")
        below.plot([0.0, *hours], [0.0, *steps], marker=".", markersize=3, linewidth=1.0, color=line.get_color())
    above.set(ylabel="goodput", title=_title("Goodput, as a portion of that without failures", results))
    above.set_ylim(bottom=0)
    below.set(xlabel="hours", ylabel="iterations done", ylim=(0, None))
    _finish(above)
    below.grid(alpha=0.3)
    return figure


def lost_tokens_over_time(results: Sequence[Result]) -> Any:
    """Draw PLT above and K below, of each result's first seed."""
    figure = _figure(9.0, 6.0)
    above, below = figure.subplots(2, 1, sharex=True)
    for one in results[:MOST_LINES]:
        hours, portions = _over_time(one.first, "plt")
        # The first sample is that of the first failure, and no tokens are lost before.
        (line,) = above.step([0.0, *hours], [0.0, *(100 * portions)], where="post", label=one.name)
        if one.first.k is not None:
            below.step(*_over_time(one.first, "k"), where="post", color=line.get_color())
    above.set(ylabel="lost tokens, % (PLT)", title=_title("Tokens that failures lost", results))
    below.set(xlabel="hours", ylabel="experts per layer saved (K)", ylim=(0, None))
    _finish(above)
    below.grid(alpha=0.3)
    return figure


def _over_time(outcome: Outcome, field: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Hours and values of the samples that have the field."""
    points = [(one.at_secs / 3600, getattr(one, field)) for one in outcome.history if getattr(one, field) is not None]
    table = np.array(points, dtype=np.float64).reshape(len(points), 2)
    return table[:, 0], table[:, 1]


def _title(text: str, results: Sequence[Result]) -> str:
    seed = f" (seed {results[0].first.seed})" if len(results[0].outcomes) > 1 else ""
    more = len(results) - MOST_LINES
    return f"{text}{seed}" + (f"; {more} more not drawn" if more > 0 else "")


def _finish(ax: Any) -> None:
    ax.grid(alpha=0.3)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)


def _time(secs: float) -> str:
    if secs < 60:
        return f"{secs:.3g} s"
    return f"{secs / 60:.3g} min" if secs < 7200 else f"{secs / 3600:.3g} h"
