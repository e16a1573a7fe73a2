"""Where a run stands: every event in every state is in the table or is refused by name."""

from __future__ import annotations

import pytest

from moe_ckpt.driver.states import TRANSITIONS, Action, Lifecycle, State
from moe_ckpt.errors import ConfigError

HAPPY = {
    "new run": (
        Action.OPEN,
        Action.RESUME,
        Action.JOIN,
        Action.BEGIN,
        Action.JOIN,
        Action.STEP,
        Action.SAVE,
        Action.FINISH,
    ),
    "window": (Action.OPEN, Action.RESUME_WINDOW, Action.BEGIN, Action.STEP, Action.STEP, Action.REPLAYED, Action.STEP),
    "nothing to train": (Action.OPEN, Action.FINISH, Action.CLOSE, Action.CLOSE),
    "failed": (Action.OPEN, Action.CLOSE, Action.CLOSE),
    "never opened": (Action.CLOSE, Action.OPEN),
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
    assert all(Action.CLOSE in events for events in TRANSITIONS.values()), "whatever happened, threads are let go of"


@pytest.mark.parametrize("state", State)
def test_what_cannot_be_names_the_call_and_what_to_do(state):
    run = Lifecycle({state: "call resume() first"})
    run.state = state
    for event in set(Action) - TRANSITIONS[state].keys():
        with pytest.raises(ConfigError, match=r"after_step\(\): call resume\(\) first \(") as refused:
            run.move(event, "after_step()")
        assert state.value in str(refused.value)
        assert run.state is state


def test_memory_holds_no_state_of_the_run_while_a_window_is_computed_again():
    for state in (State.WINDOW, State.REPLAYING):
        assert Action.SAVE not in TRANSITIONS[state]
    assert Action.STEP not in TRANSITIONS[State.WINDOW], "training begins first"
    assert Action.REPLAYED not in TRANSITIONS[State.TRAINING]
    assert Action.FINISH not in TRANSITIONS[State.CLOSED], "what was let go of is not saved any more"
