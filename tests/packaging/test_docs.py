"""The documentation is whole: every public name is in the reference, every page can be reached, every message is real.

`make docs` builds the site from it, strictly; these tests need no Sphinx.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from moe_ckpt import errors
from tests.packaging import rules
from tests.packaging.test_public_surface import EXTRAS, SOURCE, SURFACE, has_host, require_host

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DIRECTIVE = re.compile(r"^\.\. auto(module|class|function|data):: (\S+)$", re.M)
PAGES = sorted((DOCS / "reference").glob("*.md"))
DIRECTIVES = [found for page in PAGES for found in DIRECTIVE.findall(page.read_text())]
TROUBLE = (DOCS / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.*)`$", TROUBLE, re.M)


def resolve(path):
    """The object that a directive names; AttributeError if there is none."""
    module, found = path, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            found.insert(0, name)
    for name in found:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("kind", "path"), DIRECTIVES, ids=lambda value: value)
def test_what_the_reference_names_is_there(kind, path):
    require_host(path)
    value = resolve(path)
    assert isinstance(value, type) == (kind == "class")
    assert kind == "data" or value.__doc__


@pytest.mark.parametrize("module", SURFACE)
def test_every_public_name_is_in_the_reference(module):
    require_host(module)
    named = {path for _, path in DIRECTIVES}
    described = [resolve(path) for path in named if has_host(path)]
    imported = importlib.import_module(module)
    for name in SURFACE[module].split():
        # A name that two packages export is described once.
        there = f"{module}.{name}" in named or any(getattr(imported, name) is value for value in described)
        assert there, f"docs/reference has no directive for {module}.{name}"


def test_no_name_is_described_twice():
    assert len({path for _, path in DIRECTIVES}) == len(DIRECTIVES)


def test_all_errors_are_in_the_reference():
    assert ("module", "moe_ckpt.errors") in DIRECTIVES


def test_every_page_is_in_a_table_of_contents():
    listed = {DOCS / "index.md"}
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S):
            entries = [line for line in block.splitlines() if line and not line.startswith(":")]
            names = [re.sub(r".*<(.*)>$", r"\1", line) for line in entries]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert {page for page in listed if not page.exists()} == set()
    pages = {*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("recipes/*/README.md")}
    assert pages - listed == set()


def anchors(page):
    """What links may name in it: as GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_links_lead_to_a_heading_that_is_there():
    dead = []
    for page in {*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("recipes/*/README.md")}:
        for target, anchor in re.findall(r"\]\(((?!https?:)[^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert dead == []


def named_in(line):
    """Paths below tests/ of the test files in one line: who stands without a directory is in that of the one before."""
    directory = None
    for found in re.findall(r"`(?:tests/)?((?:\w+/)?test_[\w*]+)(?:\.py)?`", line):
        folder, _, name = found.rpartition("/")
        directory = folder or directory
        assert directory is not None, f"{found} is in no directory: {line}"
        yield f"{directory}/{name}.py"


def test_tests_that_the_page_on_failures_names_are_there():
    """In the rows of its tables and below them."""
    lines = (DOCS / "failures.md").read_text().splitlines()
    named = [path for line in lines for path in named_in(line)]
    assert len(named) >= 60
    assert [path for path in named if not list((ROOT / "tests").glob(path))] == []


def test_tests_that_other_pages_name_are_there():
    pages = {*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("recipes/*/README.md")}
    named = {(page.name, path) for page in pages for path in re.findall(r"\btests/[\w/*]+\.py\b", page.read_text())}
    assert len(named) >= 20
    assert {(page, path) for page, path in named if not list(ROOT.glob(path))} == set()


def test_files_that_contributing_names_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = {
        path for span in re.findall(r"`([^`\n]+)`", text) for path in re.findall(r"[\w/.]+/[\w.]+\.(?:py|md)\b", span)
    }
    assert len(named) >= 20
    assert {
        path for path in named if not any((base / path).exists() for base in (ROOT, SOURCE, ROOT / "docs"))
    } == set()


def test_extras_that_pages_install_are_there():
    pages = {*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("recipes/*/README.md")}
    installed = {
        (page.name, extras) for page in pages for extras in re.findall(r"pip install .*\[([\w,]+)\]", page.read_text())
    }
    assert len(installed) >= 6
    assert {
        (page, extra) for page, extras in installed for extra in extras.split(",") if extra not in EXTRAS.split()
    } == set()


def messages():
    """Every text in the source, with a gap for each value that is put into it."""
    for module in rules.read_package(SOURCE):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_are_found_by_texts_that_the_code_has():
    said = list(messages())
    assert len(QUOTED) >= 20
    assert [text for text in QUOTED if not any(text in message for message in said)] == []


def test_errors_that_troubleshooting_names_are_there():
    named = set(re.findall(r"`(\w+Error)`", TROUBLE))
    assert named
    assert {name for name in named if not hasattr(errors, name)} == set()
