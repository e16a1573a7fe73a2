"""Writes a checkpoint into live training state, from any sharding to any sharding.

It makes two passes over the slices that this rank needs. The first verifies them before training state changes, so that
an older checkpoint can still be taken. The second reads and verifies them again, and copies them. To keep the bytes of
the first pass would take host memory for another copy of the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from moe_ckpt.errors import ConfigError, CoverageError, DeviceMemoryError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.memory.mapping import copy_alone, page_locked
from moe_ckpt.ports import StateTensor, TensorMeta, TensorSpec, TrainingState
from moe_ckpt.reading.index import StoredSlice, TensorIndex, overlapping, split_key
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.slices import RUN_NBYTES, block
from moe_ckpt.slices.copying import warn_device_is_full

StoredByKey = Mapping[str, Sequence[StoredSlice]]
"""Tensor key -> its stored slices."""
Targets = dict[StoredSlice, list[tuple[StateTensor, Box]]]
"""Slice -> (live tensor, block of the whole that it takes of the slice)."""
MODEL = "model/"
"""How the keys of parameters begin."""


def require_fitting(
    reader: StoreReader, manifest: Manifest, state: TrainingState, plain: Mapping[str, Any] | None
) -> None:
    """Raises unless the checkpoint is whole and ``state`` can take it; reads no slice.

    Args:
        reader: Of the store.
        manifest: The checkpoint.
        state: The training state that is to be overwritten.
        plain: The plain state to be loaded; None if none is.

    Raises:
        CoverageError: The checkpoint is not whole, or its tensors are not those of the model.
        ConfigError: A tensor has another dtype than the checkpoint's, or ``state.require_loadable`` refuses.
    """
    reader.prove(manifest)
    index = reader.index(manifest)
    weights = [key for key in index.tensors if key.startswith(MODEL)]
    check_match(manifest, index, weight_specs(state.specs()), weights)
    if plain is not None:
        state.require_loadable(plain)


def parameters_of(state: TrainingState) -> list[StateTensor]:
    """Returns the parameters among ``state.tensors()``."""
    return [tensor for tensor in state.tensors() if tensor.key.startswith(MODEL)]


def weight_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns the specs of parameters."""
    return [spec for spec in specs if spec.key.startswith(MODEL)]


def check_match(manifest: Manifest, index: TensorIndex, live: Sequence[TensorSpec], stored: Iterable[str]) -> None:
    """Raises unless the live tensors of all ranks are exactly the stored ones, in shape and dtype."""
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


def needed_slices(stored_of: StoredByKey, parameters: Sequence[StateTensor]) -> Iterator[StoredSlice]:
    """Yields the slices that this rank will read. Its optimizer state need not exist yet.

    Optimizer state with the shape of its parameter is needed if this rank updates the parameter
    (``StateTensor.updated_here``); other state (step counts, row and column factors) is small and always needed.
    Parameters that only other ranks have are verified by those.
    """
    by_name: dict[str, list[StateTensor]] = {}
    for tensor in parameters:
        by_name.setdefault(split_key(tensor.key).fqn, []).append(tensor)
    for key, group in stored_of.items():
        blocks = by_name.get(split_key(key).fqn, [])
        if blocks and tuple(blocks[0].global_shape) != group[0].entry.global_shape:
            yield from group
            continue
        for tensor in blocks:
            if tensor.updated_here or key.startswith(MODEL):
                yield from (stored for stored, _ in overlapping(group, box_of(tensor)))


def prepare_state(state: TrainingState, stored: Mapping[str, TensorMeta]) -> None:
    """Does ``state.prepare(stored)``.

    Raises:
        DeviceMemoryError: This rank's device has no room for the optimizer state.
    """
    try:
        state.prepare(stored)
    except torch.OutOfMemoryError as error:
        made = {tensor.key for tensor in state.tensors()}
        missing: dict[str, list[TensorMeta]] = {}
        for key, meta in stored.items():
            if key not in made:
                missing.setdefault(split_key(key).fqn, []).append(meta)
        updated = [tensor for tensor in parameters_of(state) if tensor.updated_here and tensor.local.is_cuda]
        needed = sum(
            tensor.local.numel() * TORCH_DTYPES[meta.dtype].itemsize
            for tensor in updated
            for meta in missing.get(tensor.parameter, ())
            if meta.global_shape == tuple(tensor.global_shape)
        )
        device = updated[0].local.device
        free, total = torch.cuda.mem_get_info(device)
        raise DeviceMemoryError(str(device), needed, free, torch.cuda.memory_reserved(device), total) from error


def write_targets(reader: StoreReader, targets: Targets) -> None:
    """Reads slices, and writes each into its live tensors. Copies to a GPU may still be under way when it returns."""
    if any(tensor.local.is_cuda for blocks in targets.values() for tensor, _ in blocks):
        for stored, values in reader.read_many(targets, locked=True):
            write_slice(stored, values, targets[stored], locked=True)
    else:
        reader.use_many(targets, lambda stored, values: write_slice(stored, values, targets[stored]))


def targets_of(stored_of: StoredByKey, tensors: Sequence[StateTensor]) -> Targets:
    """Returns, for each slice that this rank needs, the live tensors that take a block of it, each with the block."""
    targets: Targets = {}
    for tensor in tensors:
        for stored, common in overlapping(stored_of.get(tensor.key, ()), box_of(tensor)):
            if prod(common.shape):
                targets.setdefault(stored, []).append((tensor, common))
    return targets


@torch.no_grad()
def write_slice(
    stored: StoredSlice, values: torch.Tensor, targets: Iterable[tuple[StateTensor, Box]], *, locked: bool = False
) -> None:
    """Writes a verified slice into live tensors. Copies to a GPU may still be under way when it returns.

    Args:
        stored: The slice.
        values: Its values.
        targets: The live tensors, each with the block that it takes.
        locked: ``values`` were read by ``read_many(locked=True)``.
    """
    locked = locked and stored.nbytes <= RUN_NBYTES
    for tensor, common in targets:
        source = block(values, stored.entry.offsets, common)
        target = block(tensor.local.detach(), tensor.offsets, common)
        if target.is_cuda and not locked and source.nbytes:
            rows = source.view(source.shape or (1,)), target.view(target.shape or (1,))
            count = max(1, RUN_NBYTES * len(rows[0]) // source.nbytes)
            for some, into in zip(*(torch.split(tensor, count) for tensor in rows), strict=True):
                _copy(into, page_locked(some.contiguous()), non_blocking=True)
        elif not target.is_cuda and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
            copy_alone(target, source)
            torch.autograd.graph.increment_version(target)
        else:
            _copy(target, source, non_blocking=locked)


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    """Copies between tensors of one shape; also to a device that has no room to lay the values out."""
    try:
        target.copy_(source, non_blocking=non_blocking)
    except torch.OutOfMemoryError:
        warn_device_is_full()
        order = sorted(range(target.dim()), key=target.stride, reverse=True)
        _copy_runs(target.permute(order), source.to(target.dtype).permute(order))


def _copy_runs(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies what lies in one piece of a device's memory by one call, which takes no memory there."""
    if target.is_contiguous():
        target.copy_(source.contiguous())
        return
    for part, values in zip(target, source, strict=True):
        _copy_runs(part, values)


def box_of(tensor: StateTensor) -> Box:
    """Returns the block of the whole tensor that this rank holds."""
    return Box(tuple(tensor.offsets), tuple(tensor.local.shape))
