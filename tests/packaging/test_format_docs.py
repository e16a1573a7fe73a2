"""docs/format.md says what the code does: its snippet reads a store, and its tables name every field."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import FileRecord, LayerRecord, Manifest, ModelRecord, Part, PartRecord, StateRecord
from moe_ckpt.format.run_records import Finished, Identity
from moe_ckpt.format.sealed import unseal
from moe_ckpt.format.shard import TORCH_DTYPES
from tests.support.store_builder import TinyRun, example

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "format.md").read_text()


OPTIONAL = {"window", "not_finite"}
"""Fields that not every manifest has."""
FROM_PARTS = {"files", "operators", "states"}
"""Fields of a manifest that its document does not have."""


def section(title):
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found, f"docs/format.md has no section {title!r}"
    return found[1]


def snippet():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    namespace = {}
    exec(compile(code, "docs/format.md", "exec"), namespace)
    return namespace["read_by_hand"]


@pytest.mark.parametrize("sharded", [False, True])
def test_the_snippet_reads_every_tensor_of_a_partial_checkpoint(tmp_path, sharded):
    run = example(tmp_path, sharded=sharded)
    read = snippet()
    for key, expected in run.views["step_00000003"].items():
        assert torch.equal(read(tmp_path, key), expected), key


def test_the_snippet_takes_the_newest_life_of_the_run(tmp_path):
    run = TinyRun(tmp_path)
    run.save(1)
    run.save(2)
    directory = run.save(1, generation=1)
    key = "model/embed.weight"
    assert torch.equal(snippet()(tmp_path, key), run.views[directory][key])


def test_the_snippet_is_as_short_as_promised():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    body = code[code.index("def ") :].strip().splitlines()
    assert len(body) <= 15


@pytest.mark.parametrize(
    ("title", "record"),
    [
        ("store.json", Identity),
        ("finished.json", Finished),
        ("MANIFEST.json", Manifest),
        ("MANIFEST.json", ModelRecord),
        ("MANIFEST.json", LayerRecord),
        ("MANIFEST.json", PartRecord),
        ("PART.json", Part),
        ("PART.json", FileRecord),
        ("PART.json", StateRecord),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_field_is_described(title, record):
    named = set(re.findall(r"`([^`\s]+)`", section(title)))
    derived = {Manifest: FROM_PARTS, FileRecord: {"path", "step"}, StateRecord: {"path"}}.get(record, set())
    assert {field.name for field in fields(record)} - derived <= named


def test_fields_that_the_code_does_not_have_are_not_described(tmp_path):
    run = TinyRun(tmp_path)
    path = tmp_path / run.save(1) / "MANIFEST.json"
    for name, optional in (("MANIFEST.json", OPTIONAL), ("PART.json", set())):
        table = re.findall(r"^\| (`.*?) \|", section(name), re.M)
        described = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
        assert described - optional == set(unseal(path.with_name(name).read_bytes(), name))


def test_state_file_fields_are_described(tmp_path):
    run = TinyRun(tmp_path)
    path = tmp_path / run.save(1) / "rank_00000_state.json"
    named = set(re.findall(r"`([^`\s]+)`", section("State files")))
    assert set(unseal(path.read_bytes(), "s")) <= named


def test_versions_and_element_types():
    assert TEXT.startswith(f"# On-disk format, version {FORMAT_VERSION}\n")
    listed = re.search(r"Element types: `(.*?)`", TEXT)[1].split()
    assert listed == list(TORCH_DTYPES)


def test_links_in_the_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
