"""The parameters that are trained: those that the optimizer has, of which training may rest some as it goes on.

What the optimizer has needs its state, and nothing else has any, so a run is resumed with the same parameters only.
Whether one of them requires gradients is state, which is restored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from moe_ckpt.driver.changes import Change
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.fragment import FixedStrings
from moe_ckpt.megatron.model.inventory import LiveParameter
from moe_ckpt.megatron.model.world import HeldTensor, natural
from moe_ckpt.modeling.state.trainable import Frozen, freeze

FROZEN = "frozen"
"""Where the plain state has the names of all of the model's parameters that the optimizer does not have; that of an
expert with ``*`` for its number stands for all experts of its layer."""
RESTING = "resting"
"""Where it has the names of this rank's parameters that the optimizer has, and that require no gradient now."""
_SHOWN = 3
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Trained:
    """The parameters that this rank's optimizer has.

    Args:
        parameters: The model's on this rank.
        updated: Those that the optimizer has.
    """

    def __init__(self, parameters: Iterable[LiveParameter], updated: Collection[nn.Parameter]) -> None:
        self._updated = {live.parts[0].name: live.parameter for live in parameters if live.parameter in updated}
        self._resting = Frozen()
        self._frozen = FixedStrings(())
        self._tensors: Mapping[str, HeldTensor] = {}

    def bind(self, tensors: Mapping[str, HeldTensor]) -> None:
        """Tells all of the model's tensors, those of other ranks too."""
        self._tensors = tensors
        self._frozen = FixedStrings(_abridged([n for n, tensor in tensors.items() if not tensor.trained], tensors))

    def read(self) -> dict[str, Any]:
        """Returns entries of the plain state."""
        return {FROZEN: self._frozen, RESTING: self.resting()}

    def resting(self) -> FixedStrings:
        """Returns the names of the parameters that rest (``RESTING``)."""
        return self._resting.names(self._updated)

    def rest(self, names: Collection[str]) -> None:
        """Makes the parameters of these names (``RESTING``) require no gradient, and all others that the optimizer has
        one."""
        freeze(self._updated, names)

    def require_same(self, plain: Mapping[str, Any]) -> None:
        """Raises ``ConfigError``, which names parameters, unless the run of the checkpoint, with that plain state,
        trained the same."""
        frozen = set(plain[FROZEN])
        here = {name for name, tensor in self._tensors.items() if tensor.trained}
        trained_then = {name for name in self._tensors if not frozen & {name, _of_all_experts(name)}}
        texts = [
            f"{_named(names)} {_be('was', names)} {then} in the run that wrote the checkpoint, and "
            f"{_be('is', names)} {now} now"
            for names, then, now in (
                (trained_then - here, "trained", "frozen"),
                (here - trained_then, "frozen", "trained"),
            )
            if names
        ]
        if texts:
            raise ConfigError(
                f"{'; '.join(texts)}. What is trained needs its optimizer state, so nothing was loaded. To continue "
                "that run, set requires_grad as it was before the optimizer is made. To train other parameters from "
                "its weights, set another dirpath, and set weights_from= to the store, a step directory or an exported "
                "file."
            )


def resting_changed(before: Sequence[str], now: Sequence[str], used: Sequence[str]) -> list[Change]:
    """Returns how the parameters that rest differ, if the script says so and training has not come to it.

    Args:
        before: Names when the run began.
        now: When this process began.
        used: After the checkpoint was loaded.
    """
    if list(before) == list(now):
        return []
    differences = []
    for names, was in ((set(used) - set(now), False), (set(now) - set(used), True)):
        if names:
            differences.append(
                Change(f"requires_grad of {_named(names)}", str(was), str(not was), from_checkpoint=True)
            )
    return differences


def _of_all_experts(name: str) -> str:
    return _EXPERT.sub(".experts.*.", name)


def _abridged(names: Collection[str], every: Iterable[str]) -> list[str]:
    """Returns ``names``, with one for all experts of a layer where all are among them: they are in each state file.

    Args:
        every: Names that there are.
    """
    chosen, whole = set(names), Counter(map(_of_all_experts, every))
    whole.subtract(map(_of_all_experts, chosen))
    return list(dict.fromkeys(name if whole[short := _of_all_experts(name)] else short for name in names))


def _named(names: Collection[str]) -> str:
    first = sorted(names, key=natural)[:_SHOWN]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return ", ".join(first) + more


def _be(verb: str, names: Collection[str]) -> str:
    return verb if len(names) == 1 else {"was": "were", "is": "are"}[verb]
