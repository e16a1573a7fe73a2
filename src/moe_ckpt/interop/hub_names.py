"""Megatron's tensors under the names that Qwen3-MoE and Mixtral have on the Hugging Face hub.

Checkpoints of Megatron have whole tensors, whatever the parallel layout was. On the hub queries, keys and values are
apart, and so are the halves of a gated unit; vocabularies are not padded. A model's ``config.json`` says how they are
divided, and which tensors there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from moe_ckpt.errors import ConfigError, CoverageError, UnsupportedError

Shape = tuple[int, ...]
Part = Callable[[torch.Tensor], torch.Tensor]

_BRIDGE = (
    "Megatron-Bridge knows more of them (pip install megatron-bridge). In a job that has built the model: "
    "moe_ckpt.megatron.load_weights(chunks, path), then AutoBridge.from_hf_pretrained(name).save_hf_pretrained(chunks, "
    "output)"
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


_FAMILIES = {
    "qwen3_moe": _Blocks("mlp.gate", "mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": _Blocks("block_sparse_moe.gate", "block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
}
"""``model_type`` -> names."""


class HubModel:
    """One model on the hub, by its config.

    Args:
        config: Content of ``config.json``.

    Raises:
        UnsupportedError: It is of a family whose names are not known here.
        ConfigError: It lacks an entry.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, kind = config, config.get("model_type")
        if kind not in _FAMILIES:
            raise UnsupportedError(
                f"--to hf writes Megatron checkpoints as {' and '.join(_FAMILIES)}, and this config is of a model_type "
                f"{kind!r}. {_BRIDGE}"
            )
        self._kind, self._blocks = kind, _FAMILIES[kind]
        self._heads, self._hidden = self._number("num_attention_heads"), self._number("hidden_size")
        self._groups = self._number("num_key_value_heads")
        self._head = config.get("head_dim") or self._hidden // self._heads
        self._experts = self._number("num_experts" if "num_experts" in config else "num_local_experts")
        self._vocabulary = self._number("vocab_size")

    def _number(self, name: str) -> int:
        value = self._config.get(name)
        if not isinstance(value, int):
            raise ConfigError(f"the config of a {self._config['model_type']} needs {name}, and has {value!r}")
        return value

    def require_architecture(self, trained: Mapping[str, Any]) -> None:
        """Raises ``ConfigError`` if the trained model computes something else with the same tensors.

        Args:
            trained: Megatron's settings, as checkpoints have them.
        """
        config = self._config
        rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
        expected = {
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
            "position_embedding_type": "rope",
            "rotary_base": config.get("rope_theta", rope.get("rope_theta")),
            "rotary_interleaved": False,
            "rotary_percent": 1.0,
        }
        differing = [
            f"{name} is {trained[name]!r} in the run, {value!r} by the config"
            for name, value in expected.items()
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
        nameless = [name for name in besides if not _IGNORED.search(name)]
        for name, shape in trained.items():
            parts = list(self._parts(name, shape))
            made.update(parts)
            if not parts:
                nameless.append(name)
        if nameless:
            raise UnsupportedError(
                f"{len(nameless)} tensors of the run have no name in a {self._kind}, such as "
                f"{', '.join(sorted(nameless)[:4])}. {_BRIDGE}"
            )
        expected = dict(self._expected())
        problems = [f"{name}, which the run does not have" for name in sorted(expected.keys() - made.keys())]
        problems += [f"no {name}, which the run has" for name in sorted(made.keys() - expected.keys())]
        problems += [
            f"{name} of shape {list(expected[name])}, and {tensor.source} of the run makes {list(tensor.shape)}"
            for name, tensor in made.items()
            if name in expected and tensor.shape != expected[name]
        ]
        if problems:
            raise CoverageError("by its config the model has", tuple(problems))
        return made

    def _parts(self, name: str, shape: Shape) -> Iterator[tuple[str, HubTensor]]:
        """Yields what is made of one of Megatron's tensors; nothing if it has no name on the hub."""
        vocabulary = (self._vocabulary, *shape[1:]) if shape[0] >= self._vocabulary else shape
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", HubTensor(name, vocabulary, partial(_rows, 0, self._vocabulary))
        elif name == "output_layer.weight":
            yield "lm_head.weight", HubTensor(name, vocabulary, partial(_rows, 0, self._vocabulary))
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
            for at, (letter, heads) in enumerate((("q", self._heads), ("k", self._groups), ("v", self._groups))):
                yield f"self_attn.{letter}_proj.weight", (heads * self._head, *shape[1:]), partial(self._attention, at)
        elif matrix := re.fullmatch(r"mlp\.(?:experts\.(\d+)\.)?linear_fc([12])\.weight", name):
            of_expert = (blocks.expert.format(matrix[1]), blocks.matrices)
            prefix, (gate, up, down) = of_expert if matrix[1] else ("mlp", ("gate_proj", "up_proj", "down_proj"))
            if matrix[2] == "2":
                yield f"{prefix}.{down}.weight", shape, None
                return
            half = shape[0] // 2
            yield f"{prefix}.{gate}.weight", (half, *shape[1:]), partial(_rows, 0, half)
            yield f"{prefix}.{up}.weight", (half, *shape[1:]), partial(_rows, half, 2 * half)

    def _attention(self, kind: int, whole: torch.Tensor) -> torch.Tensor:
        """Returns queries (0), keys (1) or values (2). Megatron has the heads of a query group one after the other."""
        queries = self._heads // self._groups
        groups = whole.view(self._groups, queries + 2, self._head, *whole.shape[1:])
        rows = (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[kind]
        return groups[:, rows].reshape(-1, *whole.shape[1:])

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
            for letter, heads in (("q", self._heads), ("k", self._groups), ("v", self._groups)):
                yield f"{at}.self_attn.{letter}_proj.weight", (heads * head, hidden)
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


def _rows(begin: int, end: int, whole: torch.Tensor) -> torch.Tensor:
    return whole[begin:end]
