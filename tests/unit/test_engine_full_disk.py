"""A disk that is full for a moment: what failed steps wrote goes at once, so that later ones fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import FaultyStorage
from tests.support.bad_disks import PATIENCE_SECS, HangingDisk, SmallDisk
from tests.unit.builders import catalog
from tests.unit.engine_parts import ALL, MODEL, Life, ThreadRanks, assert_view, failing, manifests, run_threads

TWO = RetentionPolicy(keep_last=2)
WINDOW = MoEvement(window=4)


def left_by(root: Path, step: int) -> list[str]:
    return [path.name for path in (root / f"step_{step:08d}").rglob("*")]


def step_directories(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step_*"))


@pytest.mark.parametrize("room", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_space_that_is_gone_for_two_steps_costs_two_checkpoints(tmp_path, room):
    """Two checkpoints are kept, and the third finds room for a part of itself, two times."""
    disk = SmallDisk(tmp_path, float("inf"))
    with Life(disk, policy=Dense(), retention=TWO) as life:
        life.go(1, settle=True)
        one = disk.used_bytes
        life.go(2, settle=True)
        disk.capacity_bytes = disk.used_bytes + room * one
        for step in (4, 5):
            life.go(1, settle=True)
            assert disk.full == step - 3
            assert left_by(tmp_path, step) == [], "what it wrote is gone before the next step begins"
        disk.capacity_bytes = 3.2 * one
        life.go(3, settle=True)
        life.go(1)
    assert life.records[-1].failed_checkpoints == 2
    assert [m.step for m in manifests(tmp_path)] == [8, 9]
    assert step_directories(tmp_path) == ["step_00000008", "step_00000009"]


def test_without_room_for_leftovers_partial_checkpoints_go_on_as_well(tmp_path):
    disk = SmallDisk(tmp_path, float("inf"))
    with Life(disk, policy=MoC(k=1), retention=TWO) as life:
        life.go(3, settle=True)
        kept = disk.used_bytes
        disk.capacity_bytes = kept + 600
        life.go(2, settle=True)
        assert disk.full == 2
        assert disk.used_bytes == kept
        disk.capacity_bytes = float("inf")
        life.go(2, settle=True)
    assert [m.step for m in manifests(tmp_path)][-2:] == [6, 7]


def test_every_rank_s_files_of_a_failed_step_go(tmp_path):
    """Rank 1's disk is full at step 2: rank 0, which had written all of its share, removes it."""

    def body(comm):
        storage = failing(tmp_path, 2 if comm.rank else None)
        if comm.rank:
            storage.fail_at = None
        with Life(storage, policy=Dense(), comm=comm) as life:
            life.go(1, settle=True)
            if comm.rank:
                storage.fail_at = len(storage.calls) + 2
            life.go(1, settle=True)
            left = left_by(tmp_path, 2)
            life.go(1, settle=True)
        return left

    assert run_threads(ThreadRanks(2), body) == [[], []]
    assert [m.step for m in manifests(tmp_path)] == [1, 3]


def test_what_cannot_be_removed_at_once_is_removed_after_the_next_commit(tmp_path, caplog):
    class Sticky(FaultyStorage):
        def write(self, path, chunks):
            return (
                super().write(path, chunks)
                if path.startswith("step_00000002/rank_00000_s")
                else self.inner.write(path, chunks)
            )

    storage = Sticky(LocalStorage(tmp_path), 1, verbs={"write", "delete"}, persistent=True)
    with Life(storage, policy=Dense()) as life:
        life.go(2, settle=True)
        assert left_by(tmp_path, 2), "deleting failed, too"
        assert "could not be removed, retrying" in caplog.text
        storage.fail_at = None
        life.go(1, settle=True)
        life.go(1)
    assert step_directories(tmp_path) == ["step_00000001", "step_00000003", "step_00000004"]


def test_a_step_of_a_window_that_fails_takes_those_before_it_along(tmp_path):
    disk = SmallDisk(tmp_path, float("inf"))
    with Life(disk, policy=WINDOW, model=catalog(2, 4)) as life:
        life.session.begin_run(life.capture)
        life.go(2, settle=True)
        assert step_directories(tmp_path) == ["step_00000000", "step_00000001", "step_00000002"]
        disk.capacity_bytes = disk.used_bytes + 200
        life.go(1, settle=True)
        assert step_directories(tmp_path) == ["step_00000000"], "slots 0 and 1 can never be committed"
        disk.capacity_bytes = float("inf")
        life.go(4, settle=True)
        life.go(1)
    found = manifests(tmp_path)
    assert [(m.step, len(m.slots)) for m in found] == [(0, 1), (7, 4)]
    assert life.records[-1].failed_checkpoints == 1


