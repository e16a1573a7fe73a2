"""What a run that was broken must have been, from its own record: the judge of ``faults``.

The record holds of each step what every operator was and which tokens the routers gave each expert. A start goes back
in it, and what it brings is looked up operator by operator; lost tokens are counted a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.faults_life import COUNTS, EXPERTS, LAYERS, REST

PARTIAL = frozenset({"MoC", "MoEtion"})
"""Policies under which experts may come back older, with their lost tokens counted."""
_EXPERTS = tuple(f"{layer}/{expert}" for layer in range(LAYERS) for expert in range(EXPERTS))
_WORD = 1 << 64

Event = Mapping[str, Any]


class Wrong(AssertionError):
    """A promise that was not kept."""


@dataclass
class Back:
    """What one start came back to.

    Attributes:
        step: Where the run stood when training began; of a window, its last step.
        behind: Finished steps before the fault that are computed again.
        stale: Experts that are older than the step.
    """

    step: int
    behind: int
    stale: int = 0


@dataclass
class History:
    """The steps of a run that still count.

    Attributes:
        reference: Step -> event of the undisturbed run; and its end at -1.
        steps: Step -> operator -> sum; ``routed`` has the tokens of each.
        exact: Nothing has happened that makes the run another one than the reference.
        judged: All tokens are known, so that lost ones can be counted.
    """

    reference: Mapping[int, Event]
    sharded: bool
    policies: list[str] = field(default_factory=list)
    steps: dict[int, Mapping[str, int]] = field(default_factory=dict)
    losses: dict[int, str] = field(default_factory=dict)
    routed: dict[int, list[int]] = field(default_factory=dict)
    faults: list[list[int]] = field(default_factory=list)
    exact: bool = True
    judged: bool = True
    stored: int = 0
    sealed: int = 0

    @property
    def newest(self) -> int:
        """The newest finished step."""
        return max(self.steps, default=0)

    def life(self, ranks: Sequence[Sequence[Event]], policy: str, required: int, *, same: bool) -> Back | None:
        """Judges one life.

        Args:
            ranks: The events of each rank.
            policy: Of this life.
            required: The step that it must have come back to at least.
            same: As many ranks as before, divided alike.

        Returns:
            What it came back to; None if it did not come as far as training.

        Raises:
            Wrong: A promise was not kept.
        """
        starts = [events[0] for events in ranks if events]
        if not starts:
            return None
        self.policies.append(policy)
        self.exact = self.exact and (same or not self.steps)
        step = starts[0]["step"]
        if len({start["step"] for start in starts}) > 1:
            raise Wrong(f"ranks begin at different steps: {[start['step'] for start in starts]}")
        if step < required:
            raise Wrong(f"step {required} was acknowledged, and the run came back to step {step}")
        self._fill(step, starts)
        back = Back(step, self.newest - step)
        before = dict(self.steps), dict(self.losses)
        self._cut(step)
        self.stored, self.sealed = min(self.stored, step), min(self.sealed, step)
        if step and not starts[0]["replays"] and len(starts) == len(ranks):
            back.stale = self._compare(step, _total([start["sums"] for start in starts], self.sharded))
        self._count_lost(step, starts[0])
        again = before if self.exact else ({}, {})
        for at in sorted({event["step"] for rank in ranks for event in rank[1:] if event["event"] == "step"}):
            events = [event for rank in ranks for event in rank[1:] if (event["event"], event["step"]) == ("step", at)]
            self._step(at, events, len(ranks), again)
        ends = [event for rank in ranks for event in rank[1:] if event["event"] == "end"]
        if len(ends) == len(ranks):
            self._end(ends[0], _total([event["sums"] for event in ends], self.sharded))
        for rank in ranks:
            for event in rank[1:]:
                self.stored = max(self.stored, event.get("stored", 0))
        self.sealed = max([self.sealed, *(min(pair) for pair in zip(*map(_sealed, ranks), strict=False))])
        return back

    def _cut(self, step: int) -> None:
        for kept in (self.steps, self.losses, self.routed):
            for later in [at for at in kept if at > step]:
                del kept[later]

    def _compare(self, step: int, sums: Mapping[str, int]) -> int:
        """Every operator is as of the step or, if it is an expert that may be older, of one before. Counts these."""
        partial = bool(PARTIAL.intersection(self.policies))
        then, stale = self.steps[step], 0
        for operator, result in sums.items():
            if result == then[operator] or (operator == COUNTS and partial):
                continue
            versions = [at for at, step in self.steps.items() if step.get(operator) == result]
            if operator not in _EXPERTS or not partial or not versions:
                what = f"as of step {max(versions)}" if versions else "as it never was"
                raise Wrong(f"{operator} came back {what}, and the run is at step {step}")
            stale += 1
        self.exact = self.exact and not stale
        self._versions = {
            operator: max(at for at, step in self.steps.items() if step.get(operator) == sums[operator])
            for operator in _EXPERTS
            if operator in sums
        }
        return stale

    def _count_lost(self, step: int, start: Event) -> None:
        """Counts the tokens that experts lack, and compares with the library's books."""
        self.judged = self.judged and PARTIAL.issuperset(self.policies) and all(at in self.routed for at in self.steps)
        if not self.judged or not step:
            self.faults = [] if not step else self.faults
            return
        self.faults = [fault for fault in self.faults if fault[0] < step]
        booked = max((fault[0] for fault in self.faults), default=0)
        lost = [
            sum(self.routed[at][number] for at in range(max(self._versions[operator], booked) + 1, step + 1))
            for number, operator in enumerate(_EXPERTS)
        ]
        self.faults.append([step, sum(lost), sum(tokens > 0 for tokens in lost)])
        self._compare_books(step, start)

    def _compare_books(self, step: int, event: Event) -> None:
        applied = [sum(self.routed[at][number] for at in range(1, step + 1)) for number in range(len(_EXPERTS))]
        told = [tokens for layer in event["applied"] for tokens in layer]
        if told != applied:
            raise Wrong(f"at step {step} the books have {told} tokens by expert, and {applied} were routed")
        if event["faults"] != self.faults:
            raise Wrong(f"at step {step} the books have the failures {event['faults']}, and they were {self.faults}")

    def _fill(self, step: int, starts: Sequence[Event]) -> None:
        """The run came back to ``step``. Nobody wrote it down if the rank that was to do so died in its update."""
        if step in self.steps or not step:
            return
        if step > self.newest + 1 or not self.steps:
            raise Wrong(f"the run came back to step {step}, and its newest finished one is {self.newest}")
        if self.exact:
            self.steps[step] = self.reference[step]["sums"]
            self.routed[step] = self.reference[step]["routed"]
        elif starts[0]["replays"]:
            self.steps[step] = {}
        else:
            self.steps[step] = _total([start["sums"] for start in starts], self.sharded)

    def _step(
        self, step: int, events: Sequence[Event], ranks: int, again: tuple[Mapping[int, Any], Mapping[int, str]]
    ) -> None:
        """A step as ranks wrote it down: all of them, unless one died."""
        if events[0]["replayed"]:
            return  # its weights are put in place when the step has ended
        if len(events) < ranks and self.sharded:
            return  # its state is not known
        sums = _total([event["sums"] for event in events], self.sharded)
        if step != self.newest + 1:
            raise Wrong(f"step {step} follows step {self.newest}")
        if len(events) < ranks:
            self.steps[step] = sums
            if self.exact:
                self.routed[step] = self.reference[step]["routed"]
            return
        losses = ",".join(event["loss"] for event in events)
        expected = self.reference.get(step) if self.exact else None
        for what, result, at in (
            ("the loss", losses, [] if expected is None else [expected["loss"]]),
            ("the state", sums, [] if expected is None else [expected["sums"]]),
            ("the loss when it was computed first", losses, [again[1][step]] if step in again[1] else []),
            ("the state when it was computed first", sums, [again[0][step]] if step in again[0] else []),
        ):
            if at and at[0] != result:
                raise Wrong(f"{what} of step {step} differs from that of the undisturbed run or of before")
        self.steps[step], self.losses[step] = sums, losses
        routed = [sum(tokens) for tokens in zip(*(_flat(event["routed"]) for event in events), strict=True)]
        self.routed[step] = routed

    def _end(self, event: Event, sums: Mapping[str, int]) -> None:
        if self.exact:
            expected = self.reference[-1]
            for what in ("step", "rng"):
                if event[what] != expected[what]:
                    raise Wrong(f"at the end {what} is {event[what]}, and {expected[what]} in the undisturbed run")
            if sums != expected["sums"]:
                raise Wrong("the final state differs from that of the undisturbed run")
        if self.judged:
            self._compare_books(event["step"], event)


