"""Calls actions on all ranks: either all succeed, or all learn the worst error of any rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from moe_ckpt.comm.communicator import largest
from moe_ckpt.errors import (
    CoverageError,
    DamagedError,
    NotFiniteError,
    OtherLayoutError,
    PeerLostError,
    ReplayDivergedError,
    StepRemovedError,
    StoreError,
    StoreForbiddenError,
)
from moe_ckpt.format.manifest import MANIFEST_NAME
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.step_storage import StepStorage

DAMAGED, DIVERGED, UNREAD, STOPS = 1, 2, 3, 4
"""Kinds of errors, the worst last: try the next older checkpoint; try none of the same gradient log; ``on_read_error``
decides; try no other."""

T = TypeVar("T")


@dataclass
class NotUsableError(Exception):
    """A checkpoint cannot be used; raised on every rank, and caught inside this package.

    Attributes:
        kind: The worst kind on any rank.
        rank: The first rank with that kind.
        problem: This rank's own error, if any.
    """

    kind: int
    rank: int
    problem: Exception | None


def on_rank_zero(comm: Communicator, action: Callable[[], T], doing: str) -> T:
    """Calls ``action`` on rank 0, and returns its result, plain data, on every rank. A collective.

    Ranks look at a store this way because it may change between two looks. If ``action`` raises an error, rank 0
    raises that, and the others ``StoreError`` with its message: "rank 0 cannot <doing>: ...".
    """
    answer, problem = answer_of(action) if comm.rank == 0 else ({}, None)
    result: T = result_of(json.loads(comm.broadcast(json.dumps(answer).encode())), problem, doing)
    return result


def answer_of(action: Callable[[], object]) -> tuple[dict[str, Any], Exception | None]:
    """Calls ``action``, and returns what rank 0 sends to other ranks for ``result_of``, with the error, if any."""
    try:
        return {"result": action()}, None
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        return {"error": f"{type(error).__name__}: {error}"}, error


def result_of(answer: Mapping[str, Any], problem: Exception | None, doing: str) -> Any:
    """Returns the result that rank 0 sent, or raises its error, as ``on_rank_zero`` does.

    Args:
        answer: Of rank 0.
        problem: On rank 0, its own error.
        doing: What rank 0 tried, for the message.
    """
    if problem is not None:
        raise problem
    if "error" in answer:
        raise StoreError(f"rank 0 cannot {doing}: {answer['error']}")
    return answer["result"]


def require_committed(comm: Communicator, storage: StepStorage, directory: str) -> None:
    """Raises ``StepRemovedError`` on every rank, if a step that they could not use was removed meanwhile. A collective.

    Rank 0 looks: only one rank may have missed a file, and only some may have listed the step.
    """
    if not on_rank_zero(comm, lambda: storage.is_committed(directory), f"look for {directory} again"):
        raise StepRemovedError(storage.root, (directory,), f"{directory}/{MANIFEST_NAME}") from None


def on_all_ranks(comm: Communicator, action: Callable[[], T]) -> T:
    """Returns the result of ``action``, if it succeeds on every rank. A collective.

    ``action`` must be no collective, unless each rank completes it before it raises.

    Raises:
        NotUsableError: On every rank, if it failed on any.
        PeerLostError: A peer is gone.
    """
    return on_all_ranks_with_maximum(comm, lambda: (action(), 0))[0]


def on_all_ranks_with_maximum(comm: Communicator, action: Callable[[], tuple[T, int]]) -> tuple[T, int]:
    """Does the same as ``on_all_ranks`` for an ``action`` that returns a result and a number.

    Returns:
        This rank's result, and the largest number of any rank.
    """
    result: T | None = None
    asks = 0
    problem: Exception | None = None
    try:
        result, asks = action()
    except PeerLostError:  # others may still wait in the same action, so that nothing can be agreed on
        raise
    except Exception as error:  # raised again once the other ranks know
        problem = error
    kind = _kind(problem)
    severity = kind * comm.world_size + (comm.world_size - 1 - comm.rank)  # MAX selects the worst, then the lowest rank
    severity, asked = largest(comm, [severity, asks])
    worst, order = divmod(severity, comm.world_size)
    if worst:
        raise NotUsableError(worst, comm.world_size - 1 - order, problem)
    return result, asked  # type: ignore[return-value]  # no problem, so there is a result


def _kind(problem: Exception | None) -> int:
    if problem is None:
        return 0
    if isinstance(problem, StoreForbiddenError):
        return STOPS  # an older checkpoint would only hide a mistake in the set-up
    if isinstance(problem, OSError):
        return UNREAD
    if isinstance(problem, ReplayDivergedError) and problem.logged:
        return DIVERGED
    skipped = (DamagedError, CoverageError, NotFiniteError, OtherLayoutError, StepRemovedError)
    return DAMAGED if isinstance(problem, skipped) else STOPS


def raise_on_all_ranks(
    comm: Communicator, failure: NotUsableError, directory: str, doing: str = "resume from checkpoint"
) -> NoReturn:
    """Raises on every rank: its own error if that is of the worst kind, else ``StoreError`` with the worst message.

    The traceback does not show ``failure``, which callers handle.
    """
    problem = failure.problem
    reason = comm.broadcast(str(problem).encode() if comm.rank == failure.rank else b"", failure.rank).decode()
    if problem is not None and _kind(problem) == failure.kind:
        raise problem from problem.__cause__
    raise StoreError(f"rank {failure.rank} cannot {doing} {directory}: {reason}") from None
