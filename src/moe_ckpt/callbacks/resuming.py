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


def adopt_given(session: CheckpointSession, resumed: Mapping[str, Any], dirpath: str) -> int:
    """The user named a step by ``ckpt_path``, and Lightning has loaded it already. Returns its number."""
    reader, manifest = open_step(f"{resumed['root']}/{resumed['directory']}")
    same_store = os.path.realpath(reader.storage.root) == os.path.realpath(open_storage(dirpath).root)
    session.adopt(manifest, same_store=same_store)
    return manifest.step
