"""Which tensors exist for each parameter, and what must be saved anew when that changes.

Optimizer state comes into being when it is first needed: at the first step, or much later, when a frozen
expert thaws. A partial checkpoint that combined rows saved with it and rows saved without would not be
whole, so operators whose tensors are others than before are saved until a checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_ckpt.core.operators import Catalog
from moe_ckpt.ports import TensorSpec


class Layout:
    """Equal on every rank, since the tensors that exist are.

    changes: how often their set was another one than before.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[str, frozenset[str]] | None = None
        self._seen: Sequence[TensorSpec] | None = None
        self._unsettled: dict[str, int] = {}
        self.changes = 0

    def update(self, specs: Sequence[TensorSpec]) -> Mapping[str, int]:
        """Note the tensors that exist now. Returns the operators to be saved in any case, with the change they owe
        it to; give that to ``settle`` once they are committed."""
        if specs is not self._seen:
            self._compare(specs)
            self._seen = specs
        return dict(self._unsettled)

    def _compare(self, specs: Sequence[TensorSpec]) -> None:
        keys: dict[str, set[str]] = {}
        for tensor in specs:
            keys.setdefault(tensor.parameter, set()).add(tensor.key)
        found = {parameter: frozenset(those) for parameter, those in keys.items()}
        if self._known is not None and found != self._known:
            self.changes += 1
            for parameter in found.keys() | self._known.keys():
                if found.get(parameter) != self._known.get(parameter):
                    self._unsettled.update(dict.fromkeys(self._holders(parameter), self.changes))
        self._known = found

    def _holders(self, parameter: str) -> set[str]:
        return {op.id for op, _ in self._catalog.spans_of[parameter]} | {self._catalog.home[parameter]}

    def settle(self, saved: Mapping[str, int]) -> None:
        """A checkpoint with these operators is committed; those changed again since stay unsettled."""
        for operator, change in saved.items():
            if self._unsettled.get(operator) == change:
                del self._unsettled[operator]
