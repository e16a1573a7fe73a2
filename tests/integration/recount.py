"""What MoC must have lost, counted a second time from the routers' own log, without the library's books.

The log holds, per batch, how many token assignments each router gave each expert, and which step it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Expert = tuple[int, int]
"""(MoE layer, expert)."""


@dataclass
class Recount:
    """The history that survived: step -> assignments, and step -> hashes; resumes cut it back.

    ranks: one list of events per rank; their assignments add up. order: position -> expert, in which
    experts are saved in turn. stacked: no expert is saved out of turn, as a listed one is when its optimizer
    state comes into being later than the others'.
    """

    layers: int
    experts: int
    k: int = 1
    order: tuple[int, ...] = (0, 1, 2, 3)
    stacked: bool = True
    steps: dict[int, dict[Expert, int]] = field(default_factory=dict)
    hashes: dict[int, dict[str, str]] = field(default_factory=dict)
    faults: list[list[int]] = field(default_factory=list)
    _open: dict[Expert, int] = field(default_factory=dict)

    def batch(self, events: list[dict[str, Any]]) -> None:
        """One batch, as all ranks logged it. Micro-batches count for the step that they lead to."""
        for event in events:
            for layer, row in enumerate(event["routed"]):
                for expert, tokens in enumerate(row):
                    self._open[layer, expert] = self._open.get((layer, expert), 0) + tokens
        step = events[0]["step"]
        if step != max(self.steps, default=0):
            self.steps[step], self._open = self._open, {}
            self.hashes[step] = events[0].get("hashes", {})

    def resume(self, step: int, versions: dict[Expert, int]) -> None:
        """A life begins at ``step`` (0: from nothing) with experts as old as ``versions`` says."""
        self._open = {}
        self.steps = {t: counts for t, counts in self.steps.items() if t <= step}
        # A fault that returned to this very step, or a later one, is not in the checkpoint's past.
        self.faults = [fault for fault in self.faults if fault[0] < step]
        if not step:
            return
        booked = max((fault[0] for fault in self.faults), default=0)
        lost = {
            expert: sum(self.steps[t][expert] for t in range(max(version, booked) + 1, step + 1))
            for expert, version in versions.items()
        }
        self.faults.append([step, sum(lost.values()), sum(tokens > 0 for tokens in lost.values())])

    def expected_versions(self, step: int) -> dict[Expert, int]:
        """The step at which each expert was saved last, if there is one checkpoint per step from step 1 on.

        The first is complete; after that the K experts of layer l at the c-th partial one (from 0) are those at
        positions (c + l) K, ... of the order.
        """
        found = {}
        for layer in range(self.layers):
            for place, expert in enumerate(self.order):
                turns = [t for t in range(2, step + 1) if (place - (t - 2 + layer) * self.k) % self.experts < self.k]
                found[layer, expert] = max(turns, default=1)
        return found

    @property
    def applied(self) -> list[list[int]]:
        return [
            [sum(counts[layer, expert] for counts in self.steps.values()) for expert in range(self.experts)]
            for layer in range(self.layers)
        ]

    @property
    def routed(self) -> int:
        return sum(map(sum, self.applied))

    @property
    def lost(self) -> int:
        return sum(fault[1] for fault in self.faults)


def versions_in(manifest: dict[str, Any]) -> dict[Expert, int]:
    """What a manifest says about the versions of its experts."""
    found = {}
    for operator, record in manifest["operators"].items():
        kind, *numbers = operator.split("/")
        if kind == "expert":
            found[int(numbers[0]), int(numbers[1])] = record[0]
    return found


def versions_by_bytes(recount: Recount, begin: dict[str, Any]) -> dict[Expert, int]:
    """The newest step at which each expert was what it is now, wherever it came from."""
    found = {}
    for name, held in begin["hashes"].items():
        if name != "non_expert":
            same = [t for t, hashes in recount.hashes.items() if t <= begin["step"] and hashes[name] == held]
            assert same, f"{name} came back as it never was"
            _, layer, expert = name.split("/")
            found[int(layer), int(expert)] = max(same)
    return found


def check_history(
    recount: Recount,
    lives: list[list[list[dict[str, Any]]]],
    *,
    every_step_saved: bool = True,
    in_memory: bool = False,
) -> None:
    """Compare the library's claims with the recount, life by life.

    lives: per rank, per life, the events.
    in_memory: No manifest says what came back: its bytes do.
    """
    for number, first in enumerate(lives[0]):
        begin = first[0]
        step = begin["step"] or 0
        versions = {}
        if step:
            versions = versions_by_bytes(recount, begin) if in_memory else versions_in(begin["manifest"])
        recount.resume(step, versions)
        if not step and "hashes" in begin:
            recount.hashes[0] = begin["hashes"]
        if step:
            ended = any(life[-1]["event"] == "end" for life in lives[0][:number])
            # A run that ended leaves a complete checkpoint behind, whose turn it was in or not.
            complete = ended and set(versions.values()) == {step}
            assert in_memory or begin["manifest"]["step"] == step
            _check_start(recount, begin, versions, every_step_saved and not complete)
        of_ranks = [[event for event in lives_of_rank[number] if event["event"] == "batch"] for lives_of_rank in lives]
        for events in zip(*of_ranks, strict=False):  # a killed rank may have logged one batch less
            recount.batch(list(events))
    end = lives[0][-1][-1]
    assert end["event"] == "end"
    assert end["applied"] == recount.applied
    assert end["faults"] == recount.faults
    assert (end["lost"], end["routed_total"]) == (recount.lost, recount.routed)
    assert end["plt"] == recount.lost / recount.routed


def _check_start(recount: Recount, begin: dict[str, Any], versions: dict[Expert, int], every_step_saved: bool) -> None:
    step = begin["step"]
    if every_step_saved and recount.stacked:
        assert versions == recount.expected_versions(step)
    elif every_step_saved:
        assert step - min(versions.values()) < -(-recount.experts // recount.k)
    assert begin["faults"] == recount.faults
    assert begin["applied"] == recount.applied
    if begin.get("hashes"):
        held = begin["hashes"]
        assert held["non_expert"] == recount.hashes[step]["non_expert"], "non-experts are not those of the step"
        for (layer, expert), version in versions.items():
            name = f"expert/{layer}/{expert}"
            assert held[name] == recount.hashes[version][name], f"{name} is not what it was at step {version}"
