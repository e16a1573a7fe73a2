"""Lists the part of the model that this rank holds: each parameter of its chunks, under names independent of layout.

Layers are numbered over all pipeline stages, experts over all expert-parallel ranks. Each expert's matrices are tensors
of their own (``decoder.layers.3.mlp.experts.5.linear_fc1.weight``), so that ``SequentialMLP``, ``GroupedMLP`` and
``TEGroupedMLP`` are the same model. Where rows of gate and up alternate in blocks, the blocks' size is part of the
name (``...linear_fc1.weight.moe_mlp_glu_interleave_size_32``): rows in another order are another tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.blocks import Axis, AxisSegment, BlockPart, Shape, untransposed_axes
from moe_ckpt.megatron.compat import megatron_core
from moe_ckpt.megatron.world import Owner

TIED = "embedding.word_embeddings.weight"
"""Name of the word embedding; also of its copy on the last stage, where it is the tied output layer."""
INTERLEAVED, INTERLEAVED_SHARED = "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"
"""Options, since megatron-core 0.18, under which gate and up of grouped and of shared experts alternate in blocks."""


_SHARDS = "divides weights over further ranks (GTP), so it is not known which rows of the whole a rank holds"
_GROUPS = "keeps all experts of a layer in one tensor of Transformer Engine's own kind"
_OTHER_WEIGHTS = {
    "gtp_weight_remat_size": ("tensor_parallel_num_weight_shards", _SHARDS),
    "expert_gtp_weight_remat_size": ("expert_tensor_parallel_num_weight_shards", _SHARDS),
    "moe_single_grouped_weight": ("moe_single_grouped_weight", _GROUPS),
    "moe_single_grouped_bias": ("moe_single_grouped_bias", _GROUPS),
}
"""Fields of megatron-core 0.19's config under which weights cannot be divided into tensors -> (option, reason)."""


@dataclass(frozen=True)
class FoundMoE:
    """One MoE layer of this rank.

    Attributes:
        name: Of the whole model's module.
        local_experts: Their global indices.
    """

    name: str
    experts: int
    top_k: int
    local_experts: tuple[int, ...]
    router: nn.Module


@dataclass(frozen=True, eq=False)
class LiveParameter:
    """A parameter of this rank: ``parts`` tile its flat memory; each has an owner."""

    parameter: nn.Parameter
    parts: tuple[BlockPart, ...]
    owners: tuple[Owner, ...]

    @property
    def is_expert(self) -> bool:
        return None not in self.owners[0]


@dataclass(frozen=True)
class ModelInventory:
    """The part of the model that this rank holds.

    Attributes:
        buffers: By name, those that change results: persistent ones, and those of routers.
        unread: Further parameters, which no forward pass reads.
    """

    parameters: tuple[LiveParameter, ...]
    layers: tuple[FoundMoE, ...]
    buffers: Mapping[str, torch.Tensor]
    unread: frozenset[nn.Parameter] = frozenset()


def take_inventory(chunks: Sequence[nn.Module]) -> ModelInventory:
    """Returns what this rank's model chunks hold, wrapped (DDP, ``Float16Module``) or not.

    Raises:
        UnsupportedError: An unknown expert container, parameter layout or extra state; weights kept in fp8; fp8 with
            delayed scaling.
    """
    parameters: list[LiveParameter] = []
    layers: list[FoundMoE] = []
    buffers: dict[str, torch.Tensor] = {}
    unread: set[nn.Parameter] = set()
    for chunk in chunks:
        inner = unwrap_module(chunk)
        _require_known_state(inner)
        unread |= _unread(inner)
        model = _Chunk(inner, unread)
        layers += model.layers.values()
        parameters += model.parameters()
        buffers |= model.buffers()
    return ModelInventory(tuple(parameters), tuple(layers), buffers, frozenset(unread))


def chunks_of(model_chunks: Sequence[nn.Module] | nn.Module) -> list[nn.Module]:
    """Returns a model, or its chunks, as a list of chunks. Raises ``ConfigError`` for anything else."""
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else model_chunks
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise ConfigError(
            f"model_chunks is {_named(chunks)}, not a model or a list of its chunks. The order is model_chunks, "
            "optimizer, scheduler: give the model first"
        )
    return list(chunks)


