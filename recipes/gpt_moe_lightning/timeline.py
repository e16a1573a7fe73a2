"""What the time of each run was spent on: new iterations, iterations computed again, and starts after a kill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipes.gpt_moe_lightning.summary import RunSummary

NEW, AGAIN, DOWN = "computed", "computed again", "down after a kill"
COLOURS = {NEW: "#009E73", AGAIN: "#D55E00", DOWN: "#bbbbbb"}
TIMELINE_TEXT = (
    "The same training run several times: without failures, and under several policies, killed at the same iterations. "
    "Green: iterations computed for the first time. Orange: computed again. Grey: no training, from a kill to the "
    "first iteration after it. At the right, what the kills cost."
)


@dataclass(frozen=True)
class Span:
    """kind: a key of ``COLOURS``. begin, end: in seconds since training began."""

    kind: str
    begin: float
    end: float


def spans(run: RunSummary) -> list[Span]:
    """What rank 0 did, from the begin of its training to its last iteration; spans of one kind are joined."""
    joined: list[Span] = []
    began = at = None
    reached = 0
    for record in run.records:
        if record.get("event") == "training":
            kind = DOWN
        elif "train/loss" in record:
            kind = NEW if record["step"] > reached else AGAIN
            reached = max(reached, record["step"])
        else:
            continue
        if began is None or at is None:
            began = at = record["time"]
            continue
        begin, at = at, record["time"]
        if joined and joined[-1].kind == kind:
            joined[-1] = Span(kind, joined[-1].begin, at - began)
        else:
            joined.append(Span(kind, begin - began, at - began))
    return joined


def cost(run: RunSummary, baseline: RunSummary) -> str:
    """What the kills of a run cost, in a line."""
    if run is baseline:
        return "no kill"
    lost = f"{run.plt:.2%} of tokens lost" if run.lost_tokens else "no token lost"
    same = "same bits" if run.same_as(baseline) else "other bits"
    return f"{run.recomputed} iterations again, {lost}, {same}"


def draw_timeline(axes: Any, runs: Sequence[RunSummary]) -> None:
    """A bar for each run, with a mark at each kill, and the cost at the right."""
    drawn = [spans(run) for run in runs]
    longest = max((item[-1].end for item in drawn if item), default=1.0)
    for row, (run, pair) in enumerate(zip(runs, drawn, strict=True)):
        for span in pair:
            axes.barh(row, span.end - span.begin, left=span.begin, color=COLOURS[span.kind], height=0.6)
            if span.kind == DOWN:
                axes.plot(span.begin, row, marker="X", markersize=11, color="black", markeredgecolor="white")
        axes.text(longest * 1.02, row, cost(run, runs[0]), va="center", fontsize=10)
    axes.set_yticks(range(len(runs)), [run.title for run in runs], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, longest)
    axes.set_xlabel("seconds since training began")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for kind, colour in COLOURS.items():
        axes.bar(0, 0, color=colour, label=kind)
    axes.plot([], [], "kX", markersize=9, label="kill -9")
    axes.figure.legend(frameon=False, ncols=4, loc="outside upper center")


def timeline_alternative(runs: Sequence[RunSummary]) -> str:
    """What the picture shows, for those who do not see it."""
    sentences = [f"{run.title}: {cost(run, runs[0])}" for run in runs]
    return f"A bar of seconds for each run, with its kills and what they cost. {'; '.join(sentences)}."
