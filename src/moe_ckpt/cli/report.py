"""Facts about a store as plain data, from its manifests alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import TokenBook, tokens_at_risk
from moe_ckpt.errors import DamagedError, StepRemovedError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest, age_of
from moe_ckpt.reading.memory.memory_outside import MemoryOutside
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.reader import StoreReader, locate, open_store
from moe_ckpt.reading.step_storage import listed_again


def describe(path: str | os.PathLike[str], memory: Sequence[str] = ()) -> dict[str, Any]:
    """A store and its steps, newest first; only the named step for a step directory. JSON-ready.

    Args:
        path: Of the store, or of a step.
        memory: Directories in which an ended run left further steps.

    Raises:
        NoCheckpointError: there is no store, or the step is not committed.
        StepRemovedError: the named step was removed meanwhile; or of a store all steps, listing after listing.
        StoreError, FormatVersionError, DamagedError: the store's identity cannot be read.
    """
    storage, named = locate(path)
    reader, steps = StoreReader(storage), list[dict[str, Any]]()
    if memory and named is not None and named not in reader.directories():
        steps = [step for step in _in_memory(reader, memory) if step["directory"] == named]
    if not steps:
        reader, directory = open_store(path)
        steps = [_describe_step(reader, directory)] if directory else listed_again(lambda: _describe_steps(reader))
        if memory and directory is None:
            steps = [*_in_memory(reader, memory), *steps]
    steps.sort(key=lambda step: age_of(step["directory"]), reverse=True)
    identity = reader.identity()
    return {
        "store": reader.storage.root,
        "format_version": FORMAT_VERSION,
        "run_id": identity.run_id,
        "fingerprint": identity.fingerprint,
        "steps": steps,
    }


def _in_memory(reader: StoreReader, memory: Sequence[str]) -> list[dict[str, Any]]:
    with MemoryOutside(reader, memory) as outside:
        return [_facts_of(opened.manifest, 0, opened) for opened in outside.unstored()]


def _describe_steps(reader: StoreReader) -> list[dict[str, Any]]:
    """All steps, newest first, without those that are removed meanwhile. Raises ``StepRemovedError`` if all are."""
    steps, removed = [], None
    for directory in reader.directories():
        try:
            steps.append(_describe_step(reader, directory))
        except StepRemovedError as error:
            removed = error
    if removed is not None and not steps:
        raise removed
    return steps


def _describe_step(reader: StoreReader, directory: str) -> dict[str, Any]:
    try:
        manifest = reader.manifest(directory)
        return _facts_of(manifest, reader.storage.size(f"{directory}/{MANIFEST_NAME}"))
    except DamagedError as error:
        return {"directory": directory, "damage": str(error)}


def _facts_of(manifest: Manifest, manifest_bytes: int, opened: OpenedMemory | None = None) -> dict[str, Any]:
    """Facts about one checkpoint.

    Args:
        manifest: Its manifest.
        manifest_bytes: Size of that on storage; 0 of a checkpoint in memory.
        opened: The checkpoint in memory; None for one on storage.
    """
    book = TokenBook.from_dict(manifest.tokens, *manifest.model.grid)
    in_memory = None if opened is None else opened.tokens_from_memory(manifest.operators)
    if in_memory is not None:
        book.saved[Tier.HOST] = in_memory
    unsaved = book.unsaved(Tier.HOST)
    steps = {op: record.step for op, record in manifest.operators.items()}
    versions = [
        [steps.get(expert_id(number, expert)) for expert in range(layer.experts)]
        for number, layer in enumerate(manifest.model.layers)
    ]
    ages = [[None if v is None else manifest.step - v for v in row] for row in versions]
    sizes = {file.path: file.nbytes for file in manifest.files}
    sizes |= {state.path: state.nbytes for slot in manifest.slots for state in slot.states}
    inside = tuple(f"{slot.directory}/" for slot in manifest.slots)  # of a sparse window also its earlier steps
    sizes |= {part.path: part.nbytes for part in manifest.parts}
    return {
        "directory": manifest.directory,
        "in_memory": opened is not None,
        "step": manifest.step,
        "generation": manifest.generation,
        "committed_unix_secs": manifest.created_unix_secs,
        "policy": dict(manifest.policy),
        "world_size": manifest.world_size,
        "window_steps": [slot.step for slot in manifest.slots] if manifest.window else None,
        "returned_to": manifest.parent,
        "not_finite": manifest.not_finite or None,
        "written_bytes": manifest_bytes + sum(n for path, n in sizes.items() if path.startswith(inside)),
        "whole_bytes": manifest_bytes + sum(sizes.values()),
        "layers": [{"name": x.name, "experts": x.experts, "top_k": x.top_k} for x in manifest.model.layers],
        "versions": versions,
        "ages_steps": ages,
        "oldest_age_steps": max((age for row in ages for age in row if age is not None), default=0),
        "unsaved_tokens": int(unsaved.sum()),
        "unsaved_per_expert": unsaved.tolist(),
        "routed_tokens": book.routed_tokens,
        "lost_tokens": book.lost_tokens,
        "faults": len(book.faults),
        "plt": book.plt,
        "plt_if_returned_to": book.plt_after(int(unsaved.sum())),
        "mlt_of_faults": [fault.mlt for fault in book.faults],
        "mlt_if_returned_to": tokens_at_risk(unsaved, book.applied),
    }
