"""Checks that live objects are still the very same ones, asked at every step.

A model of thousands of experts has tens of thousands of tensors, the same at every step. So nothing here runs bytecode
per object: all comparisons are loops of built-in functions over lists that were made once. Everything is looked at in
every call: what is noticed late would be a checkpoint of memory that the run no longer uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, not_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.format.gathering import Numbers, ascending, ranges
from moe_ckpt.modeling.blocks import is_dtensor
from moe_ckpt.ports import Reading, StateTensor

_BLOCK = attrgetter("_local_tensor")
_LAYOUT = attrgetter("_spec")


class Entries:
    """The entries of some dicts: whether they have the same keys in the same order, with the very same values.

    Args:
        dicts: In any order. If one of them is another kind of mapping, ``same`` is always false.
        kind: Only values of this type must stay the same objects. Others may change, though not into this type.

    Attributes:
        values: The values that must stay, in order.
        loose: For each dict whether it has other values.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], kind: type = object) -> None:
        self._kind = kind
        self._plain = all(isinstance(entries, dict) for entries in dicts)
        self._dicts = dicts
        self._lengths = list(map(len, dicts))
        self._filled = [entries for entries in dicts if entries]  # most modules have no children
        self._keys = list(chain.from_iterable(dicts))
        values = [value for entries in dicts for value in entries.values()]
        self._held = [isinstance(value, kind) for value in values]
        self._free = [] if all(self._held) else list(map(not_, self._held))
        self.values = list(compress(values, self._held))
        self.loose = [any(not isinstance(value, kind) for value in entries.values()) for entries in dicts]

    def same(self) -> bool:
        if not self._plain or list(map(len, self._dicts)) != self._lengths:
            return False
        if not all(map(is_, chain.from_iterable(self._filled), self._keys)):
            return False
        values: Any = chain.from_iterable(map(dict.values, self._filled))
        if self._free:
            present = list(values)
            if any(map(isinstance, compress(present, self._free), repeat(self._kind))):
                return False
            values = compress(present, self._held)
        return all(map(is_, values, self.values))


class TensorAddresses:
    """The addresses of the memory of tensors: that of a DTensor's local block, of any other its own.

    It changes without another tensor object by ``p.data = other``, and where FSDP2 allocates anew. Not noticed is
    ``p.data = other`` with another view of the very same memory (``p.data.t()``): to compare shapes and strides
    as well takes longer than all the rest.

    Args:
        named: Tensors, each with the parameter that it belongs to, or once with each of several.
        views: What was made of them.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], views: Sequence[StateTensor]) -> None:
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        self._sharded = [tensor for tensor in tensors.values() if is_dtensor(tensor)]
        self._blocks = list(map(_BLOCK, self._sharded))
        self._layouts = list(map(_LAYOUT, self._sharded))
        plain = [tensor for tensor in tensors.values() if not is_dtensor(tensor)]
        self._tensors = plain + self._blocks
        self._addresses = addresses(self._tensors)
        pairs = [(name, at) for at, tensor in enumerate(plain + self._sharded) for name in names[id(tensor)]]
        numbers = {name: at for at, name in enumerate(dict.fromkeys(name for name, _ in pairs))}
        owners = np.fromiter((numbers[name] for name, _ in pairs), np.int64, len(pairs))
        self._owners = np.fromiter((numbers[view.parameter] for view in views), np.int64, len(views))
        self._counts = np.bincount(owners, minlength=len(numbers))
        self._firsts = np.cumsum(self._counts) - self._counts
        self._places = np.fromiter(map(itemgetter(1), pairs), np.int64, len(pairs))[np.argsort(owners, kind="stable")]

    def same(self, of: Numbers | None = None) -> bool:
        """Returns whether the memory lies where it lay.

        Args:
            of: Places of views. Asked of all tensors of their parameters alone.
        """
        if not all(map(is_, map(_BLOCK, self._sharded), self._blocks)):
            return False
        if not all(map(is_, map(_LAYOUT, self._sharded), self._layouts)):
            return False
        if of is None:
            return np.array_equal(addresses(self._tensors), self._addresses)
        places = self._places_of(of)
        tensors = list(map(self._tensors.__getitem__, places.tolist()))
        return np.array_equal(addresses(tensors), self._addresses[places])

    def _places_of(self, views: Numbers) -> Numbers:
        """Returns the places of the tensors that belong to the parameters of these views."""
        numbers = ascending(self._owners[views], len(self._counts))
        return ascending(self._places[ranges(self._firsts[numbers], self._counts[numbers])], len(self._tensors))


def places_among(tensors: Sequence[StateTensor], of: Reading | None) -> Numbers | None:
    """Returns the places of those that are read; None for all of ``tensors``, also where ``of`` is about others."""
    return None if of is None or (len(of.places) and of.tensors is not tensors) else of.places


def addresses(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """Returns the address at which the memory of each tensor begins."""
    with torch._C.DisableTorchFunction():  # ``torch.set_default_device`` would run Python for each tensor
        return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))
