"""Registration of MoE layers whose structure is not recognised by itself.

One call per layer class, before training starts:

    moe_ckpt.register_moe(MyMoE, experts=("w_in", "w_out"), router="scorer",
                          assignments=lambda module, args, kwargs, output: output[1])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from moe_ckpt.errors import ConfigError

Assignments = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], torch.Tensor]
"""(module, args, kwargs, output) of one forward call -> integer tensor of chosen experts, any shape.

Entries outside ``[0, E)`` stand for dropped or padding tokens and are not counted. Runs in every training
forward pass, on the training thread: it must not wait for the device.
"""

HookedOn = Literal["router", "experts", "layer"]


@dataclass(frozen=True)
class MoESpec:
    """The structure of the layers of one class. See ``register_moe``."""

    experts: tuple[str, ...] = ("experts",)
    router: str | None = "gate"
    assignments: Assignments | None = None
    on: HookedOn = "router"
    flat: bool = False


_REGISTERED: dict[type[nn.Module], MoESpec] = {}


def register_moe(
    layer_class: type[nn.Module],
    *,
    experts: str | Sequence[str] = "experts",
    router: str | None = "gate",
    assignments: Assignments | None = None,
    on: HookedOn = "router",
    flat: bool = False,
) -> type[nn.Module]:
    """Registers how the MoE layers of ``layer_class`` (and its subclasses) are built.

    Call it before training starts. A later call for the same class replaces the earlier one.

    Args:
        layer_class: Class of the MoE layer.
        experts: Names, relative to the layer, of what holds the experts: a ModuleList or ModuleDict with one submodule
            per expert, a ParameterList with one parameter per expert, a submodule with stacked parameters ``[E, ...]``,
            or such parameters themselves. Several names when a layer keeps its experts in several places.
        router: Name of the submodule or parameter that routes, None if there is none; its parameters form the layer's
            gate operator.
        assignments: ``(module, args, kwargs, output)`` of one forward call -> integer tensor of the chosen experts, of
            any shape; entries outside ``[0, E)`` are not counted. It runs on the training thread and must not wait for
            the device. None: read from the forward pass as for recognised layers, that is an index or tokens-per-expert
            argument of the stacked module, the rows that reach each submodule, or the one integer tensor that the
            router returns.
        on: The module whose forward call ``assignments`` is shown: the router, the experts or the layer.
        flat: Stacked parameters have shape ``[E * F, ...]``, with expert e in rows ``[e*F, (e+1)*F)``; the layer, or
            the module that holds them, then has an integer attribute ``num_experts``.

    Returns:
        ``layer_class``.

    Raises:
        ConfigError: ``layer_class`` is no module class, or ``experts`` names nothing.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
        raise ConfigError(f"register_moe({layer_class!r}): give the class of the MoE layer, a torch.nn.Module")
    names = (experts,) if isinstance(experts, str) else tuple(experts) if isinstance(experts, Iterable) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"register_moe({layer_class.__name__}, experts={experts!r}): name what holds the experts")
    if assignments is not None and not callable(assignments):
        raise ConfigError(
            f"register_moe({layer_class.__name__}, assignments={assignments!r}): give a function of (module, args, "
            "kwargs, output) that returns the chosen experts, or None"
        )
    if on not in ("router", "experts", "layer"):
        raise ConfigError(f"register_moe({layer_class.__name__}, on={on!r}): choose 'router', 'experts' or 'layer'")
    if on == "router" and router is None and assignments is not None:
        raise ConfigError(
            f"register_moe({layer_class.__name__}, router=None): without a router, assignments cannot be read from it; "
            "set on='experts' or on='layer'"
        )
    _REGISTERED[layer_class] = MoESpec(names, router, assignments, on, flat)
    return layer_class


def spec_of(module: nn.Module) -> MoESpec | None:
    """Returns the registration that applies to ``module``: that of its class or of the nearest base class."""
    for base in type(module).__mro__:
        if base in _REGISTERED:
            return _REGISTERED[base]
        spec = _BUILT_IN.get(f"{base.__module__}.{base.__qualname__}")
        if spec is not None:
            return spec
    return None


def _highest_scores(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
    """Llama 4: the router returns scores ``[tokens, E]`` that are zero for all but the chosen experts."""
    scores: torch.Tensor = output[0].detach()
    return scores.topk(vars(module)["top_k"], dim=-1).indices


# By path, so that transformers need not be imported. All other layers of transformers 5 are recognised by structure.
_BUILT_IN: dict[str, MoESpec] = {
    "transformers.models.llama4.modeling_llama4.Llama4TextMoe": MoESpec(router="router", assignments=_highest_scores),
    "transformers.models.dbrx.modeling_dbrx.DbrxFFN": MoESpec(router="router", flat=True),
}
