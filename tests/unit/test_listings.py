"""Listings are made again where something may have changed, and nowhere else; who cannot tell is not believed."""

from __future__ import annotations

import os
import threading
import time
from typing import ClassVar

import pytest

from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.base import Stamp, Stamped
from moe_ckpt.storage.listings import Listings
from moe_ckpt.storage.remote import RemoteStorage
from moe_ckpt.testing import FaultyStorage
from tests.support.bad_disks import FastClock

STEPS = [f"step_{number:08d}" for number in range(8)]
A_TICK_SECS = 0.02
"""Clocks of file systems tick at most every 10 ms."""


def grow(storage, listings, number):
    """As a checkpoint is made: the files of a step, a listing of all, the commit record. What was listed."""
    storage.write(f"{STEPS[number]}/a", [b""])
    storage.write(f"{STEPS[number]}/b", [b""])
    found = look(storage, listings, number)
    storage.write(f"{STEPS[number]}/record", [b""])
    time.sleep(A_TICK_SECS)
    return found


def look(storage, listings, number):
    """Every listing is right. Which were made?"""
    storage.listed.clear()
    found = listings.names(STEPS[: number + 1])
    made = sorted(storage.listed)
    assert found == {step: frozenset(os.listdir(f"{storage.root}/{step}")) for step in STEPS[: number + 1]}
    listings.expect_change(STEPS[number])
    return made


@pytest.fixture
def storage(tmp_path):
    return FastClock(tmp_path)


def test_only_what_changed_is_listed(storage):
    listings = Listings(storage)
    made = [grow(storage, listings, number) for number in range(7)]
    assert made[0] == STEPS[:1]
    for number in range(2, 7):
        new = STEPS[number - 1 : number + 1]
        assert made[number] == new, "the new one, and the one before, into which its record was put"


def test_each_directory_has_its_turn(storage):
    """Also if its stamp is the same as ever."""
    listings = Listings(storage)
    for number in range(8):
        grow(storage, listings, number)
    turns = []
    for calls in range(6 * 8):
        storage.write(f"{STEPS[7]}/{calls}", [b""])
        time.sleep(A_TICK_SECS)
        turns += [step for step in look(storage, listings, 7) if step != STEPS[7]]
    assert set(turns) >= set(STEPS[:5])
    assert len(turns) <= 8


def test_directories_are_listed_ahead_of_their_need(storage):
    """As the steps of a window: each when the next one is written, the newest only when all are needed."""
    listings = Listings(storage)
    grow(storage, listings, 0)
    for number in range(1, 5):
        storage.write(f"{STEPS[number]}/a", [b""])
        storage.listed.clear()
        if number > 1:
            listings.names(STEPS[1:number], STEPS[number])
        assert storage.listed == STEPS[number - 1 : number][: number - 1]
        time.sleep(A_TICK_SECS)
    storage.listed.clear()
    assert listings.names(STEPS[1:5]) == dict.fromkeys(STEPS[1:5], frozenset("a"))
    assert storage.listed == [STEPS[4]]


@pytest.mark.parametrize("how", ["gone", "new", "renamed", "replaced"])
def test_what_somebody_changes_is_seen_at_once(storage, how):
    listings = Listings(storage)
    for number in range(7):
        grow(storage, listings, number)
    victim = f"{storage.root}/{STEPS[3]}"
    if how == "gone":
        os.unlink(f"{victim}/a")
    elif how == "new":
        open(f"{victim}/c", "w").close()
    elif how == "renamed":
        os.rename(f"{victim}/a", f"{victim}/c")
    else:
        os.rename(f"{storage.root}/{STEPS[4]}", f"{storage.root}/aside")
        os.unlink(f"{victim}/a")
        os.rename(victim, f"{storage.root}/{STEPS[4]}")
        os.rename(f"{storage.root}/aside", victim)
    assert {STEPS[3]} <= set(grow(storage, listings, 7))


