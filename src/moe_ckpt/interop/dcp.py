"""Step directories as checkpoints of ``torch.distributed.checkpoint`` (DCP), without conversion::

    dcp.load({"model": model.state_dict()}, storage_reader=MoEStorageReader("runs/x/step_00000120"))

DCP plans which blocks each rank needs, at any world size and sharding; this reader serves them from our
shards, checksum first. There is no pickled ``.metadata``: it is built from the manifest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from moe_ckpt.errors import DamagedError, MoECheckpointError, UserError
from moe_ckpt.format.shard import TORCH_DTYPES
from moe_ckpt.interop.whole import WholeCheckpoint, open_whole
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.reader import open_step, with_step
from moe_ckpt.reading.slices import block

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Entry:
    """One leaf of the state dict that DCP sees.

    Attributes:
        path: The keys that lead to it, for unflattening.
        key: Our tensor key, or None for a ``value`` that is in memory already (buffers, hyperparameters, scalar state).
    """

    path: Path
    key: str | None = None
    value: Any = None

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


def entries(checkpoint: WholeCheckpoint, model: str = "model", optimizer: str = "optim") -> Iterator[Entry]:
    """Every leaf, named as in ``{"model": model.state_dict(), "optim": get_optimizer_state_dict(...)}``.

    A further optimizer i > 0 is under ``optim_<i>``. An empty ``model`` puts parameters at the top.
    """
    top: Path = (model,) if model else ()
    for name, key in checkpoint.parameters.items():
        yield Entry((*top, name), key)
    for name, value in checkpoint.extras.items():
        yield Entry((*top, name), value=value)
    for index, plain in enumerate(checkpoint.optimizers):
        root = f"{optimizer}_{index}" if index else optimizer
        for fqn, keys in checkpoint.optimizer_keys[index].items():
            for state, key in keys.items():
                yield Entry((root, "state", fqn, state), key)
        for fqn, values in checkpoint.optimizer_values(index).items():
            for state, value in values.items():
                yield Entry((root, "state", fqn, str(state)), value=value)
        for number, group in enumerate(plain.get("param_groups", ())):
            for name, value in group.items():
                yield Entry((root, "param_groups", number, name), value=value)


class MoEStorageReader(StorageReader):
    """Lets ``dcp.load`` open a step directory (or a store: its newest good dense step).

    The checkpoint is opened, and proven to be whole, when the path is given: DCP would replace an error that comes
    later, in ``read_metadata``, by one of its own. Errors are this package's; DCP wraps those of ``read_data`` in its
    ``CheckpointException``.

    Blocks are copied as soon as they are verified, so after an error the loaded state is undefined. Ranks that opened
    different steps, of a store whose run commits meanwhile, raise before anything is read.

    Args:
        path: Directory or URL; may be given as ``checkpoint_id`` of ``dcp.load`` instead.
        model: Key under which the loaded state dict has the weights.
        optimizer: Key under which it has the optimizer state.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, model: str = "model", optimizer: str = "optim"
    ) -> None:
        self._path, self._names = path, (model, optimizer)
        self.reset()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._path = self._path if checkpoint_id is None else checkpoint_id
        self._checkpoint: WholeCheckpoint | None = None
        self._slices: dict[tuple[str, tuple[int, ...]], StoredSlice] = {}
        self._values: dict[str, Any] = {}
        if self._path is not None:
            self._open()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            open_step(checkpoint_id)
        except MoECheckpointError:
            return False
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The content of the checkpoint, after the proof that it is whole."""
        checkpoint = self._open()
        index = checkpoint.reader.index(checkpoint.manifest)
        metadata: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for entry in entries(checkpoint, *self._names):
            paths[entry.name] = entry.path
            if entry.key is not None:
                group = index.tensors[entry.key]
                self._slices.update({(entry.name, stored.entry.offsets): stored for stored in group})
                meta = index.meta(entry.key)
                boxes = [stored.entry.box for stored in group]
                metadata[entry.name] = _tensor_metadata(TORCH_DTYPES[meta.dtype], meta.global_shape, boxes)
                continue
            self._values[entry.name] = entry.value
            if isinstance(entry.value, torch.Tensor):
                shape = tuple(entry.value.shape)
                metadata[entry.name] = _tensor_metadata(entry.value.dtype, shape, [Box((0,) * len(shape), shape)])
            else:
                metadata[entry.name] = BytesStorageMetadata()
        return Metadata(metadata, planner_data=paths)

    def _open(self) -> WholeCheckpoint:
        if self._checkpoint is None:
            if self._path is None:
                raise UserError("MoEStorageReader has no path: give it one, or checkpoint_id to dcp.load()")
            self._checkpoint = with_step(self._path, open_whole, dense=True)
        return self._checkpoint

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not self._slices:
            self.read_metadata()  # the metadata came from another rank or from the caller

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        manifest = self._open().manifest
        return replace(plan, storage_data=(manifest.run_id, manifest.directory))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On one rank, which is given all plans.

        Raises:
            UserError: Ranks opened different steps.
        """
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                steps = [str(load_plan.storage_data[1]) for load_plan in (plans[0], plan)]
                raise UserError(
                    f"MoEStorageReader({str(self._path)!r}): rank 0 opened {steps[0]}, and rank {rank} {steps[1]}, "
                    "because the run committed a checkpoint meanwhile. Give all ranks the path of one step directory"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Serve every item of the plan, reading each slice once."""
        items_of: dict[StoredSlice, list[ReadItem]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(self._values[name]))
            elif name in self._values:
                _deliver(planner, item, self._values[name])
            else:
                items_of.setdefault(self._stored(item), []).append(item)
        for stored, values in self._open().reader.read_many(items_of):
            for item in items_of[stored]:
                _deliver(planner, item, values)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _stored(self, item: ReadItem) -> StoredSlice:
        index = item.storage_index
        try:
            return self._slices[index.fqn, tuple(index.offset or ())]
        except KeyError:
            raise DamagedError(str(self._path), f"has no block of {index.fqn} at {index.offset}") from None


def _tensor_metadata(dtype: torch.dtype, shape: tuple[int, ...], boxes: list[Box]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def _deliver(planner: LoadPlanner, item: ReadItem, values: torch.Tensor) -> None:
    """Copy the part of a stored block that the item asks for to where the planner wants it."""
    part = block(values, (0,) * values.dim(), Box(tuple(item.storage_offsets), tuple(item.lengths)))
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


def _saved(value: Any) -> io.BytesIO:
    """Plain data in the form that DCP's planner unpickles; made here, in memory, never read from disk."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
