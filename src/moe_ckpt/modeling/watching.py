"""Checks that live objects are still the very same ones, asked at every step.

A model of thousands of experts has tens of thousands of tensors, the same at every step. So nothing here runs bytecode
per object: all comparisons are loops of built-in functions over lists that were made once. Everything is looked at in
every call: what is noticed late would be a checkpoint of memory that the run no longer uses. A walk through the modules
takes longer than everything else that a snapshot asks of the training thread, so what it has seen is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, not_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moe_ckpt.modeling.blocks import is_dtensor
from moe_ckpt.modeling.names import clean_name, parameters_of, unwrap
from moe_ckpt.ports import Reading, StateTensor
from moe_ckpt.slices.cuts import Numbers, ascending, ranges

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


_TABLES = attrgetter("_parameters", "_modules", "_buffers")
_PART = 1024
"""All modules are compared in every call, so many at a time: what the first comparison has read of them is then
still in the processor's cache for the last one."""
Named = tuple[tuple[str, nn.Module], ...]


class Walk:
    """The parameters and modules of a model.

    Attributes:
        parameters: By name, each once.
        names: Name of each parameter by its id.
        unsliced: (name, parameter) of those without elements.
        named: All modules, but for wrappers around others, each once.
        shared: (further name, name in ``named``, module) of those that are in several places and keep anything besides
            parameters.
        buffered: Those that have buffers.
        with_extra: Those with ``get_extra_state``.
        settable: Those with ``set_extra_state``.
        with_own: Those with a ``state_dict`` of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(parameters_of(model))
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.unsliced = tuple(
            (name, p) for name, p in self.parameters.items() if not nn.parameter.is_lazy(p) and not p.numel()
        )
        modules, again = _once(model.named_modules(remove_duplicate=False))
        self.named: Named = tuple((clean_name(raw), module) for raw, module in modules if unwrap(module) is module)
        self.buffered: Named = tuple((name, module) for name, module in self.named if module._buffers)
        self.with_extra = _overriding(self.named, "get_extra_state")
        self.settable = _overriding(self.named, "set_extra_state")
        self.with_own = _overriding(self.named, "state_dict")
        first = {id(module): name for name, module in self.named}
        keeping = {id(module) for _, module in (*self.buffered, *self.with_extra, *self.with_own)}
        self.shared = tuple((clean_name(raw), first[id(m)], m) for raw, m in again if id(m) in keeping)
        self._watch = [_Modules([m for _, m in modules[at : at + _PART]]) for at in range(0, len(modules), _PART)]
        self._named_by_torch = type(model).named_parameters is nn.Module.named_parameters

    def is_current(self) -> bool:
        """Returns False once a module or parameter was added, replaced, renamed or lost, or a buffer came or went."""
        return self._named_by_torch and all(part.same() for part in self._watch)


class _Modules:
    """Watches some modules: their types, children and parameters, and how many buffers they have."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._types = list(map(type, modules))
        # In a row, not in tuples: the garbage collector looks at each.
        self._tables: list[object] = list(chain.from_iterable(map(_TABLES, modules)))
        self._children = Entries([module._modules for module in modules])
        self._parameters = Entries([module._parameters for module in modules])
        self._buffers = [module._buffers for module in modules]
        self._counts = list(map(len, self._buffers))

    def same(self) -> bool:
        return (
            list(map(type, self._modules)) == self._types
            and all(map(is_, chain.from_iterable(map(_TABLES, self._modules)), self._tables))
            and self._children.same()
            and self._parameters.same()
            and list(map(len, self._buffers)) == self._counts
        )


def _once(named: Iterable[tuple[str, nn.Module]]) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """(each module under its first name, modules under their other names)."""
    seen: set[int] = set()
    modules: tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]] = ([], [])
    for pair in named:
        modules[id(pair[1]) in seen].append(pair)
        seen.add(id(pair[1]))
    return modules


def _overriding(named: Named, method: str) -> Named:
    default = getattr(nn.Module, method)
    return tuple((name, module) for name, module in named if getattr(type(module), method) is not default)