def _named(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {', '.join(sorted({type(entry).__name__ for entry in value}))}"
    return f"of class {type(value).__name__}"


def require_halves(chunks: Sequence[nn.Module]) -> None:
    """Raises ``UnsupportedError`` if rows of gate and up alternate: Megatron's checkpoints take them for two halves."""
    for part in (part for live in take_inventory(chunks).parameters for part in live.parts):
        if match := re.search(rf"({INTERLEAVED}|{INTERLEAVED_SHARED})_", part.name):
            raise UnsupportedError(
                f"{match[1]} makes rows of gate and up alternate, and Megatron's own checkpoints cut them into halves: "
                "another layout, or a converter, would mix hidden units. Train without it to write such a checkpoint"
            )


def unwrap_module(module: nn.Module) -> nn.Module:
    """Returns the module inside of wrappers (DDP, ``Float16Module``)."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


_ARCHITECTURE = (
    *("num_attention_heads", "num_query_groups", "kv_channels", "normalization", "layernorm_zero_centered_gamma"),
    *("layernorm_epsilon", "gated_linear_unit", "activation_func", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups"),
    *("position_embedding_type", "rotary_base", "rotary_interleaved", "rotary_percent"),
)
"""Settings that decide what a model computes with its tensors, by Megatron's names."""


def architecture(chunk: nn.Module) -> dict[str, Any]:
    """Returns settings of the model that do not follow from its tensors, as plain data, for an export."""
    model: Any = unwrap_module(chunk)
    settings = {}
    for name in _ARCHITECTURE:
        value = getattr(model.config, name, getattr(model, name, None))
        settings[name] = getattr(value, "__name__", value)
    return {name: value for name, value in settings.items() if isinstance(value, (bool, int, float, str))}


def has_unread(model: Any) -> bool:
    """Returns whether the last pipeline stage has an output layer that nothing reads; equal on all ranks.

    With tied embeddings and multi-token prediction that stage holds the embedding, which Megatron uses in place of the
    output layer. In a layout of one stage there is no output layer.
    """
    config, is_tied = getattr(model, "config", None), getattr(model, "share_embeddings_and_output_weights", False)
    predicts = getattr(config, "mtp_num_layers", None)
    return bool(is_tied and predicts and getattr(config, "pipeline_model_parallel_size", 1) > 1)


def _unread(model: Any) -> set[nn.Parameter]:
    """Returns the weight of the output layer that ``has_unread`` tells of, if it is on this rank."""
    if has_unread(model) and model.mtp_process and model.post_process and not model.pre_process:
        weight = model.output_layer.weight
        return set() if weight is None else {weight}
    return set()


def _require_known_state(model: nn.Module) -> None:
    """Raises ``UnsupportedError`` for state of modules that is neither parameter nor buffer.

    Transformer Engine's modules may have such state: the history of fp8 scaling, which only delayed scaling uses.
    """
    config: Any = getattr(model, "config", None)
    for name, (option, why) in _OTHER_WEIGHTS.items():
        if int(getattr(config, name, 0) or 0) > (1 if name.endswith("_size") else 0):
            raise UnsupportedError(f"{option} {why}. Train without it")
    if getattr(config, "fp8", None):
        _require_current_scaling(config)
    for name, module in model.named_modules():
        kind = type(module)
        is_of_transformer_engine = any(base.__module__.startswith("transformer_engine") for base in kind.__mro__)
        if kind.get_extra_state is nn.Module.get_extra_state or is_of_transformer_engine:
            continue
        if module.get_extra_state() is not None:
            raise UnsupportedError(
                f"{name} ({kind.__module__}.{kind.__qualname__}) has an extra state (get_extra_state), which is not "
                "saved. Keep it in a buffer, or give it to megatron.attach(stateful={...}) and let get_extra_state "
                "return None."
            )


def _require_current_scaling(config: Any) -> None:
    """Raises ``UnsupportedError`` unless fp8 scales by current values alone."""
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    history = (
        "a history of maxima that Transformer Engine keeps internally and that is not saved, so a resumed run would"
    )
    if recipe in ("delayed", "custom"):
        how = "scales" if recipe == "delayed" else "may scale"
        raise UnsupportedError(
            f"fp8={config.fp8!r} with fp8_recipe={recipe!r} {how} by {history} scale differently. Set fp8_recipe to "
            "'tensorwise', 'blockwise' or 'mxfp8', which scale by the current values."
        )
    # Transformer Engine scales some of attention's matrices with a delay, whatever the recipe, except mxfp8.
    attention = ("fp8_dot_product_attention", "fp8_multi_head_attention")
    for name in (option for option in attention if getattr(config, option, False)):
        switched = "NVTE_DPA_FP8_RECIPE" in os.environ
        if recipe != "mxfp8" or switched:
            raise UnsupportedError(
                f"{name} with fp8_recipe={recipe!r}{' and NVTE_DPA_FP8_RECIPE' if switched else ''} scales attention "
                f"by {history} scale differently. Turn it off{', or unset that variable' if switched else ''}."
            )


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    """Raises ``UnsupportedError`` for weights whose memory is not an array of their elements."""
    if type(parameter) is not nn.Parameter:
        raise UnsupportedError(
            f"{name} is a {type(parameter).__name__}, whose memory is not that of an ordinary tensor. Keep weights in "
            "bf16 (fp8_param_gather=False), and do not shard them with FSDP."
        )
    if not parameter.numel():
        raise UnsupportedError(f"parameter {name} has no elements, so no rank could save it. Make a buffer of it")
    if not parameter.is_contiguous():
        raise UnsupportedError(
            f"parameter {name} is not contiguous (strides {parameter.stride()}): Megatron-Core keeps weights in flat "
            "buffers. Give it contiguous memory with .contiguous() before the model is wrapped"
        )


class _Chunk:
    """One model chunk: the names in the whole model, and the layout, of its parameters, except ``unread`` ones."""

    def __init__(self, model: nn.Module, unread: Collection[nn.Parameter]) -> None:
        core = megatron_core()
        state = core.parallel_state
        self._model, self._unread = model, unread
        groups = state.get_tensor_model_parallel_group(), state.get_expert_tensor_parallel_group()
        self._dense, self._expert = ((group.rank(), group.size()) for group in groups)
        self._modules = dict(model.named_modules())
        self._renamed = {
            name: re.sub(r"\d+$", str(number - 1), name)  # of the whole model; Megatron counts from 1
            for name, module in self._modules.items()
            if isinstance(number := getattr(module, "layer_number", None), int) and re.search(r"\blayers\.\d+$", name)
        }
        self._moe: dict[str, Any] = {
            name: module for name, module in self._modules.items() if isinstance(module, core.moe_layer)
        }
        self.layers = {
            name: FoundMoE(
                self._name(name),
                int(module.config.num_moe_experts),
                int(module.config.moe_router_topk),
                tuple(int(i) for i in module.local_expert_indices),
                module.router,
            )
            for name, module in self._moe.items()
        }
        self._require_own_experts()

    def _require_own_experts(self) -> None:
        """Raises ``UnsupportedError`` for a parameter of two experts, as where two layers share a module."""
        owners: dict[int, tuple[str, str]] = {}
        for moe, module in self._moe.items():
            for inner, parameter in module.experts.named_parameters(remove_duplicate=False):
                first, before = owners.setdefault(id(parameter), (moe, inner))
                if (first, before) != (moe, inner):
                    raise UnsupportedError(
                        f"experts.{before} of MoE layer {self._name(first)} is experts.{inner} of MoE layer "
                        f"{self._name(moe)}, too. Checkpoints take each expert by itself, so none can be shared: give "
                        "each layer experts of its own, or use one whole MoE layer in both places"
                    )

    def parameters(self) -> Iterator[LiveParameter]:
        for name, parameter in self._model.named_parameters():
            if parameter in self._unread:
                continue
            _require_plain(name, parameter)
            moe = next((m for m in self._moe if name.startswith(f"{m}.experts.")), None)
            if moe is not None:
                yield self._expert_parameter(moe, name, parameter)
                continue
            tied = name == "output_layer.weight" and getattr(parameter, "shared_embedding", False)
            interleaving = self._interleaving_of_shared(name, parameter)
            whole_name = TIED if tied else self._name(name) + interleaving
            shape, axes = self._dense_axes(name, parameter, is_interleaved=bool(interleaving))
            router = next((m for m in self._moe if name.startswith(f"{m}.router.")), None)
            owner = (None, non_expert_group(whole_name)) if router is None else (self._name(router), None)
            yield LiveParameter(parameter, (BlockPart(whole_name, shape, 0, axes),), (owner,))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        routers = tuple(f"{name}.router." for name in self._moe)
        for name, buffer in self._model.named_buffers():
            module, _, leaf = name.rpartition(".")
            persistent = leaf not in self._modules[module]._non_persistent_buffers_set
            if persistent or name.startswith(routers):
                yield self._name(name), buffer

    def _name(self, name: str) -> str:
        """Returns the name in the whole model, with the global number of the innermost numbered layer."""
        best = max((p for p in self._renamed if name == p or name.startswith(f"{p}.")), key=len, default=None)
        return name if best is None else self._renamed[best] + name[len(best) :]

    def _dense_axes(
        self, name: str, parameter: nn.Parameter, *, is_interleaved: bool
    ) -> tuple[Shape, tuple[Axis, ...]]:
        """Returns (global shape, axes) of a parameter that is no expert's."""
        dim, shape = self._split_dim(name, parameter), tuple(parameter.shape)
        if dim is None:
            return shape, untransposed_axes(shape)
        gated = self._is_gated(name, shape[dim])
        if self._dense[1] > 1 and int(getattr(parameter, "partition_stride", 1)) != 1 and not gated:
            raise UnsupportedError(
                f"{name} is split over tensor-parallel ranks with stride above 1, so it is not known which rows of the "
                "whole these are. Use tensor parallelism 1."
            )
        return shape_and_axes(shape, dim, *self._dense, gated=gated and not is_interleaved)

    def _interleaving_of_shared(self, name: str, parameter: nn.Parameter) -> str:
        """Returns ``_interleaving`` of a parameter that is no expert's: empty, except for shared experts."""
        unit = name.rpartition(".linear_fc1.")[0]
        if not unit.endswith(".shared_experts") or not self._is_gated(name, len(parameter)):
            return ""
        config: Any = self._modules[unit].config
        is_used = getattr(config, "use_grouped_gemm_for_shared_expert", True)
        return _interleaving(config, INTERLEAVED_SHARED) if is_used else ""

    def _split_dim(self, name: str, parameter: nn.Parameter) -> int | None:
        """Returns the axis that tensor-parallel ranks divide; None if each holds all of it.

        Raises:
            UnsupportedError: The axis is not known (Mamba, gated delta nets).
        """
        module, _, leaf = name.rpartition(".")
        if leaf == "softmax_offset":  # one per attention head; nothing on the parameter says that the heads are divided
            return 0
        # Transformer Engine marks every weight as divided, even in the layers that Megatron calls "duplicated".
        if getattr(self._modules[module], "parallel_mode", "") is None:
            return None
        if not getattr(parameter, "tensor_model_parallel", False):
            return None
        dim = int(getattr(parameter, "partition_dim", -1))
        if dim < 0 and self._dense[1] > 1:
            raise UnsupportedError(
                f"{name} ({type(self._modules[module]).__name__}) is divided over tensor-parallel ranks, but its axis "
                "(partition_dim) is not set, so the whole cannot be assembled. Use tensor parallelism 1."
            )
        return dim if dim >= 0 else None

    def _is_gated(self, name: str, rows: int) -> bool:
        """Returns whether a parameter has the rows of a gated unit's first matrix: gate and up, each split over ranks.

        The parameter may be that matrix, its bias, or a matrix of an adapter beside it (PEFT).

        Args:
            name: Of the parameter.
            rows: The number of its rows on this rank.
        """
        unit, separator, _ = name.rpartition(".linear_fc1.")
        config = getattr(self._modules[unit], "config", None) if separator else None
        if not getattr(config, "gated_linear_unit", False):
            return False
        return rows == max(
            len(parameter) for parameter in self._modules[f"{unit}.linear_fc1"].parameters() if parameter.dim()
        )

    # --- experts ---

    def _expert_parameter(self, moe: str, name: str, parameter: nn.Parameter) -> LiveParameter:
        experts: Any = self._modules[f"{moe}.experts"]
        inner, whole_moe = name.removeprefix(f"{moe}.experts."), self._name(moe)
        numbers, shape, interleaving = self.layers[moe].local_experts, tuple(parameter.shape), ""
        gated, is_transposed = bool(experts.config.gated_linear_unit), False
        if match := re.fullmatch(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))", inner):
            numbers, suffix = self._one(moe, int(match[1])), match[2]
        elif match := re.fullmatch(r"(linear_fc[12]\.(?:weight|bias))(\d+)", inner):
            numbers, suffix = self._one(moe, int(match[2])), match[1]
            interleaving = _interleaving(experts.config, INTERLEAVED) if gated else ""
        elif match := re.fullmatch(r"weight([12])", inner):  # all experts one after the other, each transposed
            suffix, is_transposed = f"linear_fc{match[1]}.weight", True
            hidden = shape[0] if match[1] == "1" else shape[1]
            width = parameter.numel() // len(numbers) // hidden
            shape = (width, hidden) if match[1] == "1" else (hidden, width)
        else:
            raise UnsupportedError(
                f"{name}: {type(experts).__name__} keeps its experts in a way that is not supported. Supported are "
                "SequentialMLP (local_experts), GroupedMLP (weight1, weight2) and TEGroupedMLP (linear_fc1.weight0)."
            )
        if suffix.startswith("linear_fc1"):  # split by rows
            whole, axes = shape_and_axes(shape, 0, *self._expert, gated=gated and not interleaving)
            suffix += interleaving
        elif len(shape) > 1:  # split by columns
            whole, axes = shape_and_axes(shape, 1, *self._expert, gated=False)
        else:  # a bias is added after the sum over ranks, so it is alike on all
            whole, axes = shape, untransposed_axes(shape)
        axes, size = axes[::-1] if is_transposed else axes, prod(shape)
        parts = tuple(
            BlockPart(f"{whole_moe}.experts.{number}.{suffix}", whole, at * size, axes)
            for at, number in enumerate(numbers)
        )
        return LiveParameter(parameter, parts, tuple((whole_moe, number) for number in numbers))

    def _one(self, moe: str, local: int) -> tuple[int]:
        """Returns the number in the whole model of this rank's ``local``-th expert."""
        indices = self.layers[moe].local_experts
        if local >= len(indices):
            raise UnsupportedError(
                f"{moe} holds weights of a local expert {local}, but its local_expert_indices are only "
                f"{list(indices)}: so it is not known which expert of the model that is. Make both agree."
            )
        return (indices[local],)


