"""The class of an optimizer, so that no other optimizer goes on with its state.

Never compared: hyperparameters (they come from the checkpoint), and flags that choose an implementation.
"""

from __future__ import annotations

import torch
from torch import optim
from torch.optim import Optimizer

from moe_ckpt.errors import optimizer_changed

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam),
        *(optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    }
)
"""Optimizers that update each element by its own gradient and state alone. Adafactor and Muon do not (their steps are
scaled by a norm over the whole parameter), and of what is not known it must be assumed."""
_TORCH = "torch.optim."


def class_name(optimizer: Optimizer) -> str:
    """Returns the qualified name of an optimizer's class; torch's own as ``torch.optim.<name>`` wherever they live."""
    return name_of(type(optimizer))


def name_of(kind: type[Optimizer]) -> str:
    """Returns ``class_name`` of the instances of a class."""
    module = _TORCH if getattr(torch.optim, kind.__qualname__, None) is kind else f"{kind.__module__}."
    return module + kind.__qualname__


def require_same_class(which: str, optimizer: Optimizer, stored: str) -> None:
    """Raises unless stored state is of the class of ``optimizer``. Changes nothing.

    A class that only moved to another module (a script that runs as ``__main__``) is the same class.

    Args:
        which: Names the optimizer in the message.
        optimizer: The running one.
        stored: Its class name in the checkpoint.

    Raises:
        ConfigError: It is of another class.
    """
    here = class_name(optimizer)
    moved = stored.rpartition(".")[2] == here.rpartition(".")[2] and not f"{stored} {here}".count(_TORCH)
    if stored != here and not moved:
        raise optimizer_changed(which, stored, here)
