"""Finds the type in which kernels read each parameter, by watching a real forward and backward pass.

Under autocast many parameters are cast before they are used, and then the cast value is all that a replay needs. But
not all are: norms and routers are read as they are stored, and so are stacked experts whose grouped matrix product is
not on autocast's list. So nothing is assumed. A parameter counts as read in a narrow type only if every operation that
touched its memory was a view or the one cast. Rounding is idempotent: what is cast again is the same, to the last bit.
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
"""In ``reads``: it was read as it is stored, or in two ways. 0: not at all; else its number in ``_NARROW``."""


class ComputeTypeProbe:
    """Watches passes between ``start`` and ``stop``, on the thread that calls them.

    What is done to parameters by optimizers must not be watched: they read all of them as they are.
    """

    def __init__(self, model: nn.Module, stopwatch: Stopwatch | None = None) -> None:
        self._stopwatch = stopwatch or Stopwatch()
        self._names = tuple(name for name, _ in parameters_of(model))
        self._seen: dict[str, set[torch.dtype]] = {name: set() for name in self._names}
        self._watch: _TypeWatch | None = None
        self._model = model

    def start(self) -> None:
        """Begin to watch. Memory of a parameter that is shared with another one is not told apart, so both are wide."""
        if self._watch is None:
            self._watch = _TypeWatch(_owners(self._model), self._seen, self._stopwatch)
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stops watching; may be called twice."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def reads(self) -> list[int]:
        """Returns how each parameter was read, in the model's order: a number of which the largest over ranks counts,
        since a rank sees only the experts that it used."""
        return [
            AS_STORED if len(seen) > 1 or not seen.issubset(_NARROW) else sum(1 + _NARROW.index(kind) for kind in seen)
            for seen in map(self._seen.__getitem__, self._names)
        ]

    def types(self, reads: Iterable[int]) -> dict[str, torch.dtype]:
        """Returns the parameters that kernels read in a narrow type only. What was never seen is left out.

        Args:
            reads: Result of ``reads``.
        """
        return {name: _NARROW[kind - 1] for name, kind in zip(self._names, reads, strict=True) if 0 < kind < AS_STORED}


def _owners(model: nn.Module) -> dict[int, str | None]:
    """Address of a parameter's memory -> its name; None where two share it."""
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
        """True if every tensor that came out lies in the same memory, so that no value was read."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        address = tensor.untyped_storage().data_ptr()
        return bool(made) and all(m.untyped_storage().data_ptr() == address for m in made)
