"""Young's and Daly's checkpoint intervals, from the cost of a checkpoint and the time between failures.

Policies, the storage cadence and the simulator compute by these alone. Seconds in, seconds out; nothing is checked.
"""

from __future__ import annotations

from math import sqrt

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
