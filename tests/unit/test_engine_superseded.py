"""What checkpoints that are let go leave on several ranks: each rank deletes its own, and nothing stays behind."""

from __future__ import annotations

import errno
import re

import pytest

from moe_ckpt.format.manifest import group_of
from moe_ckpt.ledger import retention
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import FaultyStorage
from tests.support.collecting import clean_start, collect
from tests.unit.engine_parts import Life, ThreadRanks, manifests, run_threads

LAST = RetentionPolicy(keep_last=1)


@pytest.fixture(autouse=True)
def no_spares(monkeypatch):
    monkeypatch.setattr(retention, "_spares", lambda ordered: [])


RANKS = 3


def train(root, policy, steps, ranks=RANKS, storages=None, back_to=None):
    """One life; which rank deleted which files."""

    def body(comm):
        storage = (storages or {}).get(comm.rank) or FaultyStorage(LocalStorage(root), None, verbs={"delete"})
        with Life(storage, policy=policy, comm=comm, retention=LAST) as life:
            if back_to is not None:
                life.session.resume_from(back_to)
                life.step = back_to.step
            life.session.begin_run(life.capture)
            life.go(steps, settle=True)
        return [path for verb, path in storage.calls if verb == "delete" and path.startswith("step_")]

    return run_threads(ThreadRanks(ranks), body)


def tree(root):
    return {path.relative_to(root).as_posix() for path in root.glob("step_*/*")}


def assert_nothing_but_what_is_needed(root):
    """Up to whole groups: an expert's shard stays as long as any shard of experts of its step does."""
    kept = manifests(root)
    groups = {(path.partition("/")[0], group_of(path.partition("/")[2])) for m in kept for path in m.paths}
    groups |= {(m.directory, "MANIFEST.json") for m in kept}
    assert {(path.partition("/")[0], group_of(path.partition("/")[2])) for path in tree(root)} == groups
    assert len(list(root.glob("step_*"))) == len({directory for directory, _ in groups}), "no empty directory is left"


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1), MoEvement(window=3)], ids=lambda policy: type(policy).__name__)
def test_each_rank_deletes_its_own(tmp_path, policy):
    deleted = train(tmp_path, policy, 9)
    assert_nothing_but_what_is_needed(tmp_path)
    for rank, paths in enumerate(deleted):
        own = re.compile(rf"step_\d+/rank_{rank:05d}_.*" + ("|step_.*json" if rank == 0 else ""))
        assert paths
        assert all(own.fullmatch(path) for path in paths), paths
    assert sum(path.endswith("MANIFEST.json") for path in deleted[0]) >= 2


def test_fewer_ranks_remove_what_more_ranks_left(tmp_path):
    train(tmp_path, MoC(k=1), 3)
    [newest] = manifests(tmp_path)
    train(tmp_path, MoC(k=1), 8, ranks=2, back_to=newest)
    assert_nothing_but_what_is_needed(tmp_path)
    assert not [path for path in tree(tmp_path) if "rank_00002" in path], "the round is through"


@pytest.mark.parametrize("fail_at", [1, 2, 5])
def test_what_a_rank_could_not_delete_goes_later(tmp_path, fail_at, caplog):
    broken = FaultyStorage(LocalStorage(tmp_path), fail_at, OSError(errno.EIO, "injected"), verbs={"delete"})
    train(tmp_path, MoC(k=1), 8, storages={1: broken})
    assert broken.failures == 1
    assert "old checkpoints could not be removed" in caplog.text
    left = tree(tmp_path)
    assert {m.step for m in manifests(tmp_path)} == {8}
    collect(LocalStorage(tmp_path), LAST)
    late = left - tree(tmp_path)
    assert not late or {path.partition("/")[0] for path in late} <= {m.directory for m in manifests(tmp_path)}
    assert_nothing_but_what_is_needed(tmp_path)


def test_a_rank_that_died_before_it_deleted_leaves_work_for_the_next_life(tmp_path):
    """As after a kill between rank 0's deletions and the others'."""

    class Dead(FaultyStorage):
        def delete(self, path):
            if path.startswith("lock"):
                self.inner.delete(path)

    train(tmp_path, Dense(), 4, storages={rank: Dead(LocalStorage(tmp_path), None) for rank in (1, 2)})
    assert len(list(tmp_path.glob("step_00000001/rank_00002_*"))) == 3
    assert [m.step for m in manifests(tmp_path)] == [4]
    clean_start(LocalStorage(tmp_path))
    assert_nothing_but_what_is_needed(tmp_path)
