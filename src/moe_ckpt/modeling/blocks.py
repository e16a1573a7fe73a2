"""Describes the block of a whole tensor that this rank holds, alike for plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ckpt.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class LocalBlock:
    """The part of a tensor that this rank holds, in one piece.

    Attributes:
        local: Live view, never a copy.
        replicated, duplicate, writer: As in ``ports.StateTensor``.
    """

    local: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    replicated: bool = True
    duplicate: bool = False
    writer: int | None = None


def reshard(module: FSDPModule) -> None:
    """Frees gathered parameters, so that the module has the sharded ones again, which the optimizers hold.

    ``FSDPModule.reshard`` does not suffice where a peer died within a forward pass: then it keeps whole parameters, or
    those of a smaller mesh, for a backward pass that will not come. So each group is told that it is between passes.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # earlier releases of torch
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    for group in groups:
        with group.use_training_state(type(group._training_state).IDLE):
            group.reshard()


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns False where every rank of its mesh holds the whole tensor."""
    return is_dtensor(tensor) and not all(p.is_replicate() for p in tensor.placements)


def block_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor that has the memory: a DTensor's local block; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of what a layer computed: no rows if a rank before this one holds the same part."""
    if not is_dtensor(tensor):
        return tensor
    at = tensor.device_mesh.get_coordinate() or ()
    repeated = any(p.is_replicate() and number for p, number in zip(tensor.placements, at, strict=False))
    return block_in(tensor)[:0] if repeated else block_in(tensor)


_BLOCK = "moe_ckpt.block"
"""Key of this rank's block in the mapping that replaces a DTensor in plain state."""


