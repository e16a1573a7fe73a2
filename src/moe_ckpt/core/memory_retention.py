"""Which of the snapshots in memory must stay: the newest complete checkpoint, and what may become the next one.

Pure. A snapshot is complete when every rank holds its share. None goes before its successor is complete everywhere, so
that a failure at any moment finds a whole checkpoint; of a sparse window all steps are one checkpoint together. Where
peers are slow they do not get every snapshot: then the newest checkpoint that they all have stays beside the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HeldStep:
    """A snapshot in memory.

    Attributes:
        sequence: Snapshots before it.
        window: First step of its sparse window; None for a checkpoint that stands by itself.
        slot: Its place in the window.
        size: Steps of the window.
        complete: Every rank has it; None as long as that is not known, False if it never will.
        copied: So have the peers of every rank, or, as long as that is not known, they are to get it.
    """

    sequence: int
    window: int | None = None
    slot: int = 0
    size: int = 1
    complete: bool | None = None
    copied: bool = True


def needed(held: Iterable[HeldStep]) -> frozenset[int]:
    """The sequences that must stay, of those that are held."""
    steps = sorted((step for step in held if step.complete is not False), key=lambda step: step.sequence)
    return _newest_and_after(steps) | _newest_and_after([step for step in steps if step.copied])


def _newest_and_after(steps: Sequence[HeldStep]) -> frozenset[int]:
    """The newest checkpoint among ``steps``, in order, and what may become the next one."""
    newest = newest_checkpoint(steps)
    last = newest[-1].sequence if newest else -1
    after = [step for step in steps if step.sequence > last]
    slots = Counter(step.window for step in after)
    under_way = after[-1].window if after else None
    # A window of which a step is missing, and that is not the one under way, was given up.
    kept = [step for step in after if step.window in (None, under_way) or slots[step.window] == step.size]
    return frozenset(step.sequence for step in (*newest, *kept))


def newest_checkpoint(held: Iterable[HeldStep]) -> list[HeldStep]:
    """The snapshots of the newest checkpoint that is complete, in order; none if there is none."""
    steps = sorted(held, key=lambda step: step.sequence)
    for step in reversed(steps):
        if not step.complete or step.slot + 1 < step.size:
            continue
        if step.window is None:
            return [step]
        window = [each for each in steps if each.window == step.window and each.complete]
        if [each.slot for each in window] == list(range(step.size)):
            return window
    return []
