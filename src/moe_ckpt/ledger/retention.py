"""Decides which checkpoints stay on storage and in memory, and which files go with the others. Pure.

Partial checkpoints share files: the newest view of an expert may be a file of an older step. Files come in groups, such
as all shards of experts that were written at one step. A group lives as long as some retained checkpoint names it, and
one file may be the only copy behind every recent view. The spare answers that: a complete older checkpoint that has no
group in common with the newest, so that no single damaged file takes both.

A resumed run may have skipped checkpoints that are newer than the one it returned to, mostly because they are damaged.
They must not take the place of the checkpoints that the current state descends from (its line), so each rule is applied
to the line, too. A run whose loss became NaN continues to save; what it saves must not take the place of finite
checkpoints, so each rule is applied to these, too.

In memory, a snapshot stays until every rank holds its share of a newer one, so that a failure at any moment leaves a
whole checkpoint. The steps of a sparse window are one checkpoint together, and so are a step of a gradient log and all
snapshots back to its oldest anchor. If peers are so slow that they do not get every snapshot, the newest one that they
all have stays beside the newest. A partial checkpoint lacks experts, whose newest version may be in an older one: that
stays, too, as long as there is room for it (``with_newest_experts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Reversible, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.step import Contents, Step
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError


@dataclass(frozen=True)
class CheckpointRecord:
    """One committed checkpoint.

    Attributes:
        groups: Every group of files that it needs (``directory/group``), its commit record included.
        parent: ``order`` of the checkpoint that its generation started from, which may be gone or damaged by now; None
            if that is not known, or if there was none.
        dense: It is one state of the run, which any layout opens; False for a sparse window.
        finite: None of its weights and optimizer state is NaN or infinite.
    """

    directory: str
    generation: int
    step: int
    groups: frozenset[str]
    parent: tuple[int, int] | None = None
    dense: bool = True
    finite: bool = True

    @cached_property
    def directories(self) -> frozenset[str]:
        """The directories that hold its files."""
        return frozenset(group.partition("/")[0] for group in self.groups)

    @property
    def order(self) -> tuple[int, int]:
        """Orders checkpoints by age: a later life of the run may have gone back to an earlier step."""
        return self.generation, self.step


@named_arguments
@dataclass(frozen=True)
class RetentionPolicy:
    """Decides which committed checkpoints stay on storage.

    The newest always stays, and so does the newest with finite values. If that is a sparse window (MoEvement), the
    newest dense one with finite values stays too, for a run that resumes on another layout. A fallback that shares no
    file with the newest stays (the spare), and the candidate to follow it: at most two more checkpoints, and two more
    while the line is not all. That costs nothing if every checkpoint is complete and ``keep_last >= 2``.

    Attributes:
        keep_last: How many of the newest stay: of all checkpoints, and of those that the current state descends from
            (the line). The two differ only after a run resumed from a checkpoint older than damaged ones, until it has
            made as many new ones. As many of those with finite values stay.
        keep_every_n_steps: Of every so many steps the first checkpoint stays too: that of a step divisible by it or,
            where that one was skipped, the next (one generation of it: the newest on the line, or else the newest).

    Raises:
        ConfigError: A number below 1.
    """

    keep_last: int = 2
    keep_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        _require_whole("keep_last", self.keep_last)
        if self.keep_every_n_steps is not None:
            _require_whole("keep_every_n_steps", self.keep_every_n_steps)


def retained_directories(records: Collection[CheckpointRecord], policy: RetentionPolicy) -> frozenset[str]:
    """Returns the directories of the checkpoints that stay."""
    if not records:
        return frozenset()
    ordered = sorted(records, key=lambda record: record.order)
    line = _line(ordered)
    finite = [[record for record in records if record.finite] for records in (ordered, line)]
    lists = [records for records in (ordered, line, *finite) if records]
    counted = [record for records in lists for record in records[-policy.keep_last :]]
    spares = [record for records in lists for record in _spares(records)]
    dense = [[record for record in records if record.dense] for records in finite]
    newest = [records[-1] for records in (*lists, *dense) if records]
    return frozenset(record.directory for record in (*newest, *counted, *_milestones(lists, policy), *spares))


def _line(ordered: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Returns the newest checkpoint and those that the run made on its way to it, oldest first.

    If no record says how a generation began, everything older belongs to the line.
    """
    parents = {record.generation: record.parent for record in ordered}
    line: list[CheckpointRecord] = []
    last = ordered[-1].order
    while True:
        older = [record for record in ordered if record.order <= last]
        line = [record for record in older if record.generation == last[0]] + line
        parent = parents.get(last[0])
        if parent is None or parent[0] >= last[0]:
            return [record for record in older if record.generation < last[0]] + line
        last = parent


