"""Lightning on two nodes with networks of their own: cut off for less and for more than the timeout.

Only the way of copies is cut: training's own groups, made before, go on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_same_run,
    events,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import CASES, LAYOUTS, PAIRED, lose, under_way
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.support.networks import Network, network_or_skip
from tests.support.waiting import retry_until

pytestmark = pytest.mark.slow

VICTIM = 1
TIMEOUT_SECS = 6.0
GIVEN_UP = "gets no more copies"


class Cuts:
    """What is done to the victim's cable, and the step that training had come to each time."""

    def __init__(self, run: Run, network: Network) -> None:
        self._run, self._network = run, network
        self.steps: list[int] = []
        self.given_up_early = True

    def do(self) -> None:
        retry_until(lambda: len(events(self._run)) > 8)
        for turn, secs in ((self._network.cut, 1.5), (self._network.heal, 5.0), (self._network.cut, 0.0)):
            turn(VICTIM)
            self.steps.append(self._reached)
            time.sleep(secs)
        self.given_up_early = GIVEN_UP in output(self._run)
        retry_until(lambda: GIVEN_UP in output(self._run), 5 * TIMEOUT_SECS)
        self.steps.append(self._reached)

    @property
    def _reached(self) -> int:
        return max((line["step"] for line in events(self._run) if line["event"] == "batch"), default=0)


@pytest.mark.parametrize(
    ("lost", "name"), [(lost, name) for lost in (False, True) for name in LAYOUTS] + [(True, name) for name in PAIRED]
)
def test_a_partition_costs_no_bit(lost, name, place):  # noqa: F811
    """A short one delays copies. A long one ends those that go through it: that node's loss costs what came after.

    lost: The one that is cut off, afterwards.
    """
    run = replace(CASES[name], to_storage=RARELY, samples=8000, epochs=1, slow_copy_secs=0.1)
    run = in_memory(replace(run, callback={"timeout_secs": TIMEOUT_SECS}), place)
    with network_or_skip(2) as network:
        cuts = Cuts(run, network)
        cutting = threading.Thread(target=cuts.do)
        cutting.start()
        codes = live_ranks(replace(run, networks=tuple(network.nodes)), (0, 40.0))
        cutting.join()
    assert KILLED in codes, output(run)
    assert not cuts.given_up_early, "the short one delays only"
    assert GIVEN_UP in output(run), output(run)
    _, healed, cut, ended = cuts.steps
    assert ended > cut > healed, "training does not wait for copies"
    unwritten = under_way(run)
    if lost:
        lose(run, VICTIM)
    last = replace(run, slow_copy_secs=0.0)
    assert live_ranks(last) == [0, 0], output(run)
    assert restored(run) >= healed
    assert (restored(run) <= cut + 2) == lost, (restored(run), cuts.steps)
    assert_same_run(last, unwritten)
    assert left(run) == []
