"""Computes from measured times how often a run saves, where a checkpoint goes, and how much of the model it can have.

Pure, for policies, trainers and the simulator.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.user_text import parse_secs
from moe_ckpt.errors import ConfigError

PRIOR_MTBF_SECS = 3 * 3600.0
"""Mean time between failures that is assumed before the first failure: the longest that papers report. They report 10
minutes (MoEvement, section 5.2) to 3 hours (Llama 3, section 3.3.4: 419 failures in 54 days)."""


def young_secs(cost_secs: float, mtbf_secs: float) -> float:
    """Returns the time between two checkpoints that loses least: ``sqrt(2 d M)`` (Young, CACM 1974).

    Args:
        cost_secs: d, the time that a checkpoint adds to training.
        mtbf_secs: M, the mean time between failures.
    """
    return sqrt(2 * cost_secs * mtbf_secs)


def daly_secs(cost_secs: float, mtbf_secs: float) -> float:
    """Returns ``young_secs`` to a higher order, for checkpoints that are not short beside the MTBF (Daly, FGCS 2006).

    ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d`` for ``d < 2M``, otherwise ``M``. The two do not quite
    meet: at ``d = 2M`` the first formula gives eight ninths of M.
    """
    if cost_secs >= 2 * mtbf_secs:
        return mtbf_secs
    part = cost_secs / (2 * mtbf_secs)
    return young_secs(cost_secs, mtbf_secs) * (1 + sqrt(part) / 3 + part / 9) - cost_secs


def expected_mtbf_secs(failures: int, run_secs: float) -> float:
    """Returns an estimate of the mean time between failures of a run.

    ``(PRIOR_MTBF_SECS + run_secs) / (1 + failures)``: as if the run had failed once in ``PRIOR_MTBF_SECS`` before it
    began. So there is an estimate before the first failure, no single failure changes it much, and in the long run it
    is the observed mean.

    Args:
        failures: Failures so far, over all restarts.
        run_secs: Time so far, over all restarts.
    """
    return (PRIOR_MTBF_SECS + run_secs) / (1 + failures)


AUTO = "auto"
LONGEST_AUTO_SECS = 3 * 3600.0
"""Longest interval of "auto", however rarely a run fails: that of BLOOM's training (Gemini, SOSP '23)."""
UNMEASURED_SECS = 600.0
"""Interval of "auto" before anything is measured: the shortest MTBF that papers report."""
_LONGEST_SECS = 30 * 86400.0


@dataclass(frozen=True)
class StorageFacts:
    """The input of ``StorageCadence``. Every field is the same number on all ranks.

    Attributes:
        step: Step of the snapshot that is about to begin. For a sparse window that of its slot 0, whose answer holds
            for all of its slots.
        last_step: Step of the newest snapshot that went to storage and did not fail there; None if there is none.
        secs_since: Time since that snapshot began, by the clock of rank 0; not used if ``last_step`` is None.
        flush_secs: Time from the first byte of a checkpoint on storage to its commit; None until known.
        iteration_secs: Time of an iteration without checkpoint work, or of any iteration if all have some; None until
            known.
        failures: Failures of the run so far, over all restarts.
        run_secs: Time of the run so far, over all restarts.
    """

    step: int
    last_step: int | None = None
    secs_since: float = 0.0
    flush_secs: float | None = None
    iteration_secs: float | None = None
    failures: int = 0
    run_secs: float = 0.0


@dataclass(frozen=True)
class StorageCadence:
    """Decides how often a checkpoint in memory is also written to storage: by steps or by seconds.

    The first checkpoint always is. A checkpoint that does not go to storage survives only what memory survives.

    Attributes:
        every: A whole number n: a checkpoint goes to storage if there is a multiple of n after the last one that did
            and up to this one; with 1 each goes. A duration, as text such as "10min" or as a float of seconds: the time
            after the last one. "auto": after Young's interval ``sqrt(2 d M)`` (Young, CACM 1974), where d is
            ``flush_secs`` and M is ``expected_mtbf_secs``; never sooner than ``flush_secs``, so that a checkpoint is
            written before the next begins, and never later than ``LONGEST_AUTO_SECS``.

    Raises:
        ConfigError: Any other value.
    """

    every: int | float | str = 1

    def __post_init__(self) -> None:
        every = self.every
        if every == AUTO or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
            return
        if isinstance(every, (bool, int)) or (isinstance(every, str) and every.strip().isdigit()):
            raise ConfigError(
                f"storage_every={every!r}: must be a whole number of steps, at least 1; or a duration such as '10min'; "
                f"or {AUTO!r}, which chooses by the failures seen and what writing costs"
            )
        object.__setattr__(self, "every", parse_secs(every, "storage_every", _LONGEST_SECS))

    def due(self, facts: StorageFacts) -> bool:
        """Returns whether the snapshot of ``facts.step`` goes to storage."""
        step, secs = self.next_step(facts), self.next_secs(facts)
        return (step is not None and facts.step >= step) or (secs is not None and facts.secs_since >= secs)

    def next_step(self, facts: StorageFacts) -> int | None:
        """Returns the first step after ``last_step`` that is due by its number; None if only seconds count.

        Without a ``last_step`` it is ``facts.step``.
        """
        last = facts.last_step
        if last is None:
            return facts.step
        if isinstance(self.every, int):
            return (last // self.every + 1) * self.every
        steps = self._auto_steps(facts) if self.every == AUTO else None
        return None if steps is None else last + steps

    def next_secs(self, facts: StorageFacts) -> float | None:
        """Returns the seconds after the last snapshot at which the next one is due; None if only steps count."""
        if self.every == AUTO:
            return UNMEASURED_SECS if self._auto_steps(facts) is None else None
        return self.every if isinstance(self.every, float) else None

    def _auto_steps(self, facts: StorageFacts) -> int | None:
        if facts.flush_secs is None or not facts.iteration_secs:
            return None
        best = young_secs(facts.flush_secs, expected_mtbf_secs(facts.failures, facts.run_secs))
        return max(1, ceil(max(facts.flush_secs, min(best, LONGEST_AUTO_SECS)) / facts.iteration_secs))


# --- peers ---
#
# A queue of copies would hold ever more memory, and the newest step that peers have would fall ever further behind. So
# over a slow link some steps are not copied; the next copy is one of the then newest step. The rank's own memory has
# the steps that are not copied, too.


def are_behind(in_flight: int, max_in_flight: int, window_size: int = 1) -> bool:
    """Returns whether copies of another checkpoint would only queue behind earlier ones.

    Args:
        in_flight: Number of snapshots on their way to peers.
        max_in_flight: As of ``run.options.Settings``.
        window_size: Number of snapshots of a checkpoint.
    """
    return in_flight > (max_in_flight - 1) * window_size


def goes_to_peers(plan: SnapshotPlan, *, behind: bool, waits: bool) -> bool:
    """Returns whether a snapshot goes to peers; asked of a sparse window's first snapshot, for all of them.

    Args:
        plan: Plan of the snapshot.
        behind: True if ``are_behind`` on some rank.
        waits: True if every checkpoint gets its copies, however long that takes.
    """
    return waits or plan.wait or not behind


# --- how much ---
#
# All results are whole numbers, so that every rank comes to the same experts from the same measurements.


def bytes_in_time(secs: float | None, bytes_per_sec: float | None, fraction: float = 1.0) -> int | None:
    """Returns the most bytes that one rank saves in ``fraction`` of ``secs``; None if time or rate is unknown or 0."""
    if not secs or not bytes_per_sec:
        return None
    return int(bytes_per_sec * secs * fraction)


def owned_total(capacity: int, owned: Collection[int]) -> int:
    """Returns how many experts are saved if each rank saves at most ``capacity`` of the experts that it owns."""
    return sum(min(capacity, count) for count in owned)


def least_capacity(total: int, owned: Collection[int]) -> int:
    """Returns the smallest capacity per rank with which ``total`` experts, or all if there are fewer, can be saved."""
    capacities = range(max(owned, default=0))
    return bisect_left(capacities, min(total, sum(owned)), key=lambda capacity: owned_total(capacity, owned))


def largest_k(sizes: Sequence[int], total: int) -> int:
    """Returns the largest K so that K experts of every layer, or all of a smaller layer, are at most ``total``.

    Args:
        sizes: Number of experts of each layer. If all can be saved, K is the largest of ``sizes``.
        total: Number of experts that can be saved.
    """
    return bisect_right(range(1, max(sizes, default=0) + 1), total, key=lambda k: owned_total(k, sizes))


@dataclass(frozen=True)
class Division:
    """The division of saved bytes among the ranks of one pipeline stage.

    Attributes:
        ranks: Number of ranks of the stage.
        owned: Number of experts of each owner.
        by_owner: True if each expert is saved by its owner, so that other ranks cannot take over a part of it.
        divided: Number of ranks that share the bytes of each expert, on top of an even share of the rest; None if ranks
            are filled up evenly.
    """

    ranks: int
    owned: tuple[int, ...]
    by_owner: bool
    divided: int | None

    def affordable(self, limit: int, shared_bytes: int, expert_bytes: int) -> tuple[int, int | None]:
        """Returns how many experts can be saved if no rank saves more than ``limit`` bytes.

        There are three kinds of division (``core.placement.Placement``):
        - expert parallelism: each rank has an even share of the rest, and the experts that it owns. The rest must fit,
          and what remains buys the same number of experts for every owner;
        - plain data parallelism: the rest is dealt out around the experts, so all bytes together must fit all ranks
          together, and no rank may own more experts than fit it alone;
        - everything divided evenly (FSDP): all bytes together must fit all ranks together.

        Args:
            limit: Bytes of one rank.
            shared_bytes: Bytes of all gates and non-experts.
            expert_bytes: Bytes of the largest expert.

        Returns:
            The number of experts; and how many of them one rank may own, None if that does not matter.
        """
        expert_bytes = max(expert_bytes, 1)
        if self.divided is not None:
            room = limit - -(-shared_bytes // self.ranks)
            capacity = max(0, room * self.divided // expert_bytes)
            return owned_total(capacity, self.owned), capacity
        together = min(max(0, limit * self.ranks - shared_bytes) // expert_bytes, sum(self.owned))
        if not self.by_owner:
            return together, None
        capacity = limit // expert_bytes
        return min(together, owned_total(capacity, self.owned)), capacity


BLOCK = 2
"""Number of large, then of small checkpoints in a row, from which ``run.meter`` measures what copying costs."""


def is_small(number: int) -> bool:
    """Returns whether the checkpoint of this number is a small one while a run probes (``BLOCK``)."""
    return number // BLOCK % 2 == 1
