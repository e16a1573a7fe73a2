"""Decides which pipeline stages go back after a failure, and which keep their state. Pure.

Between two updates every surviving rank has the newest step, and the senders' logs have the messages that crossed the
boundaries of the stages since the last checkpoint. So only stages that lost a rank go back: their ranks compute the
steps since then again, with the logged messages of their neighbours (MoEvement, section 3.4 and appendix A).

The trainer decides by ``local_recoveries``, from the steps that ranks kept, and by ``log_gap``. The simulator knows
which stages have lost a rank, and has no ranks that are a step apart: it takes the ``segments`` of these stages, and
joins them to recoveries under way by ``Segment.touches``. For the same dead ranks both come to the same segments,
unless every stage lost one: then a trainer lets all go back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_ckpt.ledger.coverage import joined_ranges


class Segment(NamedTuple):
    """Neighbouring stages that recover together, from the first to the last."""

    first: int
    last: int

    def touches(self, other: Segment) -> bool:
        """True if ``other`` shares a stage with this segment or is next to it: then the two recover together."""
        return other.first <= self.last + 1 and other.last >= self.first - 1

    def joined(self, others: Iterable[Segment]) -> Segment:
        """The smallest segment with all of these."""
        every = [self, *others]
        return Segment(min(segment.first for segment in every), max(segment.last for segment in every))


def segments(stages: Iterable[int]) -> list[Segment]:
    """Returns the segments of neighbouring stages, in order."""
    ranges = joined_ranges((stage, stage + 1) for stage in sorted(set(stages)))
    return [Segment(first, end - 1) for first, end in ranges]


@dataclass(frozen=True)
class LocalRecovery:
    """A recovery in which some stages keep their state.

    Attributes:
        step: Step whose state the other stages keep, and that all reach.
        segments: Segments of the stages that go back.
        ranks: Ranks of these stages, ascending.
    """

    step: int
    segments: tuple[Segment, ...]
    ranks: tuple[int, ...]


def local_recovery(stage_of: Sequence[int], steps_of_ranks: Sequence[int | None]) -> LocalRecovery | None:
    """Returns which stages go back; None if none or all have to.

    A stage keeps its state if all its ranks kept the same step, since they share experts, shards and gradients. All
    stages meet at the newest of those steps, since an update cannot be undone: a stage that stopped earlier goes back,
    and so does one of which only some ranks are ahead.

    Args:
        stage_of: Per rank, its pipeline stage.
        steps_of_ranks: Per rank, the step of the state that it kept; None if it was lost.
    """
    steps_of: dict[int, set[int | None]] = {}
    for stage, reached in zip(stage_of, steps_of_ranks, strict=True):
        steps_of.setdefault(stage, set()).add(reached)
    whole = {stage: step for stage, steps in steps_of.items() if len(steps) == 1 for step in steps if step is not None}
    step = max(whole.values(), default=None)
    lost = {stage for stage in steps_of if whole.get(stage) != step}
    if step is None or not lost:
        return None
    ranks = tuple(rank for rank, stage in enumerate(stage_of) if stage in lost)
    return LocalRecovery(step, tuple(segments(lost)), ranks)


def local_recoveries(stage_of: Sequence[int], steps_of_ranks: Sequence[int | None]) -> list[LocalRecovery]:
    """Returns which stages go back, for each step that a whole stage kept, the newest step first.

    To reach an older step, stages that kept a newer one go back as well. An older step may be needed because a log of
    the newer one may be missing, if only some ranks had ended their update.

    Args:
        stage_of: As of ``local_recovery``.
        steps_of_ranks: As of ``local_recovery``.
    """
    steps = sorted({step for step in steps_of_ranks if step is not None}, reverse=True)
    up_to = ([None if reached is None or reached > step else reached for reached in steps_of_ranks] for step in steps)
    recoveries = zip(steps, (local_recovery(stage_of, reached) for reached in up_to), strict=True)
    return [recovery for step, recovery in recoveries if recovery is not None and recovery.step == step]


class LogGap(NamedTuple):
    """A step for which a rank that keeps its state has no log."""

    rank: int
    step: int


def log_gap(recovery: LocalRecovery, since: int, ranks: int, logged: Mapping[int, Collection[int]]) -> LogGap | None:
    """Returns the first missing log that the stages that go back need from the others; None if there is none.

    Args:
        recovery: The stages that go back.
        since: Step of the checkpoint that they load.
        ranks: Number of ranks of the run.
        logged: Per rank, the steps for which it has a log.
    """
    keeping = set(range(ranks)).difference(recovery.ranks)
    gaps = (LogGap(rank, step) for step in range(since + 1, recovery.step + 1) for rank in sorted(keeping))
    return next((gap for gap in gaps if gap.step not in logged.get(gap.rank, ())), None)
