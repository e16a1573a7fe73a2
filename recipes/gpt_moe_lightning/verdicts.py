"""What the demo promises, checked on what its runs measured."""

from __future__ import annotations

from recipes.demonstrating import Verdict, human_bytes
from recipes.gpt_moe_lightning.summary import RunSummary


def verdicts(
    baseline: RunSummary,
    dense: RunSummary,
    sequential: RunSummary,
    load_aware: RunSummary,
    windows: RunSummary,
    peers: RunSummary,
    *,
    kills: int,
) -> tuple[Verdict, ...]:
    """What the demo promises, checked on what was measured. windows: the run under MoEvement. peers: that in memory."""
    failing = (dense, sequential, load_aware, windows, peers)
    survived = all(run.kills == kills and run.val_loss is not None for run in failing)
    counts = ", ".join(str(run.kills) for run in failing)
    return (
        Verdict(
            survived,
            f"All five failing runs lost a process to kill -9 {kills} times and came back by themselves."
            if survived
            else f"NOT as planned: {counts} kills instead of {kills} each, or a run did not finish.",
        ),
        _exact(baseline, dense),
        *(_partial(baseline, dense, run) for run in (sequential, load_aware)),
        _compared(sequential, load_aware),
        _exact(baseline, windows),
        _spared(dense, windows),
        _exact(baseline, peers),
        _from_memory(peers),
    )


def _exact(baseline: RunSummary, run: RunSummary) -> Verdict:
    """Losses of iterations that were computed more than once count each time."""
    same = baseline.parameters is not None and baseline.parameters == run.parameters
    losses = baseline.losses == run.losses
    end = baseline.val_loss is not None and baseline.val_loss == run.val_loss
    return Verdict(
        same and losses and end and run.lost_tokens == 0,
        f"{run.title}: parameters and every loss equal those of the run that never failed, bit for bit; no token lost."
        if same and losses and end and run.lost_tokens == 0
        else f"{run.title} DIFFERS from the run that never failed (parameters equal: {same}, training losses equal: "
        f"{losses}, validation loss equal: {end}, lost tokens: {run.lost_tokens:,}).",
    )


def _partial(baseline: RunSummary, dense: RunSummary, run: RunSummary) -> Verdict:
    drift = abs((run.val_loss or float("inf")) - (baseline.val_loss or 0.0))
    return Verdict(
        run.val_loss is not None,
        f"{run.title}: {run.lost_tokens:,} tokens lost (PLT {run.plt:.2%}), iterations computed again: "
        f"{run.recomputed} (Dense: {dense.recomputed}), validation loss {drift:.4f} away from the run that never "
        "failed.",
    )


def _compared(sequential: RunSummary, load_aware: RunSummary) -> Verdict:
    """Which selection loses less depends on the router's skewness and on the kills, so either may, and is said."""
    finished = sequential.val_loss is not None and load_aware.val_loss is not None
    less = load_aware.lost_tokens / sequential.lost_tokens - 1 if sequential.lost_tokens else 0.0
    return Verdict(
        finished,
        f"Experts chosen by load lost {load_aware.lost_tokens:,} tokens, experts in turn "
        f"{sequential.lost_tokens:,} ({less:+.0%}), through the same kills.",
    )


def _spared(dense: RunSummary, windows: RunSummary) -> Verdict:
    """How much a kill costs Dense depends on where in its ten iterations it comes, so this is said and not demanded."""
    share = windows.bytes_per_iteration / dense.bytes_per_checkpoint if dense.bytes_per_checkpoint else 0.0
    return Verdict(
        windows.val_loss is not None,
        f"{windows.title}: iterations computed again: {windows.recomputed}, {windows.replayed} of them replays "
        f"(Dense: {dense.recomputed}); it writes {share:.0%} of a whole checkpoint at every iteration.",
    )


def _from_memory(run: RunSummary) -> Verdict:
    """Whether it lost a node, and storage was not needed for that nor for the processes."""
    lost = [each for each in run.recoveries if each.killed.node]
    unread = len(run.recoveries) == run.kills and not any(each.storage for each in run.recoveries)
    passed = bool(lost) and unread and all(each.peers for each in lost)
    if not passed:
        stored = human_bytes(sum(each.storage for each in run.recoveries))
        told = f"{run.title}: NOT from memory alone: nodes lost: {len(lost)}, read from storage: {stored}."
        return Verdict(False, told)
    node, own = (human_bytes(sum(getattr(each, place) for each in lost)) for place in ("peers", "own"))
    return Verdict(
        True,
        f"{run.title}: a node was lost with its memory. What came in its place got {node} from its peer, whose own "
        f"memory gave {own} to the other; iterations computed again for that: "
        f"{sum(each.recomputed for each in lost)}. Storage was read for none of the kills.",
    )
