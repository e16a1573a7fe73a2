"""The lock of a store during training: nothing is committed without it.

The kernel drops it when rank 0's process reads the lock's file; a lease runs out unless it is renewed.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import time
import uuid

import pytest

from moe_ckpt.errors import StoreInUseError
from moe_ckpt.format.manifest import MANIFEST_NAME
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage, RemoteStorage, StoreLock
from tests.unit import engine_parts
from tests.unit.engine_parts import Life, manifests

ANOTHER = """
import sys
from moe_ckpt.errors import StoreInUseError
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
from tests.unit import engine_parts
from tests.unit.engine_parts import Life
try:
    with Life(LocalStorage(sys.argv[1]), policy=Dense()) as life:
        life.go(int(sys.argv[2]), settle=True)
    print("let in")
except StoreInUseError:
    print("refused")
"""


def another_run(root, steps=1):
    command = [sys.executable, "-c", ANOTHER, str(root), str(steps)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout.strip()


def files(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("warm_programs")
def test_a_commit_takes_the_lock_again(tmp_path):
    with Life(LocalStorage(tmp_path / "store"), policy=Dense()) as life:
        life.go(2, settle=True)
        shutil.copytree(tmp_path / "store", tmp_path / "backup")
        life.go(1, settle=True)
        assert another_run(tmp_path / "store") == "refused"
    assert [m.step for m in manifests(tmp_path / "store")] == [1, 2, 3]


@pytest.mark.usefixtures("warm_programs")
def test_after_another_run_was_let_in_nothing_is_committed_or_collected(tmp_path, caplog):
    """Retention of the first run must not judge what the second one wrote."""
    root = tmp_path / "store"
    with Life(LocalStorage(root), policy=Dense()) as life:
        life.go(2, settle=True)
        shutil.copytree(root, tmp_path / "backup")
        assert another_run(root, steps=3) == "let in"
        before = files(root)
        life.go(5, settle=True)
    assert life.records[-1].failed_checkpoints == 4
    assert re.search(r"not committed.*in use by another run \(.*, which had the store meanwhile", caplog.text)
    assert files(root) == before


class SlowStore(RemoteStorage):
    """An object store to which a shard takes longer than a lease lasts."""

    secs = 0.0

    def write(self, path, chunks):
        if path.endswith(".safetensors"):
            time.sleep(self.secs)
        return super().write(path, chunks)


@pytest.mark.usefixtures("warm_programs")
def test_an_upload_may_take_longer_than_a_lease(monkeypatch):
    monkeypatch.setattr(engine_parts, "StoreLock", functools.partial(StoreLock, ttl_secs=1.0))
    storage = SlowStore(f"memory://slow-{uuid.uuid4().hex}")
    with Life(storage, policy=Dense()) as life:
        storage.secs = 1.5
        life.go(1)
        life.session._run.lock._unregister()  # as if the other were another process
        while life.session._snapshots.pipeline.persister.in_flight:
            with pytest.raises(StoreInUseError):
                StoreLock(RemoteStorage(storage.root), "another run", ttl_secs=1.0).acquire()
            time.sleep(0.2)
        assert storage.exists(f"step_00000001/{MANIFEST_NAME}")
