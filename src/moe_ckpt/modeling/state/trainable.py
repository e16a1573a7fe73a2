"""The parameters that are trained: training may freeze and thaw some as it goes on, so that is state, too.

And which of them a step gave no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import compress, repeat
from operator import attrgetter, is_, not_

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moe_ckpt.core.operators import Catalog
from moe_ckpt.format.sealed import FixedStrings

_GRADIENT = attrgetter("grad")
_REQUIRES_GRAD = attrgetter("requires_grad")


class Frozen:
    """Names of the parameters that require no gradient; the same object for as long as they are the same."""

    def __init__(self) -> None:
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._trained: list[bool] = []
        self._names = FixedStrings(())

    def names(self, parameters: Mapping[str, nn.Parameter]) -> FixedStrings:
        """Returns the names; called at every snapshot, so it compares at the speed of built-in functions.

        Args:
            parameters: The model's, by name; another object if there are others.
        """
        with torch._C.DisableTorchFunction():  # a mode (torch.device) would be asked of each
            trained = list(map(_REQUIRES_GRAD, parameters.values()))
        if parameters is not self._parameters or trained != self._trained:
            self._parameters, self._trained = parameters, trained
            self._names = FixedStrings(compress(parameters, map(not_, trained)))
        return self._names


class FrozenExperts:
    """The experts that no update changes, as none of their parameters requires a gradient: of a stack all or none.

    Args:
        catalog: Of the model.
        parameters: Gives the model's parameters by name; the very same object for as long as they are the same.
    """

    def __init__(self, catalog: Catalog, parameters: Callable[[], Mapping[str, nn.Parameter]]) -> None:
        self._parameters, self._frozen = parameters, Frozen()
        self._of = {catalog.expert_at[op.id]: {span.parameter for span in op.spans} for op in catalog.experts}
        self._shape = catalog.expert_places.shape
        self._names: FixedStrings | None = None
        self._mask: npt.NDArray[np.bool_] | None = None

    def __call__(self) -> npt.NDArray[np.bool_] | None:
        """Returns ``[L, E]``, the very same array for as long as it is the same; None if no expert is frozen."""
        names = self._frozen.names(self._parameters())
        if names is not self._names:
            self._names, frozen = names, frozenset(names)
            mask = np.zeros(self._shape, dtype=bool)
            for at, parameters in self._of.items() if frozen else ():
                mask[at] = bool(parameters) and parameters <= frozen
            self._mask = mask if mask.any() else None
        return self._mask


def without_gradient(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns the names of the parameters that require a gradient and have none. Called at every update."""
    with torch._C.DisableTorchFunction():  # as above
        bare = map(is_, map(_GRADIENT, parameters.values()), repeat(None))
        return [name for name, parameter in compress(parameters.items(), bare) if parameter.requires_grad]


def freeze(parameters: Mapping[str, nn.Parameter], frozen: Collection[str]) -> None:
    """Make those of ``frozen`` require no gradient, and all others require one."""
    names = frozenset(frozen)
    for name, parameter in parameters.items():
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)
