"""Finds the MoE layers of a model and builds its operator catalog.

Recognised without help: stacked experts (every family of transformers 5 that has them, torchtitan's GroupedExperts)
and ModuleList or ModuleDict experts beside a router. All others are registered with ``register_moe``. A wrong guess
would make wrong slices in a checkpoint, so no expert gets a doubtful parameter: the layer's gate does, which every
checkpoint saves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from torch import nn

from moe_ckpt.core.operators import (
    Catalog,
    MoELayer,
    Operator,
    OperatorKind,
    Span,
    expert_id,
    gate_id,
    non_expert_id,
)
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.modeling.names import clean_name, parameters_of, unwrap
from moe_ckpt.modeling.registry import Assignments, MoESpec, spec_of

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


def _signature(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))


def stack_size(module: nn.Module) -> int | None:
    """Returns E, if ``module`` itself holds stacked expert parameters ``[E, ., .]``; else None.

    E must be the value of an attribute of the module with "expert" in its name, or the length of two or more stacked
    parameters. If stacks differ in length (LongCat's zero-computation experts), the shortest one counts.
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
    """Returns whether "expert" is in a module's name, class or attributes: weak evidence, used beside stronger."""
    words = [name.rpartition(".")[2], type(module).__name__, *vars(module)]
    return any("expert" in word.lower() for word in words)


def is_router_name(name: str) -> bool:
    return bool(_ROUTER.search(name)) and not _NO_ROUTER.search(name)


def _routers_of(layer: nn.Module) -> Iterator[nn.Module]:
    """Yields the direct children of ``layer`` that are routers by name."""
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
    """Returns the experts per token, by an attribute of one of the modules; None if none has it."""
    for module in modules:
        for name in _TOP_K:
            value = vars(module).get(name)
            if type(value) is int and 1 <= value <= experts:
                return value
    return None


_LEVELS_UP = 2  # a container's router is in its parent, or one above (MoE.experts.local_experts)


@dataclass(frozen=True, eq=False)
class RoutingSource:
    """The place at which a layer's routing can be observed in a forward pass.

    Attributes:
        kind: "indices" (argument of ``modules[0]`` with expert indices), "counts" (argument with tokens per expert),
            "rows" (rows that reach each of ``modules``), "router_output" (the integer tensor that ``modules[0]``
            returns), "assignments" (a registered function, called after ``modules[0]``).
    """

    kind: Literal["indices", "counts", "rows", "router_output", "assignments"]
    modules: tuple[nn.Module, ...]
    argument: tuple[int, str] | None = None
    assignments: Assignments | None = None


@dataclass(frozen=True, eq=False)
class FoundLayer:
    """One MoE layer of a live model.

    Attributes:
        info: Its number, name and sizes.
        experts: Spans of each expert.
        gate: Names of gate parameters.
        source: Where its routing can be observed.
        layer: The module of that name.
        routers: Modules in it that route.
    """

    info: MoELayer
    experts: tuple[tuple[Span, ...], ...]
    gate: tuple[str, ...]
    source: RoutingSource
    layer: nn.Module
    routers: tuple[nn.Module, ...] = ()


@dataclass(eq=False)
class _Draft:
    """A layer that is being assembled: its place, the modules that hold its experts, and the rows of each expert."""

    name: str
    layer: nn.Module
    spans: list[list[Span]]
    holders: list[nn.Module]
    routers: list[nn.Module]
    source: RoutingSource | None


def find_moe_layers(model: nn.Module) -> list[FoundLayer]:
    """Returns all MoE layers in the order of ``named_modules()``. Empty for a dense model.

    Raises:
        ConfigError: A registered layer is not built as its registration says, or its routing cannot be observed.
        UnsupportedError: Two experts share a parameter.
    """
    names = {id(parameter): name for name, parameter in parameters_of(model)}
    modules = {clean_name(raw): module for raw, module in model.named_modules() if unwrap(module) is module}
    drafts: dict[tuple[str, int], _Draft] = {}
    inside: set[int] = set()
    for name, module in modules.items():
        if id(module) in inside:
            continue
        spec = spec_of(module)
        draft = _registered(name, module, spec, names) if spec else _recognised(name, module, modules, names)
        if draft is None:
            continue
        for holder in [module] if spec else draft.holders:
            inside.update(id(child) for child in holder.modules())
        first = drafts.setdefault((draft.name, len(draft.spans)), draft)
        if first is not draft:  # the layer has its experts in two places (JetMoE: input and output projections)
            for spans, more in zip(first.spans, draft.spans, strict=True):
                spans.extend(more)
            first.holders.extend(draft.holders)
            first.source = first.source or draft.source
    return _finish(list(drafts.values()), names)


def _recognised(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], names: Mapping[int, str]
) -> _Draft | None:
    """Returns a draft of the layer whose experts ``module`` holds; None if it holds none."""
    if not name:
        return None
    if is_container(module):
        experts = expert_children(module)
        if not experts:
            return None
        site = _site(name, modules, len(experts), exact="expert" not in name.rpartition(".")[2])
        if site is None:
            return None
        spans = [[Span(names[id(p)]) for p in expert.parameters()] for expert in experts]
        return _Draft(*site[:2], spans, [module], site[2], RoutingSource("rows", tuple(experts)))
    size = stack_size(module)
    if size is None or "shared" in name.rpartition(".")[2]:
        return None
    source = _stack_source(module)
    site = _site(name, modules, size, exact=source is None)
    if site is None and source is None:
        return None
    if source is None and not mentions_experts(name, module):
        return None
    if site is None:
        parent = name.rpartition(".")[0]
        site = (parent, modules[parent], [])
    stacked = [p for p in module._parameters.values() if p is not None and p.ndim >= 2]
    return _Draft(*site[:2], _rows(stacked, size, names), [module], site[2], source)