def shape_and_axes(shape: Shape, dim: int, rank: int, size: int, *, gated: bool) -> tuple[Shape, tuple[Axis, ...]]:
    """Returns (shape of the whole, axes of the block) of block number ``rank`` of ``size`` along ``dim``.

    Args:
        shape: Of the block.
        gated: The block has two parts of equal size: its shares of the whole's two halves, which are split separately.
    """
    if size == 1:
        return shape, untransposed_axes(shape)
    whole = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
    axes = list(untransposed_axes(shape))
    if gated:
        half = shape[dim] // 2
        axes[dim] = Axis(dim, (AxisSegment(0, half, rank * half), AxisSegment(half, 2 * half, (size + rank) * half)))
    else:
        axes[dim] = Axis(dim, (AxisSegment(0, shape[dim], rank * shape[dim]),))
    return whole, tuple(axes)


def _interleaving(config: Any, option: str) -> str:
    """Returns the end of a tensor's name if rows of gate and up alternate; empty if all of up follows all of gate."""
    size = getattr(config, option, None)
    return "" if size is None else f".{option}_{size}"


def non_expert_group(name: str) -> str:
    """Returns the operator of a parameter that is neither an expert's nor a router's.

    Each layer has two such operators, each with its norm: attention and MLP (dense, or an MoE layer's shared experts).
    Outside of layers the operator is the module.
    """
    match = re.fullmatch(r"(.*\blayers\.\d+)\.(\w+)\..*", name)
    if match is None:
        parts = name.split(".")
        return ".".join(parts[: 2 if len(parts) > 2 else 1])
    attention = match[2].startswith(("input_layernorm", "self_attention", "cross_attn", "pre_cross_attn"))
    return f"{match[1]}.{'attention' if attention else 'mlp'}"
