"""Criteria on the structure of a module that make it an MoE layer, so that no list of model names is needed.

Pure questions about single modules; ``discover`` puts the answers together.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

from moe_ckpt.modeling.names import unwrap

_ROUTER = re.compile(r"router|gating|(^|_)(gate|wg|switch)($|_)")
_NO_ROUTER = re.compile(r"shared|proj|input|attn|attention")
_INDEX = re.compile(
    r"^(selected_experts?|indices|(.*_)?(top_?k|experts?|rout\w*|selected\w*)_(ind(ex|ices|exes)|idx|ids?))$"
)
_COUNTS = re.compile(r"^(.*_)?(tokens_per_(local_)?experts?|experts?_(sizes?|counts?)|group_sizes)$")
_TOP_K = ("top_k", "topk", "k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")


def is_container(module: object) -> TypeGuard[nn.ModuleList | nn.ModuleDict]:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def expert_children(module: nn.Module) -> list[nn.Module]:
    """Returns the children with parameters, in order, if two or more are of one class and one set of shapes; else [].

    Children without parameters (a dropout in the same container) do not matter.
    """
    children = [unwrap(child) for child in module._modules.values() if child is not None]
    children = [child for child in children if next(child.parameters(), None) is not None]
    if len(children) < 2:
        return []
    first = _signature(children[0])
    return children if all(_signature(child) == first for child in children[1:]) else []


def expert_parameters(named: object, experts: int | None) -> list[nn.Parameter]:
    """Returns the entries of a ParameterList, if two or more, of one shape, and as many as there are experts; else [].

    Args:
        named: What a registration names.
        experts: How many there are, if that is known.
    """
    entries = list(named.parameters()) if isinstance(named, nn.ParameterList) else []
    alike = len(entries) > 1 and len({entry.shape for entry in entries}) == 1
    return entries if alike and experts in (None, len(entries)) else []


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))


def stack_size(module: nn.Module) -> int | None:
    """Returns E, if ``module`` itself holds stacked expert parameters ``[E, ., .]``; else None.

    E must be one of the module's own attributes about experts, or shared by two or more stacked
    parameters. Where stacks differ in length (LongCat's zero-computation experts) the shortest counts.
    """
    stacked = [p for p in module._parameters.values() if p is not None and p.ndim >= 2]
    sizes = {p.shape[0] for p in stacked if p.ndim >= 3}
    if not sizes:
        return None
    declared = {value for name, value in vars(module).items() if "expert" in name and type(value) is int}
    size = int(min(sizes))
    if sizes <= declared:
        return size
    several = sum(p.shape[0] == size for p in stacked) >= 2
    return size if several and len(sizes) == 1 else None


def mentions_experts(name: str, module: nn.Module) -> bool:
    """Returns whether a module's name, class or attributes speak of experts: weak evidence, used beside stronger."""
    words = [name.rpartition(".")[2], type(module).__name__, *vars(module)]
    return any("expert" in word.lower() for word in words)


def index_argument(module: nn.Module) -> tuple[int, str] | None:
    """Returns (position, name) of the forward argument that holds the chosen experts' indices."""
    return _argument(module, _INDEX)


def counts_argument(module: nn.Module) -> tuple[int, str] | None:
    """Returns (position, name) of the forward argument that holds the number of tokens of each expert."""
    return _argument(module, _COUNTS)


def _argument(module: nn.Module, pattern: re.Pattern[str]) -> tuple[int, str] | None:
    names = list(inspect.signature(module.forward).parameters)
    return next(((at, name) for at, name in enumerate(names) if pattern.match(name)), None)


def is_router_name(name: str) -> bool:
    return bool(_ROUTER.search(name)) and not _NO_ROUTER.search(name)


def routers(layer: nn.Module) -> Iterator[nn.Module]:
    """Returns the direct children of ``layer`` that are routers by name."""
    for name, child in layer._modules.items():
        if child is not None and is_router_name(name) and not is_container(unwrap(child)):
            yield unwrap(child)


def chooses_among(router: nn.Module, experts: int) -> bool:
    """Returns True if some parameter of the router has a dimension of E, or E + 1 with a null expert."""
    return any(size in (experts, experts + 1) for p in router.parameters() for size in p.shape)


def is_gate_parameter(name: str, parameter: nn.Parameter, experts: int) -> bool:
    """Returns True for a direct parameter of an MoE layer that routes: a router matrix, or a bias ``[E]``."""
    if is_router_name(name):
        return True
    about_experts = re.search(r"expert|score|rout|correction", name) is not None
    return about_experts and parameter.ndim == 1 and parameter.shape[0] == experts


def top_k(experts: int, *modules: nn.Module) -> int | None:
    """Returns the experts per token, if one of the modules says so."""
    for module in modules:
        for name in _TOP_K:
            value = vars(module).get(name)
            if type(value) is int and 1 <= value <= experts:
                return value
    return None
