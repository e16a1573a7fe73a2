"""The documentation's tables of memory are those of the measurements that are kept."""

from __future__ import annotations

import json

import pytest

from benchmarks import memory_tiers_docs
from benchmarks.report import RESULTS


def test_the_documentation_has_what_memory_tiers_kept():
    page, facts = memory_tiers_docs.PAGE, json.loads((RESULTS / "memory_tiers.json").read_text())
    wrong = [table for table in memory_tiers_docs.tables(facts) if table not in page.read_text()]
    assert wrong == [], "python benchmarks/memory_tiers.py --docs puts it there"


def test_memory_tiers_puts_its_tables_in_their_places(tmp_path):
    facts = json.loads((RESULTS / "memory_tiers.json").read_text())
    page = tmp_path / "page.md"
    page.write_text(memory_tiers_docs.PAGE.read_text())
    for sample in facts["recoveries"]["512"]["own memory"]:
        sample["first step"] = 12.345
    memory_tiers_docs.put(facts, page)
    assert page.read_text().count(" 12345 |") == 1
    before, after = memory_tiers_docs.PAGE.read_text().splitlines(), page.read_text().splitlines()
    assert next(line for line, was in zip(after, before, strict=True) if line != was).count("|") == 8
    del facts["recoveries"]["256"]
    facts["recoveries"]["7"] = facts["recoveries"]["512"]
    with pytest.raises(ValueError, match=r"has 0 tables that begin with .* 7 MiB"):
        memory_tiers_docs.put(facts, page)
