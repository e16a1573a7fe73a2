"""What a start reads before it knows anything: what this rank wrote of the newest checkpoint; and nothing counts."""

from __future__ import annotations

import os
import threading
import time

import pytest

from moe_ckpt import Memory
from moe_ckpt.policies import Dense
from moe_ckpt.run import documents
from moe_ckpt.run.options import make_options
from moe_ckpt.threads import ThreadName
from tests.support.store_builder import example
from tests.support.waiting import retry_until


def is_over() -> bool:
    return not any(thread.name == f"{ThreadName.READ.value}-ahead" for thread in threading.enumerate())


@pytest.fixture
def read(monkeypatch):
    """Path of a file -> bytes that were read of it in pieces, into memory of the reader's own."""
    found: dict[str, int] = {}
    plain = os.readv

    def noting(descriptor, buffers):
        count = plain(descriptor, buffers)
        if threading.current_thread().name.endswith("-ahead"):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            found[path] = found.get(path, 0) + count
        return count

    monkeypatch.setattr(os, "readv", noting)
    yield found
    documents.end_reading_ahead()
    retry_until(is_over)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_this_rank_wrote_of_the_newest_checkpoint_is_read(tmp_path, monkeypatch, read, rank):
    """Files of older steps that it needs, too: here it is a partial one."""
    monkeypatch.setenv("RANK", str(rank))
    example(tmp_path, world_size=2)
    make_options("a test", Dense(), tmp_path, {})
    retry_until(is_over)
    shards = {path: count for path, count in read.items() if path.endswith(".safetensors")}
    assert {os.path.dirname(path) for path in shards} >= {
        str(tmp_path / "step_00000003"),
        str(tmp_path / "step_00000001"),
    }
    assert all(f"rank_{rank:05d}" in path and count == os.path.getsize(path) for path, count in shards.items())


@pytest.mark.parametrize(
    "options", [{"resume": "never"}, {"memory": Memory()}], ids=["nothing is resumed", "memory has it"]
)
def test_nothing_is_read_in_vain(tmp_path, read, options):
    example(tmp_path, world_size=1)
    make_options("a test", Dense(), tmp_path, options)
    make_options("a test", Dense(), tmp_path / "nothing", {})
    make_options("a test", Dense(), "memory://nothing", {})
    assert is_over()
    assert not read


def test_damage_is_met_by_whoever_resumes(tmp_path, read, caplog):
    caplog.set_level("INFO", "moe_ckpt")
    example(tmp_path, world_size=1)
    (tmp_path / "step_00000003" / "MANIFEST.json").write_text("{")
    make_options("a test", Dense(), tmp_path, {})
    retry_until(is_over)
    assert "is not read ahead" in caplog.text
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_it_ends_when_the_run_itself_reads(tmp_path, monkeypatch):
    """Even in the middle of a file."""
    (tmp_path / "file").write_bytes(bytes(100))
    monkeypatch.setattr(documents, "_PIECE_NBYTES", 1)
    stop, plain, count = threading.Event(), os.readv, []

    def slow(descriptor, buffers):
        count.append(time.sleep(0.01))
        if len(count) == 3:
            documents.end_reading_ahead()
        return plain(descriptor, buffers)

    monkeypatch.setattr(os, "readv", slow)
    documents._under_way.add(stop)
    documents._read_file(str(tmp_path / "file"), stop)
    assert len(count) == 3
    assert not documents._under_way
