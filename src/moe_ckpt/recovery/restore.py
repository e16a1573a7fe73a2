"""Writing a checkpoint back into live training state, from any sharding to any sharding.

Two passes over the slices that this rank needs. The first only verifies, before anything of the training
state is touched, so that a damaged file is found while the next older checkpoint can still be taken. The
second reads again, verifies again what it read, and copies. (Keeping the bytes of the first pass instead
would need host memory for a second copy of the state.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from moe_ckpt.core.coverage import Box
from moe_ckpt.errors import ConfigError, CoverageError
from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import StateTensor, TensorSpec, TrainingState
from moe_ckpt.recovery.index import StoredSlice, TensorIndex, overlapping, split_key
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.slices import find_damage

StoredByKey = Mapping[str, Sequence[StoredSlice]]
"""Tensor key -> its stored slices."""
_MODEL = "model/"


def restore(
    reader: StoreReader,
    manifest: Manifest,
    state: TrainingState,
    *,
    verified: bool = False,
    model_only: bool = False,
    plain: Mapping[str, Any] | None = None,
) -> None:
    """Make ``state.tensors()`` what the checkpoint says, whatever sharding wrote it.

    Called on every rank, on the training thread. ``plain()`` is not touched: the caller decodes it first
    with ``reader.state`` and loads it afterwards. ``state.prepare`` gets the optimizer tensors only.

    verified: this process has just verified every slice (``newest_good(deep=True)``): skip the first pass.

    model_only: leave optimizer state where it is, in the checkpoint and in ``state`` (evaluation).

    plain: what the caller will load afterwards; refused before anything is written if ``state`` cannot take it.

    Raises:
        DamagedError: a slice is damaged. Nothing was written, unless it broke between the two passes.
        CoverageError: the checkpoint is not whole, or its tensors are not those of the model.
        ConfigError: a tensor has another dtype than the checkpoint's, or as ``state.require_loadable`` says.
    """
    reader.prove(manifest)
    index = reader.index(manifest)
    parameters = [tensor for tensor in state.tensors() if tensor.key.startswith(_MODEL)]
    weights = [key for key in index.tensors if key.startswith(_MODEL)]
    check_match(manifest, index, weight_specs(state.specs()), weights)
    if plain is not None:
        state.require_loadable(plain, index.tensors.keys())
    if not verified:
        verify_needed(reader, {key: index.tensors[key] for key in weights} if model_only else index.tensors, parameters)
    if model_only:
        copy_slices(reader, index.tensors, parameters)
        return
    state.prepare({key: index.meta(key) for key in index.tensors if not key.startswith(_MODEL)})
    tensors = state.tensors()
    check_match(manifest, index, state.specs(), index.tensors)
    copy_slices(reader, index.tensors, tensors)


def weight_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Those of parameters."""
    return [spec for spec in specs if spec.key.startswith(_MODEL)]


def check_match(manifest: Manifest, index: TensorIndex, live: Sequence[TensorSpec], stored: Iterable[str]) -> None:
    """Raise unless the live tensors, those of all ranks, are exactly the stored ones, in shape and dtype."""
    keys = {spec.key for spec in live}
    problems = [f"{key} of the model is not in the checkpoint" for key in sorted(keys - set(index.tensors))]
    problems += [f"{key} of the checkpoint is not in the model" for key in sorted(set(stored) - keys)]
    for spec in live:
        if spec.key not in index.tensors:
            continue
        meta = index.meta(spec.key)
        if meta.global_shape != tuple(spec.global_shape):
            problems.append(
                f"{spec.key} has shape {list(spec.global_shape)} in the model, "
                f"{list(meta.global_shape)} in the checkpoint"
            )
        elif spec.dtype != meta.dtype:
            raise ConfigError(
                f"{spec.key} is {TORCH_DTYPES[spec.dtype]} in the model, but {meta.dtype} in checkpoint "
                f"{manifest.directory}: set the precision that the run was started with"
            )
    if problems:
        raise CoverageError(f"restoring checkpoint {manifest.directory}", tuple(problems))


def _needed(stored_of: StoredByKey, parameters: Sequence[StateTensor]) -> Iterator[StoredSlice]:
    """The slices that this rank will read, told before its optimizer state exists.

    State shaped like its parameter lies where the parameter is updated on this rank (``StateTensor.updated_here``). All
    slices of other state are named: it is small (step counts, row and column factors). Parameters that only other ranks
    hold are theirs to verify.
    """
    held: dict[str, list[Box]] = {}
    updated: dict[str, list[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in parameters:
        fqn = split_key(tensor.key).fqn
        held.setdefault(fqn, []).append(box_of(tensor))
        if tensor.updated_here:
            updated.setdefault(fqn, []).append(box_of(tensor))
        shapes[fqn] = tuple(tensor.global_shape)
    for key, group in stored_of.items():
        fqn = split_key(key).fqn
        if fqn not in shapes:
            continue
        if shapes[fqn] == group[0].entry.global_shape:
            boxes = held[fqn] if key.startswith(_MODEL) else updated.get(fqn, [])
            yield from (stored for box in boxes for stored, _ in overlapping(group, box))
        else:
            yield from group


def verify_needed(reader: StoreReader, stored_of: StoredByKey, parameters: Sequence[StateTensor]) -> None:
    """Raise ``DamagedError`` unless what this rank will read of ``stored_of`` is as it was written.

    parameters: the model's, as they are sharded now.
    """
    for _, error in find_damage(reader.storage, _needed(stored_of, parameters)):
        if error is not None:
            raise error


@torch.no_grad()
def copy_slices(reader: StoreReader, stored_of: StoredByKey, tensors: Sequence[StateTensor]) -> None:
    """Write what is stored into the live tensors, each rank its own part."""
    targets: dict[StoredSlice, list[tuple[StateTensor, Box]]] = {}
    for tensor in tensors:
        for stored, common in overlapping(stored_of.get(tensor.key, ()), box_of(tensor)):
            if prod(common.shape):
                targets.setdefault(stored, []).append((tensor, common))
    for stored, values in reader.read_many(targets):
        for tensor, common in targets[stored]:
            source = block(values, stored.entry.offsets, common)
            block(tensor.local.detach(), tensor.offsets, common).copy_(source)


def box_of(tensor: StateTensor) -> Box:
    """The block of the whole tensor that this rank holds."""
    return Box(tuple(tensor.offsets), tuple(tensor.local.shape))


def block(tensor: torch.Tensor, offsets: tuple[int, ...], wanted: Box) -> torch.Tensor:
    """View of the part of ``tensor``, itself placed at ``offsets`` of a whole, that ``wanted`` names."""
    for dim, (start, length, offset) in enumerate(zip(wanted.offsets, wanted.shape, offsets, strict=True)):
        tensor = tensor.narrow(dim, start - offset, length)
    return tensor
