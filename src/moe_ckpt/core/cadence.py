"""How often: which checkpoints in memory are also written to storage, and which are sent to peers; best intervals.

Pure, for policies, trainers and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.user_text import parse_secs
from moe_ckpt.errors import ConfigError

PRIOR_MTBF_SECS = 3 * 3600.0
"""What is assumed of a run that has not failed yet: the long end of what papers report, from 10 minutes (MoEvement,
section 5.2) to 3 hours (Llama 3, section 3.3.4: 419 failures in 54 days)."""


def young_secs(cost_secs: float, mtbf_secs: float) -> float:
    """Returns the time between two checkpoints that costs least: ``sqrt(2 d M)`` (Young, CACM 1974)."""
    return sqrt(2 * cost_secs * mtbf_secs)


def daly_secs(cost_secs: float, mtbf_secs: float) -> float:
    """Returns the same to a higher order, for checkpoints that are not short beside the MTBF (Daly, FGCS 2006).

    ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d`` for ``d < 2M``, else ``M``. The two do not quite meet: at
    ``d = 2M`` the first gives eight ninths of M.
    """
    if cost_secs >= 2 * mtbf_secs:
        return mtbf_secs
    part = cost_secs / (2 * mtbf_secs)
    return young_secs(cost_secs, mtbf_secs) * (1 + sqrt(part) / 3 + part / 9) - cost_secs


def expected_mtbf_secs(failures: int, run_secs: float) -> float:
    """Returns an estimate of the mean time between failures, from what a run has seen so far.

    ``(PRIOR_MTBF_SECS + run_secs) / (1 + failures)``: as if it had failed once in ``PRIOR_MTBF_SECS`` before it began.
    So there is a figure before the first failure, no single one changes it much, and in the long run it is what was
    seen.

    Args:
        failures: So far, over all restarts.
        run_secs: So far, over all restarts.
    """
    return (PRIOR_MTBF_SECS + run_secs) / (1 + failures)


AUTO = "auto"
LONGEST_AUTO_SECS = 3 * 3600.0
"""However rarely a run fails, "auto" goes to storage this often, as BLOOM's training did (Gemini, SOSP '23)."""
UNMEASURED_SECS = 600.0
"""As long as "auto" has no measurements, it goes to storage this often: the shortest MTBF that papers report."""
_LONGEST_SECS = 30 * 86400.0


@dataclass(frozen=True)
class StorageFacts:
    """Input of ``StorageCadence``. Every field is the same number on all ranks.

    Attributes:
        step: Of the snapshot that is about to begin. Of a sparse window that of its slot 0, whose answer holds for all
            of its slots.
        last_step: The same of the newest snapshot that went to storage and did not fail there; None if none did.
        secs_since: Since that one began, by the clock of rank 0. Means nothing where ``last_step`` is None.
        flush_secs: What writing a checkpoint to storage took, from its first byte to its commit; None until known.
        iteration_secs: Of an iteration with no checkpoint work beside it, or of any where each has; None until known.
        failures: Of the run so far, over all restarts.
        run_secs: Of the run so far, over all restarts.
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

    The first one always is. A checkpoint that does not go to storage survives only what memory survives.

    Attributes:
        every: A whole number n: a checkpoint goes if a multiple of n lies after the last that went and up to this one;
            with 1 each goes. A duration, as text such as "10min" or as a float of seconds: so long after the last. With
            "auto", after Young's interval ``sqrt(2 d M)`` (Young, CACM 1974), where d is ``flush_secs`` and M is
            ``core.cadence.expected_mtbf_secs``; never sooner than ``flush_secs``, so that one is written before the
            next begins, and never later than ``LONGEST_AUTO_SECS``.

    Raises:
        ConfigError: A value that cannot be.
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
        """Returns the first step after ``last_step`` that is due by its number; ``facts.step`` where there is no
        ``last_step``.

        None: only seconds count.
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
# a slow link costs copies of some steps, of which memory has the rank's own share all the same; the next one that goes
# is the newest then.


def are_behind(in_flight: int, max_in_flight: int, window_size: int = 1) -> bool:
    """Returns whether copies of another checkpoint would only queue behind earlier ones.

    Args:
        in_flight: Snapshots on their way to peers.
        max_in_flight: Of ``run.options.Settings``.
        window_size: Snapshots of a checkpoint.
    """
    return in_flight > (max_in_flight - 1) * window_size


def goes_to_peers(plan: SnapshotPlan, *, behind: bool, waits: bool) -> bool:
    """Returns whether a snapshot goes to peers; of a sparse window, asked of its first, which all others follow.

    Args:
        plan: Of it.
        behind: ``are_behind`` of some rank.
        waits: Every checkpoint gets its copies, however long that takes.
    """
    return waits or plan.wait or not behind
