"""Somebody deletes or replaces the store during training: what is gone is named by no manifest, and saved anew."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from moe_ckpt.core.step import Tier
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import STORE_NAME
from moe_ckpt.format.run_records import Identity
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import LocalStorage
from tests.support.bad_disks import FastClock, SmallDisk
from tests.support.deleting import delete_tree
from tests.unit.engine_parts import (
    ALL,
    ALWAYS,
    KEEP_ALL,
    MODEL,
    Life,
    ThreadRanks,
    assert_view,
    catalog,
    manifests,
    run_threads,
)


def identity(root):
    return Identity.decode((root / STORE_NAME).read_bytes(), STORE_NAME)


def test_after_the_store_is_deleted_the_next_step_saves_everything(tmp_path, caplog):
    root = tmp_path / "store"
    with Life(LocalStorage(root), policy=MoC(k=1)) as life:
        life.go(3, settle=True)
        before = identity(root)
        delete_tree(root)
        life.go(1, settle=True)
        assert manifests(root) == [], "its experts of older steps are gone"
        life.go(1, settle=True)
        assert life.records[-1].experts_saved == 8
        assert life.records[-1].committed_step is None
        [manifest] = manifests(root)
        assert_view(root, MODEL, manifest, dict.fromkeys(ALL, 5))
        assert np.array_equal(life.session.run_ledger.tokens.saved[Tier.STORAGE], 0 * life.counts)
        life.go(2, settle=True)
        assert life.records[-1].experts_saved == 2, "partial again"
    assert identity(root).run_id == before.run_id
    assert [m.step for m in manifests(root)] == [5, 6, 7]
    assert {op: r.step for op, r in manifests(root)[-1].operators.items() if op in ALWAYS} == dict.fromkeys(ALWAYS, 7)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any(re.search(r"store\.json is gone from .*store.*written again", message) for message in said)
    assert any(re.search(r"step 4 was not committed.* gone from .*step_00000001/rank_00000_expert", m) for m in said)
    assert sum("gone" in message for message in said) == 2


@pytest.mark.parametrize("disk", [LocalStorage, FastClock])
@pytest.mark.parametrize("what", ["directory", "expert file"])
def test_one_older_file_that_is_gone_is_enough(tmp_path, what, disk, caplog):
    with Life(disk(tmp_path), policy=MoC(k=1)) as life:
        life.go(3, settle=True)
        victim = tmp_path / "step_00000001"
        delete_tree(victim) if what == "directory" else (victim / "rank_00000_expert.safetensors").unlink()
        life.go(3, settle=True)
    assert re.search(r"step 4 was not committed.*step_00000001/rank_00000_expert\.safetensors", caplog.text)
    whole = manifests_that_open(tmp_path)
    assert whole[-1].step == 6
    assert {record.step for record in whole[-1].operators.values()} == {5, 6}


def manifests_that_open(root):
    reader = StoreReader(LocalStorage(root))
    found = []
    for name in reversed(reader.directories()):
        with contextlib.suppress(DamagedError):  # a part is gone
            found.append(reader.manifest(name))
    whole = [m for m in found if all((root / path).exists() for path in m.paths)]
    for manifest in whole:
        check_checkpoint(reader, manifest)
    return whole


def test_all_ranks_save_everything_anew(tmp_path):
    def body(comm):
        with Life(LocalStorage(tmp_path / "store"), policy=MoC(k=1), comm=comm) as life:
            life.go(3, settle=True)
            comm.broadcast(b"")
            if comm.rank == 1:
                delete_tree(tmp_path / "store")
            comm.broadcast(b"")
            life.go(5, settle=True)
        saved = life.session.run_ledger.tokens.saved[Tier.STORAGE]
        return [r.committed_step for r in life.records], saved.tolist()

    one, other = run_threads(ThreadRanks(2), body)
    assert one == other
    assert one[0][-3:] == [5, 6, 7], "learned one step later"
    for manifest in manifests(tmp_path / "store"):
        assert manifest.step >= 5


def test_a_window_whose_earlier_steps_are_gone_is_not_committed(tmp_path):
    root = tmp_path / "store"
    with Life(LocalStorage(root), policy=MoEvement(window=3)) as life:
        life.session.begin_run(life.capture)
        life.go(4, settle=True)  # a window of 1 to 3, and 4 of the next
        delete_tree(root)
        life.go(2, settle=True)
        assert manifests(root) == []
        life.go(1, settle=True)
        assert [(m.step, len(m.slots)) for m in manifests(root)] == [(7, 1)], "dense, before a new window begins"
        life.go(4, settle=True)
    assert [(m.step, len(m.slots)) for m in manifests(root)] == [(7, 1), (10, 3)]


def test_rebuilding_is_tried_until_it_is_committed(tmp_path):
    root = tmp_path / "store"
    disk = SmallDisk(root, float("inf"))
    with Life(disk, policy=MoC(k=1, every_n_steps=2)) as life:
        life.go(6, settle=True)
        delete_tree(root)
        life.go(2, settle=True)
        disk.capacity_bytes = disk.used_bytes + 500
        life.go(2, settle=True)
        assert manifests(root) == []
        disk.capacity_bytes = float("inf")
        life.go(1, settle=True)
        life.go(2, settle=True)
    assert [m.step for m in manifests(root)] == [11, 12], "at once, though only even steps are due"


def test_a_lost_store_json_alone_costs_nothing(tmp_path, caplog):
    with Life(LocalStorage(tmp_path), policy=MoC(k=1)) as life:
        life.go(2, settle=True)
        before = identity(tmp_path)
        (tmp_path / STORE_NAME).unlink()
        life.go(1, settle=True)
        assert identity(tmp_path) == before
        (tmp_path / STORE_NAME).write_bytes(b"{}")
        life.go(1, settle=True)
    assert identity(tmp_path) == before
    assert [m.step for m in manifests(tmp_path)] == [1, 2, 3, 4]
    assert caplog.text.count("it is written again") == 2


def test_another_run_s_store_in_this_one_s_place_is_left_as_it_is(tmp_path, caplog):
    mine, other = tmp_path / "mine", tmp_path / "other"
    with Life(LocalStorage(other), policy=Dense()) as life:
        life.go(6, settle=True)
    theirs = {path: path.read_bytes() for path in sorted(other.rglob("*")) if path.is_file()}
    with Life(LocalStorage(mine), policy=MoC(k=1), retention=KEEP_ALL) as life:
        life.go(8, settle=True)
        mine.rename(tmp_path / "moved")
        other.rename(mine)
        life.go(5, settle=True)
    assert life.records[-1].failed_checkpoints == 4
    assert re.search(r"was not committed; training continues.*holds another run.*another dirpath", caplog.text)
    found = {other / path.relative_to(mine): path.read_bytes() for path in sorted(mine.rglob("*")) if path.is_file()}
    assert found.keys() == theirs.keys(), "nothing more, nothing less"
    assert found == theirs
    assert "holds another run" in caplog.text
    assert [m.step for m in manifests(tmp_path / "moved")] == list(range(1, 9))


PROBE = """
import sys
from moe_ckpt.storage import LocalStorage, StoreLock
lock = StoreLock(LocalStorage(sys.argv[1]), "another run")
try:
    lock.acquire()
