"""Loads the dense checkpoint that a user names, without a fallback. Ranks that need the same of it read it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_ckpt.format.dtypes import TORCH_DTYPES
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.reading.index import split_key
from moe_ckpt.reading.newest import require_dense
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import require_fitting
from moe_ckpt.reading.shared_reading import divide, load_slices
from moe_ckpt.reading.together import together
from moe_ckpt.recovery.executing import Admits, Restored, open_dense
from moe_ckpt.recovery.sources import StorageSource, in_order

Opens = Callable[[], tuple[StoreReader, Manifest]]
"""Opens the checkpoint on this rank; no collective."""


class Named(NamedTuple):
    """A checkpoint that is loaded, but for its plain state."""

    reader: StoreReader
    manifest: Manifest
    restored: Restored


def load_step(
    comm: Communicator, opens: Opens, state: TrainingState, admits: Admits | None = None, *, model_only: bool = False
) -> Named:
    """Loads a checkpoint into ``state``. A collective, on the training thread.

    Args:
        comm: The ranks.
        opens: Opens the same checkpoint on every rank.
        state: Its tensors are written; the caller loads its plain state afterwards.
        admits: See ``Admits``.
        model_only: Load no optimizer state (evaluation).

    Raises:
        NotUsableError: On every rank, if it failed on any: the checkpoint is damaged, a sparse window, or does not fit.
            Nothing was written, unless it broke between the two passes.
        PeerLostError: A peer is gone.
    """

    def fitting() -> Named:
        reader, manifest = opens()
        require_dense(manifest)
        restored = open_dense(reader, manifest, comm.rank, admits)
        require_fitting(reader, manifest, state, None if model_only else restored.plain.get("plain"))
        return Named(reader, manifest, restored)

    named = together(comm, fitting)
    StorageSource(named.reader, named.manifest, weights_only=model_only).load(comm, state)
    return named


def whole_tensors(comm: Communicator, reader: StoreReader, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole and verified, on every rank: by key, on the CPU. A collective.

    Args:
        comm: The ranks.
        reader: Of the store.
        manifest: The checkpoint, which each rank has proved.

    Raises:
        NotUsableError: On every rank, if one could not read what it was to read.
        PeerLostError: A peer is gone.
    """
    stored_of = reader.index(manifest).tensors
    slices = in_order(stored for group in stored_of.values() for stored in group)
    shared = divide(comm, slices, lambda: slices)
    tensors: dict[str, torch.Tensor] = {}

    def made() -> list[StateTensor]:
        for key in stored_of:
            meta = reader.index(manifest).meta(key)
            tensors[key] = torch.empty(meta.global_shape, dtype=TORCH_DTYPES[meta.dtype])
        return [
            StateTensor(key, split_key(key).fqn, whole, (0,) * whole.dim(), tuple(whole.shape))
            for key, whole in tensors.items()
        ]

    together(comm, lambda: load_slices(reader, stored_of, made, shared))
    return tensors
