"""Entries of the stopwatch nest, and a part of one can be left out."""

from __future__ import annotations

import pytest

from moe_ckpt import stopwatch
from moe_ckpt.stopwatch import Since, Stopwatch, timed
from tests.support.clocks import Clock


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(stopwatch, "time", made)
    return made


class Hooks:
    def __init__(self, clock: Clock) -> None:
        self.stopwatch, self.clock = Stopwatch(), clock

    @timed
    def outer(self) -> None:
        self.clock.sleep(1)
        self.inner()

    @timed
    def inner(self) -> None:
        self.clock.sleep(2)

    @timed
    def fails(self) -> None:
        self.clock.sleep(4)
        raise ValueError("hook")


def test_an_entry_within_another_one_counts_once(clock):
    hooks = Hooks(clock)
    since = Since(hooks.stopwatch)
    hooks.outer()
    clock.sleep(100)
    assert since.take() == 3
    hooks.inner()
    with pytest.raises(ValueError, match="hook"):
        hooks.fails()
    hooks.stopwatch.around(hooks.inner)()
    clock.sleep(100)
    assert (since.take(), since.take()) == (8, 0)


def test_an_entry_under_way_counts_until_now_and_a_part_of_it_can_be_left_out(clock):
    watch = Stopwatch()
    since = Since(watch)
    with watch:
        clock.sleep(5)
        began = clock.now
        assert since.take() == 5
        clock.sleep(3)
        watch.leave_out(2)
        assert since.take(began + 3) == 1
        clock.sleep(1)
    assert since.take() == 1
