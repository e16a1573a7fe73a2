"""Whether a snapshot is sent to peers that are still behind with earlier ones. Pure, for trainers and the simulator.

A queue would hold ever more memory, and the newest step that peers have would fall ever further behind. So a slow link
costs copies of some steps, of which memory has the rank's own share all the same; the next one that goes is the newest
then.
"""

from __future__ import annotations

from moe_ckpt.core.plan import SnapshotPlan


def are_behind(in_flight: int, max_in_flight: int, window_size: int = 1) -> bool:
    """Returns whether copies of another checkpoint would only queue behind earlier ones.

    Args:
        in_flight: Snapshots on their way to peers.
        max_in_flight: Of ``engine.options.Settings``.
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
    return waits or plan.wait or plan.halt is not None or not behind