def test_a_change_within_a_tick_of_the_listing_is_seen(tmp_path):
    """All of this happens within the two seconds that the coarsest clocks may take for one moment."""

    class Watched(FastClock):
        def stamp(self, path):
            found = LocalStorage.stamp(self, path)
            return found and found._replace(changed_unix_ns=found.changed_unix_ns // 1000)

    storage = Watched(tmp_path)
    listings = Listings(storage)
    for number in range(6):
        assert grow(storage, listings, number) == STEPS[: number + 1]


def test_the_same_listing_is_the_same_object(storage):
    listings = Listings(storage)
    for number in range(3):
        grow(storage, listings, number)
    first, second = (listings.names(STEPS[:2]) for _ in range(2))
    assert all(first[step] is second[step] for step in STEPS[:2])


def test_stamps_that_never_move_are_not_believed(tmp_path):
    class Frozen(FastClock):
        def stamp(self, path):
            return Stamp(STEPS.index(path) * 10**12)

    storage = Frozen(tmp_path)
    listings = Listings(storage)
    for number in range(8):
        assert grow(storage, listings, number) == STEPS[: number + 1]


def test_a_stamp_that_went_back_is_another_one(tmp_path):
    """Of a directory that was put back from a copy, or on servers whose clocks differ."""

    class Back(FastClock):
        victim = ""

        def stamp(self, path):
            found = super().stamp(path)
            return found and found._replace(changed_unix_ns=found.changed_unix_ns // (2 if path == self.victim else 1))

    storage = Back(tmp_path)
    listings = Listings(storage)
    for number in range(7):
        grow(storage, listings, number)
    storage.victim = STEPS[3]
    os.unlink(tmp_path / STEPS[3] / "a")
    assert STEPS[3] in grow(storage, listings, 7)


def test_stamps_that_miss_a_change_are_found_out(tmp_path, caplog):
    """They move where something is written, but not where it is deleted: in its turn the directory is listed."""

    class Careless(FastClock):
        hidden: ClassVar[dict[str, int]] = {}

        def stamp(self, path):
            found = super().stamp(path)
            return found and found._replace(changed_unix_ns=found.changed_unix_ns - self.hidden.get(path, 0), rest=())

    storage = Careless(tmp_path)
    listings = Listings(storage)
    for number in range(7):
        grow(storage, listings, number)
    before = storage.stamp(STEPS[3])
    os.unlink(tmp_path / STEPS[3] / "a")
    storage.hidden = {STEPS[3]: storage.stamp(STEPS[3]).changed_unix_ns - before.changed_unix_ns}
    assert storage.stamp(STEPS[3]) == before
    storage.write(f"{STEPS[7]}/a", [b""])
    calls = 0
    while "a" in listings.names(STEPS)[STEPS[3]]:
        listings.expect_change(STEPS[7])
        storage.write(f"{STEPS[7]}/{calls}", [b""])
        calls += 1
        assert calls <= 8 * len(STEPS)
    assert calls > 0, "not at once: it could not be told"
    assert "does not report when a directory changes" in caplog.text
    assert look(storage, listings, 7) == STEPS


def test_without_stamps_all_are_listed_some_at_once(tmp_path):
    """As object stores: each listing takes its time, and no more than eight are under way."""

    class Slow(RemoteStorage):
        busy = most = 0
        changed = threading.Condition()

        def list(self, path=""):
            with self.changed:
                self.busy += 1
                self.most = max(self.most, self.busy)
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.most > 1, 120), "they are listed one by one"
            time.sleep(0.05)
            with self.changed:
                self.busy -= 1
            return super().list(path)

    storage = Slow(f"memory://{tmp_path.name}")
    assert not isinstance(storage, Stamped)
    many = [f"step_{number:08d}" for number in range(20)]
    for step in many:
        storage.write(f"{step}/a", [b""])
    assert Listings(storage).names(many) == dict.fromkeys(many, frozenset("a"))
    assert 2 <= storage.most <= 8


def test_an_error_is_raised_and_nothing_is_believed_after_it(storage):
    listings = Listings(FaultyStorage(storage, None))
    for number in range(5):
        grow(storage, listings, number)
    broken = Listings(FaultyStorage(storage, 3, verbs={"list"}))
    with pytest.raises(OSError, match="injected"):
        broken.names(STEPS[:5])
    assert broken.names(STEPS[:5]) == listings.names(STEPS[:5])


def test_a_link_has_no_stamp(storage, tmp_path):
    storage.write(f"{STEPS[0]}/a", [b""])
    os.symlink(tmp_path / STEPS[0], tmp_path / STEPS[1])
    assert storage.stamp(STEPS[0]) is not None
    assert [storage.stamp(path) for path in (STEPS[1], STEPS[2], f"{STEPS[0]}/a")] == [None] * 3
