"""Documents that have grown: nobody reads them whole, and none costs more memory than a document may need."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import tracemalloc

import numpy as np
import pytest

from moe_ckpt.errors import DamagedError, StoreError
from moe_ckpt.format.manifest import parse_step_dir, step_dir
from moe_ckpt.format.sealed import seal
from moe_ckpt.policies import MoC
from moe_ckpt.reading.reader import StoreReader, newest_good
from moe_ckpt.run.documents import read_header, read_manifest, read_parts, read_sealed
from moe_ckpt.session.opening import describe_differences
from moe_ckpt.storage import LocalStorage
from tests.support.collecting import clean_start
from tests.support.store_builder import example
from tests.support.verifying import verify_store
from tests.unit.builders import catalog
from tests.unit.engine_parts import PATIENCE_SECS, Life

NEWEST = "step_00000003/MANIFEST.json"
SIZES = (8 << 20, 900 << 20, 3 << 30, 1 << 40)
"""Of sparse files, which take no room on the disk."""


def grow(root, name, nbytes):
    try:
        os.truncate(root / name, nbytes)
    except OSError:
        pytest.skip("the file system has no files of this size")


@pytest.fixture
def memory():
    """Peak of what is allocated from here on, in bytes."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_grown_manifest_is_damage_that_costs_nothing(tmp_path, nbytes, memory):
    example(tmp_path)
    grow(tmp_path, NEWEST, nbytes)
    storage = LocalStorage(tmp_path)
    for read in (read_sealed, lambda storage, path: read_manifest(storage, "step_00000003", {})):
        with pytest.raises(DamagedError, match=r"more than a sealed file may have|does not begin and end like"):
            read(storage, NEWEST)
    assert clean_start(storage).damaged == ("step_00000003",)
    assert newest_good(StoreReader(storage)).directory == "step_00000002"
    assert [damage.path for damage in verify_store(storage)] == [NEWEST]
    assert "w of" in describe_differences(storage, ["step_00000002", "step_00000003"], {"w": (1,)})
    assert memory() < 32 << 20


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_grown_part_is_damage_to_all_that_need_it(tmp_path, nbytes, memory):
    example(tmp_path)
    part = "step_00000002/PART.json"
    grow(tmp_path, part, nbytes)
    storage = LocalStorage(tmp_path)
    assert clean_start(storage).damaged == ("step_00000002", "step_00000003")
    assert newest_good(StoreReader(storage)).directory == "step_00000001"
    [damage] = verify_store(storage)
    assert (damage.path, damage.step, damage.affects) == (part, 2, ("step_00000002", "step_00000003"))
    assert memory() < 32 << 20


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("name", ["store.json", "step_00000003/rank_00000_state.json"])
def test_so_are_a_grown_store_file_and_a_grown_state_file(tmp_path, name, nbytes, memory):
    example(tmp_path)
    grow(tmp_path, name, nbytes)
    assert name in {damage.path for damage in verify_store(LocalStorage(tmp_path))}
    assert memory() < 32 << 20


@pytest.mark.parametrize("nbytes", SIZES)
def test_opening_a_store_whose_documents_have_grown(tmp_path, nbytes, memory):
    example(tmp_path)
    for name in ("store.json", NEWEST):
        grow(tmp_path, name, nbytes)
    life = Life(LocalStorage(tmp_path), catalog(1, 4))
    with pytest.raises(StoreError, match="another model"):
        life.session.open()
    assert life.session._run.lock._taken is None
    assert memory() < 32 << 20


def test_a_step_directory_is_no_store(tmp_path):
    example(tmp_path)
    step = tmp_path / "step_00000003"
    files = {path.name: path.stat().st_mtime_ns for path in step.iterdir()}
    life = Life(LocalStorage(step), catalog(1, 4))
    with pytest.raises(StoreError, match=f"{step} is one checkpoint, step_00000003, of the store {tmp_path}: name"):
        life.session.open()
    assert life.session._run.lock._taken is None
    assert {path.name: path.stat().st_mtime_ns for path in step.iterdir()} == files


