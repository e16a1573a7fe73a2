"""Records what a run measures while it trains, in the file that the planner reads (docs/profile.md).

Rank 0 records. The training thread does no more than add numbers up; now and then it hands them to a thread of the
profile's own, which rewrites the whole file under a temporary name and renames it. Nothing that goes wrong here
disturbs training: it is logged once.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from statistics import fmean, median
from typing import Any

from moe_ckpt.core.operators import Catalog, MoELayer, OperatorKind
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.tokens import Counts, normalized_hhi
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import LayerRecord
from moe_ckpt.policies.base import Measured
from moe_ckpt.ports import TensorSpec
from moe_ckpt.run.events import (
    Closed,
    Joined,
    Loaded,
    Observer,
    Opened,
    Resumed,
    SessionEvent,
    SnapshotBegan,
    SnapshotEnded,
    StepEnded,
    StepRecord,
    StepReplayed,
    TrainingBegins,
    TrainingEnded,
)
from moe_ckpt.slices.assignment import ComputeTypes, operator_bytes
from moe_ckpt.storage.local import read_whole, remove_temporaries_of, replace_file
from moe_ckpt.threads import TaskThread, ThreadName
from moe_ckpt_sim.planner.profile_document import (
    MAX_PROFILE_BYTES,
    Life,
    OperatorRow,
    ProfiledModel,
    earlier_lives,
    encode_life,
    encode_model,
    encode_profile,
)

_IMPORTED_UNIX_SECS = time.time()


def parallel(placement: Placement, ranks: int) -> tuple[int, int, int]:
    """(pp, dp, ep), as ``sim.cluster.Parallel`` counts: stages, pipelines, and ranks that experts are split over.

    Without a distributed optimizer pipelines that hold the same experts deal them out, and so count as one wide one.
    """
    pp = len(placement.stages)
    width = placement.stages[0]
    ep = max((len(set(row)) for row in placement.owners), default=1)
    ep = 1 if placement.expert_ranks is None else ep
    if set(placement.stages) != {width} or width % ep or pp * width != ranks:
        return 1, ranks, 1
    return pp, width // ep, ep


def started_unix_secs() -> float:
    """When this process began; when this module was imported, where the system does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:  # the name, in brackets, may hold anything
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_UNIX_SECS


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


def profile_observer(path: str) -> Observer:
    """Returns an observer that keeps a run's profile in the file ``path``. For rank 0."""
    absolute = os.path.realpath(os.path.expanduser(path))
    recorder: Recorder | None = None

    def observe(event: SessionEvent) -> None:
        nonlocal recorder
        if isinstance(event, Opened):
            recorder = Recorder(absolute, event)
        elif recorder is not None:
            recorder.note(event)
            if isinstance(event, Closed):
                recorder = None

    return observe


