"""Documents that have grown: nobody reads them whole, and none costs more memory than a document may need."""

from __future__ import annotations

import dataclasses
import os
import tracemalloc

import pytest

from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.engine.collect import clean_start
from moe_ckpt.engine.differences import describe_differences
from moe_ckpt.engine.documents import read_header, read_manifest, read_sealed
from moe_ckpt.engine.opening import open_store
from moe_ckpt.errors import DamagedError, ForeignStoreError
from moe_ckpt.format.sealed import seal
from moe_ckpt.recovery.reader import StoreReader, newest_good
from moe_ckpt.recovery.verify import verify_store
from moe_ckpt.storage import LocalStorage, StoreLock
from tests.support.store_builder import example
from tests.unit.builders import catalog
from tests.unit.engine_parts import SoloCommunicator

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
    for read in (read_sealed, lambda storage, path: read_manifest(storage, "step_00000003")):
        with pytest.raises(DamagedError, match=r"more than a sealed file may have|does not begin and end like"):
            read(storage, NEWEST)
    assert clean_start(storage).damaged == ("step_00000003",)
    assert newest_good(StoreReader(storage)).directory == "step_00000002"
    assert [damage.path for damage in verify_store(storage)] == [NEWEST]
    assert "w of" in describe_differences(storage, ["step_00000002", "step_00000003"], {"w": (1,)})
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
    storage = LocalStorage(tmp_path)
    lock = StoreLock(storage, "test")
    with pytest.raises(ForeignStoreError, match="another model"):
        open_store(storage, catalog(1, 4), SoloCommunicator(), lock, RetentionPolicy())
    assert not lock.held
    assert memory() < 32 << 20


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
