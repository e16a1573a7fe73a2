"""Finds the type in which kernels read each parameter, by watching a real forward and backward pass.

Under autocast many parameters are cast before they are used, and then a replay needs only the cast values. Others are
read as they are stored: norms, routers, and stacked experts whose grouped matrix product is not on autocast's list. So
types are not assumed but observed. A parameter counts as read in a narrow type only if every operation that touched its
memory was a view or the same cast. Rounding is idempotent: casting again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_ckpt.modeling.blocks import is_dtensor
from moe_ckpt.modeling.names import parameters_of
from moe_ckpt.stopwatch import Stopwatch

_CAST = torch.ops.aten._to_copy.default
_NARROW = (torch.bfloat16, torch.float16)
AS_STORED = 1 + len(_NARROW)
"""In ``reads``: read as stored, or in two types. 0: not read; other numbers: place in ``_NARROW``, from 1."""


class ComputeTypeProbe:
    """Watches passes between ``start`` and ``stop``, on the thread that calls them.

    Optimizer steps must not be watched, since they read all parameters as they are stored.
    """

    def __init__(self, model: nn.Module, stopwatch: Stopwatch | None = None) -> None:
        self._stopwatch = stopwatch or Stopwatch()
        self._names = tuple(name for name, _ in parameters_of(model))
        self._seen: dict[str, set[torch.dtype]] = {name: set() for name in self._names}
        self._watch: _TypeWatch | None = None
        self._model = model

    def start(self) -> None:
        """Begins to watch. Two parameters that share memory both count as read as stored."""
        if self._watch is None:
            self._watch = _TypeWatch(_owners(self._model), self._seen, self._stopwatch)
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stops watching; may be called twice."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def reads(self) -> list[int]:
        """Returns how each parameter was read, in the model's order. The largest number over all ranks is valid, since
        a rank sees only the experts that it used."""
        return [
            AS_STORED if len(seen) > 1 or not seen.issubset(_NARROW) else sum(1 + _NARROW.index(kind) for kind in seen)
            for seen in map(self._seen.__getitem__, self._names)
        ]

    def types(self, reads: Iterable[int]) -> dict[str, torch.dtype]:
        """Returns the types of parameters that kernels read only in a narrow type.

        Args:
            reads: Result of ``reads``.
        """
        return {name: _NARROW[kind - 1] for name, kind in zip(self._names, reads, strict=True) if 0 < kind < AS_STORED}


def _owners(model: nn.Module) -> dict[int, str | None]:
    """Returns address of a parameter's memory -> its name; None if two parameters share it."""
    owners: dict[int, str | None] = {}
    for name, parameter in parameters_of(model):
        if is_dtensor(parameter):
            continue
        address = parameter.untyped_storage().data_ptr()
        owners[address] = None if address in owners else name
    return owners


class _TypeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(
        self, owners: Mapping[int, str | None], seen: Mapping[str, set[torch.dtype]], stopwatch: Stopwatch
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stopwatch = stopwatch
        self._owners = owners
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with self._stopwatch:
            touched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for tensor in touched:
                name = self._owner(tensor)
                if name is not None and not self._is_view_of(result, tensor):
                    cast = func is _CAST and (kwargs or {}).get("dtype")
                    self._seen[name].add(cast or tensor.dtype)
        return result

    def _owner(self, tensor: torch.Tensor) -> str | None:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        return self._owners.get(tensor.untyped_storage().data_ptr())

    @staticmethod
    def _is_view_of(result: Any, tensor: torch.Tensor) -> bool:
        """Returns whether all results have the same memory as ``tensor``, so that no value was read."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        address = tensor.untyped_storage().data_ptr()
        return bool(made) and all(m.untyped_storage().data_ptr() == address for m in made)