def reference_of(ranks: Sequence[Sequence[Event]], sharded: bool) -> dict[int, Event]:
    """Returns what ``History.reference`` is, from the undisturbed run."""
    results: dict[int, Event] = {}
    for events in zip(*(rank[1:] for rank in ranks), strict=True):
        sums = _total([event["sums"] for event in events], sharded)
        if events[0]["event"] == "end":
            results[-1] = {**events[0], "sums": sums}
        else:
            loss = ",".join(event["loss"] for event in events)
            routed = [sum(tokens) for tokens in zip(*(_flat(event["routed"]) for event in events), strict=True)]
            results[events[0]["step"]] = {"loss": loss, "sums": sums, "routed": routed}
    return results


def _total(sums: Sequence[Mapping[str, int]], sharded: bool) -> dict[str, int]:
    """Of all ranks. Where none is divided, all ranks must have the same."""
    if not sharded:
        if any(each != sums[0] for each in sums):
            raise Wrong("ranks that hold the same state hold different ones")
        return dict(sums[0])
    operators = dict.fromkeys(operator for each in sums for operator in each)
    return {operator: sum(each.get(operator, 0) for each in sums) % _WORD for operator in operators}


def _flat(rows: Sequence[Sequence[int]]) -> Iterator[int]:
    for row in rows:
        yield from row


def _sealed(events: Sequence[Event]) -> list[int]:
    """Of each step the newest checkpoint in memory that was known by then."""
    result, newest = [], 0
    for event in events[1:]:
        newest = max(newest, event.get("sealed", 0))
        result.append(newest)
    return result


assert REST not in _EXPERTS
