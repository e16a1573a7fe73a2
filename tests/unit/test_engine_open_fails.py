"""Whatever goes wrong while a session opens: the lock, the threads and the memory it took are let go of."""

from __future__ import annotations

import threading

import pytest

from moe_ckpt import Memory
from moe_ckpt.commit import persisting
from moe_ckpt.errors import StoreError
from moe_ckpt.memory.directory import holder_of, rank_directories, user_directory
from moe_ckpt.policies import Dense
from moe_ckpt.run.events import Opened
from moe_ckpt.storage import LocalStorage, StoreLock
from tests.unit.engine_parts import Life, ThreadRanks, manifests, run_threads


class Bug(Exception):
    """An error of a kind that nobody counts on."""


class Buggy(LocalStorage):
    """Its n-th call raises ``Bug``."""

    def __init__(self, root, fail_at):
        super().__init__(root)
        self.left = fail_at

    def _locate(self, path, **how):
        self.left -= 1
        if self.left == 0:
            raise Bug(f"at {path!r}")
        return super()._locate(path, **how)


def broken(*args, **kwargs):
    raise Bug("broken")


def threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("moe_ckpt")}


def open_and_save(root, steps=1):
    with Life(LocalStorage(root), policy=Dense()) as life:
        life.step = max([m.step for m in manifests(root)], default=0)
        life.go(steps, settle=True)


def test_the_store_is_free_after_every_way_in_which_opening_it_fails(tmp_path):
    open_and_save(tmp_path)
    number = 0
    while True:
        number += 1
        storage = Buggy(tmp_path, number)
        life = Life(storage, policy=Dense())
        try:
            life.session.open()
        except Bug:
            assert not threads()
            assert not life.session.is_open
            with StoreLock(LocalStorage(tmp_path), "the next fit"):
                pass
        else:
            life.session.close()
            break
    assert number > 4, "the loop has seen every call"
    open_and_save(tmp_path)


def test_other_ranks_hear_of_an_error_of_any_kind(tmp_path):
    said = []

    def body(comm):
        storage = Buggy(tmp_path, 3 if comm.rank == 0 else -1)
        with pytest.raises((Bug, StoreError)) as caught:
            Life(storage, policy=Dense(), comm=comm).session.open()
        said.append((comm.rank, str(caught.value)))

    run_threads(ThreadRanks(2), body)
    assert sorted(rank for rank, _ in said) == [0, 1]
    assert any("rank 0 cannot open the store: Bug" in text for _, text in said)
    open_and_save(tmp_path)


@pytest.mark.parametrize("what", ["Committer", "SnapshotResolver", "Room"])
def test_memory_is_let_go_of_for_the_next_session_of_the_process(tmp_path, monkeypatch, what):
    """What was left there by a session that failed is still what the next one resumes from."""
    (tmp_path / "memory").mkdir()
    settings = {"memory": Memory(directory=tmp_path / "memory", storage_every=100)}
    first = Life(LocalStorage(tmp_path / "store"), policy=Dense(), **settings)
    first.session.open()
    first.go(3, settle=True)
    first.session.close()
    with monkeypatch.context() as patch:
        module = "session.opening" if what == "Committer" else "commit.pipeline"
        patch.setattr(f"moe_ckpt.{module}.{what}", broken)
        with pytest.raises(Bug):
            Life(LocalStorage(tmp_path / "store"), policy=Dense(), **settings).session.open()
    assert not threads()
    [run] = user_directory(str(tmp_path / "memory")).iterdir()
    held = [path for _, _, path in rank_directories(run) if holder_of(path)]
    with Life(LocalStorage(tmp_path / "store"), policy=Dense(), **settings) as last:
        assert held == []
        assert [found.header.step for found in last.session.tier.left_slots.slots][:1] == [3]


@pytest.mark.parametrize("what", ["threads", "observer", "memory"])
def test_what_comes_after_the_lock_may_fail_as_well(tmp_path, monkeypatch, what):
    settings = {}
    with monkeypatch.context() as patch:
        if what == "threads":
            patch.setattr(persisting.threading, "Thread", broken)
        elif what == "observer":
            settings = {"observers": [lambda event: broken() if isinstance(event, Opened) else None]}
        else:
            patch.setattr("moe_ckpt.tiers.host_memory.BufferPool", broken)
        life = Life(LocalStorage(tmp_path / "store"), policy=Dense(), **settings)
        with pytest.raises(Bug):
            life.session.open()
    assert not threads()
    open_and_save(tmp_path / "store", steps=2)