class Recorder:
    """One life's entry in the file at ``path``. For the training thread of rank 0.

    An earlier file of the same model is gone on with; one that is something else is renamed, not overwritten.
    The file is written when the loop is entered, when the first iterations are measured, and then after each
    hundredth part of the life's length, but not more often than every 0.5 s and not less than every 10 s.
    """

    def __init__(self, path: str, opened: Opened) -> None:
        now, run = time.time(), opened.run
        ranks, settings = run.comm.world_size, run.settings
        pp, dp, ep = parallel(run.placement, ranks)
        self._life: dict[str, Any] = {
            "run_id": opened.run_id,
            "generation": opened.generation,
            "policy": run.policy.describe(),
            "ranks": ranks,
            "ranks_per_node": min(settings.local_ranks, ranks),
            "pp": pp,
            "dp": dp,
            "ep": ep,
            "host_memory_bytes": opened.host_memory_bytes,
            "replicas": 0 if settings.memory is None else settings.memory.replicas,
            "started_unix_secs": min(max(started_unix_secs(), _left_unix_secs), now),
            "opened_unix_secs": now,
            **dict.fromkeys(("stall_secs", "waited_secs", "agree_secs", "clean_secs"), 0.0),
            **dict.fromkeys(("begun", "committed", "failed", "snapshot_bytes", "clean_steps"), 0),
            "replayed_steps": 0,
        }
        self._state, self._recent = run.state, _Recent(run.catalog.layers)
        self._record: StepRecord | None = None
        self._routed_before = 0
        self._joined_at: float | None = None
        self._final_at: float | None = None
        self._layout: tuple[int, ComputeTypes] | None = None
        self._specs: Sequence[TensorSpec] | None = None
        self._due = 0.0
        self._writer = ProfileWriter(path, run.catalog, run.placement)

    def note(self, event: SessionEvent) -> None:
        """Add what ``event`` tells; now and then, begin to write the file."""
        match event:
            case Loaded(planned):
                self._loaded(time.time(), planned)
            case Resumed(step):
                self._adopted(step)
            case StepReplayed():
                self._life["replayed_steps"] += 1
            case TrainingBegins():
                now = time.time()
                self._life |= {"ready_unix_secs": now, "training_unix_secs": now}
                self._write(now)
            case Joined(now) if self._joined_at is None:
                self._joined_at = now
            case SnapshotBegan():
                self._life["begun"] += 1
                self._life["snapshot_bytes"] += event.nbytes
                self._life["held_alike"] = event.held_alike
                changes, compute = self._layout or (None, None)
                if changes != event.layout_changes or compute is not event.compute_types:
                    self._layout, self._specs = (event.layout_changes, event.compute_types), event.specs
            case SnapshotEnded(committed):
                self._life["committed" if committed else "failed"] += 1
            case StepEnded():
                self._stepped(event)
            case TrainingEnded(record):
                self._record = record
            case Closed(finished):
                self._close(finished)

    def _loaded(self, unix_secs: float, planned_unix_secs: float | None = None) -> None:
        opened = self._life["opened_unix_secs"]
        self._life["load_secs"] = max(0.0, unix_secs - opened)  # clocks may be set back
        if planned_unix_secs is not None:
            self._life["plan_secs"] = min(max(0.0, planned_unix_secs - opened), self._life["load_secs"])

    def _adopted(self, step: int) -> None:
        """A state that is in place only after the loop was entered was computed again there."""
        now = time.time()
        ready = self._life.get("ready_unix_secs")
        if "load_secs" not in self._life:  # the framework loaded it
            self._loaded(now if ready is None else ready)
        self._life["restored_step"] = step
        if ready is not None:
            self._life["training_unix_secs"] = now

    def _stepped(self, ended: StepEnded) -> None:
        now, record, life = time.time(), ended.record, self._life
        if self._final_at is not None and not ended.loaded:
            life["clean_secs"] += ended.final_at - self._final_at
            life["clean_steps"] += 1
        self._final_at = ended.final_at
        if self._joined_at is not None:
            self._recent.updates.append(ended.final_at - self._joined_at)
            self._joined_at = None
        if self._record is None:
            self._routed_before = record.routed_tokens - int(ended.run_ledger.activity.newest.sum())
            entered = life.get("training_unix_secs")
            life["first_step"] = record.step
            life["first_step_secs"] = None if entered is None else max(0.0, now - entered)
        self._record = record
        life |= {"last_step": record.step, "last_step_unix_secs": now}
        life["stall_secs"] += record.stall_secs
        life["waited_secs"] += record.stall_secs if record.waited else 0.0
        life["agree_secs"] += record.agree_secs
        newly_known = self._recent.iterations_begin(ended.measured)
        if newly_known or now >= self._due:
            if self._layout is None:  # nothing was saved yet, but what there is to save can be weighed
                self._layout, self._specs = (-1, {}), self._state.specs()
            self._recent.look(ended.run_ledger.activity.newest)
            self._write(now)

    def _close(self, finished: bool) -> None:
        global _left_unix_secs
        _left_unix_secs = now = time.time()
        self._recent.look()
        self._writer.wait(_LAST_WRITE_SECS)
        self._write(now, finished=finished)
        self._writer.close(_LAST_WRITE_SECS)

    def _write(self, now: float, *, finished: bool = False) -> None:
        age_secs = now - self._life["started_unix_secs"]
        self._due = now + min(_MOST_SECS, max(_LEAST_SECS, _SHARE_OF_AGE * age_secs))
        specs, self._specs = self._specs, None
        compute = {} if self._layout is None else self._layout[1]
        if self._record is not None:
            self._life["assignments"] = max(0, self._record.routed_tokens - self._routed_before)
            self._life["skipped"] = self._record.skips
            self._life["sent_bytes"] = self._record.replica_sent_nbytes
            self._life["saved_bytes"] = self._record.replica_saved_nbytes
        life = Life(**self._life, **self._recent.typical(), last_unix_secs=now, finished=finished)
        if not self._writer.write(life, specs, compute):
            self._specs = specs


_MEASURED = sorted({field.name for field in fields(Measured)} & {field.name for field in fields(Life)})
"""Of what is measured, what a profile has."""


class _Recent:
    """Numbers that vary, of which a profile tells the typical.

    Attributes:
        updates: Seconds from join to final state, of the newest steps.
    """

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self.updates: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._experts = [layer.experts for layer in layers]
        self._measured = Measured()
        self._looks: deque[Measured] = deque(maxlen=_RECENT_LOOKS)
        self._skews: deque[float] = deque(maxlen=_RECENT_LOOKS)

    def iterations_begin(self, measured: Measured) -> bool:
        """Take the newest measurements. Returns whether they tell the length of an iteration for the first time."""
        before, self._measured = self._measured.recent_iteration_secs, measured
        return before is None and measured.recent_iteration_secs is not None

    def look(self, popularity: Counts | None = None) -> None:
        """Keep the newest measurements, and how uneven ``popularity`` is."""
        self._looks.append(self._measured)
        if popularity is not None and self._experts and popularity.any():
            self._skews.append(float(normalized_hhi(popularity, self._experts).mean()))

    def typical(self) -> dict[str, Any]:
        """Fields of ``Life``."""
        medians: dict[str, Any] = {}
        for name in _MEASURED:
            seen = [value for look in self._looks if (value := getattr(look, name)) is not None]
            medians[name] = median(seen) if seen else None
        medians["update_secs"] = median(self.updates) if self.updates else None
        medians["skewness"] = min(1.0, fmean(self._skews)) if self._skews else None
        return medians


