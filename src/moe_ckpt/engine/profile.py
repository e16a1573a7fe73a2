"""What a run tells of itself while it trains: a JSON file that simulator and planner take as input (docs/profile.md).

Rank 0 records. The training thread does no more than add numbers up; now and then it hands them to a thread of the
profile's own, which writes the whole file anew under a temporary name and renames it. Nothing that goes wrong here
disturbs training: it is logged once.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.skew import normalized_hhi
from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.profile_facts import parallel, started_unix_secs
from moe_ckpt.engine.profile_file import ProfileWriter
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.shares import ComputeTypes
from moe_ckpt.format.profile import Life
from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import TensorSpec

_MOST_SECS = 10.0
_LEAST_SECS = 0.5
_SHARE_OF_AGE = 0.01
_RECENT_STEPS = 50
_RECENT_LOOKS = 100
"""Of what is measured over few iterations or checkpoints, many looks are taken, and the median counts."""
_LAST_WRITE_SECS = 10.0
"""Longest wait for the last write: a disk that hangs must not keep training from ending."""

_left_unix_secs = 0.0
"""When an earlier life in this process ended: a later one begins there, not with the process."""


@dataclass(frozen=True)
class Facts:
    """What is the same during one life; fields as of ``format.profile.Life``."""

    run_id: str
    generation: int
    policy: Mapping[str, Any]
    ranks: int
    ranks_per_node: int
    host_memory_bytes: int


class NoRecorder:
    """Records nothing: of ranks other than 0, and where no profile is wanted."""

    def adopted(self, step: int) -> None:
        """The state of ``step`` is in place: loaded, or computed again."""

    def ready(self) -> None:
        """Training is about to enter its loop."""

    def joined(self, now: float) -> None:
        """The optimizer may change tensors from ``now`` (``perf_counter``) on."""

    def begun(self, nbytes: int, changes: int, specs: Sequence[TensorSpec], compute: ComputeTypes) -> None:
        """A snapshot of ``nbytes`` began. changes: of the layout; with another number the tensors are weighed anew."""

    def resolved(self, committed: bool) -> None:
        """A snapshot ended."""

    def lap(self, now: float, *, loaded: bool) -> None:
        """A step ended at ``now`` (``perf_counter``); ``loaded`` if a checkpoint was in flight during it."""

    def stepped(
        self,
        record: StepRecord,
        began: float,
        measured: Measured,
        popularity: Counts,
        specs: Callable[[], Sequence[TensorSpec]],
    ) -> None:
        """A step is done; its state was final at ``began`` (``perf_counter``). Called at the end of each."""

    def close(self, finished: bool) -> None:
        """The life is over. Safe to call twice; the first call counts."""


class Recorder(NoRecorder):
    """One life's entry in the file at ``path``. For the training thread of rank 0.

    An earlier file of the same model is gone on with; one that is something else is renamed, not overwritten.
    The file is written when the loop is entered, when the first iterations are measured, and then after each
    hundredth part of the life's length, but not more often than every 0.5 s and not less than every 10 s.
    """

    def __init__(self, path: str, catalog: Catalog, placement: Placement, facts: Facts) -> None:
        self._path = os.path.realpath(os.path.expanduser(path))
        self._catalog, self._placement, self._facts = catalog, placement, facts
        self._parallel = parallel(placement, facts.ranks)
        self._fingerprint = catalog.fingerprint()
        self._opened = time.time()
        self._started = min(max(started_unix_secs(), _left_unix_secs), self._opened)
        self._moments: dict[str, Any] = {}
        self._load_secs = 0.0
        self._steps: dict[str, Any] = {}
        self._sums: dict[str, Any] = {"stall_secs": 0.0, "waited_secs": 0.0, "agree_secs": 0.0, "clean_secs": 0.0}
        self._counts: dict[str, Any] = {"begun": 0, "committed": 0, "failed": 0, "skipped": 0, "snapshot_bytes": 0}
        self._counts |= {"clean_steps": 0}
        self._measured = Measured()
        self._record: StepRecord | None = None
        self._routed_before: int | None = None
        self._joined_at: float | None = None
        self._lap_at: float | None = None
        self._updates: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._looks: deque[Measured] = deque(maxlen=_RECENT_LOOKS)
        self._skews: deque[float] = deque(maxlen=_RECENT_LOOKS)
        self._layout: tuple[int, ComputeTypes] | None = None
        self._specs: Sequence[TensorSpec] | None = None
        self._due = 0.0
        self._closed = False
        self._writer = ProfileWriter(self._path, catalog, placement, self._fingerprint)

    def adopted(self, step: int) -> None:
        self._moments["restored_step"] = step
        if "ready_unix_secs" in self._moments:
            self._moments["load_secs"] = self._load_secs
            self._moments["training_unix_secs"] = time.time()
        else:
            self._moments["load_secs"] = max(0.0, time.time() - self._opened)  # clocks may be set back

    def ready(self) -> None:
        now = time.time()
        self._load_secs = max(0.0, now - self._opened)
        self._moments |= {"ready_unix_secs": now, "training_unix_secs": now}
        self._write(now)

    def joined(self, now: float) -> None:
        if self._joined_at is None:
            self._joined_at = now

    def begun(self, nbytes: int, changes: int, specs: Sequence[TensorSpec], compute: ComputeTypes) -> None:
        self._counts["begun"] += 1
        self._counts["snapshot_bytes"] += nbytes
        if self._layout is None or self._layout[0] != changes or self._layout[1] is not compute:
            self._layout, self._specs = (changes, compute), specs

    def resolved(self, committed: bool) -> None:
        self._counts["committed" if committed else "failed"] += 1

    def lap(self, now: float, *, loaded: bool) -> None:
        if self._lap_at is not None and not loaded:
            self._sums["clean_secs"] += now - self._lap_at
            self._counts["clean_steps"] += 1
        self._lap_at = now

    def stepped(
        self,
        record: StepRecord,
        began: float,
        measured: Measured,
        popularity: Counts,
        specs: Callable[[], Sequence[TensorSpec]],
    ) -> None:
        now = time.time()
        if self._joined_at is not None:
            self._updates.append(began - self._joined_at)
            self._joined_at = None
        first = not self._steps
        if first:
            self._steps["first_step"] = record.step
            self._routed_before = record.routed_tokens - int(popularity.sum())
            entered = self._moments.get("training_unix_secs")
            self._steps["first_step_secs"] = None if entered is None else max(0.0, now - entered)
        self._steps |= {"last_step": record.step, "last_step_unix_secs": now}
        self._sums["stall_secs"] += record.stall_secs
        self._sums["waited_secs"] += record.stall_secs if record.waited else 0.0
        self._sums["agree_secs"] += record.agree_secs
        newly_known = self._measured.recent_iteration_secs is None and measured.recent_iteration_secs is not None
        self._measured, self._record = measured, record
        if newly_known or now >= self._due:
            if self._layout is None:  # nothing was saved yet, but what there is to save can be weighed
                self._layout, self._specs = (-1, {}), specs()
            experts = [layer.experts for layer in self._catalog.layers]
            if experts and popularity.any():
                self._skews.append(float(normalized_hhi(popularity, experts).mean()))
            self._looks.append(measured)
            self._write(now)

    def close(self, finished: bool) -> None:
        global _left_unix_secs
        if self._closed:
            return
        self._closed = True
        _left_unix_secs = now = time.time()
        self._looks.append(self._measured)
        self._writer.wait(_LAST_WRITE_SECS)
        self._write(now, finished=finished)
        self._writer.close(_LAST_WRITE_SECS)

    def _write(self, now: float, *, finished: bool = False) -> None:
        self._due = now + min(_MOST_SECS, max(_LEAST_SECS, _SHARE_OF_AGE * (now - self._started)))
        specs, self._specs = self._specs, None
        compute = {} if self._layout is None else self._layout[1]
        if not self._writer.write(self._life(now, finished), specs, compute):
            self._specs = specs

    def _typical(self, name: str) -> float | None:
        """Of a field of ``Measured``."""
        seen = [value for look in self._looks if (value := getattr(look, name)) is not None]
        return median(seen) if seen else None

    def _life(self, now: float, finished: bool) -> Life:
        facts, record = self._facts, self._record
        pp, dp, ep = self._parallel
        routed = 0 if record is None or self._routed_before is None else record.routed_tokens - self._routed_before
        skips = 0 if record is None else record.skips
        looked: dict[str, Any] = {each.name: self._typical(each.name) for each in fields(Measured)}
        return Life(
            run_id=facts.run_id,
            generation=facts.generation,
            policy=facts.policy,
            ranks=facts.ranks,
            ranks_per_node=facts.ranks_per_node,
            pp=pp,
            dp=dp,
            ep=ep,
            host_memory_bytes=facts.host_memory_bytes,
            started_unix_secs=self._started,
            opened_unix_secs=self._opened,
            last_unix_secs=now,
            finished=finished,
            update_secs=median(self._updates) if self._updates else None,
            assignments=max(0, routed),
            skewness=min(1.0, sum(self._skews) / len(self._skews)) if self._skews else None,
            **looked,
            **self._moments,
            **self._steps,
            **self._sums,
            **{**self._counts, "skipped": skips},
        )
