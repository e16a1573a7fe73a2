"""Going on from a checkpoint: what the session must be told, and what the user is."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moe_ckpt.callbacks.finished import go_on_from_end
from moe_ckpt.callbacks.hyperparameters import Change
from moe_ckpt.callbacks.lightning_state import check_state
from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.engine.finishing import read_finished
from moe_ckpt.engine.options import Options
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.format.finished import Finished
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.reader import open_step
from moe_ckpt.recovery.replay import Admits
from moe_ckpt.recovery.resume import Restored, other_ranks, rank_of_state
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")


def admission(trainer: Any, session: CheckpointSession, rank: int) -> Admits:
    """What a checkpoint must be for this trainer to go on from it; asked before anything of it is loaded."""

    def admits(manifest: Manifest, plain: Mapping[str, Any]) -> None:
        session.books.check(manifest)
        check_state(trainer, plain, state_path(manifest.slots[0].directory, rank_of_state(manifest, rank)))

    return admits


def say_new(dirpath: str, resume: str, generation: int, rank: int) -> None:
    """Once per job: training begins with what the script holds.

    Args:
        dirpath: The store.
        resume: The option.
        generation: Of this life of the run; 0 if nobody has written to the store before.
        rank: Of this process.
    """
    if rank:
        return
    if resume == "never" and generation:
        announce("training starts new, as resume='never' says, beside the checkpoints in %s", dirpath)
    else:
        announce("training starts new: %s holds no checkpoint yet", dirpath)


def say_resumed(session: CheckpointSession, fault: FaultRecord, manifest: Manifest, dirpath: str, rank: int) -> None:
    """Once per job: where training goes on from, and what that lost."""
    if rank:
        return
    plt = session.books.tokens.plt
    lost = "every expert is of that step"
    if fault.stale_experts:
        lost = f"{fault.stale_experts} experts are older than that, {fault.lost_tokens:,} tokens lost"
    announce(
        "resumed at step %d from %s: %s (PLT %.4f)", manifest.step, os.path.join(dirpath, manifest.directory), lost, plt
    )


def say_replayed(steps: tuple[int, int], manifest: Manifest, dirpath: str, rank: int) -> None:
    """Once per job: a sparse window is brought back."""
    if rank == 0:
        announce(
            "resumed at step %d from %s: the steps of its sparse window, up to %d, are computed again",
            steps[0],
            os.path.join(dirpath, manifest.directory),
            steps[1],
        )


def say_changes(found: Collection[Change], rank: int) -> None:
    """Once per job: which hyperparameters are not those of the checkpoint, and whose are used."""
    if rank or not found:
        return
    told = []
    for kept, whose in ((True, "the checkpoint's"), (False, "this script's")):
        some = "; ".join(str(change) for change in found if change.kept is kept)
        told += [f"{some} (training goes on with {whose})"] if some else []
    log.warning("hyperparameters differ from the checkpoint's: %s", "; ".join(told))


def say_finished(finished: Finished, plt: float, until: str | None, dirpath: str, rank: int) -> None:
    """Once per job: the store holds a finished run. until: how far it is extended, None if nothing is left to train."""
    if rank:
        return
    end = f"{dirpath} is finished ({finished.reason}, at step {finished.step}, PLT {plt:.4f})"
    if until is None:
        log.warning(
            "the run in %s: nothing is left to train. For another experiment choose another dirpath; to train on, "
            "raise max_steps or max_epochs, or give resume='extend'",
            end,
        )
    else:
        log.warning("the run in %s and is extended: training goes on to %s", end, until)


def is_same_place(path: str | os.PathLike[str], dirpath: str) -> bool:
    """Whether ``path``, which may be anybody's, names the store ``dirpath``."""
    return os.path.realpath(os.path.expanduser(path)) == os.path.realpath(open_storage(dirpath).root)


def say_other_ranks(manifest: Manifest, rank: int, world_size: int) -> None:
    """Warn, once per job, that another number of ranks goes on than wrote the checkpoint, and what is not exact."""
    warning = other_ranks(manifest, world_size)
    if warning is not None and rank == 0:
        log.warning("%s", warning)


def adopt_given(session: CheckpointSession, resumed: Mapping[str, Any], dirpath: str, trainer: Any) -> int:
    """The user named a step by ``ckpt_path``, and Lightning has loaded it already. Returns its number."""
    reader, manifest = open_step(f"{resumed['root']}/{resumed['directory']}")
    say_other_ranks(manifest, trainer.global_rank, trainer.world_size)
    fault = session.adopt(manifest, same_store=is_same_place(reader.storage.root, dirpath))
    say_resumed(session, fault, manifest, str(resumed["root"]), trainer.global_rank)
    return manifest.step


def adopt_restored(
    trainer: Any,
    session: CheckpointSession,
    comm: Communicator,
    options: Options,
    restored: Restored,
    found: Sequence[Change],
) -> None:
    """Let the session go on from a checkpoint whose state is in place, and tell the user once per job.

    found: how the script's hyperparameters differ from the checkpoint's.

    Raises:
        FinishedRunError: The run is finished, and hyperparameters have changed.
    """
    manifest, dirpath = restored.manifest, options.dirpath
    finished = read_finished(open_storage(dirpath), comm, manifest)
    until = None
    if finished is not None:
        extend = options.resume == "extend"
        until = go_on_from_end(trainer, dirpath, manifest, finished, found, extend=extend)
    fault = session.adopt(manifest, held=restored.held)
    if finished is not None:
        say_finished(finished, session.books.tokens.plt, until, dirpath, comm.rank)
    if finished is None or until is not None:
        say_resumed(session, fault, manifest, dirpath, comm.rank)
        say_other_ranks(manifest, comm.rank, comm.world_size)
        say_changes(found, comm.rank)