def test_a_header_is_read_only_where_it_may_be_one(tmp_path, memory):
    run = example(tmp_path)
    record = run.manifests["step_00000003"].files[0]
    grow(tmp_path, record.path, 1 << 40)
    storage = LocalStorage(tmp_path)
    with pytest.raises(DamagedError, match="the manifest says"):
        read_header(storage, record)
    with pytest.raises(DamagedError, match="cannot have a header"):
        read_header(storage, dataclasses.replace(record, nbytes=1 << 40, header_nbytes=1 << 39))
    assert memory() < 32 << 20


def test_a_large_document_is_read_like_any_other(tmp_path):
    (tmp_path / "d").write_bytes(seal({"text": "x" * (6 << 20)}))
    assert len(read_sealed(LocalStorage(tmp_path), "d")) > 6 << 20


class SlowStorage(LocalStorage):
    """Parts are given when four are asked for at once. most: so many reads were under way at once."""

    def __init__(self, root, secs=0.005):
        super().__init__(root)
        self.secs = secs
        self.most, self.busy, self.read_paths, self._changed = 0, 0, [], threading.Condition()

    def read(self, path, offset=0, nbytes=None):
        with self._changed:
            self.busy += 1
            self.most = max(self.most, self.busy)
            self.read_paths.append(path)
            self._changed.notify_all()
            if path.endswith("PART.json"):
                assert self._changed.wait_for(lambda: self.most >= 4, PATIENCE_SECS), "parts are read one by one"
        time.sleep(self.secs)  # for more than sixteen to come, if they do
        with self._changed:
            self.busy -= 1
        return super().read(path, offset, nbytes)


def a_round_of_parts(root, parts):
    with Life(LocalStorage(root), model=catalog(1, parts), policy=MoC(k=1)) as life:
        life.counts = np.ones((1, parts), dtype=np.int64)
        life.go(parts + 1, settle=True)
    return step_dir(parts + 1, 0)


def both_ways(storage, newest):
    """Parts are read by rank 0, which collects, and by whoever opens the store."""
    yield lambda: read_manifest(storage, newest, {})
    reader = StoreReader(storage)
    yield lambda: reader.manifest(newest)


def test_parts_are_read_several_at_a_time(tmp_path):
    newest = a_round_of_parts(tmp_path, 40)
    storage = SlowStorage(tmp_path)
    for load in both_ways(storage, newest):
        storage.most, storage.read_paths = 0, []
        manifest = load()
        assert len(manifest.parts) == 40
        paths = [path for path in storage.read_paths if path.endswith("PART.json")]
        assert sorted(paths) == sorted(part.path for part in manifest.parts), "each once"
        assert 4 <= storage.most <= 16


def test_the_first_damaged_part_is_named_whichever_is_read_first(tmp_path):
    """The newest of those that are damaged, as when they were read one after the other."""
    newest = a_round_of_parts(tmp_path, 40)
    parts = read_manifest(LocalStorage(tmp_path), newest, {}).parts
    for record in parts[7:]:
        with open(tmp_path / record.path, "r+b") as file:
            file.seek(90)
            file.write(b"damage")
    (tmp_path / parts[5].path).unlink()
    storage = SlowStorage(tmp_path, secs=0.1)  # long enough to decode the damaged one meanwhile, on a busy machine
    for load in both_ways(storage, newest):
        storage.read_paths = []
        with pytest.raises(DamagedError, match="is missing") as caught:
            load()
        assert caught.value.path == parts[5].path
        assert caught.value.step == parse_step_dir(parts[5].directory)[0]
        assert len(storage.read_paths) < 40, "no more are begun once one is damaged"


def test_a_part_of_another_format_is_named_with_its_step(tmp_path):
    """Its checksum is right: it was written so."""
    newest = a_round_of_parts(tmp_path, 3)
    manifest = read_manifest(LocalStorage(tmp_path), newest, {})
    known = {}
    with pytest.raises(DamagedError, match="is a 'nothing'") as caught:
        read_parts(manifest, known, lambda record: seal({"kind": "nothing"}))
    assert (caught.value.path, caught.value.step) == (manifest.parts[0].path, 4)
    assert known == {}
