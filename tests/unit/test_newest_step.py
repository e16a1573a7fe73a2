"""``newest_step``: what a directory holds, asked before there is a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_ckpt import newest_step
from moe_ckpt.errors import NoCheckpointError
from tests.support.store_builder import example


def everything(root: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))}


def test_it_is_asked_of_places_that_hold_nothing(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert newest_step(tmp_path / "empty") is None
    assert newest_step(tmp_path / "absent") is None
    assert newest_step(str(tmp_path / "absent" / "deeper")) is None
    assert not (tmp_path / "absent").exists()


def test_it_reads_the_newest_manifest_and_changes_nothing(tmp_path: Path):
    run = example(tmp_path)
    before = everything(tmp_path)
    assert newest_step(tmp_path) == max(manifest.step for manifest in run.manifests.values())
    assert everything(tmp_path) == before


def test_it_passes_over_what_was_not_committed_or_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = example(tmp_path)
    newest, second, *_ = sorted(run.manifests.values(), key=lambda manifest: -manifest.step)
    (tmp_path / "step_00000099").mkdir()
    assert newest_step(tmp_path) == newest.step
    path = tmp_path / newest.directory / "MANIFEST.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert newest_step(tmp_path) == second.step
    assert newest.directory in caplog.text
    for manifest in run.manifests.values():
        (tmp_path / manifest.directory / "MANIFEST.json").write_bytes(b"{")
    with pytest.raises(NoCheckpointError, match=r"no checkpoint in .* is usable"):
        newest_step(tmp_path)
    for manifest in run.manifests.values():
        shutil.rmtree(tmp_path / manifest.directory)
    assert newest_step(tmp_path) is None, "a store that is new"
