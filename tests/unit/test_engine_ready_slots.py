"""Slots are there when the first snapshots of a start begin: training does not wait while the kernel clears pages."""

from __future__ import annotations

import threading
import time

import pytest

from moe_ckpt.memory import arena
from moe_ckpt.memory.mapping import Pages
from moe_ckpt.policies import Dense, MoC
from tests.support.deleting import delete_tree
from tests.unit.engine_parts import ALL
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory import life, no_memory_of_other_tests, where  # noqa: F401 - fixtures


@pytest.fixture
def made(monkeypatch) -> list[tuple[str, int]]:
    """(thread, bytes) of each time that memory is made; a page is all that a room needs."""
    found: list[tuple[str, int]] = []
    grow = Pages.grow

    def recorded(pages, end, **how):
        found.append((threading.current_thread().name, end - pages.ready))
        time.sleep(0.02)  # whoever does not wait for it is found to be early
        return grow(pages, end, **how)

    monkeypatch.setattr(Pages, "grow", recorded)
    monkeypatch.setattr(arena, "ALIGNMENT", 4096)
    return found


def on_training_thread(made) -> list[tuple[str, int]]:
    return [each for each in made if each[0] == threading.current_thread().name]


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1)], ids=["all at each step", "partial later"])
def test_the_first_slot_of_a_run_is_not_made_by_training(where, made, policy):  # noqa: F811
    with life(where, policy) as first:
        first.session.training_begins()
        first.go(1)
        assert made
        assert on_training_thread(made) == []


def test_slots_of_all_later_steps_are_there_too(where, made):  # noqa: F811
    with life(where) as first:
        first.session.training_begins()
        first.go(6, settle=True)
        assert on_training_thread(made) == []
        assert sum(nbytes for _, nbytes in made) == 3 * 4096, "as much as there is in the steady state"


def train_and_fail(where, steps=6):  # noqa: F811
    with life(where) as first:
        first.session.training_begins()
        first.go(steps, settle=True)


def test_memory_that_an_earlier_start_left_is_used_again(where, made):  # noqa: F811
    train_and_fail(where)
    [before] = where[1].rglob("arena")
    inode, nbytes = before.stat().st_ino, before.stat().st_size
    made.clear()
    with life(where) as second:
        come_back(second)
        assert_state(second, dict.fromkeys(ALL, 6))
        second.go(4, settle=True)
        assert on_training_thread(made) == []
        now = (second.session.tier.files.path / "arena").stat()
        assert now.st_ino == inode
        assert nbytes <= now.st_size <= nbytes + 4096, "the step that it came back to may lie beside new ones at first"
    with life(where) as third:
        come_back(third)
        assert_state(third, dict.fromkeys(ALL, 10))
    assert {path.stat().st_ino for path in where[1].rglob("arena")} == {inode}


def test_after_a_start_from_storage_training_makes_no_slot(where, made):  # noqa: F811
    train_and_fail(where)
    delete_tree(where[1])
    where[1].mkdir()
    made.clear()
    with life(where) as second:
        come_back(second)
        second.go(4, settle=True)
        assert made
        assert on_training_thread(made) == []