def with_blocks(state: Any) -> Any:
    """Replaces each DTensor in plain state, such as a moving average of FSDP2's parameters, by this rank's block."""
    if isinstance(state, Mapping):
        return {key: with_blocks(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(with_blocks, state))
    is_distributed = isinstance(state, torch.Tensor) and is_dtensor(state)
    return {_BLOCK: block_in(state), "shape": list(state.shape)} if is_distributed else state


def has_blocks(state: Any) -> bool:
    """Returns whether ``with_blocks`` has replaced a DTensor in ``state``."""
    if isinstance(state, Mapping):
        return _BLOCK in state or any(map(has_blocks, state.values()))
    return isinstance(state, (list, tuple)) and any(map(has_blocks, state))


def without_blocks(state: Any, here: Any, name: str) -> Any:
    """Inverts ``with_blocks``.

    Args:
        state: Saved by the rank of the same number.
        here: The state of the same object in this process, whose DTensors must have the same layout.
        name: Of the object, for messages.

    Raises:
        ConfigError: A DTensor has another shape or block here, or is not a DTensor.
    """
    if isinstance(state, dict) and _BLOCK in state:
        return _dtensor_like(here, state[_BLOCK], state["shape"], name)
    if isinstance(state, dict):
        entries = here if isinstance(here, Mapping) else {}
        return {key: without_blocks(value, entries.get(key), f"{name}/{key}") for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        items = here if isinstance(here, (list, tuple)) and len(here) == len(state) else [None] * len(state)
        return type(state)(
            without_blocks(*pair, f"{name}/{at}") for at, pair in enumerate(zip(state, items, strict=True))
        )
    return state


def _dtensor_like(here: Any, block: torch.Tensor, shape: Sequence[int], name: str) -> torch.Tensor:
    if not (isinstance(here, torch.Tensor) and is_dtensor(here)):
        raise ConfigError(f"{name} is a DTensor of shape {shape} in the checkpoint, and none in this process")
    block_here = block_in(here)
    if block.shape != block_here.shape or list(here.shape) != shape:
        raise ConfigError(
            f"{name}: the checkpoint has this rank's block {list(block.shape)} of a DTensor of shape {shape}, and in "
            f"this process that is {list(block_here.shape)} of {list(here.shape)}: resume with the same mesh"
        )
    mesh, placements = here.device_mesh, here.placements
    return DTensor.from_local(
        block.to(block_here), mesh, placements, run_check=False, shape=here.shape, stride=here.stride()
    )


def require_known_holders(name: str, parameter: torch.Tensor, ranks: int) -> None:
    """Raises ``UnsupportedError`` for a DTensor on a mesh without some ranks: it is not known what these hold."""
    if is_dtensor(parameter) and (mesh := _root(parameter.device_mesh)).size() != ranks:
        raise UnsupportedError(
            f"parameter {name!r} lies on {mesh}, which is not all of the {ranks} ranks, so it is not known what the "
            "others hold. Slice the meshes of all parameters from one of all ranks, init_device_mesh(..., "
            "mesh_dim_names=...)[...]"
        )


def block_of(tensor: torch.Tensor, what: str) -> LocalBlock:
    """Returns this rank's block of ``tensor``.

    A DTensor that is replicated over its whole mesh counts as plain. One that is sharded in some mesh dimensions and
    replicated in others (HSDP, tensor parallelism beside FSDP) is held by several ranks but not by all: the first of
    them writes it, the others hold duplicates.

    Args:
        tensor: A plain tensor or a DTensor.
        what: Names it in messages.

    Raises:
        UnsupportedError: The tensor has partial sums, a sparse layout, or is of another subclass.
    """
    if is_dtensor(tensor):
        return _dtensor_block(tensor, what)
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            f"{what} is a {type(tensor).__name__} of layout {tensor.layout}; only plain strided tensors and DTensors "
            "can be cut into slices. Use an optimizer or layer that keeps plain tensors."
        )
    local = tensor.detach()
    return LocalBlock(local, (0,) * local.ndim, tuple(local.shape))


def _dtensor_block(tensor: DTensor, what: str) -> LocalBlock:
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError(f"{what} is a DTensor with partial sums {placements}; reduce it before training starts")
    if not _is_in_one_piece(mesh, placements):
        raise UnsupportedError(
            f"{what} is a DTensor whose part on a rank is not one piece of the whole, placed as {placements}; shard it "
            "in another dimension, or by FSDP2 alone"
        )
    with torch.no_grad():
        local = tensor.to_local().detach()
    shape, offsets, writer = _layout(tuple(tensor.shape), mesh, tuple(placements), mesh.get_rank())
    if shape != tuple(local.shape):
        raise UnsupportedError(f"{what} has local shape {tuple(local.shape)}, not the {shape} that {placements} gives")
    return LocalBlock(local, offsets, tuple(tensor.shape), not is_sharded(tensor), writer is not None, writer)


def _is_in_one_piece(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Returns whether each rank's part of the tensor is one contiguous block.

    FSDP2 cuts a dimension that was sharded before (by experts, by tensor parallelism) into ``split_factor`` pieces per
    rank. A rank holds one piece only if mesh dimensions to the right, with that many ranks, divide the pieces.
    """
    for at, placement in enumerate(placements):
        pieces = getattr(placement, "split_factor", 1)
        for after, other in enumerate(placements[at + 1 :], at + 1):
            if pieces > 1 and getattr(other, "dim", None) == placement.dim:  # type: ignore[attr-defined]
                pieces //= mesh.size(after)
        if pieces > 1:
            return False
    return True


@lru_cache(maxsize=1 << 16)
def _layout(
    global_shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """Returns (local shape, offsets, the other rank that writes the block or None) on ``rank``, this process's.

    The results are cached, since thousands of tensors have the same layout. ``rank`` is part of the key because it may
    change when process groups are rebuilt, although meshes compare equal.
    """
    shape, offsets = compute_local_shape_and_global_offset(global_shape, mesh, placements)
    sharded = not all(placement.is_replicate() for placement in placements)
    return tuple(shape), tuple(offsets), _other_writer(mesh, placements) if sharded else None


def _root(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that ``mesh`` was sliced from, or ``mesh`` itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # torch 2.9 and older

    root: DeviceMesh = device_mesh._mesh_resources.get_root_mesh(mesh)
    return root


def _other_writer(mesh: DeviceMesh, placements: Sequence[Placement]) -> int | None:
    """Returns the first of the ranks that hold the same block; None if that is this rank.

    The coordinates of these ranks differ only in mesh dimensions along which the tensor is not sharded: replicated
    ones, and dimensions of the whole mesh that the tensor's sub-mesh leaves out.
    """
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    sharded = {name for name, placement in zip(names, placements, strict=True) if not placement.is_replicate()}
    whole = _root(mesh) if mesh.mesh_dim_names else mesh
    whole_names = whole.mesh_dim_names or names
    if not sharded <= set(whole_names):  # dimensions flattened out of the whole mesh: it cannot be asked
        whole, whole_names = mesh, names
    coordinate = whole.get_coordinate() or ()
    first = [at if name in sharded else 0 for at, name in zip(coordinate, whole_names, strict=True)]
    return None if first == list(coordinate) else int(whole.mesh[tuple(first)])
