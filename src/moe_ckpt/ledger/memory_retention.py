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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.step import Contents, Step

NO_EXPERTS: npt.NDArray[np.bool_] = np.zeros(1, dtype=bool)


@dataclass(eq=False)
class MemoryStep:
    """A snapshot in memory, and what has become of it.

    Attributes:
        identity: Names it.
        contents: What it holds.
        experts: ``[operators]`` those that it holds; ``NO_EXPERTS`` for a step of a sparse window.
        sent: Of those, the ones that peers get; likewise.
        complete: Every rank has it; None as long as that is not known, False if it never will.
        copied: So have the peers of every rank, or, as long as that is not known, they are to get it.
        on_storage: A checkpoint on storage holds it.
    """

    identity: Step
    contents: Contents
    experts: npt.NDArray[np.bool_] = field(default_factory=lambda: NO_EXPERTS)
    sent: npt.NDArray[np.bool_] = field(default_factory=lambda: NO_EXPERTS)
    complete: bool | None = None
    copied: bool = True
    on_storage: bool = False

    @property
    def number(self) -> int:
        return self.identity.number

    @property
    def window(self) -> int | None:
        """First step of its sparse window; None for a checkpoint by itself."""
        return None if self.contents.window is None else self.contents.window.start

    @property
    def size(self) -> int:
        """Steps of its window."""
        return 1 if self.contents.window is None else self.contents.window.size

    @property
    def gradient_slots(self) -> Sequence[Sequence[int]]:
        """The groups of operators whose gradients lie in each slot of a step of a gradient log."""
        return () if self.contents.groups is None else self.contents.groups.groups

    @cached_property
    def groups(self) -> frozenset[int]:
        """All groups of ``gradient_slots``."""
        return frozenset(chain.from_iterable(self.gradient_slots))


Held = TypeVar("Held", bound=MemoryStep)


def with_newest_experts(in_memory: Iterable[MemoryStep]) -> tuple[int, ...]:
    """Numbers of those that hold some expert's newest version in this memory, or in that of peers; ascending.

    Not those that storage has, and the newest version of an expert in one that storage has is not looked for further.
    """
    steps = sorted((step for step in in_memory if step.complete), key=lambda step: -step.number)
    newest_here = _newest_versions((step, step.experts) for step in steps)
    return tuple(sorted(newest_here | _newest_versions((step, step.sent) for step in steps if step.copied)))


def _newest_versions(steps: Iterable[tuple[MemoryStep, npt.NDArray[np.bool_]]]) -> set[int]:
    """Of (snapshot, experts), newest first, those with experts that none before has."""
    numbers, seen = set(), NO_EXPERTS
    for step, experts in steps:
        if not step.on_storage and (experts & ~seen).any():
            numbers.add(step.number)
        seen = seen | experts
    return numbers


def needed(in_memory: Iterable[MemoryStep]) -> frozenset[int]:
    """The numbers of those that must stay, of those in memory."""
    steps = sorted((step for step in in_memory if step.complete is not False), key=lambda step: step.number)
    return _newest_and_after(steps) | _newest_and_after([step for step in steps if step.copied])


def _newest_and_after(steps: Sequence[MemoryStep]) -> frozenset[int]:
    """The newest checkpoint among ``steps``, in order, and what may become the next one."""
    newest = newest_checkpoint(steps)
    last = newest[-1].number if newest else -1
    after = [step for step in steps if step.number > last]
    slots = Counter(step.window for step in after)
    under_way = after[-1].window if after else None
    # A window of which a step is missing, and that is not the one under way, was given up.
    unfinished = [step for step in after if step.window in (None, under_way) or slots[step.window] == step.size]
    return frozenset(step.number for step in (*newest, *unfinished))


Live = tuple[tuple[int, frozenset[int]], tuple[int, frozenset[int]]]
"""(number, groups) of the newest checkpoint, and of the newest that peers have; -1 and no groups without any."""


def live_groups(in_memory: Iterable[MemoryStep]) -> Live:
    """Returns which groups' gradients are needed, and up to which snapshot.

    Gradients before a group's newest anchor are not, since the steps to come have newer anchors only.
    """
    steps = [step for step in in_memory if step.complete is not False]
    return _head(steps), _head([step for step in steps if step.copied])


def _head(steps: Sequence[MemoryStep]) -> tuple[int, frozenset[int]]:
    newest = newest_checkpoint(steps)
    return (newest[-1].number, newest[-1].groups) if newest else (-1, frozenset())


def is_live(step: MemoryStep, groups: Collection[int], live: Live) -> bool:
    """Returns whether gradients of ``groups`` that ``step`` has are needed still.

    Args:
        step: One that stays.
        groups: Of the operators whose gradients they are.
        live: Of ``live_groups``.
    """
    (newest, _), (newest_copied, _) = live
    if not step.complete or step.number > (newest_copied if step.copied else newest):
        return True  # it may become a part of the next one
    return any(step.number <= number and not alive.isdisjoint(groups) for number, alive in live)


def newest_checkpoint(in_memory: Iterable[Held]) -> list[Held]:
    """The snapshots of the newest checkpoint that is complete, in order; none if there is none."""
    steps = sorted(in_memory, key=lambda step: step.number)
    for step in reversed(steps):
        if not step.complete or not step.contents.is_checkpoint:
            continue
        since = step.contents.since
        if since is not None:
            log = [member for member in steps if since <= member.number <= step.number and member.complete]
            if len(log) == step.number - since + 1:
                return log
            continue
        if step.window is None:
            return [step]
        window = [member for member in steps if member.window == step.window and member.complete]
        if [member.contents.slot for member in window] == list(range(step.size)):
            return window
    return []
