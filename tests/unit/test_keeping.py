"""What rank 0 remembers of directories it does not list again never hides what is gone, or what is left."""

from __future__ import annotations

import time

import pytest

from moe_ckpt.commit.keeping import PART, StoreKeeper
from moe_ckpt.errors import FilesGoneError
from moe_ckpt.format.manifest import MANIFEST_NAME, STORE_NAME, Manifest, ModelRecord, group_path, step_dir
from moe_ckpt.format.run_records import Identity
from moe_ckpt.ledger import retention
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.storage import StoreLock
from tests.support.bad_disks import FastClock

LAST = RetentionPolicy(keep_last=1)


@pytest.fixture(autouse=True)
def no_spares(monkeypatch):
    monkeypatch.setattr(retention, "_spares", lambda ordered: [])


FIRST = step_dir(1, 0)
A_TICK_SECS = 0.02
EXPERTS = frozenset({"rank_00000_expert.safetensors", "rank_00001_expert.safetensors"})
OF_OTHERS = frozenset({"rank_00001_non_expert.safetensors"})


class Run:
    """Two ranks, of which the second one's files are written, and deleted, by the test."""

    def __init__(self, storage):
        self.storage = storage
        identity = Identity("run", "f", 0.0)
        storage.write(STORE_NAME, [identity.encode()])
        self.lock = StoreLock(storage, "this run")
        self.keeper = StoreKeeper(storage, identity, LAST, self.lock, ranks=2)

    def checkpoint(self, step, of_first, own=("expert",)):
        """One that needs these groups of the first step. What the second rank is to delete."""
        groups = {"expert": EXPERTS, "non_expert": OF_OTHERS, "state": frozenset({"rank_00001_state.json"})}
        needed = {step_dir(step, 0): {group: groups[group] for group in own} | PART}
        for directory, held in needed.items():
            for name in frozenset().union(*held.values()):
                self.storage.write(f"{directory}/{name}", [b""])
        if step > 1:
            needed[FIRST] = {group: groups[group] for group in of_first} | PART
        manifest = Manifest("run", step, 0, 2, step, float(step), ModelRecord("f"), (), {}, ())
        self.storage.listed.clear()
        self.keeper.require_whole(manifest, needed)
        self.storage.write(f"{manifest.directory}/{MANIFEST_NAME}", [manifest.encode()])
        time.sleep(A_TICK_SECS)
        return self.keeper.collect()

    def listed(self, directory):
        return directory in self.storage.listed


@pytest.fixture
def run(tmp_path):
    made = Run(FastClock(tmp_path))
    made.checkpoint(1, (), own=("expert", "non_expert"))
    for step in range(2, 7):
        made.checkpoint(step, ("expert", "non_expert"))
    return made


def delete(run, left, rank=1):
    for directory, (whole, groups) in left.items():
        for group in groups:
            run.storage.delete(group_path(directory, rank, group))
        if whole:
            run.storage.delete_dir(directory)


def test_what_another_rank_could_not_delete_is_told_again_though_nothing_has_changed(run):
    """Rank 0 has no file of that group, and touches nothing in the directory."""
    for step in range(7, 12):
        left = run.checkpoint(step, ("expert",))
        assert left[FIRST] == (False, ["non_expert"]), step
        delete(run, {other: left[other] for other in left if other != FIRST})
    delete(run, left)
    assert FIRST not in run.checkpoint(12, ("expert",))
    assert run.storage.list(FIRST) == sorted([*PART, *EXPERTS])


def test_what_is_gone_is_seen_by_the_next_manifest(run):
    run.storage.delete(f"{FIRST}/rank_00001_expert.safetensors")
    with pytest.raises(FilesGoneError, match="step_00000001/rank_00001_expert"):
        run.checkpoint(7, ("expert", "non_expert"))
    with pytest.raises(FilesGoneError, match="step_00000001/rank_00001_expert"):
        run.checkpoint(8, ("expert", "non_expert"))


def test_a_directory_that_is_gone_is_seen_by_the_next_manifest(run):
    for name in run.storage.list(FIRST):
        run.storage.delete(f"{FIRST}/{name}")
    run.storage.delete_dir(FIRST)
    with pytest.raises(FilesGoneError, match="step_00000001/PART"):
        run.checkpoint(7, ("expert", "non_expert"))


def test_the_runs_own_retention_is_nobody_who_deletes(run):
    """Ranks agree a step later on what is newest, and ask until then for what retention dropped meanwhile."""
    assert not run.storage.exists(f"{step_dir(5, 0)}/{MANIFEST_NAME}")
    assert not run.keeper.looks_gone(step_dir(5, 0))
    assert not run.keeper.looks_gone(step_dir(6, 0))
    run.storage.delete(f"{step_dir(6, 0)}/{MANIFEST_NAME}")
    assert run.keeper.looks_gone(step_dir(6, 0))


def test_what_somebody_puts_there_is_collected(run):
    """Another process of this format: an older version, or a rank of a run that was thought dead."""
    run.storage.write(f"{FIRST}/rank_00007_state.json", [b""])
    run.checkpoint(7, ("expert", "non_expert"))
    assert "rank_00007_state.json" not in run.storage.list(FIRST)
    assert set(run.storage.list(FIRST)) >= EXPERTS | OF_OTHERS


def test_proven_is_what_was_needed_and_nothing_more(run):
    """Whatever a view says: a group that was not looked for in a listing is looked for in it."""
    with pytest.raises(FilesGoneError, match="step_00000001/rank_00001_state"):
        run.checkpoint(7, ("expert", "non_expert", "state"))


def test_an_old_part_is_listed_now_and_then(run):
    listed = []
    for step in range(7, 7 + 16):
        delete(run, run.checkpoint(step, ("expert", "non_expert")))
        listed.append(run.listed(FIRST))
    assert sum(listed) == 2