except Exception as error:
    print(type(error).__name__, flush=True)
else:
    print("taken", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(root):
    """What another process finds that wants the store; while the block lasts it keeps what it gets."""
    command = [sys.executable, "-c", PROBE, str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


def test_the_lock_is_taken_again_in_the_new_directory(tmp_path):
    root = tmp_path / "store"
    with Life(LocalStorage(root), policy=Dense()) as life:
        life.go(1, settle=True)
        delete_tree(root)
        life.go(1, settle=True)
        with another_process(root) as found:
            assert found == "StoreInUseError"
    with another_process(root) as found:
        assert found == "taken"


def test_a_run_that_came_into_the_emptied_directory_keeps_it(tmp_path, caplog):
    root = tmp_path / "store"
    with Life(LocalStorage(root), policy=MoC(k=1)) as life:
        life.go(2, settle=True)
        delete_tree(root)
        with another_process(root) as found:
            assert found == "taken"
            life.go(4, settle=True)
            assert re.search(r"was not committed.*in use by another run \(another run", caplog.text)
        assert sorted(path.name for path in root.iterdir()) == [".lock"], "no file of ours is left between theirs"


def test_nothing_is_listed_twice_for_it(tmp_path):
    """The proof costs one listing of the root and the reading of store.json; the collection uses its listings."""
    calls = []

    class Counting(LocalStorage):
        def stamp(self, path):
            return None

        def list(self, path=""):
            calls.append(("list", path))
            return super().list(path)

        def read(self, path, *args):
            calls.append(("read", path))
            return super().read(path, *args)

    with Life(Counting(tmp_path), policy=MoC(k=1)) as life:
        life.go(6, settle=True)
        life.settle()
        calls.clear()
        life.go(1, settle=True)
        life.session.close()
    needed = {path.partition("/")[0] for path in manifests(tmp_path)[-1].paths}
    assert len(needed) < 7, "all checkpoints are kept, but the newest does not need something of each"
    assert sorted(path for verb, path in calls if verb == "list") == ["", "", *sorted(needed)]
    assert [path for verb, path in calls if verb == "read"] == [STORE_NAME], "its own manifest is not read back"


def test_what_has_not_changed_is_not_listed_again(tmp_path):
    """Of a round of 16 parts only: the new one, the one before, whose manifest is new, and one that was due."""
    storage = FastClock(tmp_path)
    experts, most = 16, 0
    with Life(storage, model=catalog(1, experts), policy=MoC(k=1), retention=RetentionPolicy(keep_last=1)) as life:
        life.counts = np.ones((1, experts), dtype=np.int64)
        life.go(2 * experts, settle=True)
        for _ in range(8):
            time.sleep(0.02)  # a tick of the file system's clock
            storage.listed.clear()
            life.go(1, settle=True)
            most = max(most, len(storage.listed))
    manifest = manifests(tmp_path)[-1]
    assert len(manifest.parts) == experts
    assert most <= 2 + 5, "the root twice; a dropped checkpoint leaves two more that have changed"
