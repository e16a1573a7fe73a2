"""Slots are there when the first snapshots of a start begin: training does not wait while the kernel clears pages."""

from __future__ import annotations

import threading
import time

import pytest

from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, MoC
from tests.support.deleting import delete_tree
from tests.unit.engine_parts import ALL
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory import life, no_memory_of_other_tests, slots, where  # noqa: F401 - fixtures


@pytest.fixture
def made(monkeypatch) -> list[tuple[str, int]]:
    """(thread, bytes) of each slot that is made."""
    found: list[tuple[str, int]] = []
    create = Slot.create.__func__

    def recorded(cls, path, nbytes):
        found.append((threading.current_thread().name, nbytes))
        time.sleep(0.02)  # whoever does not wait for it is found to be early
        return create(cls, path, nbytes)

    monkeypatch.setattr(Slot, "create", classmethod(recorded))
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
        assert len(made) == 3, "as many as there are in the steady state"


def train_and_fail(where, steps=6):  # noqa: F811
    with life(where) as first:
        first.session.training_begins()
        first.go(steps, settle=True)


def test_slots_that_an_earlier_start_left_are_used_again(where, made):  # noqa: F811
    train_and_fail(where)
    left = slots(where[1])
    assert len(left) > 1
    inodes = {path.with_suffix(".data").stat().st_ino for path in left}
    made.clear()
    with life(where) as second:
        come_back(second)
        assert_state(second, dict.fromkeys(ALL, 6))
        second.go(1, settle=True)
        assert on_training_thread(made) == []
        now = {path.with_suffix(".data").stat().st_ino: path for path in slots(where[1])}
        assert inodes & {node for node, path in now.items() if second.session.tier.files.path in path.parents}
        second.go(3, settle=True)
        assert on_training_thread(made) == []
    with life(where) as third:
        come_back(third)
        assert_state(third, dict.fromkeys(ALL, 10))


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
