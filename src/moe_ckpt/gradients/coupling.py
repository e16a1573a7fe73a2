"""Which optimizers can be stepped again from gradients, and what of their state must be anchored together."""

from __future__ import annotations

import enum

from torch import optim
from torch.optim import Optimizer

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.modeling.state.optimizer_class import ELEMENTWISE, class_name, name_of


class Coupling(enum.Enum):
    """The state that an update of one element depends on, beside hyperparameters."""

    ELEMENTS = "elements"
    """Its own gradient and state: rows of a parameter may be anchored at different steps."""
    PARAMETERS = "parameters"
    """Those of its whole parameter: a parameter is anchored as a whole."""


_COUPLINGS: dict[type[Optimizer], Coupling] = {
    **dict.fromkeys(ELEMENTWISE, Coupling.ELEMENTS),
    optim.Adafactor: Coupling.PARAMETERS,
}
if hasattr(optim, "Muon"):  # since torch 2.9
    _COUPLINGS[optim.Muon] = Coupling.PARAMETERS
_REFUSED = {
    "LBFGS": "it keeps one history for all parameters together, and evaluates the model several times per step",
    "SparseAdam": "its gradients are sparse",
    "Shampoo": "blocks of several parameters share preconditioners",
    "DistributedShampoo": "blocks of several parameters share preconditioners",
    "SOAP": "its preconditioners are made by iterations that are not part of the gradients",
}


def coupling_of(optimizer: Optimizer) -> Coupling:
    """Returns what the updates of ``optimizer`` couple.

    Raises:
        UnsupportedError: Its steps cannot be repeated, or nothing is known of its class.
    """
    coupling = _COUPLINGS.get(type(optimizer))
    if coupling is not None:
        return coupling
    name = type(optimizer).__name__
    if name in _REFUSED:
        raise UnsupportedError(
            f"{class_name(optimizer)} cannot be stepped again from gradients, as MoEtion(recompute=True) and "
            f"GradientLog() need it: {_REFUSED[name]}. Use AdamW, SGD or Adafactor, or a policy that saves full state, "
            "such as MoEtion(recompute=False)."
        )
    raise UnsupportedError(
        f"{class_name(optimizer)} may couple parameters, which would make a replay from gradients wrong, as "
        "MoEtion(recompute=True) and GradientLog() need it. If each parameter's update depends on its own gradient and "
        "state alone, say so with moe_ckpt.gradients.coupling.register(); otherwise use a policy that saves full "
        "state, such as MoEtion(recompute=False)."
    )


def register(kind: type[Optimizer], coupling: Coupling) -> None:
    """Declares what the updates of a class couple. Subclasses do not inherit it.

    The class must also do the same whenever it is given the same: no random numbers, no state outside of
    ``optimizer.state`` and ``param_groups``, and it must call a closure once, before it reads gradients.

    Args:
        kind: The class.
        coupling: What an update depends on.
    """
    _COUPLINGS[kind] = coupling


def class_named(name: str) -> type[Optimizer]:
    """Returns the class that ``class_name`` gave ``name``, if it is one of those known here.

    Nothing is imported by a name that was stored.

    Raises:
        UnsupportedError: It is not known.
    """
    for kind in _COUPLINGS:
        if name_of(kind) == name:
            return kind
    raise UnsupportedError(
        f"optimizer class {name} is not registered: call moe_ckpt.gradients.coupling.register() first (moe-ckpt "
        "densify --import MODULE imports a module that does)"
    )
