"""Which parameters are trained: training may freeze and thaw some as it goes on, so that is state, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import compress
from operator import attrgetter, not_

import torch
from torch import nn

from moe_ckpt.format import tensor_words
from moe_ckpt.format.fragment import FixedStrings

_REQUIRES_GRAD = attrgetter("requires_grad")


class Frozen:
    """Names of the parameters that require no gradient; the same object for as long as they are the same."""

    def __init__(self) -> None:
        self._parameters: Mapping[str, nn.Parameter] = {}
        self._trained: list[bool] = []
        self._names = FixedStrings(())
        self._words: tensor_words.Requiring | None = None

    def names(self, parameters: Mapping[str, nn.Parameter]) -> FixedStrings:
        """Called at every snapshot: reads the words of all at once, or compares at the speed of built-in functions.

        Args:
            parameters: The model's, by name; another object if there are others.
        """
        alike = parameters is self._parameters
        if alike and self._words is not None and self._words.same():
            return self._names
        with torch._C.DisableTorchFunction():  # a mode (torch.device) would be asked of each
            trained = list(map(_REQUIRES_GRAD, parameters.values()))
            if not alike or trained != self._trained:
                self._parameters, self._trained = parameters, trained
                self._names = FixedStrings(compress(parameters, map(not_, trained)))
                self._words = tensor_words.requiring(list(parameters.values()))
            else:  # the words say other things as well: where those change, parameters are asked one by one
                self._words = None
        return self._names


def freeze(parameters: Mapping[str, nn.Parameter], frozen: Collection[str]) -> None:
    """Make those of ``frozen`` require no gradient, and all others require one."""
    names = frozenset(frozen)
    for name, parameter in parameters.items():
        if parameter.requires_grad == (name in names):
            parameter.requires_grad_(name not in names)
