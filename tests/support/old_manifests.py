"""Manifests as versions 1 and 2 of the format wrote them: complete views, each with all its files and operators."""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import Any

from moe_ckpt.format import FORMAT_VERSION, WINDOW_VERSION
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.sealed import seal


def encode_old(manifest: Manifest) -> bytes:
    """Of version 2 if there is a window."""
    body: dict[str, Any] = {
        "kind": "moe_ckpt.manifest",
        "format_version": WINDOW_VERSION if manifest.window else FORMAT_VERSION,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "generation": manifest.generation,
        "world_size": manifest.world_size,
        "index": manifest.index,
        "created_unix_secs": manifest.created_unix_secs,
        "model": asdict(manifest.model),
        "parent": manifest.parent,
        "policy": dict(manifest.policy),
        "measured": dict(manifest.measured),
        "tokens": dict(manifest.tokens),
        "files": [astuple(record) for record in manifest.files],
        "states": [astuple(record) for record in manifest.states],
        "operators": {op: [record.step, *record.files] for op, record in manifest.operators.items()},
    }
    if manifest.passed_over:
        body["passed_over"] = list(manifest.passed_over)
    if manifest.window:
        body["window"] = [[slot.step, [astuple(state) for state in slot.states]] for slot in manifest.window]
    return seal(body)
