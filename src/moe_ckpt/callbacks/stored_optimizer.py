"""Optimizer state on its way through Lightning, which hands it to whatever optimizers the run has."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from moe_ckpt.modeling.optimizer_class import require_same_class


class StoredOptimizer(dict[str, Any]):
    """An optimizer's ``state_dict`` that only an optimizer of the same class can load.

    Nobody tells a ``CheckpointIO`` which optimizers there are, and without the callback nothing else of this package
    runs. But the first thing that ``Optimizer.load_state_dict`` does, before it changes anything, is to call ``copy``
    on what it was given; so that is where its class is compared.
    """

    def __init__(self, index: int, stored: str | None, state_dict: Mapping[str, Any]) -> None:
        super().__init__(state_dict)
        self._index, self._stored = index, stored

    def copy(self) -> dict[str, Any]:
        """Returns a plain copy.

        Raises:
            OptimizerChangedError: The caller is an optimizer of another class.
        """
        loading = sys._getframe(1).f_locals.get("self")
        if isinstance(loading, Optimizer):
            states = {str(name) for state in self["state"].values() for name in state}
            require_same_class(f"optimizer {self._index}", loading, self._stored, self["param_groups"], states)
        return dict(self)


def guarded_states(
    state_dicts: Iterable[Mapping[str, Any]], described: Iterable[Mapping[str, Any]]
) -> list[StoredOptimizer]:
    """Returns ``state_dicts`` guarded, each by its entry under ``plain/optimizers`` of the checkpoint."""
    pairs = zip(state_dicts, described, strict=True)
    return [StoredOptimizer(index, entry.get("class"), found) for index, (found, entry) in enumerate(pairs)]
