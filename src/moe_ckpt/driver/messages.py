"""Messages to the user, the same for every framework. ``unit`` is the framework's name for a step."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from moe_ckpt.core.memory_shares import LeftBehind
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.quantities import human_bytes, name_ranks
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.engine.options import Options
from moe_ckpt.interop.weights import LoadedWeights
from moe_ckpt.notices import announce
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.expected import roughly

log = logging.getLogger("moe_ckpt")


def say_setup(options: Options, catalog: Catalog, specs: Iterable[TensorSpec], rank: int) -> None:
    """Says what was found at a start: so somebody whose MoE layers were not found learns of it."""
    if rank:
        return
    counts = [layer.experts for layer in catalog.layers]
    experts = f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else f"{counts[0]}" if counts else ""
    result = "no MoE layer was found (under Lightning moe_ckpt.register_moe tells of one)"
    if counts:
        layers = f"{len(counts)} MoE layers were" if len(counts) > 1 else "1 MoE layer was"
        result = f"{layers} found, with {experts} experts{' each' if len(counts) > 1 else ''}"
    policy: Any = options.policy
    inner = getattr(policy, "policy", None)
    name = type(policy).__name__ if inner is None else f"{type(policy).__name__}({type(inner).__name__})"
    announce(
        "%s: %s. Checkpoints go to %s, about %s where all is saved (with Adam); memory that outlives the process: %s",
        *(name, result, options.dirpath, human_bytes(roughly(specs)), "off" if options.memory is None else "on"),
    )


def say_new(dirpath: str, resume: str, generation: int, rank: int) -> None:
    """A new run begins.

    Args:
        generation: Number of this start of the run; 0 if the store is new.
    """
    if rank:
        return
    if resume == "never" and generation:
        announce("training starts from scratch, because resume='never' is set; the checkpoints in %s stay", dirpath)
    else:
        announce("training starts from scratch: %s holds no checkpoint yet", dirpath)


def say_weights(unit: str, loaded: LoadedWeights, rank: int) -> None:
    """A new run begins with loaded weights."""
    if rank == 0:
        announce("a new run starts with %s; %s count, optimizer, schedules and data start from scratch", loaded, unit)


def say_resumed(
    unit: str, step: int, source: str, *, fault: FaultRecord, plt: float, dirpath: str, rank: int, besides: str = ""
) -> None:
    """Says where training resumes, and what was lost.

    Args:
        source: ``Restored.origin``.
        besides: A warning to add.
    """
    if rank:
        return
    lost, portion = f"all experts are of that {unit}", ""
    if fault.stale_experts:
        lost = f"{fault.stale_experts} experts are older than that, {fault.lost_tokens:,} tokens lost"
        portion = f"MLT {fault.mlt:.2%}, "
    where = f"{unit} {step} from {_path(dirpath, source)}"
    level = logging.WARNING if besides else logging.INFO
    announce("resumed at %s: %s (%sPLT %s)%s", where, lost, portion, f"{plt:.2%}", besides, level=level)


def say_left_behind(unit: str, step: int, lost_checkpoint: LeftBehind | None, rank: int) -> None:
    """The run continues from ``step`` on storage, although memory held newer steps, if it did."""
    if rank or lost_checkpoint is None:
        return
    if lost_checkpoint.step is None:
        announce(
            "no node has a checkpoint of an earlier start in memory: %ss after %d that were only in memory are lost, "
            "and are computed again",
            *(unit, step),
        )
        return
    several = lost_checkpoint.step > step + 1
    lost = f"{unit}s {step + 1} to {lost_checkpoint.step} are" if several else f"{unit} {lost_checkpoint.step} is"
    if not lost_checkpoint.writers:
        announce(
            "%s lost, and must be computed again: memory holds no whole checkpoint of %s that this run can use",
            *(lost, "them" if several else "it"),
            level=logging.WARNING,
        )
        return
    announce(
        "%s lost, and must be computed again: memory holds only a part of %s %d, and the part of %s is on no surviving "
        "node. More copies on other nodes, Memory(replicas=...), survive the loss of more nodes",
        *(lost, unit, lost_checkpoint.step, name_ranks(lost_checkpoint.writers)),
        level=logging.WARNING,
    )


def say_survived(unit: str, step: int, why: str, nbytes: int, secs: float, rank: int) -> None:
    """This rank sealed its newest step.

    Args:
        why: Training stops.
        nbytes: 0 if a snapshot had all of it.
    """
    cost = f"{human_bytes(nbytes)} in {secs:.1f} s" if nbytes else "a checkpoint of which was there"
    message = "training stops (%s): rank %d keeps its state of %s %d in memory, %s"
    (announce if rank == 0 else log.info)(message, why, rank, unit, step, cost)


def say_not_survived(unit: str, step: int, why: str, problem: str, rank: int, *, is_open: bool) -> None:
    """This rank did not seal its newest step, so the next start uses an older checkpoint.

    Args:
        is_open: Unless it is sealed before the process ends.
    """
    verb = "may not keep" if is_open else "could not keep"
    log.warning("training stops (%s), and rank %d %s %s %d in memory: %s", why, rank, verb, unit, step, problem)


def say_not_counted(which: str, missing: str, why: str, rank: int) -> None:
    """The update of a step was made, and the step cannot be sealed.

    Args:
        which: The step.
        missing: Why it cannot.
    """
    log.warning("training stops (%s), and rank %d does not keep %s in memory: %s", why, rank, which, missing)


def say_inexact(why: str | None, rank: int) -> None:
    """Why the resumed run is inexact; None if it is exact."""
    if why is not None and rank == 0:
        log.warning("%s", why)


def say_replayed(unit: str, first: int, last: int, source: str, dirpath: str, rank: int) -> None:
    """A sparse window is replayed from step ``first``.

    Args:
        source: ``Restored.origin``.
    """
    if rank == 0:
        announce(
            "resumed at %s %d from %s: the %ss of its sparse window, up to %d, are computed again",
            *(unit, first, _path(dirpath, source), unit, last),
        )


def say_routed_otherwise(unit: str, first: int, last: int, rank: int) -> None:
    """The steps of a sparse window that were computed again, those after ``first``, are not the run's."""
    if rank == 0:
        announce(
            "the %ss %d to %d, computed again, gave experts other numbers of tokens than the first time: data or "
            "kernels do not repeat, so the state is close to the run's, and not equal to it. Random numbers that a "
            "dataset draws in workers of its loader, and kernels that are not deterministic, do that "
            "(docs/moevement.md, Other tokens than the first time)",
            *(unit, first + 1, last),
            level=logging.WARNING,
        )


