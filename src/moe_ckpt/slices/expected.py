"""How large a rank's share of a complete checkpoint will be, as far as that is known before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.format.dtypes import itemsize
from moe_ckpt.ports import StateTensor, TensorSpec
from moe_ckpt.slices.assignment import Sharder, is_weight
from moe_ckpt.slices.cuts import NBYTES
from moe_ckpt.slices.local_state import LocalState

_MOMENTS = 2


class ExpectedShare:
    """This rank's share once its optimizer has state.

    Where the optimizer has none yet, two moments are counted for each weight that it updates (Adam), in the type in
    which it consumes gradients.

    Args:
        tensors: This rank's, as they are now.
        specs: Of all ranks' tensors.
    """

    def __init__(self, tensors: Sequence[StateTensor], specs: Sequence[TensorSpec]) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.duplicate]
        self._divided = any(not tensor.updated_here for tensor in tensors)  # by a distributed optimizer
        self._moments = self._missing_moments({spec.parameter: spec for spec in specs if is_weight(spec)})
        self.is_estimated = bool(self._moments)
        """Whether such moments are counted."""

    @property
    def most_nbytes(self) -> int:
        """The bytes that this rank holds: its share if it has no peers, and more than that otherwise."""
        return sum(tensor.local.nbytes for tensor in self._tensors) + sum(n for _, n in self._moments)

    def nbytes(self, catalog: Catalog, placement: Placement, rank: int) -> int:
        """Returns the bytes that this rank writes, plain state apart: its own, and its part of what its peers hold as
        well.

        Takes as long as describing a first snapshot.

        Args:
            catalog: Of the model.
            placement: Who holds what.
            rank: This one.
        """
        dealt = Sharder(catalog, placement).assign(catalog.everything, self._tensors)
        cuts = LocalState(catalog, self._tensors).cuts(catalog.everything, dealt, rank)
        written = int(cuts.shelf.table(cuts.slices)[:, NBYTES].sum())
        undivided = sum(tensor.local.nbytes for tensor in self._tensors if not tensor.replicated)
        alike = sum(tensor.local.nbytes for tensor in self._tensors if tensor.replicated)
        moments = sum(n for tensor, n in self._moments if tensor.replicated and not self._divided)
        own_moments = sum(n for _, n in self._moments) - moments
        return written + own_moments + (written - undivided) * moments // max(1, alike)

    def _missing_moments(self, weights: Mapping[str, TensorSpec]) -> list[tuple[StateTensor, int]]:
        """Each block of weights that this rank's optimizer updates, with the bytes of moments that it will make."""
        updated = [
            (tensor, weights[tensor.parameter].dtype, gradient)
            for tensor in self._tensors
            if is_weight(tensor) and tensor.updated_here
            if (gradient := weights[tensor.parameter].gradient) is not None
        ]
        masters = sum(tensor.local.numel() for tensor, dtype, gradient in updated if gradient != dtype)
        state = sum(t.local.numel() for t in self._tensors if not is_weight(t) and prod(t.global_shape) > 1)
        if state > masters:  # there are moments
            return []
        return [(tensor, _MOMENTS * tensor.local.numel() * itemsize(gradient)) for tensor, _, gradient in updated]


def roughly(specs: Iterable[TensorSpec]) -> int:
    """Bytes of a complete checkpoint of all ranks with Adam's moments, and masters where gradients are of another type.

    Args:
        specs: Of all ranks' tensors.
    """
    total = 0
    for spec in specs:
        copies = 0 if spec.gradient is None else _MOMENTS + (spec.gradient != spec.dtype)
        if is_weight(spec):
            total += prod(spec.global_shape) * (itemsize(spec.dtype) + copies * itemsize(spec.gradient or spec.dtype))
    return total
