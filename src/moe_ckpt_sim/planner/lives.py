"""Training speed and restart costs, from the lives of a profiled run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.planner.profile_document import Life

_ENOUGH_LAPS = 20
_LONGEST_UPDATE = 0.95
"""Portion of an iteration. Where the optimizer takes nearly all of it, its median and the iteration's may cross."""


@dataclass(frozen=True)
class RunPace:
    """The training speed of a profiled run and the cost of its checkpoints.

    Figures that are not sums over all lives are of the newest life that recorded them.

    Attributes:
        path: The profile's path, for messages.
        lives: Oldest first.
    """

    path: str
    lives: tuple[Life, ...]

    def newest(self, name: str) -> float | None:
        """The field of the newest life that recorded it; None if no life did."""
        values = (getattr(life, name) for life in reversed(self.lives))
        newest: float | None = next((value for value in values if value is not None), None)
        return newest

    @property
    def iteration_secs(self) -> float:
        """Median time of an iteration without checkpoints.

        It is the lesser of two medians: that of iterations without concurrent checkpoint work, which may include waits,
        and that of all iterations less their waits, which concurrent work may have slowed down.
        """
        medians = [secs for secs in map(self.newest, ("iteration_secs", "recent_iteration_secs")) if secs is not None]
        if not medians:
            raise ConfigError(f"the profile {self.path} does not tell iteration_secs: train for some more steps")
        return min(medians)

    @property
    def is_known(self) -> bool:
        """True if enough iterations were measured to know their time."""
        return any(self.newest(name) is not None for name in ("iteration_secs", "recent_iteration_secs"))

    @property
    def update_secs(self) -> float:
        """Time from the last gradient to the next forward pass, in which parameters change."""
        return min(self.newest("update_secs") or 0.0, _LONGEST_UPDATE * self.clean_iteration_secs)

    @property
    def mean_lap_secs(self) -> float | None:
        """Mean time from step to step in the newest life with two steps, with stalls, validation and ends of epochs."""
        for life in reversed(self.lives):
            took = _between(life.training_unix_secs, life.last_step_unix_secs)
            if life.steps > 1 and took is not None:
                return max(0.0, took - (life.first_step_secs or 0.0)) / (life.steps - 1)
        return None

    @cached_property
    def clean_iteration_secs(self) -> float:
        """Mean time of iterations without concurrent checkpoint work, slow ones included; what the simulator uses.

        If there are hardly any, it is the mean of all iterations less their waits. For a sum of many iterations, the
        mean is a better estimate than the median.
        """
        steps, secs = sum(life.clean_steps for life in self.lives), sum(life.clean_secs for life in self.lives)
        (laps, took), usual = self._laps(), self.iteration_secs
        if secs and steps >= min(_ENOUGH_LAPS, laps):
            return secs / steps
        waited = self.stall_secs_per_step * laps
        return (took - waited) / laps if took > waited else usual

    @property
    def drag_secs_per_byte(self) -> float:
        """Time by which iterations exceeded clean ones, per byte of rank 0's snapshots.

        It excludes waits for a free buffer and for copies that take longer than the time between two updates, which the
        simulator adds itself.
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
        """The number and total time of steps in all lives, without the first step of each."""
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
    def mean_snapshot_bytes(self) -> float:
        """Mean bytes of rank 0's snapshots."""
        return sum(life.snapshot_bytes for life in self.lives) / max(1, sum(life.begun for life in self.lives))


@dataclass(frozen=True)
class Restarts:
    """The costs of a profiled run's restarts.

    Attributes:
        lives: Oldest first.
        pace: Training speed of the same run.
    """

    lives: tuple[Life, ...]
    pace: RunPace

    @property
    def restart_secs(self) -> float | None:
        """Median time from the start of the process to training: imports, building, loading, steps computed again."""
        return _middle(_between(life.started_unix_secs, life.training_unix_secs) for life in self.lives)

    @property
    def load_secs(self) -> float | None:
        """Median loading time of lives that loaded something: part of ``restart_secs``."""
        return _middle(life.load_secs for life in self.lives)

    @property
    def replay_secs(self) -> float | None:
        """Median time to compute a sparse window again, of lives that did: part of ``restart_secs``."""
        again = (_between(life.ready_unix_secs, life.training_unix_secs) for life in self.lives)
        return _middle(secs for secs in again if secs)

    @property
    def warm_up_secs(self) -> float | None:
        """Mean time by which a restart's first steps exceeded others, while loaders and kernels start."""
        restarted = [life for life in self._restarted if life.first_step_secs is not None]
        if not (restarted and self.pace.is_known):
            return None
        first = fmean(life.first_step_secs or 0.0 for life in restarted) - self.pace.clean_iteration_secs
        return max(0.0, first) + fmean(map(self._replay_warm_up_secs, restarted))

    def _replay_warm_up_secs(self, life: Life) -> float:
        """Time by which the steps of a window that were computed again exceeded clean ones."""
        took = _between(life.ready_unix_secs, life.training_unix_secs) or 0.0
        return max(0.0, took - life.replayed_steps * self.pace.clean_iteration_secs) if life.replayed_steps else 0.0

    @property
    def _restarted(self) -> Sequence[Life]:
        return [later for _, later in self._restarts()] or self.lives

    @property
    def set_up_secs(self) -> float | None:
        """Mean time of a restart besides loading and computing steps again, with the warm-up: ``Cluster.restart_secs``.

        A run pays for the sum of its restarts, hence the mean. Without a restart it is the time of the first start,
        which may be slower, since its files are not cached.
        """
        secs_of_restarts = [secs for life in self._restarted if (secs := self._set_up(life)) is not None]
        return fmean(secs_of_restarts) + (self.warm_up_secs or 0.0) if secs_of_restarts else None

    @staticmethod
    def _set_up(life: Life) -> float | None:
        secs = _between(life.started_unix_secs, life.ready_unix_secs)
        return None if secs is None else max(0.0, secs - (life.load_secs or 0.0) + (life.plan_secs or 0.0))

    @property
    def gap_secs(self) -> tuple[float, ...]:
        """Times from the last record of a life to the start of the next one's process, in lives of one store."""
        return tuple(_between(a.last_unix_secs, b.started_unix_secs) or 0.0 for a, b in self._restarts())

    @property
    def downtime_secs(self) -> tuple[float, ...]:
        """Times from the last record of a life to the next one's training; lives that never trained are left out."""
        downtimes = (_between(a.last_unix_secs, b.training_unix_secs) for a, b in self._restarts())
        return tuple(secs for secs in downtimes if secs is not None)

    def _restarts(self) -> Iterable[tuple[Life, Life]]:
        return ((a, b) for a, b in pairwise(self.lives) if a.run_id == b.run_id and not a.finished)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _middle(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None
