"""Where a run stands: every event in every state is in the table or is refused by name."""

from __future__ import annotations

import pytest

from moe_ckpt.driver.states import TRANSITIONS, Event, Lifecycle, State
from moe_ckpt.errors import ConfigError

HAPPY = {
    "new run": (Event.OPEN, Event.RESUME, Event.JOIN, Event.BEGIN, Event.JOIN, Event.STEP, Event.SAVE, Event.FINISH),
    "window": (Event.OPEN, Event.RESUME_WINDOW, Event.BEGIN, Event.STEP, Event.STEP, Event.REPLAYED, Event.STEP),
    "nothing to train": (Event.OPEN, Event.FINISH, Event.CLOSE, Event.CLOSE),
    "failed": (Event.OPEN, Event.CLOSE, Event.CLOSE),
    "never opened": (Event.CLOSE, Event.OPEN),
}


@pytest.mark.parametrize("events", HAPPY.values(), ids=HAPPY)
def test_what_runs_do(events):
    run = Lifecycle({})
    for event in events:
        assert run.allows(event)
        run.move(event, "x")


def test_every_state_is_left_and_reached():
    reached = {after for events in TRANSITIONS.values() for after in events.values()}
    assert TRANSITIONS.keys() == set(State) == reached
    assert all(Event.CLOSE in events for events in TRANSITIONS.values()), "whatever happened, threads are let go of"


@pytest.mark.parametrize("state", State)
def test_what_cannot_be_names_the_call_and_what_to_do(state):
    run = Lifecycle({state: "call resume() first"})
    run.state = state
    for event in set(Event) - TRANSITIONS[state].keys():
        with pytest.raises(ConfigError, match=r"after_step\(\): call resume\(\) first \(") as refused:
            run.move(event, "after_step()")
        assert state.value in str(refused.value)
        assert run.state is state


def test_memory_holds_no_state_of_the_run_while_a_window_is_computed_again():
    for state in (State.WINDOW, State.REPLAYING):
        assert Event.SAVE not in TRANSITIONS[state]
    assert Event.STEP not in TRANSITIONS[State.WINDOW], "training begins first"
    assert Event.REPLAYED not in TRANSITIONS[State.TRAINING]
    assert Event.FINISH not in TRANSITIONS[State.CLOSED], "what was let go of is not saved any more"
