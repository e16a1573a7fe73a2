"""The versions that the project says it works with are those that its tests can be run with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = ("dependencies", "lightning", "hydra", "cli", "plot", "megatron")


def lower_bounds(table: str) -> dict[str, str]:
    """Name -> oldest release that pyproject.toml accepts, of one list of requirements."""
    listed = re.search(rf"^{table} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None, table
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)', listed[1]))


def test_the_oldest_releases_that_are_tested_are_the_oldest_that_are_accepted():
    accepted = {name: version for table in TESTED for name, version in lower_bounds(table).items()}
    pinned = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))
    parts = {name: [*map(int, version.split(".")), 0, 0][:3] for name, version in accepted.items()}
    assert {name: [*map(int, version.split("."))] for name, version in pinned.items()} == parts


def test_the_readme_names_the_oldest_releases():
    accepted = {**lower_bounds("dependencies"), **lower_bounds("lightning"), **lower_bounds("megatron")}
    text = (ROOT / "README.md").read_text()
    for name, package in (("torch", "torch"), ("Lightning", "lightning"), ("megatron-core", "megatron-core")):
        assert f"{name} {accepted[package]} or newer" in text
