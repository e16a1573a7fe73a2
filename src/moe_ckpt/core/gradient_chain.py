"""Which anchors and gradients bring operators to a step.

Between two anchors the state of an operator follows from the anchor and the gradients that its optimizer consumed
since (MoEtion, Algorithm 3). An operator reaches step ``t`` from its anchor of step ``a`` if of each step in ``(a, t]``
it is known which operators it updated, and the gradient is there where it updated this one. A step without an update,
one that the loss scaler skipped say, needs none. Names and numbers only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from moe_ckpt.errors import GradientGapError

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LoggedStep:
    """What the log has of one step.

    Attributes:
        updated: Operators that an optimizer updated. A step that is not logged may have updated any.
        gradients: Operators whose consumed gradients it has.
        anchored: Operators that it has in full, as they were after the step.
    """

    updated: frozenset[str] = _NONE
    gradients: frozenset[str] = _NONE
    anchored: frozenset[str] = _NONE


Log = Mapping[int, LoggedStep]
"""Step -> what the log has of it."""


@dataclass(frozen=True)
class Chain:
    """How one operator comes to a step.

    Attributes:
        operator: Its id.
        anchor: The step of its anchor.
        gradients: Steps whose gradients are then applied, ascending.
    """

    operator: str
    anchor: int
    gradients: tuple[int, ...]


def chain(log: Log, operator: str, step: int) -> Chain:
    """Returns the shortest way of ``operator`` to ``step``, which is that from its newest anchor.

    Raises:
        GradientGapError: Something is missing since that anchor, or there is none.
    """
    gradients: list[int] = []
    for at in range(step, min(log, default=step) - 1, -1):
        logged = log.get(at)
        if logged is None:
            raise GradientGapError(operator, at, step, "it is not known what that step updated")
        if operator in logged.anchored:
            return Chain(operator, at, tuple(reversed(gradients)))
        if operator in logged.updated:
            if operator not in logged.gradients:
                raise GradientGapError(operator, at, step, "its gradient is missing")
            gradients.append(at)
    raise GradientGapError(operator, min(log, default=step), step, "there is no anchor of that step or before")


def newest_reachable(log: Log, operators: Collection[str]) -> int | None:
    """Returns the newest step that every one of ``operators`` reaches, None if there is none.

    Takes time in proportion to operators times steps.
    """
    reached: set[str] = set()
    newest, before = None, None
    for step in sorted(log):
        logged = log[step]
        if before is not None and step != before + 1:
            reached.clear()
        reached -= logged.updated - logged.gradients
        reached |= logged.anchored
        before = step
        if reached.issuperset(operators):
            newest = step
    return newest


def anchors(log: Log) -> dict[str, int]:
    """Returns operator -> step of the anchor from which it comes to the newest step; no operator that does not.

    Takes time in proportion to the log.
    """
    found: dict[str, int] = {}
    before = None
    for step in sorted(log):
        logged = log[step]
        if before is not None and step != before + 1:
            found.clear()
        for operator in logged.updated - logged.gradients:
            found.pop(operator, None)
        found.update(dict.fromkeys(logged.anchored, step))
        before = step
    return found


def chains(log: Log, operators: Iterable[str], step: int) -> dict[str, Chain]:
    """Returns the way of each of ``operators`` to ``step``.

    Raises:
        GradientGapError: Of the first that does not reach it.
    """
    return {operator: chain(log, operator, step) for operator in operators}


class Follower:
    """What a replica holds of the operators that it follows, in the order in which it receives it.

    A gradient comes with the step of the update before it, so that one that got lost is seen at once; what follows it
    is refused until the operator is sent in full again.
    """

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}
        self._length: dict[str, int] = {}

    def reached(self, operator: str) -> int | None:
        """Returns the step to which the operator can be brought; None if it must be sent in full."""
        return self._reached.get(operator)

    def length(self, operator: str) -> int:
        """Returns how many gradients there are beyond the operator's anchor."""
        return self._length.get(operator, 0)

    def anchor(self, operator: str, step: int) -> None:
        """The operator was received in full, as of ``step``."""
        self._reached[operator], self._length[operator] = step, 0

    def gradient(self, operator: str, step: int, previous: int) -> None:
        """The gradient of ``step`` was received; the operator's update, or anchor, before it is of step ``previous``.

        Raises:
            GradientGapError: The operator is not there as of ``previous``. From here on it must be sent in full.
        """
        known = self._reached.get(operator)
        if known != previous or step <= previous:
            self._reached.pop(operator, None)
            self._length.pop(operator, None)
            found = "no anchor of it is held" if known is None else f"it is held as of step {known}"
            raise GradientGapError(operator, previous, step, found)
        self._reached[operator] = step
        self._length[operator] += 1


def sends_gradient(reached: int | None, previous: int, length: int, most: int) -> bool:
    """Returns whether the gradient of an update is enough for a replica, or the operator must be sent in full.

    Args:
        reached: The step as of which the replica holds the operator; None if it does not.
        previous: The step of the operator's update before this one, or of its anchor.
        length: Gradients that the replica holds beyond the anchor.
        most: How many it may hold, which bounds its memory and the time of a replay.
    """
    return reached == previous and length < most