def _site(
    name: str, modules: Mapping[str, nn.Module], experts: int, exact: bool
) -> tuple[str, nn.Module, list[nn.Module]] | None:
    """Returns (name, module, routers) of the nearest module around ``name`` that has a router; None if none has."""
    for _ in range(_LEVELS_UP):
        if not name:
            return None
        name = name.rpartition(".")[0]
        parent = modules.get(name)
        if parent is None:
            return None
        routers = [r for r in _routers_of(parent) if not exact or chooses_among(r, experts)]
        if routers:
            return name, parent, routers
    return None


def _stack_source(module: nn.Module) -> RoutingSource | None:
    """Returns how routing is observed at a module with stacked experts, by the names of its forward's arguments."""
    arguments = list(enumerate(inspect.signature(module.forward).parameters))
    for at, name in arguments:
        if _INDEX.match(name):  # the chosen experts
            return RoutingSource("indices", (module,), (at, name))
    counts = next(((at, name) for at, name in arguments if _COUNTS.match(name)), None)  # tokens of each expert
    return None if counts is None else RoutingSource("counts", (module,), counts)


def _rows(stacked: Sequence[nn.Parameter], experts: int, names: Mapping[int, str]) -> list[list[Span]]:
    """Returns one row of each stacked parameter per expert. Rows beyond E (zero experts) are left to the gate."""
    return [[Span(names[id(p)], e, e + 1) for p in stacked if p.shape[0] >= experts] for e in range(experts)]


