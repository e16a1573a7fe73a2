"""Going on from a checkpoint: what the session must be told, and what the user is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.recovery.reader import open_step
from moe_ckpt.recovery.resume import other_ranks
from moe_ckpt.storage import open_storage

log = logging.getLogger("moe_ckpt")


def say_resumed(session: CheckpointSession, fault: FaultRecord, manifest: Manifest, dirpath: str) -> None:
    log.info(
        "resumed at step %d from %s: %d experts are older than that, %d tokens lost (PLT %.4f)",
        manifest.step,
        os.path.join(dirpath, manifest.directory),
        fault.stale_experts,
        fault.lost_tokens,
        session.books.tokens.plt,
    )


def say_other_ranks(manifest: Manifest, rank: int, world_size: int) -> None:
    """Warn, once per job, that another number of ranks goes on than wrote the checkpoint, and what is not exact."""
    warning = other_ranks(manifest, world_size)
    if warning is not None and rank == 0:
        log.warning("%s", warning)


def adopt_given(session: CheckpointSession, resumed: Mapping[str, Any], dirpath: str, trainer: Any) -> int:
    """The user named a step by ``ckpt_path``, and Lightning has loaded it already. Returns its number."""
    reader, manifest = open_step(f"{resumed['root']}/{resumed['directory']}")
    say_other_ranks(manifest, trainer.global_rank, trainer.world_size)
    same_store = os.path.realpath(reader.storage.root) == os.path.realpath(open_storage(dirpath).root)
    session.adopt(manifest, same_store=same_store)
    return manifest.step
