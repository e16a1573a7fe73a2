"""What pages show as printed by the program is what it prints, in its own words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_ckpt.cli.densify import summary
from moe_ckpt.core.step import Tier
from moe_ckpt.gradient_log.units import Device
from moe_ckpt.recovery.executing import plan_text
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery
from tests.packaging.test_docs import messages

DOCS = Path(__file__).parents[2] / "docs"
PLANS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"^```\n(recovery plan for .*?)\n```", page.read_text(), re.M | re.S))
]
GRADIENT_LOG = (DOCS / "gradient_log.md").read_text()
TIERS = {"memory": Tier.HOST, "peers": Tier.PEER, "storage": Tier.STORAGE}
ROW = r"  (\w+): (.+?) +(\d+)(?: to (\d+))? +(\d+) +(\d+) +([\d.]+) (B|KiB|MiB|GiB)"


def plan_of(text: str) -> RecoveryPlan:
    """A plan with the numbers of what a page shows."""
    head, _, *lines = text.splitlines()
    checkpoint = head.removeprefix("recovery plan for ").rstrip(":")
    rows = [found.groups() for line in lines if (found := re.fullmatch(ROW, line))]
    operators = [
        f"{'expert' if number < int(experts) else 'gate'}/{at}/{number}"
        for at, (*_, count, experts, _, _) in enumerate(rows)
        for number in range(int(count))
    ]
    sources, begin = [], 0
    for tier, place, oldest, newest, count, _, size, unit in rows:
        steps, nbytes = np.full(len(operators), ABSENT), np.zeros(len(operators), dtype=np.int64)
        mine = slice(begin, begin := begin + int(count))
        steps[mine], nbytes[mine.start] = int(newest or oldest), float(size) * 1024 ** "BKMG".index(unit[0])
        steps[mine.start] = int(oldest)
        sources.append(Inventory(TIERS[tier], place, steps, nbytes))
    plan = plan_recovery(checkpoint, int(checkpoint.removeprefix("step_")), tuple(operators), sources)
    updates = re.search(r"the \d+ updates of steps (\d+) to (\d+)", text)
    return plan if updates is None else replace(plan, updates=(int(updates[1]) - 1, int(updates[2])))


@pytest.mark.parametrize("text", PLANS)
def test_a_recovery_plan_is_what_is_printed(text):
    assert plan_text(plan_of(text)) == text


def test_plans_are_found():
    assert len(PLANS) >= 2


def test_densify_says_what_the_page_shows():
    [shown] = re.findall(r"^\$ moe-ckpt densify .*\n(.*):\nruns/x/step_", GRADIENT_LOG, re.M)
    printed = summary(1234, round(9.8 * 2**30), 4, Device("cpu", "x86_64 AVX512", 2))
    assert shown == printed


def test_the_page_on_hosts_has_the_tokens_that_the_results_have():
    rows = json.loads((DOCS.parent / "benchmarks" / "results" / "host_kills.json").read_text())["rows"]
    lines = (DOCS / "hosts.md").read_text().splitlines()
    assert all(len(row["kills"]) == 20 for row in rows)
    for row in (row for row in rows if row["policy"] == "MoC"):
        cell = f"{row['lost']:,} of {row['routed']:,}, {row['ranks']} rank{'s' * (row['ranks'] > 1)} |"
        assert any(line.endswith(cell) for line in lines), row["host"]
    for row in (row for row in rows if row["policy"] != "MoC"):
        assert row["wrong"] is None, row["host"]


def lines_shown():
    """What pages show as printed by a run; lines that a page wraps are one."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        for _, block in re.findall(r"^```(.*?)\n(.*?)^```$", page.read_text(), re.M | re.S):
            yield from re.findall(r"^(?:moe_ckpt: |(?=training stops ))(.{100,}\n(?!moe_ckpt: ).+|.*)", block, re.M)


def test_lines_that_pages_show_are_said_by_the_code():
    gaps = re.compile(r"%[\w,.]|\{\}")
    said = [
        re.compile(".*".join(re.escape(part.replace("%%", "%")) for part in gaps.split(text)), re.S)
        for text in messages()
        if len(gaps.sub("", text)) > 15
    ]
    shown = [" ".join(text.splitlines()) for text in lines_shown()]
    assert len(shown) >= 5
    assert [line for line in shown if not any(text.fullmatch(line) for text in said)] == []
