"""Snapshots of the newest step that ranks seal when training stops at a failure: pure.

A rank that lives on when another one fails still holds the state of the newest step, whatever the policy saved of it.
What it seals then has a separate number among the snapshots of its life, by its step: ranks that stopped at different
steps never seem to have sealed one snapshot together. It counts as newer than all that were due.

Data-parallel ranks hold the same experts. So a survivor also seals the experts that the next rank in its group writes:
if that one is gone, they are not. That share is lent: it lacks the other rank's plain state (random numbers, position
in the data), so that it gives experts to a checkpoint of the same step, and is no part of one that stands by itself.

Where data-parallel ranks hold the same state, a survivor lends all that the other rank writes, and each rank seals
its plain state by itself as soon as a step has ended: with both nothing is lost with a rank that is killed between two
updates, also while what it saves itself is still being copied. A rank that dies in an update which the others end has
no plain state of their step.
"""

from __future__ import annotations

from collections.abc import Sequence

STATE, TENSORS = "state", "tensors"
"""What a share may be instead of all of a rank's: its plain state, or all but that."""
GRADIENTS = "gradients"
"""What a slot has of a step of a gradient log, if it has consumed gradients of some operators only: each of these slots
goes as soon as no newer step needs it (``core.anchors``)."""
_OF_ANOTHER = 1 << 48
_OF_ITSELF = 1 << 49


def survivor_sequence(step: int, *, of_another: bool = False) -> int:
    """Returns the number of the snapshot of ``step`` that survivors seal.

    Args:
        of_another: Of another rank's share.
    """
    return (_OF_ANOTHER if of_another else _OF_ITSELF) + step


def is_survivors(sequence: int) -> bool:
    """Returns whether a snapshot of this number was sealed by survivors."""
    return sequence >= _OF_ANOTHER


def is_lent(sequence: int) -> bool:
    """Returns whether a share in a snapshot of this number was sealed by one rank on behalf of another."""
    return _OF_ANOTHER <= sequence < _OF_ITSELF


def shared_sequence(sequence: int) -> int:
    """Returns the number of the snapshot that a share belongs to, together with those of the other ranks."""
    return sequence - _OF_ANOTHER + _OF_ITSELF if is_lent(sequence) else sequence


def lends(rank: int, alike: Sequence[int]) -> int | None:
    """Returns the rank whose experts ``rank`` seals besides its own; None if no other rank has the same.

    Each rank's are sealed by one other, which does not know who is gone.

    Args:
        rank: The survivor.
        alike: Ranks that hold the same experts, ``rank`` included, ascending.
    """
    if rank not in alike or len(alike) < 2:
        return None
    return alike[(alike.index(rank) + 1) % len(alike)]