log = logging.getLogger("moe_ckpt")

_MOST_LIVES = 1000


class ProfileWriter:
    """Owns the file, and the thread that writes it, one write at a time. ``close`` ends the thread."""

    def __init__(self, path: str, catalog: Catalog, placement: Placement) -> None:
        self._path = path
        self._catalog, self._placement, self._fingerprint = catalog, placement, catalog.fingerprint
        self._idle = threading.Event()
        self._idle.set()
        self._model = encode_model(None)
        self._earlier: tuple[str, ...] = ()
        self._off = self._complained = False
        try:
            self._take_up()
        except OSError as error:
            self._off = True
            log.warning("the profile %s cannot be used, so this run writes no profile: %s", path, error)
        self._thread = TaskThread(ThreadName.PROFILE, self._failed)

    def _take_up(self) -> None:
        """Continue the file that is there, if it is one of this model."""
        remove_temporaries_of(self._path)
        try:
            fingerprint, model, lives = earlier_lives(read_whole(self._path, MAX_PROFILE_BYTES), self._path)
        except FileNotFoundError:
            return
        except (DamagedError, FormatVersionError) as error:
            self._put_aside(str(error))
            return
        if fingerprint != self._fingerprint:
            self._put_aside(f"{self._path} is of another model")
            return
        self._model, self._earlier = model, tuple(lives[1 - _MOST_LIVES :])

    def _put_aside(self, reason: str) -> None:
        aside = next(name for n in range(1, 10000) if not os.path.lexists(name := f"{self._path}.aside-{n}"))
        os.rename(self._path, aside)
        log.warning("%s; it was renamed to %s, and a new profile begins", reason, aside)

    def write(self, life: Life, specs: Sequence[TensorSpec] | None, compute: ComputeTypes) -> bool:
        """Begin to write the file with ``life`` as its last one.

        Args:
            life: Of this process.
            specs: To be weighed; None if they were.
            compute: What kernels read of the parameters.

        Returns:
            False if the write before is still going on.
        """
        if not self._idle.is_set():
            return False
        if not self._off:
            self._idle.clear()
            self._thread.put(functools.partial(self._write, life, specs, compute))
            self._thread.put(self._idle.set)
        return True

    def wait(self, timeout_secs: float) -> None:
        """Until nothing is being written."""
        self._idle.wait(timeout_secs)

    def close(self, timeout_secs: float) -> None:
        """Stop after the writes that were requested; abandon a thread that does not end."""
        self._thread.close(timeout_secs)

    def _write(self, life: Life, specs: Sequence[TensorSpec] | None, compute: ComputeTypes) -> None:
        if specs is not None:
            self._model = encode_model(weighed(self._catalog, self._placement, specs, compute))
        lives = (*self._earlier, encode_life(life))
        replace_file(self._path, encode_profile(self._fingerprint, self._model, lives))

    def _failed(self, error: Exception) -> None:
        """A report is no reason to end training."""
        if not self._complained:
            log.warning("the profile %s cannot be written, training continues: %s", self._path, error)
        self._complained = True


def weighed(
    catalog: Catalog, placement: Placement, specs: Sequence[TensorSpec], compute: ComputeTypes
) -> ProfiledModel:
    """Bytes of each operator, in the form that window policies take; equal neighbours share a row."""
    sizes = operator_bytes(catalog, specs, compute)
    rows: list[OperatorRow] = []
    for op in catalog.operators:
        elements = 0
        for span in op.spans:
            shape = catalog.parameters[span.parameter]
            start, stop = span.rows(shape)
            elements += (stop - start) * prod(shape[1:])
        weight = sizes[op.id]
        stage, gradient, weights = placement.stage_of.get(op.id, 0), weight.gradient, weight.weights
        row = OperatorRow(
            op.id, 1, elements, weight.full, weight.compute, stage, gradient_bytes=gradient, weight_bytes=weights
        )
        if rows and op.kind is OperatorKind.EXPERT and _follows(row, rows[-1]):
            last = rows.pop()
            row = replace(last, count=last.count + 1)
        rows.append(row)
    layers = tuple(LayerRecord(layer.name, layer.experts, layer.top_k) for layer in catalog.layers)
    return ProfiledModel(layers, tuple(rows))


def _follows(row: OperatorRow, before: OperatorRow) -> bool:
    """Returns whether the expert of ``row`` is the next of the same layer, with the same sizes and stage."""
    if before.expert is None or row.layer != before.layer or row.expert != before.expert + before.count:
        return False
    return (row.elements, row.size, row.stage) == (before.elements, before.size, before.stage)
