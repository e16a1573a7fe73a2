"""A model walked through once: its parameters, and the modules that keep anything besides them.

Walking through thousands of modules takes longer than everything else that a snapshot asks of the training thread, and
they are the same modules at every step. So what was found is kept, for as long as it is still what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_

from torch import nn

from moe_ckpt.modeling.names import clean_name, parameters_of, unwrap
from moe_ckpt.modeling.state.watching import Entries

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