def _registered(name: str, layer: nn.Module, spec: MoESpec, names: Mapping[int, str]) -> _Draft:
    """Returns a draft of a registered layer."""
    who = f"{type(layer).__name__} at {name!r}"
    named = [_member(layer, path, who) for path in spec.experts]
    modules = [m for m in named if isinstance(m, nn.Module)]
    # E, if an attribute of the layer or of what holds the experts says so.
    sizes = (vars(m)["num_experts"] for m in (*modules, layer) if type(vars(m).get("num_experts")) is int)
    declared = next(sizes, None)
    stacked: list[nn.Parameter] = []
    separate: list[list[list[nn.Parameter]]] = []
    for m in named:
        if isinstance(m, nn.Parameter):
            stacked.append(m)
        elif apart := _apart(m, declared):
            separate.append(apart)
        else:  # a vector below a module may be shared by all experts
            stacked += [p for p in m.parameters() if p.ndim >= 2]
    size = _registered_size({len(experts) for experts in separate}, declared, stacked, spec, who)
    spans: list[list[Span]] = [[] for _ in range(size)]
    for experts in separate:
        for expert, parameters in enumerate(experts):
            spans[expert].extend(Span(names[id(p)]) for p in parameters)
    for parameter in stacked:
        width = parameter.shape[0] // size if spec.flat else 1
        if parameter.shape[0] == width * size:
            for e in range(size):
                spans[e].append(Span(names[id(parameter)], e * width, (e + 1) * width))
    if not all(spans):
        raise ConfigError(f"register_moe: no parameter with {size} experts was found under {spec.experts} of {who}")
    router = _member(layer, spec.router, who) if spec.router else None
    routers = [router] if isinstance(router, nn.Module) else []
    return _Draft(name, layer, spans, modules, routers, _registered_source(layer, spec, modules, routers, who))


def _member(layer: nn.Module, path: str, who: str) -> nn.Module | nn.Parameter:
    """Returns the submodule or parameter of ``layer`` at a dotted path."""
    member: object = layer
    for part in path.split("."):
        member = getattr(unwrap(member) if isinstance(member, nn.Module) else member, part, None)
    if isinstance(member, nn.Parameter):
        return member
    if isinstance(member, nn.Module):
        return unwrap(member)
    raise ConfigError(f"register_moe: {who} has no submodule or parameter {path!r}; name what its forward uses")


def _apart(module: nn.Module, experts: int | None) -> list[list[nn.Parameter]]:
    """Returns the parameters of each expert, if ``module`` lists experts, or one parameter of each; else [].

    Args:
        module: What a registration names.
        experts: E, if it is known.
    """
    if is_container(module):
        return [list(child.parameters()) for child in expert_children(module)]
    entries = list(module.parameters()) if isinstance(module, nn.ParameterList) else []
    alike = len(entries) > 1 and len({entry.shape for entry in entries}) == 1
    return [[entry] for entry in entries] if alike and experts in (None, len(entries)) else []


def _registered_size(
    sizes: set[int], declared: int | None, stacked: Sequence[nn.Parameter], spec: MoESpec, who: str
) -> int:
    """Returns E of a registered layer: the length of its lists of experts, else ``declared``, else that of stacks."""
    if not sizes and declared is not None:
        return declared
    if not sizes and not spec.flat:
        sizes = {int(p.shape[0]) for p in stacked}
    if len(sizes) != 1:
        raise ConfigError(
            f"register_moe: cannot tell how many experts {who} has (lengths found: {sorted(sizes)}); "
            "give the layer an integer attribute num_experts"
        )
    return sizes.pop()


def _registered_source(
    layer: nn.Module,
    spec: MoESpec,
    modules: Sequence[nn.Module],
    routers: Sequence[nn.Module],
    who: str,
) -> RoutingSource:
    """Returns how the routing of a registered layer is observed."""
    if spec.assignments is not None:
        hooked = {"router": routers, "experts": modules, "layer": [layer]}[spec.on]
        if not hooked:
            raise ConfigError(f"register_moe: on={spec.on!r} names no module of {who}; set on='layer'")
        return RoutingSource("assignments", (hooked[0],), assignments=spec.assignments)
    for experts in filter(None, (expert_children(module) for module in modules if is_container(module))):
        return RoutingSource("rows", tuple(experts))
    for module in modules:
        if (source := _stack_source(module)) is not None:
            return source
    if routers:
        return RoutingSource("router_output", (routers[0],))
    raise ConfigError(f"register_moe: the routing of {who} cannot be observed; set assignments=, see register_moe")


