"""The kernel drops rank 0's lock, because this process has read the lock's file: nothing is committed without it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from moe_ckpt.errors import SaveFailedError
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
from tests.unit.engine_parts import Life, manifests

ANOTHER = """
import sys
from moe_ckpt.errors import StoreInUseError
from moe_ckpt.policies import Dense
from moe_ckpt.storage import LocalStorage
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


def test_a_commit_takes_the_lock_again(tmp_path):
    with Life(LocalStorage(tmp_path / "store"), policy=Dense()) as life:
        life.go(2, settle=True)
        shutil.copytree(tmp_path / "store", tmp_path / "backup")
        life.go(1, settle=True)
        assert another_run(tmp_path / "store") == "refused"
    assert [m.step for m in manifests(tmp_path / "store")] == [1, 2, 3]


def test_after_another_run_was_let_in_nothing_is_committed_or_collected(tmp_path):
    """Retention of the first run must not judge what the second one wrote."""
    root = tmp_path / "store"
    with Life(LocalStorage(root), policy=Dense(), max_failures=2) as life:
        life.go(2, settle=True)
        shutil.copytree(root, tmp_path / "backup")
        assert another_run(root, steps=3) == "let in"
        before = files(root)
        with pytest.raises(SaveFailedError, match=r"in use by another run \(.*, which had the store meanwhile"):
            life.go(5, settle=True)
    assert files(root) == before
