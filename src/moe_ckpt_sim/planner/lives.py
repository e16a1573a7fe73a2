"""Training speed and restart costs, from the lives of a profiled run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from moe_ckpt.errors import ConfigError
from moe_ckpt.format.profile import Life

_ENOUGH_LAPS = 20
_LONGEST_UPDATE = 0.95
"""Portion of an iteration. Where the optimizer takes nearly all of it, its median and the iteration's may cross."""


@dataclass(frozen=True)
class RunPace:
    """How fast a run trained, and what its checkpoints cost it. What changes between lives is the newest life's.

    Attributes:
        path: Of the profile, for messages.
        lives: Oldest first.
    """

    path: str
    lives: tuple[Life, ...]

    def newest(self, name: str) -> float | None:
        """The field, of the newest life that tells it."""
        values = (getattr(life, name) for life in reversed(self.lives))
        found: float | None = next((value for value in values if value is not None), None)
        return found

    @property
    def iteration_secs(self) -> float:
        """Without checkpoints. The lesser of two medians: of iterations that had no checkpoint work beside them, which
        may have waited for some, and of all, less what they waited, which may have been slowed down.
        """
        known = [secs for secs in map(self.newest, ("iteration_secs", "recent_iteration_secs")) if secs is not None]
        if not known:
            raise ConfigError(f"the profile {self.path} does not tell iteration_secs: train for some more steps")
        return min(known)

    @property
    def is_known(self) -> bool:
        """Whether enough iterations were measured to tell their length."""
        return any(self.newest(name) is not None for name in ("iteration_secs", "recent_iteration_secs"))

    @property
    def update_secs(self) -> float:
        """From the gradients' end to the next forward pass: the part of an iteration in which parameters change."""
        return min(self.newest("update_secs") or 0.0, _LONGEST_UPDATE * self.clean_iteration_secs)

    @property
    def mean_lap_secs(self) -> float | None:
        """From step to step, all in: stalls, validation, epochs' ends. The newest life with two steps or more."""
        for life in reversed(self.lives):
            took = _between(life.training_unix_secs, life.last_step_unix_secs)
            if life.steps > 1 and took is not None:
                return max(0.0, took - (life.first_step_secs or 0.0)) / (life.steps - 1)
        return None

    @cached_property
    def clean_iteration_secs(self) -> float:
        """Mean of all iterations that had no checkpoint work beside them, those that are slow for other reasons
        included; where hardly any had none, of all, less what they waited. What the simulator takes: of a sum of many
        iterations the mean tells more than the median.
        """
        steps, secs = sum(life.clean_steps for life in self.lives), sum(life.clean_secs for life in self.lives)
        (laps, took), usual = self._laps(), self.iteration_secs
        if secs and steps >= min(_ENOUGH_LAPS, laps):
            return secs / steps
        waited = self.stall_secs_per_step * laps
        return (took - waited) / laps if took > waited else usual

    @property
    def drag_secs_per_byte(self) -> float:
        """What iterations took longer than clean ones, over the bytes of the snapshots, rank 0's; without waits for a
        free buffer, or for copies that need longer than the time between two updates, which the simulator adds itself.
        """
        laps, took = self._laps()
        steps = sum(life.steps for life in self.lives)
        nbytes = sum(life.snapshot_bytes for life in self.lives)
        if not (laps and nbytes):
            return 0.0
        waited = sum(life.waited_secs for life in self.lives)
        copy_rate, secs = self.newest("copy_bytes_per_sec"), self.clean_iteration_secs
        if copy_rate:
            copy_secs = self.mean_snapshot_bytes / copy_rate
            waited += max(0.0, copy_secs - (secs - self.update_secs)) * sum(life.begun for life in self.lives)
        return max(0.0, (took / laps - secs) * steps - waited) / nbytes

    def _laps(self) -> tuple[int, float]:
        """From step to step, of all lives, all in: how many, and seconds. A life's first step is none."""
        lives = [
            (life.steps - 1, took - (life.first_step_secs or 0.0))
            for life in self.lives
            if life.steps > 1 and (took := _between(life.training_unix_secs, life.last_step_unix_secs)) is not None
        ]
        return sum(laps for laps, _ in lives), sum(max(0.0, secs) for _, secs in lives)

    @property
    def stall_secs_per_step(self) -> float:
        return sum(life.stall_secs for life in self.lives) / max(1, sum(life.steps for life in self.lives))

    @property
    def stall_secs_per_snapshot(self) -> float:
        return sum(life.stall_secs for life in self.lives) / max(1, sum(life.begun for life in self.lives))

    @property
    def mean_snapshot_bytes(self) -> float:
        """Of rank 0."""
        return sum(life.snapshot_bytes for life in self.lives) / max(1, sum(life.begun for life in self.lives))