def _finish(drafts: Sequence[_Draft], names: Mapping[int, str]) -> list[FoundLayer]:
    """Numbers the layers, and gives each gate the parameters of its routers and containers that are no expert's."""
    _require_own_experts(drafts)
    taken = {span.parameter for draft in drafts for spans in draft.spans for span in spans}
    layers = []
    for index, draft in enumerate(drafts):
        size = len(draft.spans)
        direct = [(name, p) for name, p in draft.layer._parameters.items() if p is not None]
        direct_gates = [p for name, p in direct if is_gate_parameter(name, p, size)]
        rest = [p for module in (*draft.routers, *draft.holders) for p in module.parameters()]
        gate = [name for name in dict.fromkeys(names[id(p)] for p in (*direct_gates, *rest)) if name not in taken]
        taken.update(gate)
        source = draft.source or RoutingSource("router_output", tuple(draft.routers[:1]))
        k = top_k(size, draft.layer, *draft.routers, *draft.holders)
        info = MoELayer(index, draft.name or "(model)", size, k)
        spans = tuple(map(tuple, draft.spans))
        layers.append(FoundLayer(info, spans, tuple(gate), source, draft.layer, tuple(draft.routers)))
    return layers


def _require_own_experts(drafts: Sequence[_Draft]) -> None:
    """Raises ``UnsupportedError`` for rows of two experts, as where two layers have the same module as an expert."""
    owners: dict[Span, tuple[int, int]] = {}
    for at, draft in enumerate(drafts):
        for expert, span in ((e, span) for e, spans in enumerate(draft.spans) for span in spans):
            first, number = owners.setdefault(span, (at, expert))
            if (first, number) != (at, expert):
                raise UnsupportedError(
                    f"parameter {span.parameter!r} belongs to expert {number} of MoE layer {drafts[first].name!r} and "
                    f"to expert {expert} of MoE layer {draft.name!r}. Checkpoints take each expert by itself, so none "
                    "can be shared: give each layer experts of its own, or use one whole MoE layer in both places"
                )


def build_catalog(model: nn.Module, layers: Sequence[FoundLayer] | None = None) -> Catalog:
    """Returns the operator catalog of ``model``: equal on every rank, from names and global shapes.

    Args:
        model: Without MoE layers all of its state is non-expert.
        layers: Result of ``find_moe_layers``, if known.

    Raises:
        ConfigError: As ``find_moe_layers``.
        UnsupportedError: A parameter has no shape yet (lazy module).
        CoverageError: Two experts have the same rows.
    """
    layers = find_moe_layers(model) if layers is None else layers
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in parameters_of(model):
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedError(f"parameter {name!r} has no shape yet; run one forward pass before training starts")
        shapes[name] = tuple(parameter.shape)
    operators = [op for layer in layers for op in _operators(layer, shapes)]
    taken = {span.parameter for op in operators for span in op.spans}
    groups: dict[str, list[Span]] = {}
    for name in shapes:
        if name not in taken:
            groups.setdefault(non_expert_group(name), []).append(Span(name))
    operators.extend(
        Operator(non_expert_id(group), OperatorKind.NON_EXPERT, tuple(spans)) for group, spans in groups.items()
    )
    return Catalog(tuple(operators), tuple(layer.info for layer in layers), shapes)


def _operators(layer: FoundLayer, shapes: Mapping[str, tuple[int, ...]]) -> list[Operator]:
    """Returns the operators of one layer: its experts and its gate, which exists even without parameters."""
    index = layer.info.index
    operators = [
        Operator(expert_id(index, e), OperatorKind.EXPERT, spans, index, e) for e, spans in enumerate(layer.experts)
    ]
    beyond = [
        Span(span.parameter, span.stop, shapes[span.parameter][0])
        for span in layer.experts[-1]
        if span.stop is not None and span.stop < shapes[span.parameter][0]
    ]
    gate = (*(Span(name) for name in layer.gate), *beyond)
    return [*operators, Operator(gate_id(index), OperatorKind.GATE, gate, index)]


def non_expert_group(name: str) -> str:
    """Returns the group of a non-expert parameter, from its name alone.

    That is the innermost numbered block with the child below it (``model.layers.3.self_attn``); for a parameter in no
    numbered block, the module that owns it (``model.embed_tokens``); at the root, the parameter's own name.
    """
    path = name.split(".")[:-1]
    blocks = [at for at, part in enumerate(path) if part.isdigit()]
    return ".".join(path[: blocks[-1] + 2] if blocks else path) or name