def groups_to_delete(
    groups_of: Mapping[str, Iterable[str]], records: Iterable[CheckpointRecord], keep_directories: Collection[str] = ()
) -> dict[str, list[str]]:
    """Returns step directory -> its groups that no retained checkpoint names; no directory without any.

    Args:
        groups_of: Step directory -> all its groups.
        records: The checkpoints that stay.
        keep_directories: Directories being written now; nothing in them is superseded yet.
    """
    named = frozenset[str]().union(*(record.groups for record in records))
    superseded = {
        directory: [group for group in groups if f"{directory}/{group}" not in named]
        for directory, groups in groups_of.items()
        if directory not in keep_directories
    }
    return {directory: groups for directory, groups in superseded.items() if groups}


def _milestones(lists: Iterable[Sequence[CheckpointRecord]], policy: RetentionPolicy) -> list[CheckpointRecord]:
    """Returns the first checkpoint of every ``keep_every_n_steps`` steps, from the last of ``lists`` that has one."""
    every = policy.keep_every_n_steps
    if every is None:
        return []
    milestones: dict[int, CheckpointRecord] = {}
    for records in lists:
        descending = sorted(records, key=lambda record: (-record.step, record.generation))  # so the first one stays
        milestones |= {record.step // every: record for record in descending if record.step >= every or not record.step}
    return list(milestones.values())


def _spares(ordered: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
    """Returns the spare and the checkpoint that will be the next spare.

    The spare is the newest checkpoint that shares no file with the newest one. The next spare is the oldest checkpoint
    after it. It must be kept from now on, since it takes time until the newest one shares no file with it.
    """
    newest, others = ordered[-1], ordered[:-1]
    disjoint = [i for i, record in enumerate(others) if record.groups.isdisjoint(newest.groups)]
    if not disjoint:
        return list(others[:1])
    return list(others[disjoint[-1] : disjoint[-1] + 2])


def _require_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"retention: {name}={value!r} must be a whole number of at least 1")


# --- in memory ---

NO_EXPERTS: npt.NDArray[np.bool_] = np.zeros(1, dtype=bool)


@dataclass(eq=False)
class MemoryStep:
    """A snapshot in memory, and what has become of it.

    Attributes:
        identity: Names the snapshot.
        contents: What it holds.
        experts: ``[operators]`` whether it holds an expert; ``NO_EXPERTS`` for a step of a sparse window.
        sent: ``[operators]`` whether peers get that expert; ``NO_EXPERTS`` for a step of a sparse window.
        complete: Every rank has its share; None while that is not known, False if some rank never will.
        copied: The peers of every rank have it or, while that is not known, are to get it.
        on_storage: A checkpoint on storage holds it.
    """

    identity: Step
    contents: Contents
    experts: npt.NDArray[np.bool_] = field(default_factory=lambda: NO_EXPERTS)
    sent: npt.NDArray[np.bool_] = field(default_factory=lambda: NO_EXPERTS)
    complete: bool | None = None
    copied: bool = True
    on_storage: bool = False

    @cached_property
    def number(self) -> int:
        return self.identity.number

    @cached_property
    def window(self) -> int | None:
        """The first step of its sparse window; None if it is a checkpoint by itself."""
        return None if self.contents.window is None else self.contents.window.start

    @property
    def size(self) -> int:
        """The number of steps of its window."""
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


def with_newest_experts(in_memory: Reversible[MemoryStep]) -> frozenset[int]:
    """Returns the numbers of the steps that hold some expert's newest version in this memory, or in that of peers.

    A step that storage has is not among them, and the newest version of an expert in it is looked for no further.

    Args:
        in_memory: In ascending order of their numbers.
    """
    steps = [step for step in reversed(in_memory) if step.complete]
    newest_here = _newest_versions([(step, step.experts) for step in steps])
    return newest_here | _newest_versions([(step, step.sent) for step in steps if step.copied])


def _newest_versions(steps: Sequence[tuple[MemoryStep, npt.NDArray[np.bool_]]]) -> frozenset[int]:
    """Returns the numbers of the snapshots, given the newest first, that have an expert which no newer one has."""
    with_experts = [(step, experts) for step, experts in steps if experts is not NO_EXPERTS]
    if not with_experts:
        return frozenset()
    experts_of = np.array([experts for _, experts in with_experts])
    newest = np.unique(experts_of.argmax(axis=0)[experts_of.any(axis=0)])
    members = (with_experts[at][0] for at in newest.tolist())
    return frozenset(step.number for step in members if not step.on_storage)


def needed_steps(in_memory: Iterable[MemoryStep]) -> frozenset[int]:
    """Returns the numbers of the steps that must stay.

    Args:
        in_memory: In ascending order of their numbers.
    """
    steps = [step for step in in_memory if step.complete is not False]
    return _newest_and_after(steps) | _newest_and_after([step for step in steps if step.copied])


def _newest_and_after(steps: Sequence[MemoryStep]) -> frozenset[int]:
    """Returns the numbers of the newest checkpoint among ``steps``, in order, and of what may become the next one."""
    newest = newest_checkpoint(steps)
    last = newest[-1].number if newest else -1
    after = [step for step in steps if step.number > last]
    slots = Counter(step.window for step in after)
    under_way = after[-1].window if after else None
    # A window that lacks a step, and is not under way, was given up.
    unfinished = [step for step in after if step.window in (None, under_way) or slots[step.window] == step.size]
    return frozenset(step.number for step in (*newest, *unfinished))


Live = tuple[tuple[int, frozenset[int]], tuple[int, frozenset[int]]]
"""(number, groups) of the newest checkpoint, and of the newest that peers have; -1 and no groups without any."""


def live_groups(in_memory: Iterable[MemoryStep]) -> Live:
    """Returns the groups whose gradients are needed, and up to which snapshot.

    Gradients before a group's newest anchor are not needed, since later steps start from newer anchors.
    """
    steps = [step for step in in_memory if step.complete is not False]
    return _head(steps), _head([step for step in steps if step.copied])


def _head(steps: Sequence[MemoryStep]) -> tuple[int, frozenset[int]]:
    newest = newest_checkpoint(steps)
    return (newest[-1].number, newest[-1].groups) if newest else (-1, frozenset())


def is_live(step: MemoryStep, groups: Collection[int], live: Live) -> bool:
    """Returns whether gradients of ``groups`` that ``step`` has are still needed.

    Args:
        step: A snapshot that stays.
        groups: The groups of the operators whose gradients they are.
        live: What ``live_groups`` returned.
    """
    (newest, _), (newest_copied, _) = live
    if not step.complete or step.number > (newest_copied if step.copied else newest):
        return True  # it may become a part of the next one
    return any(step.number <= number and not alive.isdisjoint(groups) for number, alive in live)


def newest_checkpoint(steps: Reversible[Held]) -> list[Held]:
    """Returns the snapshots of the newest checkpoint that is complete, in order; none if there is none.

    Args:
        steps: In ascending order of their numbers.
    """
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
