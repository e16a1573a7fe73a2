"""Knows the tensors of each parameter, and the operators that must be saved again when that changes.

Optimizer state comes into being when it is first needed: at the first step, or much later, when a frozen
expert thaws. A partial checkpoint that combined rows saved with it and rows saved without would not be
whole, so operators whose tensors are others than before are saved until a checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.ports import TensorSpec


class Layout:
    """Notices new and removed tensors, and tells the ledger which operators must be saved for it.

    Equal on every rank, since the tensors that exist are.

    changes: how often their set was another one than before.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[str, frozenset[str]] | None = None
        self._seen: Sequence[TensorSpec] | None = None
        self.changes = 0

    @property
    def mandatory(self) -> Mapping[str, int]:
        """Returns operators to be saved in any case: see ``Ledger.mandatory``."""
        return self._ledger.mandatory

    def update(self, specs: Sequence[TensorSpec]) -> Mapping[str, int]:
        """Note the tensors that exist now. Returns the operators to be saved in any case: see ``Ledger.mandatory``."""
        if specs is not self._seen:
            self._compare(specs)
            self._seen = specs
        return self.mandatory

    def _compare(self, specs: Sequence[TensorSpec]) -> None:
        keys: dict[str, set[str]] = {}
        for tensor in specs:
            keys.setdefault(tensor.parameter, set()).add(tensor.key)
        current = {parameter: frozenset(key_set) for parameter, key_set in keys.items()}
        if self._known is not None and current != self._known:
            self.changes += 1
            for parameter in current.keys() | self._known.keys():
                if current.get(parameter) != self._known.get(parameter):
                    self._ledger.owe(self._holders(parameter), self.changes)
        self._known = current

    def _holders(self, parameter: str) -> set[str]:
        catalog = self._ledger.catalog
        return {op.id for op, _ in catalog.spans_of[parameter]} | {catalog.home[parameter]}
