"""Which anchors and gradients bring operators to a step.

Between two anchors the state of an operator follows from the anchor and the gradients that its optimizer consumed
since (MoEtion, Algorithm 3). An operator reaches step ``t`` from its anchor of step ``a`` if of each step in ``(a, t]``
it is known which operators it updated, and the gradient is there where it updated this one. A step without an update,
one that the loss scaler skipped say, needs none. Names and numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LoggedStep:
    """Content of the log for one step.

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
    """The anchor and the gradients that bring one operator to a step.

    Attributes:
        operator: Its id.
        anchor: The step of its anchor.
        gradients: Steps whose gradients are then applied, ascending.
    """

    operator: str
    anchor: int
    gradients: tuple[int, ...]


def chain(log: Log, operator: str, step: int) -> Chain:
    """Returns the shortest chain of ``operator`` to ``step``: the one from its newest anchor.

    Raises:
        LookupError: Something is missing since that anchor, or there is none.
    """
    gradients: list[int] = []
    for at in range(step, min(log, default=step) - 1, -1):
        logged = log.get(at)
        if logged is None:
            raise LookupError(operator, at, step, "it is not known what that step updated")
        if operator in logged.anchored:
            return Chain(operator, at, tuple(reversed(gradients)))
        if operator in logged.updated:
            if operator not in logged.gradients:
                raise LookupError(operator, at, step, "its gradient is missing")
            gradients.append(at)
    raise LookupError(operator, min(log, default=step), step, "there is no anchor of it or of an earlier step")