def test_later_steps_of_a_window_that_failed_are_not_written(tmp_path):
    """Slots 1 and 2 are under way when slot 1 fails: slot 2 is of no use, and its bytes would fill the disk further."""
    tried = []

    class Broken(HangingDisk):
        def write(self, path, chunks):
            tried.append(path[:13])
            if path.startswith("step_00000002"):
                self.answers.wait(PATIENCE_SECS)
                raise OSError(28, "No space left on device")
            return super().write(path, chunks)

    disk = Broken(tmp_path)
    with Life(disk, policy=WINDOW) as life:
        life.session.begin_run(life.capture)
        life.go(1, settle=True)
        disk.answers.clear()
        life.go(2)
        disk.answers.set()
        life.settle()
        assert "step_00000002" in tried
        assert "step_00000003" not in tried
        assert step_directories(tmp_path) == ["step_00000000"]
        life.go(5, settle=True)
    assert life.records[-1].failed_checkpoints == 1, "one window is one checkpoint"
    assert [m.step for m in manifests(tmp_path)] == [0, 7]


def test_windows_of_which_only_the_last_step_fails_are_failures_in_a_row(tmp_path, caplog):
    """Steps that could be written do not hide that no checkpoint ever came of them."""

    class NoManifest(LocalStorage):
        def write(self, path, chunks):
            if path.endswith("MANIFEST.json") and not path.startswith("step_00000000"):
                raise OSError(28, "No space left on device")
            return super().write(path, chunks)

    with Life(NoManifest(tmp_path), policy=WINDOW) as life:
        life.session.begin_run(life.capture)
        life.go(13, settle=True)
    assert life.records[-1].failed_checkpoints == 3, "windows of the steps 1 to 4, 5 to 8, 9 to 12"
    assert "step 8 was not committed either, for the same reason (2 in a row)" in caplog.text


def test_a_view_after_failures_is_right(tmp_path):
    disk = SmallDisk(tmp_path, float("inf"))
    with Life(disk, policy=Dense(), retention=TWO) as life:
        life.go(2, settle=True)
        disk.capacity_bytes = disk.used_bytes + 100
        life.go(1, settle=True)
        disk.capacity_bytes = float("inf")
        life.go(2, settle=True)
    assert_view(tmp_path, MODEL, manifests(tmp_path)[-1], dict.fromkeys(ALL, 5))


def test_a_row_of_failures_on_a_full_disk_is_told_in_full_once(tmp_path, caplog):
    disk = SmallDisk(tmp_path, float("inf"))
    with Life(disk, policy=Dense(), retention=TWO) as life:
        life.go(2, settle=True)
        kept = disk.used_bytes
        for row in (1, 2):
            caplog.clear()
            disk.capacity_bytes = kept
            life.go(9, settle=True)
            first, *others = [r.getMessage() for r in caplog.records if "not committed" in r.getMessage()]
            assert re.search(r"No space left.* \(it has [\d,]+ bytes, and [\d,]+ are free\)", first), row
            assert first.count("not committed") == first.count("SaveFailedError") + 1 == 1
            assert first.endswith(" Make room there, or keep fewer checkpoints (retention).")
            assert [re.sub(r"step \d+", "step N", other) for other in others] == [
                f"the checkpoint of step N was not committed either, for the same reason ({count} in a row)"
                for count in (2, 4, 8)
            ]
            disk.capacity_bytes = float("inf")
            life.go(1, settle=True)
            kept = disk.used_bytes


def test_another_reason_in_the_same_row_is_told_in_full(tmp_path, caplog):
    disk = SmallDisk(tmp_path, float("inf"))
    storage = FaultyStorage(disk, None, verbs={"write"})
    with Life(storage, policy=Dense()) as life:
        life.go(1, settle=True)
        disk.capacity_bytes = disk.used_bytes
        life.go(1, settle=True)
        disk.capacity_bytes = float("inf")
        storage.fail_at = len(storage.calls) + 1
        life.go(1, settle=True)
    told = [record.getMessage() for record in caplog.records if "not committed" in record.getMessage()]
    assert ["training continues" in each for each in told] == [True, True]
    assert "No space left" in told[0]
    assert "No space left" not in told[1]
