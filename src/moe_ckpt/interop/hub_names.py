"""Megatron's tensors under the names of the Hugging Face hub.

The names of Qwen3-MoE and Mixtral are listed here. Those of other families Megatron-Bridge knows, if it is installed.

Checkpoints of Megatron have whole tensors, whatever the parallel layout was. On the hub queries, keys and values are
apart, and so are the halves of a gated unit; vocabularies are not padded. A model's ``config.json`` says how they are
divided, and which tensors there are.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_ckpt.errors import ConfigError, CoverageError, UnsupportedError

Shape = tuple[int, ...]
Part = Callable[[torch.Tensor], torch.Tensor]

BRIDGE = (
    "In a job that has built the model Megatron-Bridge may write it: moe_ckpt.megatron.load_weights(chunks, path), "
    "then AutoBridge.from_hf_pretrained(name).save_hf_pretrained(chunks, output)"
)
_IGNORED = re.compile(r"\.(local_tokens_per_expert|_extra_state)$")
"""Names of what no model on the hub has, and no forward pass needs."""


class HubTensor(NamedTuple):
    """One tensor on the hub.

    Attributes:
        source: Megatron's name of the tensor that it is made of.
        shape: Of the result.
        part: Takes the result out of that tensor; None for all of it.
    """

    source: str
    shape: Shape
    part: Part | None = None


@dataclass(frozen=True)
class _Blocks:
    """The names in a family's MoE blocks.

    Attributes:
        gate: Of the router.
        expert: Of an expert, up to its matrices; with its number.
        matrices: Names of gate, up and down projection.
    """

    gate: str
    expert: str
    matrices: tuple[str, str, str]


_ALIKE = ("AutoMapping", "DirectMapping", "ReplicatedMapping", "ColumnParallelMapping", "RowParallelMapping")
"""Bridge's mappings of a tensor that is the same on the hub."""
_PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")

