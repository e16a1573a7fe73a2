"""What the benchmarks of bubbles and of bytes sent say, and that the docs have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bubbles, sent_bytes
from benchmarks.bubbles_rank import NONE, OFF, ON

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "moetion.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def iteration(cycle: int, way: str, secs: float, in_bubbles: int = 0) -> dict:
    moved = {"copied": 10, "copied_in_bubbles": in_bubbles, "sent": 0, "sent_in_bubbles": 0}
    return {"cycle": cycle, "way": way, "wall": secs, "cpu": secs, "stall": 0.0, **moved}


def test_ways_are_compared_within_a_cycle():
    """The machine gets slower and slower; saving costs a half, and gating a tenth of what is then."""
    cost = {NONE: 1.0, OFF: 1.5, ON: 1.65}
    found = {
        way: [[[iteration(cycle, way, secs * 2.0**cycle, 5)] * bubbles.STAGES for cycle in range(4)]]
        for way, secs in cost.items()
    }
    made = bubbles.summary(found)
    assert made["on_over_off"]["wall"] == pytest.approx([1.1] * 4)
    rows = {row["way"]: row for row in made["rows"]}
    assert rows[ON]["copied_in_bubbles"] == 0.5
    assert rows[OFF]["of_none"] == pytest.approx(1.5)


SENT = json.loads((RESULTS / "sent_bytes.json").read_text())["rows"]


@pytest.mark.parametrize("row", [row for row in SENT if row["policy"] == "MoEtion"], ids=lambda row: row["case"])
def test_the_docs_have_what_was_sent(row):
    sent = (f"{row[way]['sent'] / 1024:,.0f}" for way in ("off", "on"))
    assert f"| {row['case']} | {' | '.join(sent)} | {row['saved']:.1%} |".replace("%", " %") in DOCS


def test_the_docs_have_how_much_less_gradients_are():
    sent = {(row["case"], row["policy"]): row["on"]["sent"] for row in SENT}
    for case in ("Lightning FSDP2", "the same, distributed optimizer"):
        gain = sent[case, "MoEtion, 6 of 8"] / sent[case, "MoEtion, 6 of 8, gradients"]
        assert f"{gain:.1f} times fewer bytes" in DOCS


def test_what_is_not_sent_was_had():
    for row in SENT:
        assert row["off"]["sent"] - row["on"]["sent"] == pytest.approx(row["on"]["saved"], rel=0.05, abs=2000), row
    assert sent_bytes.PAPER == 0.4


def test_the_docs_have_what_gating_costs():
    found = json.loads((RESULTS / "bubbles.json").read_text())["found"]
    assert f"iterations take {bubbles.spread(found[bubbles.COMPUTE]['on_over_off']['wall'])} times as long" in DOCS
    assert all(row["copied_in_bubbles"] == 1 for kind in found.values() for row in kind["rows"] if row["way"] == ON)
