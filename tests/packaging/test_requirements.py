"""The versions that the project says it works with are those that its tests can be run with."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = ("dependencies", "lightning", "hydra", "recipes", "plot", "megatron")


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


def test_make_takes_no_environment_that_has_another_checkout_installed(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for checkout in (here, elsewhere):
        checkout.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints-cpu.txt"):
            shutil.copy(ROOT / name, checkout)
    python, info = here / "venv/bin/python", here / "venv/lib/python3.11/site-packages/moe_ckpt-0.1.0.dist-info"
    for path in (python, info):
        path.parent.mkdir(parents=True)
    info.mkdir()
    python.write_text("#!/bin/sh\necho checked\n")
    python.chmod(0o700)
    (info / "direct_url.json").write_text(f'{{"dir_info": {{"editable": true}}, "url": "file://{here}"}}')
    (here / "venv/.moe_ckpt_installed").touch()

    def make(checkout):
        command = ["make", "--no-print-directory", "lint", f"VENV={here}/venv"]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)

    assert make(here).stdout == "checked\n"
    refused = make(elsewhere)
    assert refused.returncode != 0
    assert f"has the sources of {here} installed, not those of {elsewhere}" in refused.stderr
    (here / "pyproject.toml").unlink()  # as of a checkout that was moved
    (here / "venv/.moe_ckpt_installed").touch()
    assert make(elsewhere).returncode == 0
