"""What the demo promises, checked on what its runs measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipes.demonstrating import Verdict, human_bytes
from recipes.gpt_moe_lightning.summary import RunSummary


def verdicts(baseline: RunSummary, failing: Sequence[tuple[RunSummary, bool]], *, kills: int) -> Iterator[Verdict]:
    """One sentence on all kills, and one or two on each run.

    Args:
        baseline: The run that never failed.
        failing: The others, and whether the policy of each promises to come back exactly.
        kills: Planned for each of these.
    """
    runs = [run for run, _ in failing]
    survived = all(run.kills == kills and run.val_loss is not None for run in runs)
    yield Verdict(
        survived,
        f"Each failing run was killed {kills} times (kill -9) and came back by itself."
        if survived
        else f"NOT as planned: {', '.join(str(run.kills) for run in runs)} kills instead of {kills} each, or a run did "
        "not finish.",
    )
    for run, exact in failing:
        yield _exact(baseline, run) if exact else _counted(baseline, run)
        if run.memory_bytes and any(recovery.killed.node for recovery in run.recoveries):
            yield _from_memory(run)


def _exact(baseline: RunSummary, run: RunSummary) -> Verdict:
    if run.same_as(baseline) and run.lost_tokens == 0:
        return Verdict(True, f"{run.title}: parameters and losses as without failures, bit for bit.")
    return Verdict(
        False,
        f"{run.title} DIFFERS from the run that never failed (parameters equal: {run.parameters == baseline.parameters}"
        f", training losses equal: {run.losses == baseline.losses}, validation loss equal: "
        f"{run.val_loss == baseline.val_loss}, lost tokens: {run.lost_tokens:,}).",
    )


def _counted(baseline: RunSummary, run: RunSummary) -> Verdict:
    away = abs((run.val_loss or float("inf")) - (baseline.val_loss or 0.0))
    return Verdict(
        run.val_loss is not None,
        f"{run.title}: {run.lost_tokens:,} tokens lost and counted ({run.plt:.2%}), final loss {away:.4f} away.",
    )


def _from_memory(run: RunSummary) -> Verdict:
    """Whether storage was needed neither for the lost node nor for the processes."""
    lost = [recovery for recovery in run.recoveries if recovery.killed.node]
    stored = sum(recovery.storage for recovery in run.recoveries)
    if len(run.recoveries) < run.kills or stored or not all(item.peers for item in lost):
        return Verdict(False, f"{run.title}: NOT from memory alone: {human_bytes(stored)} were read from storage.")
    node = human_bytes(sum(item.peers for item in lost))
    return Verdict(
        True,
        f"{run.title}: a node was lost with its memory; its successor got {node} from the other node. Storage was "
        "read for no kill.",
    )
