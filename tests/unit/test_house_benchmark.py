"""The counts of ``benchmarks/house.py``, on sources whose counts are plain to see."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from benchmarks import house

SOURCE = '''"""A docstring
of two lines."""

import os
from dataclasses import (
    dataclass,
)

# A comment.


@dataclass
class Share:
    """Text."""

    step: int
    """A field's text."""
    found: str = "a # that is no comment"


def size(path):
    """Text."""
    text = """two
lines"""
    return len(text)  # both count
'''


def module(text: str) -> house.Module:
    return house.Module(Path("x.py"), text, ast.parse(text))


def test_lines_of_code_are_without_docstrings_comments_blank_lines_and_imports():
    assert module(SOURCE).lines == 25
    # @dataclass, class, two fields; def, the text's two lines, return
    assert module(SOURCE).code_lines == 8


def test_records_and_their_fields():
    (share,) = module(SOURCE).classes()
    assert house.is_record(share)
    assert house.fields_of(share) == ["step", "found"]


def test_bound_names_are_those_that_the_source_defines():
    assert sorted(module(SOURCE).bound_names()) == ["Share", "found", "path", "size", "step", "text"]


def test_the_library_is_counted(capsys):
    assert house.main(["--static"]) == 0
    shown = capsys.readouterr().out
    for label in ("lines of code", "record types of a snapshot", "options", "places that start threads"):
        assert label in shown


def test_a_run_is_traced():
    entered = house.traced("step")
    save, idle, resume = (entered[f"a {name}"] for name in ("warm step with a save", "warm step without", "resume"))
    assert 0 < len(idle) < len(save) < len(resume)
    counts = [sum(map(len, run.values())) for run in (idle, save, resume)]
    assert counts == sorted(counts)
    assert "Committer.commit" in save["commit/commit.py"]
    assert "commit/commit.py" not in idle
