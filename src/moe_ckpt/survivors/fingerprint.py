"""Checks whether weights and optimizer state are unchanged after other code could write to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_ckpt.ports import StateTensor

_SAMPLES = 32
"""Elements that are looked at of each tensor: torch counts no writes through ``.data``, as averaging callbacks make."""
_MOST_SAMPLED = 2048
"""Tensors that are looked at, at even distances where there are more: the training thread does it, at each validation.
Averaging callbacks write to most of them."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Address, write count and some elements of each tensor.

    Args:
        tensors: Of a training state, as they are now.
    """

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._places = [_place(tensor) for tensor in tensors]
        self._samples = [_sample(tensor.local) for tensor in _sampled(tensors)]

    def fits(self, tensors: Sequence[StateTensor]) -> bool:
        """Returns whether ``tensors`` are the same, and seem not to have been written to."""
        if [_place(tensor) for tensor in tensors] != self._places:
            return False
        samples = (_sample(tensor.local) for tensor in _sampled(tensors))
        return all(map(torch.equal, samples, self._samples))


def _sampled(tensors: Sequence[StateTensor]) -> Sequence[StateTensor]:
    return tensors[:: -(-len(tensors) // _MOST_SAMPLED) or 1]


def _place(tensor: StateTensor) -> tuple[str, tuple[int, ...], int, int]:
    local = tensor.local
    return tensor.key, tuple(tensor.offsets), local.data_ptr(), local._version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of elements at even distances, by their bits."""
    count = tensor.numel()
    number = min(count, _SAMPLES)
    places = torch.arange(number, device=tensor.device) * count // max(number, 1)
    kind = _INTEGERS.get(tensor.element_size())
    return torch.take(tensor.detach() if kind is None else tensor.detach().view(kind), places)
