"""Checks at every step whether modules, parameters and optimizer state are still the very same objects.

A model of thousands of experts has tens of thousands of tensors, the same at every step. So nothing here runs bytecode
per object: all comparisons are loops of built-in functions over lists that were made once. Every call looks at all
objects, since a change that is noticed late means a checkpoint of memory that the run no longer uses. Walking through
the modules takes longer than everything else that a snapshot asks of the training thread, so its results are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, not_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moe_ckpt.modeling.blocks import block_in, is_dtensor
from moe_ckpt.modeling.names import clean_name, parameters_of, unwrap
from moe_ckpt.ports import Reading, StateTensor
from moe_ckpt.slices.cuts import ascending, ranges

_BLOCK = attrgetter("_local_tensor")
_LAYOUT = attrgetter("_spec")


class Entries:
    """The entries of some dicts, to tell whether keys, their order and values are still the same.

    Args:
        dicts: In any order. If one of them is another kind of mapping, ``same`` returns False.
        kind: Only values of this type must stay the same objects. Other values may change, though not into this type.

    Attributes:
        values: The values that must stay, in order.
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

    def same(self) -> bool:
        """Returns whether the dicts have the entries that they had."""
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
    """The memory addresses of tensors; of a DTensor, that of its local block.

    ``p.data = other`` and FSDP2 move memory without making another tensor object. ``p.data = p.data.t()``, another
    view of the same memory, is not noticed: to compare shapes and strides takes longer than everything else here.

    Args:
        named: (parameter, tensor that belongs to it); a tensor of several parameters appears once for each.
        views: The tensors' views in the training state.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], views: Sequence[StateTensor]) -> None:
        unique: list[torch.Tensor] = []
        numbers: dict[int, int] = {}  # of each tensor, by its id
        of_parameter: dict[str, list[int]] = {}
        for name, tensor in named:
            if numbers.setdefault(id(tensor), len(unique)) == len(unique):
                unique.append(tensor)
            of_parameter.setdefault(name, []).append(numbers[id(tensor)])
        self._sharded = list(filter(is_dtensor, unique))
        self._blocks = list(map(_BLOCK, self._sharded))
        self._layouts = list(map(_LAYOUT, self._sharded))
        self._tensors = list(map(block_in, unique))
        self._addresses = addresses(self._tensors)
        parameters = {name: at for at, name in enumerate(of_parameter)}
        self._views = views
        self._owners = np.fromiter((parameters[view.parameter] for view in views), np.int64, len(views))
        self._counts = np.fromiter(map(len, of_parameter.values()), np.int64, len(parameters))
        self._firsts = np.cumsum(self._counts) - self._counts
        self._places = np.fromiter(chain.from_iterable(of_parameter.values()), np.int64, int(self._counts.sum()))

    def same(self, of: Reading | None = None) -> bool:
        """Returns whether all memory is at the address where it was.

        Args:
            of: Only tensors that belong to the parameters of these views are compared. None, or ``of`` is about other
                views: all tensors.
        """
        if not all(map(is_, map(_BLOCK, self._sharded), self._blocks)):
            return False
        if not all(map(is_, map(_LAYOUT, self._sharded), self._layouts)):
            return False
        if of is None or (len(of.places) and of.tensors is not self._views):
            return np.array_equal(addresses(self._tensors), self._addresses)
        numbers = ascending(self._owners[of.places], len(self._counts))
        places = ascending(self._places[ranges(self._firsts[numbers], self._counts[numbers])], len(self._tensors))
        tensors = list(map(self._tensors.__getitem__, places.tolist()))
        return np.array_equal(addresses(tensors), self._addresses[places])


def addresses(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
    """Returns the address at which the memory of each tensor begins."""
    with torch._C.DisableTorchFunction():  # ``torch.set_default_device`` would run Python for each tensor
        return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.uint64, len(tensors))


_TABLES = attrgetter("_parameters", "_modules", "_buffers")
_PART = 1024
"""Modules are compared in parts of this size, so that a part stays in the processor's cache for all comparisons."""
Named = tuple[tuple[str, nn.Module], ...]


class Walk:
    """The parameters and modules of a model.

    Attributes:
        parameters: By name, each once.
        names: Name of each parameter by its id.
        unsliced: (name, parameter) of those without elements.
        named: All modules except wrappers around others, each once.
        shared: (further name, name in ``named``, module) of modules in several places that have other state than
            parameters.
        buffered: Modules that have buffers.
        with_extra: Modules that override ``get_extra_state``.
        settable: Modules that override ``set_extra_state``.
        with_own: Modules that override ``state_dict``.
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
        # One flat list, no tuples: the garbage collector would look at each of these.
        self._tables: list[object] = list(chain.from_iterable(map(_TABLES, modules)))
        self._entries = Entries([table for module in modules for table in (module._modules, module._parameters)])
        self._buffers = [module._buffers for module in modules]
        self._counts = list(map(len, self._buffers))

    def same(self) -> bool:
        return (
            list(map(type, self._modules)) == self._types
            and all(map(is_, chain.from_iterable(map(_TABLES, self._modules)), self._tables))
            and self._entries.same()
            and list(map(len, self._buffers)) == self._counts
        )


def _once(named: Iterable[tuple[str, nn.Module]]) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """Returns (each module under its first name, the further names of modules)."""
    seen: set[int] = set()
    first: list[tuple[str, nn.Module]] = []
    again: list[tuple[str, nn.Module]] = []
    for pair in named:
        (again if id(pair[1]) in seen else first).append(pair)
        seen.add(id(pair[1]))
    return first, again


def _overriding(named: Named, method: str) -> Named:
    default = getattr(nn.Module, method)
    return tuple((name, module) for name, module in named if getattr(type(module), method) is not default)
