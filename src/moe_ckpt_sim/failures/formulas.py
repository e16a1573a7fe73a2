"""Closed forms of time: how often a job fails, how often to save, and what a failure costs.

They are of first order and ignore failures during recovery, contention, spares and drifting loads, which the simulation
has. They check the simulation, and replace it for estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, fsum

from moe_ckpt.core.cadence import daly_secs, young_secs
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import above_zero, at_least, not_none, whole


@dataclass(frozen=True)
class Component:
    """A kind of part that a cluster has ``count`` of, each failing once in ``mtbf_hours`` on average.

    Attributes:
        blast_nodes: Neighbouring nodes that one such part takes down, such as those of a switch.
    """

    name: str
    count: int
    mtbf_hours: float
    blast_nodes: int = 1

    def __post_init__(self) -> None:
        owner = f"Component {self.name!r}"
        whole(owner, count=self.count, blast_nodes=self.blast_nodes)
        above_zero(owner, mtbf_hours=self.mtbf_hours)

    @property
    def failures_per_hour(self) -> float:
        """Failures per hour of all ``count`` parts together."""
        return self.count / self.mtbf_hours


def system_mtbf_hours(components: Iterable[Component]) -> float:
    """Mean time between failures of a cluster, each of which stops the job: rates add, ``1 / sum(count / MTBF)``.

    Raises:
        ConfigError: there are no components.
    """
    rate = fsum(one.failures_per_hour for one in components)
    if not rate:
        raise ConfigError("system_mtbf_hours(components=()): name at least one component; without any, nothing fails")
    return 1 / rate


def observed_mtbf_hours(*, failures: int, days: float) -> float:
    """Mean time between failures of a job with ``failures`` in ``days`` (Llama 3, section 3.3.4: 419 in 54 days)."""
    whole("observed_mtbf_hours", failures=failures)
    above_zero("observed_mtbf_hours", days=days)
    return days * 24 / failures


def component_mtbf_hours(*, system_mtbf_hours: float, count: int) -> float:
    """Mean time between failures of one of ``count`` equal components, if only they make the system fail."""
    above_zero("component_mtbf_hours", system_mtbf_hours=system_mtbf_hours)
    whole("component_mtbf_hours", count=count)
    return system_mtbf_hours * count


def young_interval_secs(*, checkpoint_secs: float, mtbf_secs: float) -> float:
    """Training time between two checkpoints that costs least, to first order: ``core.cadence.young_secs``."""
    above_zero("young_interval_secs", checkpoint_secs=checkpoint_secs, mtbf_secs=mtbf_secs)
    return young_secs(checkpoint_secs, mtbf_secs)


def daly_interval_secs(*, checkpoint_secs: float, mtbf_secs: float) -> float:
    """Training time between two checkpoints that costs least, to higher order: ``core.cadence.daly_secs``."""
    above_zero("daly_interval_secs", checkpoint_secs=checkpoint_secs, mtbf_secs=mtbf_secs)
    return daly_secs(checkpoint_secs, mtbf_secs)


def whole_iterations(*, interval_secs: float, iteration_secs: float) -> int:
    """The interval as a number of iterations: the nearest, at least 1."""
    above_zero("whole_iterations", interval_secs=interval_secs, iteration_secs=iteration_secs)
    return max(1, floor(interval_secs / iteration_secs + 0.5))


def overhead_portion(*, interval_secs: float, checkpoint_secs: float, mtbf_secs: float) -> float:
    """Cost of saving and lost work as a portion of training time, to first order: ``d / t + t / 2M`` (Young, 1974).

    It is least at ``young_interval_secs``, where both terms are equal. Above 1 training hardly advances, and first
    order no longer holds.
    """
    owner = "overhead_portion"
    above_zero(owner, interval_secs=interval_secs, mtbf_secs=mtbf_secs)
    at_least(owner, 0, checkpoint_secs=checkpoint_secs)
    return checkpoint_secs / interval_secs + interval_secs / (2 * mtbf_secs)


def ettr(
    *, checkpoint_secs: float, iteration_secs: float, interval: int, recovery_secs: float, mtbf_secs: float | None
) -> float:
    """Effective training time ratio, above 0 and up to 1 (MoEvement, section 2.4 and appendix C).

    ``1 / (1 + T_ckpt / (T_iter * interval)) * 1 / (1 + E[R] / MTBF)``.

    Args:
        checkpoint_secs: Stall of training per checkpoint, without the time that a checkpoint takes besides. If every
            iteration is saved it is the stall per iteration, with an interval of 1.
        interval: Iterations between checkpoints.
        recovery_secs: Mean of one failure: ``expected_recovery_secs_dense`` or ``_sparse``.
        mtbf_secs: None without failures.
    """
    above_zero("ettr", iteration_secs=iteration_secs, **not_none(mtbf_secs=mtbf_secs))
    at_least("ettr", 0, checkpoint_secs=checkpoint_secs, recovery_secs=recovery_secs)
    whole("ettr", interval=interval)
    running = 1 / (1 + checkpoint_secs / (iteration_secs * interval))
    return running if mtbf_secs is None else running / (1 + recovery_secs / mtbf_secs)


def expected_recovery_secs_dense(*, interval: int, iteration_secs: float, down_secs: float = 0.0) -> float:
    """E[R] with a dense checkpoint every ``interval`` iterations, half of which are repeated (MoEvement, section 3.6).

    Args:
        down_secs: From the failure until training computes again; 0 in the paper's formula.
    """
    _recovery("expected_recovery_secs_dense", iteration_secs, down_secs, interval=interval)
    return interval * iteration_secs / 2 + down_secs


def most_recovery_secs_dense(*, interval: int, iteration_secs: float, down_secs: float = 0.0) -> float:
    """The greatest R: a whole interval is computed again (MoEvement, section 3.6)."""
    _recovery("most_recovery_secs_dense", iteration_secs, down_secs, interval=interval)
    return interval * iteration_secs + down_secs


def expected_recovery_secs_sparse(*, window: int, iteration_secs: float, down_secs: float = 0.0) -> float:
    """E[R] with windows: one is computed again to make it dense, then half of one (MoEvement, section 3.6).

    The paper counts W iterations for the first part. The library's windows need ``W - 1``, since their last slot is
    taken at the iteration that they are made dense for; the simulation counts these.
    """
    _recovery("expected_recovery_secs_sparse", iteration_secs, down_secs, window=window)
    return 1.5 * window * iteration_secs + down_secs


def most_recovery_secs_sparse(*, window: int, iteration_secs: float, down_secs: float = 0.0) -> float:
    """The greatest R: two windows are computed again (MoEvement, section 3.6)."""
    _recovery("most_recovery_secs_sparse", iteration_secs, down_secs, window=window)
    return 2 * window * iteration_secs + down_secs


def wasted_work_secs(*, checkpoint_secs: float, retrieve_secs: float, interval: int, iteration_secs: float) -> float:
    """Work wasted per failure: ``T_ckpt + T_retrieval + f / 2 * T_iter`` (MoEtion, section 7.2).

    Args:
        checkpoint_secs: Time to save one checkpoint.
        retrieve_secs: Time to load one.
        interval: F.
    """
    above_zero("wasted_work_secs", iteration_secs=iteration_secs)
    at_least("wasted_work_secs", 0, checkpoint_secs=checkpoint_secs, retrieve_secs=retrieve_secs)
    whole("wasted_work_secs", interval=interval)
    return checkpoint_secs + retrieve_secs + interval * iteration_secs / 2


def moc_overhead_secs(
    *, save_secs: float, iterations: int, interval: int, restart_secs: Sequence[float], lost_secs: Sequence[float]
) -> float:
    """Overhead of a run: ``O_save * I_total / I_ckpt + sum(O_restart + O_lost)`` over its faults (PEC, equation 3).

    Args:
        save_secs: Stall of training per checkpoint.
        restart_secs, lost_secs: One value per fault; the loss is half an interval on average,
            ``expected_recovery_secs_dense``.

    Raises:
        ConfigError: restart_secs and lost_secs differ in length.
    """
    owner = "moc_overhead_secs"
    at_least(owner, 0, save_secs=save_secs)
    whole(owner, 0, iterations=iterations)
    whole(owner, interval=interval)
    if len(restart_secs) != len(lost_secs):
        raise ConfigError(
            f"{owner}: restart_secs are of {len(restart_secs)} faults, lost_secs of {len(lost_secs)}; "
            "give both for each fault"
        )
    for number, (restart, lost) in enumerate(zip(restart_secs, lost_secs, strict=True), start=1):
        at_least(f"{owner}, fault {number}", 0, restart_secs=restart, lost_secs=lost)
    return fsum((save_secs * iterations / interval, *restart_secs, *lost_secs))


def _recovery(owner: str, iteration_secs: float, down_secs: float, **iterations: int) -> None:
    whole(owner, **iterations)
    above_zero(owner, iteration_secs=iteration_secs)
    at_least(owner, 0, down_secs=down_secs)
