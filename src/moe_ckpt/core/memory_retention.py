"""Which of the snapshots in memory must stay: the newest complete checkpoint, and what may become the next one.

Pure. A snapshot is complete when every rank holds its share. None goes before its successor is complete everywhere, so
that a failure at any moment finds a whole checkpoint; of a sparse window all steps are one checkpoint together, and so
are a step of a gradient log and all snapshots back to its oldest anchor. Where
peers are slow they do not get every snapshot: then the newest checkpoint that they all have stays beside the newest.

A partial checkpoint lacks experts, whose newest version may be in an older one: that stays, too, as long as there is
room for it (``with_newest_experts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryStep:
    """A snapshot in memory.

    Attributes:
        sequence: Snapshots before it.
        window: First step of its sparse window; None for a checkpoint that stands by itself.
        slot: Its place in the window.
        size: Steps of the window.
        complete: Every rank has it; None as long as that is not known, False if it never will.
        copied: So have the peers of every rank, or, as long as that is not known, they are to get it.
        experts: Those that it holds, a bit each (``OperatorSets``); 0 for a step of a sparse window.
        sent: Of those, the ones that peers get.
        on_storage: A checkpoint on storage holds it.
        since: Of a step of a gradient log, sequence of the first snapshot that it needs; None if it stands by itself.
        groups: Of the same, the groups of operators that gradients lead to it (``core.anchors.GradientGroups``).
    """

    sequence: int
    window: int | None = None
    slot: int = 0
    size: int = 1
    complete: bool | None = None
    copied: bool = True
    experts: int = 0
    sent: int = 0
    on_storage: bool = False
    since: int | None = None
    groups: frozenset[int] = frozenset()


def with_newest_experts(in_memory: Iterable[MemoryStep]) -> tuple[int, ...]:
    """Sequences of those that hold some expert's newest version in this memory, or in that of peers; ascending.

    Not those that storage has, and the newest version of an expert in one that storage has is not looked for further.
    """
    steps = sorted((step for step in in_memory if step.complete), key=lambda step: -step.sequence)
    newest_here = _newest_versions((step, step.experts) for step in steps)
    return tuple(sorted(newest_here | _newest_versions((step, step.sent) for step in steps if step.copied)))


def _newest_versions(steps: Iterable[tuple[MemoryStep, int]]) -> set[int]:
    """Of (snapshot, experts), newest first, those with experts that none before has."""
    sequences, seen = set(), 0
    for step, experts in steps:
        if experts & ~seen and not step.on_storage:
            sequences.add(step.sequence)
        seen |= experts
    return sequences


def needed(in_memory: Iterable[MemoryStep]) -> frozenset[int]:
    """The sequences that must stay, of those in memory."""
    steps = sorted((step for step in in_memory if step.complete is not False), key=lambda step: step.sequence)
    return _newest_and_after(steps) | _newest_and_after([step for step in steps if step.copied])


def _newest_and_after(steps: Sequence[MemoryStep]) -> frozenset[int]:
    """The newest checkpoint among ``steps``, in order, and what may become the next one."""
    newest = newest_checkpoint(steps)
    last = newest[-1].sequence if newest else -1
    after = [step for step in steps if step.sequence > last]
    slots = Counter(step.window for step in after)
    under_way = after[-1].window if after else None
    # A window of which a step is missing, and that is not the one under way, was given up.
    unfinished = [step for step in after if step.window in (None, under_way) or slots[step.window] == step.size]
    return frozenset(step.sequence for step in (*newest, *unfinished))


Live = tuple[tuple[int, frozenset[int]], tuple[int, frozenset[int]]]
"""(sequence, groups) of the newest checkpoint, and of the newest that peers have; -1 and no groups without any."""


def live_groups(in_memory: Iterable[MemoryStep]) -> Live:
    """Returns which groups' gradients are needed, and up to which snapshot.

    Gradients before a group's newest anchor are not, since the steps to come have newer anchors only.
    """
    steps = [step for step in in_memory if step.complete is not False]
    return _head(steps), _head([step for step in steps if step.copied])


def _head(steps: Sequence[MemoryStep]) -> tuple[int, frozenset[int]]:
    newest = newest_checkpoint(steps)
    return (newest[-1].sequence, newest[-1].groups) if newest else (-1, frozenset())


def is_live(step: MemoryStep, groups: Collection[int], live: Live) -> bool:
    """Returns whether gradients of ``groups`` that ``step`` has are needed still.

    Args:
        step: One that stays.
        groups: Of the operators whose gradients they are.
        live: Of ``live_groups``.
    """
    (newest, _), (newest_copied, _) = live
    if not step.complete or step.sequence > (newest_copied if step.copied else newest):
        return True  # it may become a part of the next one
    return any(step.sequence <= sequence and not alive.isdisjoint(groups) for sequence, alive in live)


def newest_checkpoint(in_memory: Iterable[MemoryStep]) -> list[MemoryStep]:
    """The snapshots of the newest checkpoint that is complete, in order; none if there is none."""
    steps = sorted(in_memory, key=lambda step: step.sequence)
    for step in reversed(steps):
        if not step.complete or step.slot + 1 < step.size:
            continue
        if step.since is not None:
            chain = [member for member in steps if step.since <= member.sequence <= step.sequence and member.complete]
            if len(chain) == step.sequence - step.since + 1:
                return chain
            continue
        if step.window is None:
            return [step]
        window = [member for member in steps if member.window == step.window and member.complete]
        if [member.slot for member in window] == list(range(step.size)):
            return window
    return []
