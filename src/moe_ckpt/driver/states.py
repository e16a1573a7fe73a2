"""The states of a run, and the actions that each allows: a transition table, as data.

::

    NEW ── open ──► OPEN ─┬─ resume ────────► READY ─── begin ──► TRAINING ◄─┐ step, save
                          └─ resume window ─► WINDOW ── begin ──► REPLAYING ─┘ replayed
    anywhere from OPEN on ── finish ──► ENDED, or close ──► CLOSED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from moe_ckpt.errors import ConfigError


class State(Enum):
    """Stage that one life of a run has reached."""

    NEW = "the store is not open"
    OPEN = "the store is open, and no checkpoint was loaded yet"
    READY = "the model holds the state that training starts with"
    WINDOW = "the model holds the first step of a sparse window"
    TRAINING = "steps are computed and saved"
    REPLAYING = "steps of a sparse window are computed again, and the model holds no complete state of the run"
    ENDED = "training ended, and the last state was saved"
    CLOSED = "the store was closed before the run ended"


class Moment(Enum):
    """Moment of an iteration; the value says of which step parameters and optimizer state are."""

    UNKNOWN = "no state of this life, or callbacks may have put other weights in"
    RESTING = "those of the newest step"
    EXPOSED = "those of the newest step, unless callbacks have put other weights in"
    REDUCING = "the same; an update has begun, which first reduces gradients over ranks"
    WRITING = "between two steps"
    WRITTEN = "those of the next step, which the loop has not counted yet"
    WRITTEN_ALONE = "the same; whether what other ranks write of it has arrived is not known"
    BOOKING = "those of the newest step, which the session is booking"


class Action(Enum):
    """Next action of an adapter."""

    OPEN = "open"
    RESUME = "resume"
    RESUME_WINDOW = "resume window"
    BEGIN = "begin"
    JOIN = "join"
    STEP = "step"
    REPLAYED = "replayed"
    SAVE = "save"
    FINISH = "finish"
    CLOSE = "close"


_ENDS = {Action.FINISH: State.ENDED, Action.CLOSE: State.CLOSED}
TRANSITIONS: Mapping[State, Mapping[Action, State]] = {
    State.NEW: {Action.OPEN: State.OPEN, Action.CLOSE: State.NEW},
    State.OPEN: {Action.RESUME: State.READY, Action.RESUME_WINDOW: State.WINDOW, **_ENDS},
    State.READY: {Action.BEGIN: State.TRAINING, Action.JOIN: State.READY, Action.SAVE: State.READY, **_ENDS},
    State.WINDOW: {Action.BEGIN: State.REPLAYING, Action.JOIN: State.WINDOW, **_ENDS},
    State.TRAINING: dict.fromkeys((Action.JOIN, Action.STEP, Action.SAVE), State.TRAINING) | _ENDS,
    State.REPLAYING: {
        Action.JOIN: State.REPLAYING,
        Action.STEP: State.REPLAYING,
        Action.REPLAYED: State.TRAINING,
        **_ENDS,
    },
    State.ENDED: {Action.CLOSE: State.ENDED},
    State.CLOSED: {Action.CLOSE: State.CLOSED},
}
"""For each state the actions that it allows, and the state after each of them."""

Advice = Mapping[State, str]
"""For states in which an adapter may be called too early or too late: which call was forgotten or made, and advice."""


class Lifecycle:
    """The state of one run.

    Args:
        advice: In the adapter's words, for errors.
    """

    def __init__(self, advice: Advice) -> None:
        self.state = State.NEW
        self._advice = advice

    @property
    def is_training(self) -> bool:
        """True if steps are computed, for the first time or again."""
        return self.state in (State.TRAINING, State.REPLAYING)

    def allows(self, event: Action) -> bool:
        """Returns whether the state allows this action."""
        return event in TRANSITIONS[self.state]

    def require(self, event: Action, call: str) -> None:
        """Raises ``ConfigError`` unless ``event`` may happen now.

        Args:
            event: The action.
            call: The function that was called, for the message.
        """
        if event not in TRANSITIONS[self.state]:
            advice = self._advice.get(self.state, "it cannot be called now")
            raise ConfigError(f"{call}: {advice} ({self.state.value})")

    def move(self, event: Action, call: str) -> None:
        """Changes the state by an action. Raises as ``require``."""
        self.require(event, call)
        self.state = TRANSITIONS[self.state][event]