@dataclass(frozen=True)
class Restarts:
    """What failures cost a run.

    Attributes:
        lives: Oldest first.
        pace: Of the same run.
    """

    lives: tuple[Life, ...]
    pace: RunPace

    @property
    def restart_secs(self) -> float | None:
        """Median from the start of the process to training: imports, building, loading, and steps computed again."""
        return _middle(_between(life.started_unix_secs, life.training_unix_secs) for life in self.lives)

    @property
    def load_secs(self) -> float | None:
        """Median, of lives that loaded something: part of ``restart_secs``."""
        return _middle(life.load_secs for life in self.lives)

    @property
    def replay_secs(self) -> float | None:
        """Median of computing a sparse window again, of lives that did: part of ``restart_secs``."""
        again = (_between(life.ready_unix_secs, life.training_unix_secs) for life in self.lives)
        return _middle(secs for secs in again if secs)

    @property
    def warm_up_secs(self) -> float | None:
        """Mean of what a restart's first steps took longer than others: loaders and kernels start."""
        found = [life for life in self._restarted if life.first_step_secs is not None]
        if not (found and self.pace.is_known):
            return None
        first = fmean(life.first_step_secs or 0.0 for life in found) - self.pace.clean_iteration_secs
        return max(0.0, first) + fmean(map(self._replay_warm_up_secs, found))

    def _replay_warm_up_secs(self, life: Life) -> float:
        """Where steps of a window were computed again, the first of those are a restart's first ones."""
        took = _between(life.ready_unix_secs, life.training_unix_secs) or 0.0
        return max(0.0, took - life.replayed_steps * self.pace.clean_iteration_secs) if life.replayed_steps else 0.0

    @property
    def _restarted(self) -> Sequence[Life]:
        return [later for _, later in self._restarts()] or self.lives

    @property
    def set_up_secs(self) -> float | None:
        """What a restart takes besides loading and computing steps again: up to a process that knows what to load, from
        a loaded one to its loop, and the warm-up. This is ``Cluster.restart_secs``. Mean of the restarts, since it is
        their sum that a run pays for; of the first start where there was none, which may be slower, its files not being
        cached.
        """
        found = [secs for life in self._restarted if (secs := self._set_up(life)) is not None]
        return fmean(found) + (self.warm_up_secs or 0.0) if found else None

    @staticmethod
    def _set_up(life: Life) -> float | None:
        secs = _between(life.started_unix_secs, life.ready_unix_secs)
        return None if secs is None else max(0.0, secs - (life.load_secs or 0.0) + (life.plan_secs or 0.0))

    @property
    def gap_secs(self) -> tuple[float, ...]:
        """From what was last heard of a life to the start of the next one's process, lives of one store."""
        return tuple(_between(a.last_unix_secs, b.started_unix_secs) or 0.0 for a, b in self._restarts())

    @property
    def downtime_secs(self) -> tuple[float, ...]:
        """From what was last heard of a life to the next one's training; of one that never trained, left out."""
        found = (_between(a.last_unix_secs, b.training_unix_secs) for a, b in self._restarts())
        return tuple(secs for secs in found if secs is not None)

    def _restarts(self) -> Iterable[tuple[Life, Life]]:
        return ((a, b) for a, b in pairwise(self.lives) if a.run_id == b.run_id and not a.finished)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
