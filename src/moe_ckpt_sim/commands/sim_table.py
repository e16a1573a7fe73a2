"""Outcomes of simulated runs as tables: where the time of one run went, or a row per combination of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

from moe_ckpt.tables import PIPED_WIDTH, drawn
from moe_ckpt_sim.commands.sim_runs import PARTS, Result, Timespan
from moe_ckpt_sim.run.scenario import Outcome

MEANING = {
    "useful": "iterations that were kept",
    "stall": "training waited for checkpointing",
    "lost": "iterations that failures undid",
    "down": "failures noticed, ranks restarted",
    "idle": "no spare node was there",
    "retrieve": "loading a checkpoint",
    "replay": "computing windows again",
}
_BAR = 30
_SHORT_BAR = 12
"""Width of bars on a narrow terminal."""
_NONE = "-"


def one_table(result: Result, room: int = PIPED_WIDTH) -> tuple[list[str], list[list[str]]]:
    """The columns and rows that show where the time of a single run went, as means over its seeds.

    Args:
        room: Width of the terminal in columns.
    """
    wide = _BAR if room >= PIPED_WIDTH else _SHORT_BAR
    total = result.over_seeds(lambda one: one.spent.total).mean
    rows = []
    for part in PARTS:
        share = result.share(part)
        if part == "idle" and not share:
            continue
        bar = drawn("█", "#") * round(share * wide)
        rows.append([part, duration(share * total), _percent(share), bar.ljust(wide, drawn("·", ".")), MEANING[part]])
    return ["", "time", "share", "", "what it is"], rows


def one_facts(result: Result) -> str:
    """The sentence above the table of a single run."""
    first, ettr = result.first, result.over_seeds(lambda one: one.ettr)
    hours = duration(result.over_seeds(lambda one: one.spent.total).mean)
    facts = [
        f"ETTR {_spread(ettr, '{:.3f}')}",
        f"{_spread(result.over_seeds(lambda one: one.failures), '{:.0f}')} failures",
        _how_often(first),
        *_sources(result),
        *([] if first.k is None else [f"K = {_spread(_of(result, 'k'), '{:.0f}')}"]),
        f"{_spread(_stall(result), '{:.1f}')} ms of stall per iteration of {first.iteration_secs:.3g} s",
        f"lost tokens {_spread(result.over_seeds(lambda one: one.plt), '{:.2%}')}",
    ]
    seeds = "" if len(result.outcomes) == 1 else f", {len(result.outcomes)} seeds (least to most)"
    return f"{first.system}, {hours} simulated{seeds}: {'; '.join(facts)}"


def sweep_table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a sweep, one row per combination. Shares and K that no row has are left out."""
    keys = [key for key, _ in results[0].combination.varied if key != "policy"]
    parts = [part for part in PARTS if part != "useful"]
    columns = ["system", *keys, "ETTR", *parts, "failures", "every", "K", "PLT", "stall/iteration"]
    rows = [_row(result, keys, parts) for result in results]
    nothing = {**dict.fromkeys(parts, _percent(0.0)), "K": _NONE}
    differs = [any(row[at] != nothing.get(column) for row in rows) for at, column in enumerate(columns)]
    return list(compress(columns, differs)), [list(compress(row, differs)) for row in rows]


def _row(result: Result, keys: Sequence[str], parts: Sequence[str]) -> list[str]:
    varied = dict(result.combination.varied)
    return [
        result.first.system,
        *(varied[key] for key in keys),
        _spread(result.over_seeds(lambda one: one.ettr), "{:.3f}"),
        *(_percent(result.share(part)) for part in parts),
        _spread(result.over_seeds(lambda one: one.failures), "{:.0f}"),
        _how_often(result.first),
        _NONE if result.first.k is None else _spread(_of(result, "k"), "{:.0f}"),
        _spread(result.over_seeds(lambda one: one.plt), "{:.2%}"),
        f"{_spread(_stall(result), '{:.1f}')} ms",
    ]


def verdicts(results: Sequence[Result]) -> list[str]:
    """A sentence for each run that does not advance."""
    sentences = []
    for result in results:
        seeds = {} if len(result.outcomes) == 1 else {one.seed: f", seed {one.seed}" for one in result.outcomes}
        sentences += [
            f"{result.name}{seeds.get(one.seed, '')}: {one.verdict}" for one in result.outcomes if one.verdict
        ]
    return sentences


def duration(secs: float) -> str:
    """Format seconds: 5400 -> '1 h 30 min'; 75 -> '1 min 15 s'; 2.5 -> '2.5 s'."""
    if secs < 60:
        return f"{secs:.3g} s"
    minutes, rest = divmod(round(secs), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(round(secs / 60), 60)
    return f"{hours} h {minutes:02} min"


def _how_often(outcome: Outcome) -> str:
    """The window size or the interval between checkpoints, in words."""
    if outcome.window is not None:
        return f"W = {outcome.window}"
    return _NONE if outcome.interval is None else f"{outcome.interval} it."


SOURCES = {"host": "own memory", "peer": "peers", "storage": "storage"}


def _sources(result: Result) -> list[str]:
    """The numbers of recoveries by tier, for systems that recover from memory."""
    spans = {tier: result.over_seeds(lambda one, tier=tier: one.recovered[tier]) for tier in SOURCES}  # type: ignore[misc]
    if not (spans["host"].most or spans["peer"].most):
        return []
    return [
        "recovered from " + ", ".join(f"{label} {_spread(spans[tier], '{:.0f}')}" for tier, label in SOURCES.items())
    ]


def _stall(result: Result) -> Timespan:
    """Stall per iteration in milliseconds."""
    return result.over_seeds(lambda one: one.mean_stall_secs * 1e3)


def _of(result: Result, name: str) -> Timespan:
    figure: Callable[[Outcome], float] = lambda one: getattr(one, name) or 0  # noqa: E731
    return result.over_seeds(figure)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _spread(span: Timespan, form: str) -> str:
    """Format the mean, followed by the least and greatest value if they print differently."""
    mean, least, most = (form.format(value) for value in (span.mean, span.least, span.most))
    return mean if least == most else f"{mean} ({least} to {most})"