def _path(dirpath: str, source: str) -> str:
    """The path of a checkpoint in the store, also where memory held a part of it."""
    *memory, directory = source.split(" ")
    return source if directory == "memory" else " ".join([*memory, os.path.join(dirpath, directory)])


def say_unfinished(unit: str, step: int, window: tuple[int, int], rank: int) -> None:
    """Training ended before the replay of a sparse window.

    Args:
        window: Its first and last step.
    """
    if rank == 0:
        log.warning(
            "training ended at %s %d, before the sparse window of %ss %d to %d was computed again: nothing was saved, "
            "and the optimizer state in memory is incomplete. The store is unchanged; the next start continues from "
            "that window.",
            *(unit, step, unit, *window),
        )


def say_halted(unit: str, step: int, reason: str, rank: int) -> None:
    """The policy ends training."""
    if rank == 0:
        announce(
            "training ends at %s %d, because the policy asks for it: %s", unit, step, reason, level=logging.WARNING
        )


def say_unsaved(unit: str, step: int, newest: int | None, rank: int) -> None:
    """Training ended where the newest step's state was gone, and is not saved unless it had been.

    Args:
        step: The newest one.
        newest: Of the newest checkpoint; None if there is none.
    """
    if rank or newest == step:
        return
    state, first = (
        ("the store holds no checkpoint", 1)
        if newest is None
        else (f"the newest checkpoint is of {unit} {newest}", newest + 1)
    )
    log.warning(
        "training ended between two optimizer %ss, after %s %d, whose last batch accumulated gradients only, and those "
        "are in no checkpoint: %s, and the next start computes %ss %d to %d again. Stop training in a batch that makes "
        "a step, or save more often",
        *(unit, unit, step, state, unit, first, step),
    )


def say_gone_back(unit: str, step: int, before: int, rank: int) -> None:
    """A second fit of the same trainer begins at an older step than the first one ended at.

    Args:
        step: The restored one.
        before: The last one of the first fit.
    """
    if rank or step >= before:
        return
    steps = f"{unit}s {step + 1} to {before} are" if before > step + 1 else f"{unit} {before} is"
    log.warning(
        "fit() was called again on a Trainer that had come to %s %d, but with save_last=False the newest checkpoint is "
        "of %s %d: %s computed again. Leave save_last=False out to go on from the end of the fit before",
        *(unit, before, unit, step, steps),
    )