FAMILIES = {
    "qwen3_moe": _Blocks("mlp.gate", "mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": _Blocks("block_sparse_moe.gate", "block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
}
"""``model_type`` -> names."""


class HubModel(ABC):
    """One model on the hub, by its config.

    Args:
        config: Content of ``config.json``.
        heads: Number of attention heads.
        groups: Number of heads of keys and of values.
        head: Size of a head.

    Raises:
        ConfigError: The config lacks an entry.
    """

    def __init__(self, config: Mapping[str, Any], heads: int, groups: int, head: int) -> None:
        self._config, self._kind = config, config.get("model_type")
        self._heads, self._groups, self._head = heads, groups, head
        self._vocabulary = self._number("vocab_size")

    def _number(self, name: str) -> int:
        return number_in(self._config, name)

    @abstractmethod
    def _architecture(self) -> Mapping[str, Any]:
        """Returns Megatron's settings of the model, by name."""

    @abstractmethod
    def _parts(self, name: str, shape: Shape) -> Iterator[tuple[str, HubTensor]]:
        """Yields what is made of one of Megatron's tensors; nothing if it has no name on the hub."""

    @abstractmethod
    def _problems(self, made: Mapping[str, HubTensor]) -> Sequence[str]:
        """Returns what is not as in the model on the hub."""

    def require_architecture(self, trained: Mapping[str, Any]) -> None:
        """Raises ``ConfigError`` if the trained model computes something else with the same tensors.

        Args:
            trained: Megatron's settings, as checkpoints have them.
        """
        differing = [
            f"{name} is {trained[name]!r} in the run, {value!r} by the config"
            for name, value in self._architecture().items()
            if name in trained and trained[name] != value
        ]
        if differing:
            raise ConfigError(f"the config is not that of the trained model: {'; '.join(differing)}")

    def tensors(self, trained: Mapping[str, Shape], besides: Mapping[str, Any]) -> dict[str, HubTensor]:
        """Returns name on the hub -> how it is made.

        Args:
            trained: Megatron's name -> shape, of all parameters.
            besides: Its buffers and other state.

        Raises:
            CoverageError: The model on the hub has other tensors, or of other shapes; they are named.
            UnsupportedError: The run has tensors without a name there.
        """
        made: dict[str, HubTensor] = {}
        nameless = []
        others = {name: tuple(getattr(value, "shape", ())) for name, value in besides.items()}
        for name, shape in {**trained, **others}.items():
            parts = [] if _IGNORED.search(name) else list(self._parts(name, shape))
            made.update(parts)
            if not parts and not _IGNORED.search(name):
                nameless.append(name)
        if nameless:
            raise UnsupportedError(
                f"{len(nameless)} tensors of the run have no name in a {self._kind}, such as "
                f"{', '.join(sorted(nameless)[:4])}. {BRIDGE}"
            )
        problems = self._problems(made)
        if problems:
            raise CoverageError("by its config the model has", tuple(problems))
        return made

    def _attention(self, kind: int, whole: torch.Tensor) -> torch.Tensor:
        """Returns queries (0), keys (1) or values (2). Megatron has the heads of a query group one after the other."""
        queries = self._heads // self._groups
        groups = whole.view(self._groups, queries + 2, self._head, *whole.shape[1:])
        which = (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[kind]
        return groups[:, which].reshape(-1, *whole.shape[1:])

    def _queries_keys_values(self, shape: Shape) -> Iterator[tuple[str, Shape, Part]]:
        """Yields what a projection to all heads is divided into: "q", "k" and "v", each with its shape."""
        for at, (letter, heads) in enumerate((("q", self._heads), ("k", self._groups), ("v", self._groups))):
            yield letter, (heads * self._head, *shape[1:]), partial(self._attention, at)


class ListedModel(HubModel):
    """A model of a family whose names are listed here.

    Args:
        config: Content of ``config.json``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        heads, hidden = (number_in(config, name) for name in ("num_attention_heads", "hidden_size"))
        head = config.get("head_dim") or hidden // heads
        super().__init__(config, heads, number_in(config, "num_key_value_heads"), head)
        self._blocks, self._hidden = FAMILIES[config["model_type"]], hidden
        self._experts = self._number("num_experts" if "num_experts" in config else "num_local_experts")

    def _architecture(self) -> Mapping[str, Any]:
        config = self._config
        rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return {
            "num_attention_heads": self._heads,
            "num_query_groups": self._groups,
            "kv_channels": self._head,
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": False,
            "layernorm_epsilon": config.get("rms_norm_eps", 1e-6 if self._kind == "qwen3_moe" else 1e-5),
            "gated_linear_unit": True,
            "activation_func": config.get("hidden_act", "silu"),
            "moe_router_topk": config.get("num_experts_per_tok"),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": self._kind == "qwen3_moe" and not config.get("norm_topk_prob", False),
            "moe_router_topk_scaling_factor": 1.0,
            "moe_router_num_groups": None,
            "position_embedding_type": "rope",
            "rotary_base": config.get("rope_theta", rope.get("rope_theta")),
            "rotary_interleaved": False,
            "rotary_percent": 1.0,
        }

    def _problems(self, made: Mapping[str, HubTensor]) -> Sequence[str]:
        expected = dict(self._expected())
        problems = [f"{name}, which the run does not have" for name in sorted(expected.keys() - made.keys())]
        problems += [f"no {name}, which the run has" for name in sorted(made.keys() - expected.keys())]
        problems += [
            f"{name} of shape {list(expected[name])}, and {tensor.source} of the run makes {list(tensor.shape)}"
            for name, tensor in made.items()
            if name in expected and tensor.shape != expected[name]
        ]
        return problems

    def _parts(self, name: str, shape: Shape) -> Iterator[tuple[str, HubTensor]]:
        vocabulary = (self._vocabulary, *shape[1:]) if shape and shape[0] >= self._vocabulary else shape
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", HubTensor(name, vocabulary, partial(rows, 0, self._vocabulary))
        elif name == "output_layer.weight":
            yield "lm_head.weight", HubTensor(name, vocabulary, partial(rows, 0, self._vocabulary))
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", HubTensor(name, shape)
        elif layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            for rest, hub_shape, part in self._of_layer(layer[2], shape):
                yield f"model.layers.{layer[1]}.{rest}", HubTensor(name, hub_shape, part)

    def _of_layer(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape, Part | None]]:
        blocks = self._blocks
        if name in _OF_LAYERS:
            yield _OF_LAYERS[name], shape, None
        elif name == "mlp.router.weight":
            yield f"{blocks.gate}.weight", shape, None
        elif name == "self_attention.linear_qkv.weight":
            for letter, part_shape, part in self._queries_keys_values(shape):
                yield f"self_attn.{letter}_proj.weight", part_shape, part
        elif matrix := re.fullmatch(r"mlp\.(?:experts\.(\d+)\.)?linear_fc([12])\.weight", name):
            of_expert = (blocks.expert.format(matrix[1]), blocks.matrices)
            prefix, (gate, up, down) = of_expert if matrix[1] else ("mlp", ("gate_proj", "up_proj", "down_proj"))
            if matrix[2] == "2":
                yield f"{prefix}.{down}.weight", shape, None
                return
            for which, (part_shape, part) in zip((gate, up), _halves(shape), strict=True):
                yield f"{prefix}.{which}.weight", part_shape, part

    def _expected(self) -> Iterator[tuple[str, Shape]]:
        """Yields every tensor of the model on the hub, with its shape."""
        config, hidden, head, blocks = self._config, self._hidden, self._head, self._blocks
        yield "model.embed_tokens.weight", (self._vocabulary, hidden)
        yield "model.norm.weight", (hidden,)
        if not config.get("tie_word_embeddings", False):
            yield "lm_head.weight", (self._vocabulary, hidden)
        for layer in range(self._number("num_hidden_layers")):
            at = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}.{norm}.weight", (hidden,)
            for letter, shape, _ in self._queries_keys_values((hidden, hidden)):
                yield f"{at}.self_attn.{letter}_proj.weight", shape
            yield f"{at}.self_attn.o_proj.weight", (hidden, self._heads * head)
            if self._kind == "qwen3_moe":
                for letter in "qk":
                    yield f"{at}.self_attn.{letter}_norm.weight", (head,)
            width = self._number("intermediate_size")
            matrices = [("mlp", ("gate_proj", "up_proj", "down_proj"))]
            if self._is_moe(layer):
                width = width if self._kind == "mixtral" else self._number("moe_intermediate_size")
                matrices = [(blocks.expert.format(expert), blocks.matrices) for expert in range(self._experts)]
                yield f"{at}.{blocks.gate}.weight", (self._experts, hidden)
            for prefix, (gate, up, down) in matrices:
                yield f"{at}.{prefix}.{gate}.weight", (width, hidden)
                yield f"{at}.{prefix}.{up}.weight", (width, hidden)
                yield f"{at}.{prefix}.{down}.weight", (hidden, width)

    def _is_moe(self, layer: int) -> bool:
        config = self._config
        every = config.get("decoder_sparse_step", 1)
        return layer not in (config.get("mlp_only_layers") or ()) and bool(every) and (layer + 1) % every == 0


_OF_LAYERS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # where Transformer Engine fuses them
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Names in a layer that differ, and nothing else."""


class BridgeModel(HubModel):
    """A model by what Megatron-Bridge knows of its family.

    Args:
        config: Content of ``config.json``.
        path: Of its directory.

    Raises:
        UnsupportedError: Megatron-Bridge is not installed, or does not know the family.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        try:
            from megatron.bridge import AutoBridge
        except ImportError as error:
            raise UnsupportedError(
                f"--to hf writes Megatron checkpoints as {' and '.join(FAMILIES)}, and this config is of a model_type "
                f"{config.get('model_type')!r}. Of other families Megatron-Bridge has the names, which cannot be "
                f"imported here (pip install megatron-bridge): {error}. {BRIDGE}"
            ) from error
        try:
            bridge: Any = AutoBridge.from_hf_pretrained(str(path))
            self._settings = bridge.to_megatron_provider(load_weights=False)
        except ValueError as error:
            raise UnsupportedError(f"Megatron-Bridge does not know the model of {path}: {error}") from error
        self._names, self._path = bridge._model_bridge.mapping_registry(), path
        heads, groups = self._settings.num_attention_heads, self._settings.num_query_groups
        super().__init__(config, heads, groups or heads, self._settings.kv_channels or 0)

    def _architecture(self) -> Mapping[str, Any]:
        settings = {name: getattr(value, "__name__", value) for name, value in vars(self._settings).items()}
        unused = {name for name, value in settings.items() if value is None}
        if settings.get("multi_latent_attention"):
            unused |= {"kv_channels", "num_query_groups", "position_embedding_type"}
        if settings.get("moe_router_score_function") != "softmax":
            unused.add("moe_router_pre_softmax")
        return {name: value for name, value in settings.items() if name not in unused}

    def _parts(self, name: str, shape: Shape) -> Iterator[tuple[str, HubTensor]]:
        expert = re.sub(r"\.experts\.(\d+)\.", r".experts.local_experts.\1.", name)
        grouped = re.sub(r"\.experts\.(\d+)\.(.+)", r".experts.\2\1", name)
        mapping = self._names.megatron_to_hf_lookup(expert) or self._names.megatron_to_hf_lookup(grouped)
        if mapping is None:
            return
        kind, names = type(mapping).__name__, mapping.hf_param
        if kind in _ALIKE and isinstance(names, str) and getattr(mapping, "permute_dims", None) is None:
            is_padded = name in _PADDED and shape[0] >= self._vocabulary
            result = (self._vocabulary, *shape[1:]) if is_padded else shape
            yield names, HubTensor(name, result, partial(rows, 0, self._vocabulary) if is_padded else None)
        elif kind == "GatedMLPMapping":
            for which, (part_shape, part) in zip(("gate", "up"), _halves(shape), strict=True):
                yield names[which], HubTensor(name, part_shape, part)
        elif kind == "QKVMapping":
            for letter, part_shape, part in self._queries_keys_values(shape):
                yield names[letter], HubTensor(name, part_shape, part)

    def _problems(self, made: Mapping[str, HubTensor]) -> list[str]:
        """Compares sizes alone: transformers has experts under other names than the hub, stacked."""
        from transformers import AutoConfig, AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        with torch.device("meta"):
            model: nn.Module = models.from_config(AutoConfig.from_pretrained(self._path))
        names = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        needed: Counter[int] = Counter()
        for name, tensor in model.state_dict().items():
            needed[_layer(name)] += 0 if name in tied else tensor.numel()
        saved: Counter[int] = Counter()
        for name, made_of in made.items():
            saved[_layer(name)] += prod(made_of.shape)
        return [
            f"{needed[layer]:,} numbers {'outside of layers' if layer < 0 else f'in layer {layer}'}, and the run has "
            f"{saved[layer]:,}"
            for layer in range(-1, self._number("num_hidden_layers"))  # further ones predict more tokens
            if needed[layer] != saved[layer]
        ]


def _layer(name: str) -> int:
    match = re.search(r"\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def hub_model(config: Mapping[str, Any], path: Path) -> HubModel:
    """Returns the model of a ``config.json`` in the directory ``path``.

    Raises:
        UnsupportedError: Nobody here knows its names.
        ConfigError: It lacks an entry.
    """
    return ListedModel(config) if config.get("model_type") in FAMILIES else BridgeModel(config, path)


def rows(begin: int, end: int, whole: torch.Tensor) -> torch.Tensor:
    """Returns some rows of a tensor."""
    return whole[begin:end]


def _halves(shape: Shape) -> tuple[tuple[Shape, Part], tuple[Shape, Part]]:
    """Returns the shape of each half of a gated unit, with what takes it."""
    half = shape[0] // 2
    return ((half, *shape[1:]), partial(rows, 0, half)), ((half, *shape[1:]), partial(rows, half, 2 * half))


def number_in(config: Mapping[str, Any], name: str) -> int:
    """Returns an entry of ``config.json`` that must be a whole number."""
    value = config.get(name)
    if not isinstance(value, int):
        raise ConfigError(f"the config of a {config.get('model_type')} needs {name}, and has {value!r}")
    return value
