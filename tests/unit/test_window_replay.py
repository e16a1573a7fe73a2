"""The order in which a window's steps are asked for, made, put in place and compared, whatever makes them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.recovery.replay import StepReplay
from moe_ckpt.windows.replay import WindowReplay


class Window(WindowReplay):
    """The replay of a window of the steps 4, 6 and 7, of which nothing is read; step 4 is in place."""

    def __init__(self, told: list[str]) -> None:
        slots = [SimpleNamespace(step=step) for step in (4, 6, 7)]
        reader = SimpleNamespace(index=lambda manifest: None)
        manifest = SimpleNamespace(slots=slots, directory="step_00000007")
        loader = SimpleNamespace(agreed=lambda directory, load: load())
        super().__init__(loader, reader, manifest, None, 0)  # type: ignore[arg-type]
        self._loaded = 1
        self.told = told

    def upcoming(self) -> Mapping[str, Any]:
        return {} if self.is_loaded else {"rng": self.upcoming_step}

    def load(self) -> None:
        self.told.append(f"load {self.upcoming_step}")
        self._loaded += 1

    def repeat(self) -> None:
        self.told.append("repeat")


def replaying(told: list[str]) -> WindowReplay:
    def repeated(before: Mapping[str, Any], recorded: Mapping[str, Any]) -> Any:
        told.append(f"from {before['rng']} to {recorded['rng']}")
        return [("the random numbers", lambda state: state["rng"])]

    window = Window(told)
    window.resume({"rng": 4}, repeated)
    return window


def test_the_window_replaces_each_step_that_is_computed():
    told: list[str] = []
    window = replaying(told)
    assert window.steps == (4, 7)
    for step in (6, 7):
        window.put_back(step)
        window.put_back(step)  # the optimizer's end and the adapter's own may both say it
        assert window.done is (step == 7)
        window.compare(step, {"rng": step})
    assert told == ["load 6", "repeat", "from 4 to 6", "load 7", "repeat", "from 6 to 7"]


def test_a_step_that_is_another_is_no_step_of_the_window():
    window = replaying([])
    with pytest.raises(ReplayDivergedError, match=r"it is computed now, and was skipped then \(the run computed 6\)"):
        window.put_back(5)
    window.skip(5)
    with pytest.raises(ReplayDivergedError, match="it is skipped now, and was computed then"):
        window.skip(6)
    with pytest.raises(ReplayDivergedError, match="the random numbers differs"):
        window.compare(6, {"rng": 5})


def test_ranks_that_go_back_alone_skip_no_step_behind_the_checkpoint():
    """A step has a log only if it was computed."""
    alone = StepReplay(SimpleNamespace(slots=[SimpleNamespace(step=4)]))  # type: ignore[arg-type]
    alone.resume({}, lambda before, recorded: (), until=7)
    alone.compare(5, {})
    with pytest.raises(ReplayDivergedError, match="step 6 again did not repeat it: it is skipped now"):
        alone.skip(6)
