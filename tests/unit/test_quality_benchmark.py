"""The docs have what the committed runs of ``quality.py`` and ``quality_grid.py`` found."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from benchmarks.quality import BOOST, MLT, QUALITY, paired_t, result_of
from benchmarks.quality_grid import RESULT

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NEVER = QUALITY[0].name
Runs = list[dict[str, Any]]
STUDENT_2 = 4.303
"""Student's t at 95 %, both sides, with two degrees of freedom."""


def docs(name: str) -> str:
    """In one line, since a sentence may be broken anywhere."""
    return " ".join((ROOT / "docs" / f"{name}.md").read_text().split())


def runs_of(comparison: str | None) -> dict[str, Runs]:
    return json.loads((RESULTS / result_of(comparison)).read_text())["arms"]


def chance(runs: dict[str, Runs]) -> float:
    return stdev(each["val_loss"] for each in runs[NEVER])


def gaps(runs: dict[str, Runs], arm: str) -> list[float]:
    """Loss of each seed less that of the same seed without failures."""
    return [one["val_loss"] - other["val_loss"] for one, other in zip(runs[arm], runs[NEVER], strict=True)]


def signed(number: float) -> str:
    return f"{number:+.4f}".replace("-", "\N{MINUS SIGN}")


def told_of(pairs: list[float]) -> str:
    return f"{signed(mean(pairs))}, t = {paired_t(pairs):.1f}"


def percent(portion: float, digits: int = 0) -> str:
    return f"{portion:.{digits}%}".replace("%", " %")


def made_up(runs: Runs) -> float:
    """Of the tokens that these runs lost."""
    return 1 - sum(each["owed_tokens"] for each in runs) / sum(each["lost_tokens"] for each in runs)


@pytest.mark.parametrize("number", range(0, len(MLT), 2), ids=lambda at: MLT[at].name.removesuffix(", no boost"))
def test_the_docs_have_losses_over_mlt(number):
    runs = runs_of("mlt")
    plain, boosted = (MLT[number + at].name for at in (0, 1))
    both = runs[plain] + runs[boosted]
    cells = [percent(mean(each[what] for each in both), 1) for what in ("mlt_worst", "plt")]
    cells += [told_of([*gaps(runs, plain), *gaps(runs, boosted)]), percent(made_up(runs[boosted]))]
    assert f"| {' | '.join(cells)} |" in docs("moetion")


def test_the_docs_have_what_chance_is_in_runs_over_mlt():
    runs = runs_of("mlt")
    assert f"loss differs by {chance(runs):.4f} between seeds" in docs("moetion")
    beyond = [gap for arm in MLT[2:] for gap in gaps(runs, arm.name)]
    assert min(beyond) > 0
    assert f"from 2 % on, the loss was higher in all of {len(beyond)} runs" in docs("moetion")


def test_the_docs_have_losses_with_and_without_a_boost():
    runs = runs_of("boost")
    [gap] = {f"{mean(gaps(runs, arm.name)):.4f}" for arm in BOOST}
    worst = [each["mlt_worst"] for arm in BOOST for each in runs[arm.name]]
    found = [made_up([each]) for each in runs[BOOST[1].name]]
    said = docs("moetion")
    assert f"validation loss is {gap} higher than that of the same seeds" in said
    pairs = [gap for arm in BOOST for gap in gaps(runs, arm.name)]
    assert f"no more than chance (t = {paired_t(pairs):.1f} over six pairs)" in said
    assert f"worst MLT {100 * min(worst):.0f} to {percent(max(worst))}" in said
    assert f"{100 * min(found):.0f} to {percent(max(found))} of the lost tokens were made up" in said


@pytest.mark.parametrize(("arm", "name"), zip(QUALITY[1:], ("within the budget", "budget broken"), strict=True))
def test_the_docs_have_losses_within_a_budget_and_beyond(arm, name):
    runs = runs_of(None)
    plt = " ".join(percent(each["plt"], 1 if each["plt"] < 0.1 else 0) for each in runs[arm.name])
    pairs = gaps(runs, arm.name)
    assert f"| {name} | {plt} | {mean(pairs):+.4f} (mean), t = {paired_t(pairs):.1f} |" in docs("moc")
    half = STUDENT_2 * stdev(pairs) / 3**0.5
    assert name == "budget broken" or f"could show none below {half:.4f} (95 %)" in docs("moc")
    assert f"The seeds alone differ by {chance(runs):.4f}" in docs("moc")
    [costly] = [each for each in range(0, len(MLT), 2) if "1 of 8 every 1," in MLT[each].name]
    mlt = runs_of("mlt")
    pairs = [gap for at in (0, 1) for gap in gaps(mlt, MLT[costly + at].name)]
    lost = mean(each["plt"] for at in (0, 1) for each in mlt[MLT[costly + at].name])
    said = f"at a PLT of {percent(lost, 1)}, end {mean(pairs):.4f} higher (t = {paired_t(pairs):.1f} over six pairs)"
    assert said in docs("moc")


@pytest.mark.parametrize(
    "cell", json.loads((RESULTS / RESULT).read_text())["cells"], ids=lambda c: f"{c['k']}-{c['every']}"
)
def test_the_docs_have_losses_over_k_and_interval(cell):
    spread = json.loads((RESULTS / RESULT).read_text())["chance"]
    cells = [str(cell["k"]), str(cell["every"]), f"{cell['plt']:.2%}", f"{cell['gap']:+.4f}"]
    assert f"| {' | '.join(cells)} | {cell['gap'] / spread:+.1f} |" in docs("simulator_papers")
